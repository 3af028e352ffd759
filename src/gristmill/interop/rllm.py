"""Importer of rLLM's traces: those of its model gateway (`TraceRecord`) and of its older SDK (`Trace`).

Read are JSON lines, a JSON array as the gateway's `/sessions/ID/traces` answers it, its compact form with messages in a
tree, and the gateway's SQLite store. A session is a rollout.

Invariant: the parent of a call is stated where the format states it (its prompt is stored as what follows an earlier
trace), else worked out from the messages. An empty list of ids stands for none, as the gateway writes it.

Not here: rewards, which rLLM keeps outside its traces.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from math import inf
from pathlib import Path
from typing import Final, NamedTuple, cast
from urllib.parse import quote

from gristmill.canonical import JsonValue
from gristmill.captures import CapturedRollout, Note
from gristmill.captures.fields import JsonObject, list_at, name_at, number, text_at
from gristmill.captures.reply import Unexpected, chat_status
from gristmill.errors import Code, DecodeError
from gristmill.interop.attempt import AttemptLines, hole, refused
from gristmill.interop.foreign import bytes_of, kept, loads_foreign, object_at, objects_at, unknown_keys
from gristmill.interop.importer import Importer, Report
from gristmill.interop.lines import Key, KeyedLines, first_object
from gristmill.interop.rllm_prompts import Prompts
from gristmill.records import LostCall, ResponseStatus

__all__ = ["RLLM"]

_SQLITE: Final = b"SQLite format 3\0"
_GATEWAY: Final = frozenset(
    {
        *("trace_id", "session_id", "model", "messages", "prompt_token_ids", "prompt_delta_token_ids"),
        *("parent_trace_id", "response_message", "completion_token_ids", "logprobs", "finish_reason"),
        *("weight_version", "token_counts", "timestamp", "raw_request", "raw_response", "messages_ref"),
    }
)
_SDK: Final = frozenset(
    {"trace_id", "session_name", "input", "output", "model", "tokens", "timestamp", "parent_trace_id", "tools"}
)
_SDK_INPUT: Final = frozenset({"messages", "prompt_token_ids"})
_SDK_OUTPUT: Final = frozenset({"message", "finish_reason", "output_token_ids", "rollout_logprobs"})
_LOSSES: Final = {
    "fields": "Fields without a place in a call, such as metadata, latency, cost and tags, are left out.",
    "routing_matrices": "Routing of experts: its type and shape are not stated, so it cannot be carried.",
    "requests": "Calls whose trace has the messages alone of the request: tools and sampling settings are unknown.",
    "prompts": "Prompts stored as the tokens after a trace that is not there: those calls are not usable.",
}


class _Trace(NamedTuple):
    """One trace and the place to name in errors."""

    place: str
    value: JsonObject


def _key(trace: JsonObject) -> Key:
    for name in ("session_id", "session_name"):
        session = name_at(trace, name, "$")
        if session:
            return Key(session)
    raise Unexpected("session_id or session_name", "neither", "$")


def _read(path: Path, report: Report) -> Iterator[CapturedRollout]:
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if file.suffix in {".jsonl", ".json", ".db", ".sqlite"}:
                yield from _read(file, report)
        return
    if _head(path) == _SQLITE:
        yield from _stored(path, report)
    elif path.suffix == ".json":
        yield from _listed(path, report)
    else:
        file = KeyedLines(path, report, _key)
        for key in file.keys:
            yield _session(key, [_Trace(line.place, line.value) for line in file.lines(key)], file.lost, report)


def _head(path: Path) -> bytes:
    return _bytes_until(path, len(_SQLITE))


def _bytes_until(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError:
        return bytes_of(path)


# Where traces stand


def _listed(path: Path, report: Report) -> Iterator[CapturedRollout]:
    """Read what the gateway answers for a session: an array, or the compact form; one trace is read too."""
    place = str(path)
    traces: Sequence[JsonValue] = ()
    try:
        answer = loads_foreign(bytes_of(path), place)
        if isinstance(answer, dict) and "traces" in answer:
            compact = object_at(answer, "$")
            traces = [_expanded(trace, where, compact) for trace, where in objects_at(compact, "traces", "$")]
        else:
            traces = cast("list[JsonValue]", answer) if isinstance(answer, list) else [answer]
    except (DecodeError, Unexpected) as error:
        report.refuse(refused(error, place))
    sessions: dict[Key, list[_Trace]] = {}
    lost: list[LostCall] = []
    for index, value in enumerate(traces):
        at = f"{place} trace {index}"
        try:
            trace = object_at(value, "$")
            sessions.setdefault(_key(trace), []).append(_Trace(at, trace))
        except Unexpected as error:
            report.refuse(refused(error, at))
            lost.append(hole(f"trace-{index}", at))
    for key, held in sessions.items():
        yield _session(key, held, lost, report)


def _expanded(trace: JsonObject, where: str, compact: JsonObject) -> JsonObject:
    """Give a trace its messages, which the compact form keeps as a leaf of a tree and their number."""
    reference = list_at(trace, "messages_ref", where)
    if reference is None:
        return trace
    nodes = object_at(compact.get("nodes"), "$.nodes")
    if len(reference) != 2:
        raise Unexpected("a leaf and a number", f"{len(reference)} values", f"{where}.messages_ref")
    leaf, length = reference
    messages: list[JsonValue] = []
    while leaf is not None:
        node = nodes.get(leaf) if isinstance(leaf, str) else None
        if node is None or len(messages) > len(nodes):
            raise Unexpected("a tree of messages", "a node without its parent", f"{where}.messages_ref")
        held = object_at(node, "$.nodes")
        messages.append(held.get("m"))
        leaf = held.get("p")
    if len(messages) != length:
        raise Unexpected("as many messages as stated", f"{len(messages)}", f"{where}.messages_ref")
    return {**trace, "messages": messages[::-1]}


def _stored(path: Path, report: Report) -> Iterator[CapturedRollout]:
    """Read the gateway's SQLite store, session by session."""
    # Immutable would miss what is still in the write-ahead log.
    address = f"file:{quote(str(path.resolve()))}?mode=ro"
    try:
        with closing(sqlite3.connect(address, uri=True)) as store:
            sessions = store.execute(
                "SELECT session_id FROM trace_sessions GROUP BY session_id ORDER BY MIN(created_at), session_id"
            ).fetchall()
            for (session,) in sessions:
                rows = store.execute(
                    "SELECT t.trace_id, t.data FROM trace_sessions s JOIN traces t ON t.trace_id = s.trace_id"
                    " WHERE s.session_id = ? ORDER BY s.created_at, s.rowid",
                    (session,),
                )
                yield _stored_session(path, str(session), rows, report)
    except sqlite3.Error as error:
        raise DecodeError(f"expected a store of traces: {error}", where=str(path)) from error


