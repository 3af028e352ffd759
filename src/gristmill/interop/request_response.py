"""Importer of plain JSON lines: a request with its response a line, as logs of OpenAI-style APIs are.

Invariant: the response is read by the code that reads our own recorded exchanges, so token ids and log-probabilities
count wherever an engine puts them. Those beside the response count where the response has none; where both have them
and they differ, the call is not usable.

Not here: what a dialect's bodies mean (captures).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, isnan
from pathlib import Path
from typing import Final, NamedTuple, cast

import msgspec
import numpy as np

from gristmill.canonical import JsonNumber, JsonValue, RepeatedKeys
from gristmill.captures import CapturedRollout
from gristmill.captures.decode import dialect_of
from gristmill.captures.exact import dumps
from gristmill.captures.exchange_line import ExchangeLine, parse_exchange
from gristmill.captures.fields import JsonObject, count_at, list_at, name_at, number, text_at
from gristmill.captures.reply import Reply, ReplyChoice, Unexpected, encodable
from gristmill.errors import Code
from gristmill.interop.attempt import AttemptLines, hole, refused
from gristmill.interop.foreign import kept, object_at, unknown_keys
from gristmill.interop.importer import Importer, Report
from gristmill.interop.lines import Key, KeyedLines, Line, first_object
from gristmill.interop.reward import Rewards
from gristmill.records import Dialect, Result

__all__ = ["REQUEST_RESPONSE"]

_REQUEST: Final = ("request", "request_body", "kwargs")
_RESPONSE: Final = ("response", "response_body", "completion")
_ROLLOUT: Final = ("rollout_id", "trajectory_id", "episode_id", "session_id")
_CALL: Final = ("model_call_id", "call_id", "request_id", "id", "custom_id")
_PATH: Final = ("path", "endpoint", "url")
_STATUS: Final = ("status", "status_code")
_STREAM: Final = ("sse", "sse_raw")
_PROMPT_IDS: Final = ("prompt_token_ids", "prompt_ids")
_SAMPLED_IDS: Final = ("completion_token_ids", "response_token_ids", "output_token_ids", "token_ids")
_RESULT: Final = "result"
_LOGPROBS: Final = ("logprobs", "completion_logprobs", "response_logprobs", "output_token_logprobs")
_CARRIED: Final = frozenset({"attempt", "group_id", "reward", "dialect", "error", "method"})
_KNOWN: Final = _CARRIED.union(
    _REQUEST, _RESPONSE, _ROLLOUT, _CALL, _PATH, _STATUS, _STREAM, _PROMPT_IDS, _SAMPLED_IDS, _LOGPROBS
)
_ROUTES: Final = {
    Dialect.CHAT: "/v1/chat/completions",
    Dialect.COMPLETIONS: "/v1/completions",
    Dialect.RESPONSES: "/v1/responses",
    Dialect.MESSAGES: "/v1/messages",
}
_OBJECTS: Final = {
    "chat.completion": Dialect.CHAT,
    "text_completion": Dialect.COMPLETIONS,
    "response": Dialect.RESPONSES,
    "message": Dialect.MESSAGES,
}
_MISSING: Final = frozenset({Code.TOKEN_IDS_MISSING, Code.PROMPT_IDS_MISSING, Code.LOGPROBS_MISSING})
_LOSSES: Final = {
    "fields": "Fields beside request, response and the documented ones are left out.",
    "rewards": "Rollouts whose lines state rewards that differ: none of them is taken for the rollout's.",
    "headers": "Request headers beside those of session, agent and content are left out.",
}


class _Pair(NamedTuple):
    """Request and response of a line, taken out of their wrappers: route, status, bodies, headers."""

    request: JsonObject
    response: JsonValue
    route: str | None
    status: int
    headers: JsonValue


def _first(line: Mapping[str, JsonValue], names: Sequence[str]) -> str | None:
    """Name the one of several spellings that a line has; `Unexpected` where it has two."""
    found = [name for name in names if line.get(name) is not None]
    if len(found) > 1:
        raise Unexpected(f"one of {', '.join(names)}", f"{found[0]} and {found[1]}", "$")
    return found[0] if found else None


def _named(line: JsonObject, names: Sequence[str]) -> str | None:
    """Give the first of several names that a line states: the more particular spelling stands first."""
    for name in names:
        stated = name_at(line, name, "$")
        if stated:
            return stated
    return None


def _key(line: JsonObject) -> Key:
    return Key(_named(line, _ROLLOUT) or "rollout", count_at(line, "attempt", "$") or 0)


def _read(path: Path, report: Report) -> Iterator[CapturedRollout]:
    file = KeyedLines(path, report, _key)
    for key in file.keys:
        lines = AttemptLines(*key, report)
        rewards, groups, returned = Rewards(), set[str](), list[JsonValue]()
        for line in file.lines(key):
            call_id = f"line-{line.number}"
            try:
                call_id = _named(line.value, _CALL) or call_id
                rewards.add(line.value.get("reward"), "$.reward")
                groups.update(filter(None, [name_at(line.value, "group_id", "$")]))
                if len(groups) > 1:
                    raise Unexpected("one group for each rollout", "several", "$.group_id")
                if _RESULT in line.value and _first(line.value, (*_REQUEST, *_RESPONSE, *_STREAM)) is None:
                    returned.append(kept(line.value[_RESULT], f"$.{_RESULT}"))
                    if len(returned) > 1:
                        raise Unexpected("one result for each attempt", "a second one", "$")
                    report.lose("fields", len(unknown_keys(line.value, _KNOWN | {_RESULT})))
                else:
                    _take(line, call_id, lines, report)
            except Unexpected as error:
                report.refuse(refused(error, line.place))
                lines.lose([hole(call_id, line.place)])
        lines.lose(file.lost)
        report.lose("rewards", rewards.differ)
        if rewards.stated or groups or returned:
            value = returned[0] if returned else None
            lines.result = Result(value=value, reward=rewards.value, group_id=next(iter(groups), None))
        yield lines.finish()


def _take(line: Line, call_id: str, lines: AttemptLines, report: Report) -> None:
    pair = _pair(line.value)
    dialect = _dialect(line.value, pair)
    request: JsonObject = {"path": _ROUTES[dialect], "body": pair.request}
    if pair.headers is not None:
        request["headers"] = pair.headers
    stated: JsonObject = {"request": request, "status": pair.status, "model_call_id": call_id}
    stated.update(_served(pair.response))
    parsed = parse_exchange(stated, lines.rollout_id, lines.attempt, call_id)
    if isinstance(parsed, str):
        raise Unexpected("a route that samples", encodable(parsed), "$")
    report.lose("headers", len(parsed.dropped_headers))
    answered = _first(line.value, (*_RESPONSE, *_STREAM)) is not None
    report.lose("fields", len(unknown_keys(line.value, _KNOWN - {"error"} if answered else _KNOWN)))
    lines.exchange(_with_tokens_beside(parsed, line.value))


def _pair(line: JsonObject) -> _Pair:
    asked, answered = _first(line, _REQUEST), _first(line, _RESPONSE)
    stream = _first(line, _STREAM)
    if asked is None:
        raise Unexpected(f"one of {', '.join(_REQUEST)}", "none", "$")
    if (answered is None) == (stream is None) and line.get("error") is None:
        raise Unexpected(f"one of {', '.join((*_RESPONSE, *_STREAM))}", "none" if stream is None else "both", "$")
    request = object_at(line[asked], f"$.{asked}")
    route, headers = _route(line, "$"), None
    if isinstance(request.get("body"), dict) and "messages" not in request and "input" not in request:
        # The whole HTTP request was logged.
        route = _route(request, f"$.{asked}") or route
        headers = request.get("headers")
        request = object_at(request["body"], f"$.{asked}.body")
    status = _status(line, "$")
    if stream is not None:
        response: JsonValue = text_at(line, stream, "$")
    elif answered is None:
        response, status = {"error": line["error"]}, max(status or 0, 400)
    else:
        response = line[answered]
    if isinstance(response, dict) and "body" in response:
        wrapper = object_at(response, f"$.{answered}")
        status = _status(wrapper, f"$.{answered}") or status
        response = wrapper["body"]
    if not isinstance(response, str):
        object_at(response, f"$.{answered}")
    kept(request, f"$.{asked}")
    return _Pair(request, response, route, 200 if status is None else status, headers)


def _route(holder: JsonObject, where: str) -> str | None:
    name = _first(holder, _PATH)
    return None if name is None else name_at(holder, name, where)


def _status(holder: JsonObject, where: str) -> int | None:
    name = _first(holder, _STATUS)
    return None if name is None else count_at(holder, name, where)


def _served(response: JsonValue) -> JsonObject:
    """Give the reply as an exchange line holds it: a body, its text where no JSON can hold it, or a stream."""
    if isinstance(response, str):
        return {"body": response} if response.lstrip().startswith("{") else {"sse_raw": response}
    body = object_at(response, "$.response")
    try:
        kept(body, "$.response")
    except Unexpected:
        return {"body": dumps(_spelled(body)).decode()}
    return {"body": body}


def _spelled(value: JsonValue) -> JsonValue:
    """Write numbers that are not finite as Python does, so that the text of a reply is what was logged."""
    if isinstance(value, float) and not isfinite(value):
        return JsonNumber("NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity")
    if isinstance(value, RepeatedKeys):
        return RepeatedKeys([(key, _spelled(member)) for key, member in value.pairs])
    if isinstance(value, dict):
        return {key: _spelled(member) for key, member in cast(JsonObject, value).items()}
    if isinstance(value, list):
        return [_spelled(member) for member in cast("list[JsonValue]", value)]
    return value


def _dialect(line: JsonObject, pair: _Pair) -> Dialect:
    """Tell the dialect by what the line states, else by what only one dialect's bodies have."""
    stated = name_at(line, "dialect", "$")
    if stated is not None:
        if stated not in {dialect.value for dialect in _ROUTES}:
            raise Unexpected(f"one of {', '.join(_ROUTES)}", repr(encodable(stated)), "$.dialect")
        return Dialect(stated)
    if pair.route is not None:
        dialect = dialect_of(pair.route)
        if dialect is None or dialect not in _ROUTES:
            raise Unexpected("a route that samples", repr(encodable(pair.route)), "$")
        return dialect
    response = cast(JsonObject, pair.response) if isinstance(pair.response, dict) else {}
    kind = response.get("object", response.get("type"))
    if isinstance(kind, str) and kind in _OBJECTS:
        return _OBJECTS[kind]
    if "choices" in response and ("messages" in pair.request) != ("prompt" in pair.request):
        return Dialect.CHAT if "messages" in pair.request else Dialect.COMPLETIONS
    if "input" in pair.request and "messages" not in pair.request:
        return Dialect.RESPONSES
    raise Unexpected("path, dialect, or a response that names its kind", "none of them", "$")


