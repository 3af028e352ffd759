"""Responses replies: the served items are the members of `output`.

Token ids are there only with `enable_response_messages` (one raw message in, one out); log-probabilities only
on a text part, and they count only if that part covers every sampled token.

Caveat, not curable from here: an aborted generation says `completed` like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from msgspec.structs import replace

from gristmill.canonical import JsonValue, loads
from gristmill.captures.assembly import truncated
from gristmill.captures.choices import error_text
from gristmill.captures.fields import JsonObject, count_at, list_at, name_at, number, object_at, text_at
from gristmill.captures.reply import Reply, ReplyChoice, Unexpected, Usage, failed_reply, malformed_reply
from gristmill.captures.sse import DONE, ServerEvent, parse_events
from gristmill.errors import Code, DecodeError
from gristmill.records import Dialect, ResponseStatus

__all__ = ["read_body", "read_stream", "read_value"]

_STATUSES = {
    "completed": ResponseStatus.COMPLETED,
    "incomplete": ResponseStatus.INCOMPLETE,
    "failed": ResponseStatus.FAILED,
    "cancelled": ResponseStatus.INCOMPLETE,
}
_TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})


def read_body(body: bytes) -> Reply:
    """Read a `response` object."""
    try:
        value = loads(body)
    except DecodeError as error:
        return malformed_reply(Dialect.RESPONSES, error.message)
    return read_value(value)


def read_value(value: JsonValue) -> Reply:
    """Read a body that is already decoded."""
    try:
        return _read(object_at(value, "$"))
    except Unexpected as error:
        return malformed_reply(Dialect.RESPONSES, str(error))


def read_stream(stream: bytes | str) -> Reply:
    """Read a stream of `response.*` events; the terminal event holds the whole response."""
    try:
        return _read_events(parse_events(stream))
    except (DecodeError, Unexpected) as error:
        return malformed_reply(Dialect.RESPONSES, str(error))


def _read_events(events: Iterable[ServerEvent]) -> Reply:
    opened: JsonObject = {}
    done_items: list[JsonValue] = []
    for event in events:
        if event.data.strip() == DONE:
            break
        data = object_at(loads(event.data), "$")
        kind = text_at(data, "type", "$") or event.event
        if kind in _TERMINAL:
            return _read(object_at(data.get("response"), "$.response"))
        if kind == "error" or data.get("error") is not None:
            return failed_reply(Dialect.RESPONSES, error_text(data) or error_text({"error": data}) or kind)
        if kind == "response.created":
            opened = object_at(data.get("response"), "$.response")
        elif kind == "response.output_item.done":
            done_items.append(object_at(data.get("item"), "$.item"))
    cut = Reply(
        response_id=name_at(opened, "id", "$.response"),
        model=name_at(opened, "model", "$.response"),
        dialect=Dialect.RESPONSES,
        status=ResponseStatus.UNKNOWN,
        choices=(ReplyChoice(items=tuple(done_items)),),
    )
    return truncated(cut, "no response.completed, response.incomplete or response.failed")


def _read(response: JsonObject) -> Reply:
    stated = text_at(response, "status", "$")
    status = _STATUSES.get(stated or "", ResponseStatus.UNKNOWN)
    error = error_text(response)
    if error is not None and status is not ResponseStatus.FAILED:
        return failed_reply(Dialect.RESPONSES, error)
    items = tuple(
        object_at(item, f"$.output[{position}]") for position, item in enumerate(list_at(response, "output", "$") or ())
    )
    usage = _usage(response)
    choice = _choice(response, items, status, usage)
    if status is ResponseStatus.FAILED:
        error = error or "the engine said status 'failed'"
        reason, detail = Code.CALL_FAILED, error
    elif stated == "cancelled":
        reason, detail = Code.ABORTED, "the engine said status 'cancelled'"
    else:
        reason, detail = choice.reason, choice.detail
    return Reply(
        response_id=name_at(response, "id", "$"),
        model=name_at(response, "model", "$"),
        dialect=Dialect.RESPONSES,
        status=status,
        choices=(replace(choice, reason=reason, detail=detail),),
        usage=usage,
        error=error,
    )


def _usage(response: JsonObject) -> Usage:
    value = response.get("usage")
    if value is None:
        return Usage()
    usage = object_at(value, "$.usage")
    details = usage.get("input_tokens_details")
    place = "$.usage.input_tokens_details"
    cached = None if details is None else count_at(object_at(details, place), "cached_tokens", place)
    return Usage(count_at(usage, "input_tokens", "$.usage"), count_at(usage, "output_tokens", "$.usage"), cached)


def _choice(response: JsonObject, items: tuple[JsonObject, ...], status: ResponseStatus, usage: Usage) -> ReplyChoice:
    details = response.get("incomplete_details")
    place = "$.incomplete_details"
    finish = None if details is None else name_at(object_at(details, place), "reason", place)
    if finish is None and response.get("status") == "cancelled":
        finish = "cancelled"
    ids = _raw_tokens(response, "output_messages")
    prompt = _raw_tokens(response, "input_messages")
    logprobs = None if ids is None else _text_logprobs(items, len(ids))
    reason, detail = _token_reason(ids, prompt, logprobs, usage)
    return ReplyChoice(
        finish_reason=finish,
        response_status=status,
        items=items,
        prompt_ids=prompt,
        token_ids=ids,
        logprobs=logprobs,
        reason=reason,
        detail=detail,
    )


def _token_reason(
    ids: Sequence[int] | None, prompt: Sequence[int] | None, logprobs: Sequence[float] | None, usage: Usage
) -> tuple[Code | None, str | None]:
    if ids is None:
        return Code.TOKEN_IDS_MISSING, "the reply has no complete token_ids under output_messages"
    if usage.completion_tokens is not None and usage.completion_tokens != len(ids):
        detail = f"{len(ids)} token ids, the engine reported {usage.completion_tokens}"
        return Code.TOKEN_COUNT_MISMATCH, detail
    if prompt is None:
        return Code.PROMPT_IDS_MISSING, "the reply has no complete token ids under input_messages"
    if logprobs is None:
        return Code.LOGPROBS_MISSING, f"{len(ids)} token ids, no logprobs on a text part"
    if len(logprobs) != len(ids):
        return (
            Code.LOGPROB_COUNT_MISMATCH,
            f"{len(ids)} token ids, {len(logprobs)} logprobs on the text parts",
        )
    return None, None


def _raw_tokens(response: JsonObject, key: str) -> Sequence[int] | None:
    """Return the ids of the one raw message; several have tool output between them: no one generation."""
    messages = list_at(response, key, "$")
    if messages is None or len(messages) != 1:
        return None
    tokens = list_at(object_at(messages[0], f"$.{key}[0]"), "tokens", f"$.{key}[0]")
    if tokens is None or not set(map(type, tokens)) <= {int}:
        return None
    return cast("list[int]", tokens)


def _text_logprobs(items: Iterable[JsonObject], expected: int) -> Sequence[float] | None:
    """Return the log-probabilities of the text part that covers every token, else of all parts together."""
    found: list[list[float]] = []
    for item in items:
        content = item.get("content")
        for part in cast("list[Any]", content) if isinstance(content, list) else ():
            scored = part.get("logprobs") if isinstance(part, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            if isinstance(scored, list) and scored:
                entries = cast("list[JsonValue]", scored)
                found.append([number(_logprob(entry)) for entry in entries])
    covering = [values for values in found if len(values) == expected]
    if len(covering) == 1:
        return covering[0]
    return [value for values in found for value in values] if found else None


def _logprob(entry: JsonValue) -> JsonValue:
    return cast(JsonObject, entry).get("logprob") if isinstance(entry, dict) else None