def _stored_session(path: Path, session: str, rows: Iterable[tuple[object, object]], report: Report) -> CapturedRollout:
    traces: list[_Trace] = []
    lost: list[LostCall] = []
    for trace_id, data in rows:
        place = f"{path} trace {trace_id}"
        try:
            text = data if isinstance(data, bytes) else str(data).encode("utf-8", "surrogatepass")
            traces.append(_Trace(place, object_at(loads_foreign(text, place), "$")))
        except (DecodeError, Unexpected) as error:
            report.refuse(refused(error, place))
            lost.append(hole(str(trace_id), place))
    return _session(Key(session), traces, lost, report)


# Traces


def _session(key: Key, traces: Sequence[_Trace], lost: Iterable[LostCall], report: Report) -> CapturedRollout:
    lines = AttemptLines(*key, report)
    prompts = Prompts(trace.value for trace in traces)
    for index, trace in enumerate(traces):
        call_id = f"trace-{index}"
        try:
            call_id = name_at(trace.value, "trace_id", "$") or call_id
            sdk = "input" in trace.value or "output" in trace.value
            line = _sdk_call(trace.value, report) if sdk else _gateway_call(trace.value, prompts, report)
            lines.call({"model_call_id": call_id, **line})
        except Unexpected as error:
            report.refuse(refused(error, trace.place))
            lines.lose([hole(call_id, trace.place)])
    lines.lose(lost)
    report.notes.extend(Note(f"{key.rollout_id} {call}", told) for call, told in prompts.missing)
    report.lose("prompts", len(prompts.missing))
    return lines.finish()