def _with_tokens_beside(line: ExchangeLine, beside: JsonObject) -> ExchangeLine:
    """Add ids and log-probabilities that stand beside the response; of several choices they can be nobody's."""
    names = [_first(beside, spellings) for spellings in (_PROMPT_IDS, _SAMPLED_IDS, _LOGPROBS)]
    prompt, sampled, logprobs = (None if name is None else list_at(beside, name, "$") for name in names)
    if prompt is None and sampled is None and logprobs is None:
        return line
    if len(line.reply.choices) != 1:
        raise Unexpected("tokens beside a response of one choice", f"{len(line.reply.choices)}", "$")
    [choice] = line.reply.choices
    values = None if logprobs is None else [_logprob(entry) for entry in logprobs]
    made = _joined(choice, prompt, sampled, values)
    reply: Reply = msgspec.structs.replace(line.reply, choices=(made,))
    return msgspec.structs.replace(line, reply=reply)


def _logprob(entry: JsonValue) -> float:
    """Read a log-probability: a number, or the object that holds one."""
    return number(cast(JsonObject, entry).get("logprob") if isinstance(entry, dict) else entry)


def _joined(
    choice: ReplyChoice, prompt: list[JsonValue] | None, sampled: list[JsonValue] | None, logprobs: list[float] | None
) -> ReplyChoice:
    given = {"prompt_ids": prompt, "token_ids": sampled, "logprobs": logprobs}
    differ = [
        name for name, value in given.items() if _differ(getattr(choice, name), value, logprobs=name == "logprobs")
    ]
    if differ:
        detail = f"{' and '.join(differ)} beside the response are others than in it"
        return msgspec.structs.replace(choice, reason=choice.reason or Code.REPLY_MALFORMED, detail=detail)
    added = {name: value for name, value in given.items() if value is not None and getattr(choice, name) is None}
    reason, detail = (None, None) if choice.reason in _MISSING else (choice.reason, choice.detail)
    return msgspec.structs.replace(choice, **added, reason=reason, detail=detail)


def _differ(inside: Sequence[object] | None, beside: Sequence[object] | None, *, logprobs: bool) -> bool:
    if inside is None or beside is None or len(inside) != len(beside):
        return inside is not None and beside is not None
    if not logprobs:
        return list(inside) != list(beside)
    # One text of a float32 is as good as another; what is too large for one is infinite, and no log-probability.
    with np.errstate(over="ignore"):
        first, second = np.asarray(inside, np.float32), np.asarray(beside, np.float32)
    return not np.array_equal(first, second, equal_nan=True)


def _certain(path: Path) -> bool:
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    line = first_object(path)
    return line is not None and _is_pair(line)


def _is_pair(line: JsonObject) -> bool:
    """Tell a pair from our own lines, which have a status and no response."""
    both = isinstance(line.get("request"), dict) and isinstance(line.get("response"), dict)
    return both and "kind" not in line and "output_items" not in line


REQUEST_RESPONSE: Final = Importer(
    name="request-response",
    title="JSON lines of a request with its response, as logs of OpenAI-style APIs have them.",
    made_for="bodies as vLLM 0.32 and SGLang 0.5 serve them",
    losses=_LOSSES,
    read=_read,
    certain=_certain,
)
