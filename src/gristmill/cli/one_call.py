"""One call of a rollout, whole: what was asked, what was served, and the tokens around the end of its prompt.

Invariant: what was not captured is said to be missing, not left out.

Not here: its JSON keys' documentation (show), and why it was selected or not (explain).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from gristmill.cli.attempts import Attempt
from gristmill.cli.choice import Choice
from gristmill.cli.plural import counted
from gristmill.errors import Code, ConfigError

if TYPE_CHECKING:
    from gristmill.cli.show import Shown
    from gristmill.records import CallRecord, Exchange, OutputItem

__all__ = ["show_call"]

_AROUND_T: Final = 16
_LONG_TEXT: Final = 200  # characters
_LONG_ARRAY: Final = 8  # items
_KINDS: Final = {"int": "integers", "float": "numbers", "JsonNumber": "numbers", "str": "strings", "dict": "objects"}
_KNOWN: Final = frozenset({"model", "messages", "input", "prompt", "tools", "system", "instructions"})


def show_call(attempts: Iterable[Attempt], choice: Choice, call_id: str, as_json: bool) -> None:
    """Show a call, by JSON or by text.

    Raises:
        ConfigError: `call_unknown`, no attempt has it, or several.
    """
    from gristmill.cli.nearest import did_you_mean
    from gristmill.cli.show import look

    holders: list[Attempt] = []
    known: dict[str, None] = {}
    for attempt in attempts:
        ids = [record.model_call_id for record in attempt.capture.records]
        if call_id in ids:
            holders.append(attempt)
        else:
            known |= dict.fromkeys(ids)
    if not holders:
        message = f"no call {call_id!r} in the rollout"
        raise ConfigError(message, code=Code.CALL_UNKNOWN, where="--call", hint=did_you_mean(call_id, known))
    if len(holders) > 1:
        numbers = ", ".join(str(attempt.capture.attempt) for attempt in holders)
        raise ConfigError(
            f"expected a call of one attempt, {call_id!r} is in attempts {numbers}",
            code=Code.CALL_UNKNOWN,
            where="--call",
            hint=f"name one of them: --attempt {holders[0].capture.attempt}",
        )
    shown = look(holders[0], choice)
    record = next(record for record in holders[0].capture.records if record.model_call_id == call_id)
    told = _call_json(shown, record)
    if as_json:
        from gristmill.cli.document import json_text

        sys.stdout.write(json_text(told) + "\n")
    else:
        _write(told)


def _call_json(shown: Shown, record: CallRecord) -> dict[str, Any]:
    from gristmill.cli.prose import Explainer
    from gristmill.cli.show import call_json
    from gristmill.cli.tree import placed_calls

    call_id, capture = record.model_call_id, shown.attempt.capture
    included = {call for call, verdict in shown.verdicts.items() if verdict.included}
    depth = next(
        placed.depth
        for placed in placed_calls(capture.records, included)
        if capture.records[placed.position].model_call_id == call_id
    )
    certificate = shown.certificates.get(call_id)
    exchange = capture.exchanges.get(call_id)
    return {
        "rollout_id": capture.rollout_id,
        "attempt": capture.attempt,
        **call_json(shown, record, depth),
        "text": Explainer(capture, shown.selection).call(shown.verdicts[call_id]).text,
        "items": [_item_json(item) for item in record.output_items],
        "tokens": _tokens_json(shown, record),
        "certificate": None if certificate is None else msgspec.to_builtins(certificate),
        "weight_versions": msgspec.to_builtins(record.weight_versions),
        "sampling": msgspec.to_builtins(record.sampling),
        "request": None if exchange is None else _request_json(exchange),
        "reply": None if exchange is None else _reply_json(exchange),
    }


def _item_json(item: OutputItem) -> dict[str, Any]:
    from gristmill.selection.nearest import describe_atom

    text = None if item.atoms is None else ", ".join(describe_atom(atom) for atom in item.atoms)
    return {"kind": str(item.kind), "type": item.type, "id": item.id, "fingerprint": item.fingerprint, "text": text}


def _tokens_json(shown: Shown, record: CallRecord) -> dict[str, Any] | None:
    from gristmill.errors import ReconstructionError
    from gristmill.tokens import expand

    capture = shown.attempt.capture
    delta = capture.tokens.get(record.model_call_id)
    if delta is None:
        return None
    by_id = {one.model_call_id: one for one in capture.records}
    try:
        sequence_T = expand(by_id, capture.tokens, record.model_call_id)
    except ReconstructionError:
        # Said by the call being unusable, and by `verify`.
        return None
    end, sampled = record.prompt_len, record.cum_len - record.prompt_len
    logprobs_T = delta.logprobs_T[delta.logprobs_T.size - sampled :][:_AROUND_T]
    return {
        "prompt_len": end,
        "prev_len": record.prev_len,
        "base_call_id": record.base_call_id,
        "cum_len": record.cum_len,
        "before": sequence_T[max(0, end - _AROUND_T) : end].tolist(),
        "sampled": sequence_T[end : end + _AROUND_T].tolist(),
        "logprobs": [round(value, 6) for value in logprobs_T.tolist()],
        "sequence_digest": record.sequence_digest,
    }


def _request_json(exchange: Exchange) -> dict[str, Any] | None:
    """Say what a request holds, without its texts."""
    if not isinstance(exchange.request, Mapping):
        return None
    body = cast(Mapping[str, Any], exchange.request)
    said = body.get("messages", body.get("input", body.get("prompt")))
    messages: Any = None
    if isinstance(said, list):
        roles = [_role(message) for message in cast(Sequence[Any], said)]
        messages = {role: roles.count(role) for role in dict.fromkeys(roles)}
    elif isinstance(said, str):
        messages = {"user": 1}
    tools = body.get("tools")
    return {
        "model": body.get("model"),
        "messages": messages,
        "tools": [_tool(tool) for tool in cast(Sequence[Any], tools)] if isinstance(tools, list) else [],
        "parameters": {name: value for name, value in body.items() if name not in _KNOWN},
        "headers": dict(exchange.headers),
    }


def _role(message: Any) -> str:
    if not isinstance(message, Mapping):
        return "other"
    fields = cast(Mapping[str, Any], message)
    return str(fields.get("role") or fields.get("type") or "other")


def _tool(tool: Any) -> str:
    fields: Mapping[str, Any] = cast(Mapping[str, Any], tool) if isinstance(tool, Mapping) else {}
    inner: Any = fields.get("function")
    named = cast(Mapping[str, Any], inner) if isinstance(inner, Mapping) else fields
    return str(named.get("name") or named.get("type") or "other")


def _reply_json(exchange: Exchange) -> dict[str, Any]:
    from gristmill.captures.exact import dumps

    reply = exchange.reply
    kind = "nothing" if reply is None else "stream" if isinstance(reply, str) else "body"
    size = len(reply.encode("utf-8", "surrogatepass")) if isinstance(reply, str) else len(dumps(reply))
    return {"status": exchange.status, "kind": kind, "bytes": 0 if reply is None else size}


# ---- text --------------------------------------------------------------------------------------------------


def _write(told: Mapping[str, Any]) -> None:
    from gristmill.cli.document import json_text
    from gristmill.cli.screen import show, words

    number = f" attempt {told['attempt']}" if told["attempt"] else ""
    show(words(f"{told['rollout_id']}{number}  {told['model_call_id']}  {told['kind']}", "bold"), words(told["text"]))
    for name, value in (*_request_lines(told), *_token_lines(told)):
        show(words(f"{name}: {value}"))
    for item in told["items"]:
        show(words(f"item: {item['kind']} {item['text'] or 'whose content is not known'}"))
    certificate = told["certificate"]
    if certificate is not None:
        show(words(f"context: {json_text(certificate)}"))


def _request_lines(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    from gristmill.cli.document import json_text

    request, reply = told["request"], told["reply"]
    if request is None:
        return [("request", "was not captured")]
    roles: Mapping[str, int] = request["messages"] or {}
    messages = ", ".join(f"{count} {role}" for role, count in roles.items()) or "none"
    lines = [("request", f"model {request['model']}, messages: {messages}")]
    if request["tools"]:
        lines.append(("tools", ", ".join(request["tools"])))
    if request["parameters"]:
        lines.append(("parameters", json_text(_elided(request["parameters"]))))
    lines.append(("reply", f"{reply['kind']} of {counted(reply['bytes'], 'byte')}, status {reply['status']}"))
    return lines


def _elided(value: Any) -> Any:
    """Shorten what is long in a JSON value: it is whole in the JSON answer."""
    if isinstance(value, str):
        return value if len(value) <= _LONG_TEXT else f"{value[:_LONG_TEXT]}… ({len(value):,} characters)"
    if isinstance(value, Mapping):
        return {name: _elided(one) for name, one in cast(Mapping[str, Any], value).items()}
    if not isinstance(value, list):
        return value
    items = cast(list[Any], value)
    if len(items) <= _LONG_ARRAY:
        return [_elided(one) for one in items]
    # A number that was written like no other keeps its text, in a type of its own.
    types = {type(one).__name__ for one in items}
    kind = _KINDS.get(types.pop(), "values") if len(types) == 1 else "values"
    return f"[{len(items):,} {kind}]"


def _token_lines(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    tokens = told["tokens"]
    if tokens is None:
        return [("tokens", "none that can be read")]
    base = f", {tokens['prev_len']} of them those of {tokens['base_call_id']}" if tokens["base_call_id"] else ""
    return [
        ("prompt", f"{counted(tokens['prompt_len'], 'token')}{base}, the last: {_ids(tokens['before'])}"),
        (
            "sampled",
            f"{counted(tokens['cum_len'] - tokens['prompt_len'], 'token')}, the first: {_ids(tokens['sampled'])}",
        ),
        ("logprobs", " ".join(f"{value:.4g}" for value in tokens["logprobs"]) or "none"),
    ]


def _ids(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids)) or "none"