def _gateway_call(trace: JsonObject, prompts: Prompts, report: Report) -> JsonObject:
    """Write a gateway's trace as a `call` line."""
    message = trace.get("response_message")
    if message is None and "completion_token_ids" not in trace:
        raise Unexpected("response_message or completion_token_ids", "neither", "$")
    request = trace.get("raw_request")
    if request is None:
        request = _request(trace, trace.get("messages"), report)
    report.lose("routing_matrices", trace.get("routing_matrices") is not None)
    report.lose("fields", len(unknown_keys(trace, _GATEWAY | {"routing_matrices"})))
    logprobs = list_at(trace, "logprobs", "$")
    line: JsonObject = {
        "dialect": "chat",
        "output_items": _items(message, "$.response_message"),
        "prompt_token_ids": prompts.of(trace),
        "generation_token_ids": list_at(trace, "completion_token_ids", "$") or None,
        "generation_log_probs": logprobs,
        "usage": _usage(trace.get("token_counts"), "$.token_counts"),
        "request": kept(request, "$.messages"),
        "reply": kept(trace.get("raw_response"), "$.raw_response"),
        "weights_at_start": _version(trace.get("weight_version")),
        **_common(trace, trace.get("finish_reason"), "$.finish_reason"),
    }
    parent = name_at(trace, "parent_trace_id", "$")
    if parent is not None and trace.get("prompt_delta_token_ids") is not None and prompts.holds(parent):
        # The format defines it: this prompt begins with that trace's prompt and completion.
        line["parent_call_id"] = parent
    return line


def _sdk_call(trace: JsonObject, report: Report) -> JsonObject:
    """Write an SDK's trace as a `call` line; its output is a message with ids, or a whole response with choices."""
    asked = object_at(trace.get("input"), "$.input")
    answered = object_at(trace.get("output"), "$.output")
    report.lose("fields", len(unknown_keys(trace, _SDK)) + len(unknown_keys(asked, _SDK_INPUT)))
    request = _request(trace, asked.get("messages"), report)
    if isinstance(request, dict) and trace.get("tools") is not None:
        request["tools"] = trace["tools"]
    line: JsonObject = {"dialect": "chat", "usage": _usage(trace.get("tokens"), "$.tokens")}
    if "choices" in answered:
        line.update(_served(answered))
    else:
        report.lose("fields", len(unknown_keys(answered, _SDK_OUTPUT)))
        line.update(
            {
                "output_items": _items(answered.get("message"), "$.output.message"),
                "prompt_token_ids": list_at(asked, "prompt_token_ids", "$.input") or None,
                "generation_token_ids": list_at(answered, "output_token_ids", "$.output") or None,
                "generation_log_probs": list_at(answered, "rollout_logprobs", "$.output"),
            }
        )
        line.update(_common(trace, answered.get("finish_reason"), "$.output.finish_reason"))
    line["request"] = kept(request, "$.input")
    return {**_common(trace, None, "$"), **line}


def _served(output: JsonObject) -> JsonObject:
    """Take the one choice of a response that was kept whole, as the code for recorded exchanges reads it."""
    from gristmill.captures.chat import read_value  # noqa: PLC0415 - only traces of the SDK have whole responses

    reply = read_value(output)
    if len(reply.choices) != 1:
        raise Unexpected("one choice", f"{len(reply.choices)}", "$.output.choices")
    [choice] = reply.choices
    return {
        "response_id": reply.response_id,
        "output_items": list(choice.items),
        "prompt_token_ids": _list(choice.prompt_ids),
        "generation_token_ids": _list(choice.token_ids),
        "generation_log_probs": _list(choice.logprobs),
        "finish_reason": choice.finish_reason,
        "response_status": str(choice.response_status),
        "unusable_reason": None if choice.reason is None or choice.reason in _FOUND_AGAIN else str(choice.reason),
        "unusable_detail": choice.detail,
    }


