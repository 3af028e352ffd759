"""Anthropic Messages replies: the served item is the whole message.

The dialect has no place for token ids, so its calls are never usable for rows. A reply without a stop reason
(which is what an aborted generation looks like) has the status `unknown`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from gristmill.canonical import JsonValue, loads
from gristmill.captures.assembly import truncated
from gristmill.captures.choices import error_text
from gristmill.captures.fields import JsonObject, count_at, list_at, name_at, object_at, text_at
from gristmill.captures.reply import Reply, ReplyChoice, Unexpected, Usage, failed_reply, malformed_reply
from gristmill.captures.sse import ServerEvent, parse_events
from gristmill.errors import Code, DecodeError
from gristmill.records import Dialect, ResponseStatus

__all__ = ["read_body", "read_stream", "read_value"]

_STATUSES = {
    "end_turn": ResponseStatus.COMPLETED,
    "tool_use": ResponseStatus.COMPLETED,
    "stop_sequence": ResponseStatus.COMPLETED,
    "refusal": ResponseStatus.COMPLETED,
    "max_tokens": ResponseStatus.INCOMPLETE,
    "pause_turn": ResponseStatus.INCOMPLETE,
    "model_context_window_exceeded": ResponseStatus.INCOMPLETE,
}
_DELTAS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


def read_body(body: bytes) -> Reply:
    """Read a `message` object."""
    try:
        value = loads(body)
    except DecodeError as error:
        return malformed_reply(Dialect.MESSAGES, error.message)
    return read_value(value)


def read_value(value: JsonValue) -> Reply:
    """Read a body that is already decoded."""
    try:
        return _read(object_at(value, "$"))
    except Unexpected as error:
        return malformed_reply(Dialect.MESSAGES, str(error))


def read_stream(stream: bytes | str) -> Reply:
    """Read a stream of Messages events; `message_stop` ends it."""
    try:
        return _read_events(parse_events(stream))
    except (DecodeError, Unexpected) as error:
        return malformed_reply(Dialect.MESSAGES, str(error))


def _read(message: JsonObject) -> Reply:
    error = error_text(message)
    if error is not None or message.get("type") == "error":
        return failed_reply(Dialect.MESSAGES, error or "the engine gave no message")
    content = list_at(message, "content", "$")
    if content is None:
        raise Unexpected("an array", "nothing", "$.content")
    stop = name_at(message, "stop_reason", "$")
    status = _STATUSES.get(stop or "", ResponseStatus.UNKNOWN)
    detail = "the Messages dialect carries no token_ids"
    if stop is None:
        detail += "; there is no stop_reason either, so it is unknown whether the reply is complete"
    item = {key: message[key] for key in ("id", "type", "role", "content") if key in message}
    return Reply(
        response_id=name_at(message, "id", "$"),
        model=name_at(message, "model", "$"),
        dialect=Dialect.MESSAGES,
        status=status,
        choices=(
            ReplyChoice(
                finish_reason=stop,
                response_status=status,
                items=(item,),
                stop_reason=message.get("stop_sequence"),
                reason=Code.TOKEN_IDS_MISSING,
                detail=detail,
            ),
        ),
        usage=_usage(message),
    )


def _usage(message: JsonObject) -> Usage:
    """Read the counts; here `input_tokens` leaves out what the cache served, so the prompt is the sum."""
    value = message.get("usage")
    if value is None:
        return Usage()
    usage = object_at(value, "$.usage")
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    fresh, read, created = (count_at(usage, name, "$.usage") for name in names)
    prompt = None if fresh is None else fresh + (read or 0) + (created or 0)
    return Usage(prompt, count_at(usage, "output_tokens", "$.usage"), read)


def _read_events(events: Iterable[ServerEvent]) -> Reply:
    message: JsonObject = {}
    blocks: dict[int, JsonObject] = {}
    stopped = False
    for event in events:
        data = object_at(loads(event.data), "$")
        kind = text_at(data, "type", "$") or event.event
        if kind == "error" or data.get("error") is not None:
            return failed_reply(Dialect.MESSAGES, error_text(data) or "the engine gave no message")
        if kind == "message_stop":
            stopped = True
            break
        _take(kind, data, message, blocks)
    message["content"] = [_closed(blocks[index]) for index in sorted(blocks)]
    message.setdefault("role", "assistant")
    reply = _read(message)
    return reply if stopped else truncated(reply, "no message_stop")


def _take(kind: str, data: JsonObject, message: JsonObject, blocks: dict[int, JsonObject]) -> None:
    if kind == "message_start":
        message.update(object_at(data.get("message"), "$.message"))
    elif kind == "message_delta":
        delta = object_at(data.get("delta"), "$.delta")
        message.update({key: value for key, value in delta.items() if value is not None})
        usage = data.get("usage")
        if usage is not None:
            before = object_at(message.get("usage") or {}, "$.usage")
            message["usage"] = {**before, **object_at(usage, "$.usage")}
    elif kind == "content_block_start":
        block = object_at(data.get("content_block"), "$.content_block")
        index = count_at(data, "index", "$") or 0
        if index in blocks:
            raise Unexpected(f"content block {index} once", "it started again", "$.index")
        blocks[index] = dict(block)
    elif kind == "content_block_delta":
        index = count_at(data, "index", "$") or 0
        if index not in blocks:
            raise Unexpected("a content block that was started", f"block {index}", "$.index")
        _join(blocks[index], object_at(data.get("delta"), "$.delta"))


def _join(block: JsonObject, delta: JsonObject) -> None:
    kind = text_at(delta, "type", "$.delta")
    if kind == "citations_delta":
        citations = block.get("citations")
        known = cast("list[JsonValue]", citations) if isinstance(citations, list) else []
        block["citations"] = [*known, delta.get("citation")]
        return
    field = _DELTAS.get(kind or "")
    if field is None:
        raise Unexpected("a known delta type", repr(kind), "$.delta.type")
    piece = text_at(delta, field, "$.delta")
    block[field] = (text_at(block, field, "$.content_block") or "") + (piece or "")


def _closed(block: JsonObject) -> JsonObject:
    """Turn the joined text of a tool's input into the JSON that it is; text that is no JSON stays text."""
    if "partial_json" not in block:
        return block
    text = cast(str, block.pop("partial_json"))
    if text:
        try:
            block["input"] = loads(text)
        except DecodeError:
            block["input"] = text
    return block