_FOUND_AGAIN: Final = frozenset({Code.TOKEN_IDS_MISSING, Code.PROMPT_IDS_MISSING, Code.LOGPROBS_MISSING})
"""Reasons that reading the line finds again."""


def _list(values: Sequence[int] | Sequence[float] | None) -> list[JsonValue] | None:
    return None if values is None else list(values)


def _common(trace: JsonObject, finish: JsonValue, where: str) -> JsonObject:
    reason = name_at({"": finish}, "", where)
    status = chat_status(reason)
    stamp = trace.get("timestamp")
    completed = None if stamp is None else number(stamp)
    return {
        "model": name_at(trace, "model", "$") or None,
        "finish_reason": reason,
        "response_status": None if status is ResponseStatus.UNKNOWN else str(status),
        "completed_at": completed if completed and 0 < completed < inf else None,
    }


def _request(trace: JsonObject, messages: JsonValue, report: Report) -> JsonValue:
    """Write the request as far as it is known: the model that was asked and the messages."""
    if not messages:
        return None
    report.lose("requests")
    return {"model": trace.get("model"), "messages": messages}


def _items(message: JsonValue, where: str) -> list[JsonValue]:
    if not message:
        return []
    said = object_at(kept(message, where), where)
    calls = [call for call, _ in objects_at(said, "tool_calls", where)]
    if any(type(call.get("index")) is int for call in calls):
        said = {**said, "tool_calls": _joined(calls, f"{where}.tool_calls")}
    return [said if said.get("role") is not None else {"role": "assistant", **said}]


def _joined(pieces: Iterable[JsonObject], where: str) -> list[JsonValue]:
    """Join the pieces of tool calls: of a stream the gateway keeps them as they came, in order, each with its index."""
    made: dict[JsonValue, JsonObject] = {}
    for position, piece in enumerate(pieces):
        index = piece.get("index")
        key = index if type(index) is int else f"piece {position}"
        held = piece.get("function")
        function = {} if held is None else object_at(held, f"{where}[{position}].function")
        call = made.setdefault(key, {"id": None, "type": "function", "function": {"name": None, "arguments": ""}})
        whole = cast(JsonObject, call["function"])
        call["id"] = call["id"] or name_at(piece, "id", f"{where}[{position}]")
        whole["name"] = whole["name"] or name_at(function, "name", f"{where}[{position}].function")
        whole["arguments"] += text_at(function, "arguments", f"{where}[{position}].function") or ""
    return list(made.values())


def _usage(counts: JsonValue, where: str) -> JsonValue:
    if counts is None:
        return None
    said = object_at(counts, where)
    named = {"prompt_tokens": said.get("prompt"), "completion_tokens": said.get("completion")}
    return {name: count for name, count in named.items() if count is not None} or None


def _version(value: JsonValue) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if type(value) is not int:
        raise Unexpected("an integer", type(value).__name__, "$.weight_version")
    return str(value)


# Detection


def _certain(path: Path) -> bool:
    if path.suffix == ".jsonl" and path.is_file():
        line = first_object(path)
        return line is not None and {"trace_id", "session_id", "response_message"} <= line.keys()
    return False


RLLM: Final = Importer(
    name="rllm",
    title="Traces of rLLM's model gateway (JSON lines, JSON answers, its SQLite store) and of its older SDK.",
    made_for="rllm-model-gateway 0.1 (TraceRecord), rllm 0.2 (sdk Trace)",
    losses=_LOSSES,
    read=_read,
    certain=_certain,
)
