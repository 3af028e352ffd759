"""What is stored of a call that was served: records, tokens and the exchange, one call per choice.

Invariant: tokens, finish and usage are the engine's word; content is what the client was served, in its dialect. Every
choice that was admitted gets a record, whatever became of it, and a call without tokens says why.

Not here: when a call is stored (call), reading an engine's reply (captures).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec
import orjson

from gristmill.canonical import JsonValue
from gristmill.captures import CallContext, Reply, ReplyChoice, calls_from_reply, choice_call_id
from gristmill.captures.decode import decode_value
from gristmill.captures.reply import encodable
from gristmill.errors import Code
from gristmill.ledger import StoredCall
from gristmill.records import CallRecord, Continuation, Dialect, Exchange, ResponseStatus, schema_of
from gristmill.tokens import TokenBook

__all__ = [
    "admitted_ids",
    "as_aborted",
    "as_broken",
    "as_failed",
    "as_served",
    "ended_itself",
    "stored_calls",
    "tokens_of",
    "unfinished",
    "with_prompt_checked",
]

_OWN_ENDS: Final = frozenset({"stop", "tool_calls", "function_call"})


def as_failed(dialect: Dialect, message: str, choices: int, reason: Code = Code.CALL_FAILED) -> Reply:
    """A reply that never was: one failed choice for each that was asked for."""
    detail = encodable(message)
    made = tuple(
        ReplyChoice(index=index, response_status=ResponseStatus.FAILED, reason=reason, detail=detail)
        for index in range(choices)
    )
    return Reply(dialect=dialect, status=ResponseStatus.FAILED, choices=made, error=detail)


def as_broken(reply: Reply, why: str) -> Reply:
    """Say of a reply that broke off what broke it."""
    made = tuple(
        msgspec.structs.replace(choice, detail=encodable(f"{choice.detail}; {why}"))
        if choice.reason is Code.STREAM_TRUNCATED
        else choice
        for choice in reply.choices
    )
    return msgspec.structs.replace(reply, choices=made)


def unfinished(reply: Reply) -> Reply:
    """Mark the choices of a whole reply that have no finish reason: how they ended was not said."""
    if all(choice.finish_reason for choice in reply.choices):
        return reply
    detail = "the reply has no finish_reason for this choice"
    made = tuple(
        choice if choice.finish_reason else msgspec.structs.replace(choice, reason=Code.STREAM_TRUNCATED, detail=detail)
        for choice in reply.choices
    )
    return msgspec.structs.replace(reply, choices=made, status=ResponseStatus.UNKNOWN)


def as_aborted(reply: Reply, why: str, choices: int) -> Reply:
    """Mark a reply that the gateway broke off; what had been sampled by then stays with it.

    A choice that had come to its own end by then is complete, whoever was still there to read it.
    """
    known = {choice.index: choice for choice in reply.choices if choice.index < choices}
    made: list[ReplyChoice] = []
    for index in range(choices):
        choice = known.get(index, ReplyChoice(index=index))
        if choice.finish_reason is not None and choice.reason is None:
            made.append(choice)
            continue
        detail = why if choice.token_ids is not None else f"{why}; {Code.TOKEN_IDS_MISSING}"
        status = ResponseStatus.INCOMPLETE if choice.finish_reason is not None else ResponseStatus.UNKNOWN
        made.append(msgspec.structs.replace(choice, response_status=status, reason=Code.ABORTED, detail=detail))
    return msgspec.structs.replace(reply, choices=tuple(made), status=ResponseStatus.UNKNOWN, error=None)


def as_served(
    reply: Reply, dialect: Dialect, served: JsonValue, *, response_id: str, no_ids: str | None, choices: int
) -> Reply:
    """Put what the client was served into an engine's reply.

    Args:
        reply: what the engine said.
        dialect: the client's.
        served: the whole reply as the client got it, None where it got nothing.
        response_id: as the client was told.
        no_ids: why the engine gives no token ids, None where it was asked for them.
        choices: how many were admitted; one that the engine never mentioned is stored as truncated.
    """
    items: dict[int, tuple[JsonValue, ...]] = {}
    if served is not None:
        items = {choice.index: choice.items for choice in decode_value(dialect, 200, served).choices}
    known = {choice.index: choice for choice in reply.choices}
    absent = ReplyChoice(reason=Code.STREAM_TRUNCATED, detail="the engine never mentioned this choice")
    unasked = len(known.keys() - set(range(choices)))
    made: list[ReplyChoice] = []
    for index in range(choices):
        choice = known.get(index) or msgspec.structs.replace(absent, index=index)
        if unasked and choice.reason is None:
            # The reported counts are sums over choices that nobody asked for.
            detail = f"the engine sent {unasked} choices that were not asked for"
            choice = msgspec.structs.replace(choice, reason=Code.REPLY_MALFORMED, detail=detail)
        choice = _writable(msgspec.structs.replace(choice, items=items.get(index, ())))
        if choice.reason is Code.TOKEN_IDS_MISSING:
            reason = no_ids or f"not returned: the engine was asked for token ids; {choice.detail}"
            choice = msgspec.structs.replace(choice, detail=encodable(reason))
        made.append(choice)
    return msgspec.structs.replace(reply, dialect=dialect, response_id=response_id, choices=tuple(made))


def _writable(choice: ReplyChoice) -> ReplyChoice:
    """Escape lone surrogates, which are no text; a choice that has some says so and is not trained."""
    try:
        orjson.dumps(choice.items, default=_opaque)
    except TypeError:
        pass
    else:
        return choice
    return msgspec.structs.replace(
        choice,
        items=tuple(_escaped(item) for item in choice.items),
        reason=Code.REPLY_MALFORMED,
        detail="the reply holds a lone surrogate, which is no text",
    )


def _opaque(value: Any) -> None:
    """Numbers kept as text and the like are not looked into."""
    del value


def _escaped(value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list):
        return [_escaped(member) for member in cast("list[JsonValue]", value)]
    if isinstance(value, dict):
        members = cast("dict[str, JsonValue]", value)
        return {encodable(key): _escaped(member) for key, member in members.items()}
    return value


def stored_calls(
    reply: Reply,
    context: CallContext,
    book: TokenBook,
    exchange: Mapping[str, Any] | None,
    changes: Mapping[str, Any],
    continuation: Callable[[ReplyChoice], Continuation] | None = None,
) -> tuple[StoredCall, ...]:
    """Make what the ledger stores of a reply.

    Args:
        reply: of `as_served`.
        context: ids, request and lineage of the call.
        book: the attempt's tokens; the new ones are added.
        exchange: fields of `Exchange`, None where exchanges are not kept.
        changes: fields of the records that take precedence (`sampling` as it was asked of the engine, `model`).
        continuation: says of a choice what became of continuing the call; None where that was not asked for.
    """
    stored: list[StoredCall] = []
    for choice, made in zip(reply.choices, calls_from_reply(reply, context, book), strict=True):
        record = msgspec.structs.replace(made.record, **changes)
        if continuation is not None:
            record = msgspec.structs.replace(record, continuation=continuation(choice))
            record = msgspec.structs.replace(record, schema=schema_of(record))
        kept = None if exchange is None else Exchange(model_call_id=record.model_call_id, **exchange)
        stored.append(StoredCall(record=record, tokens=made.tokens, exchange=kept))
    return tuple(stored)


def ended_itself(choice: ReplyChoice, stop_token_ids: Any) -> bool:
    """Tell whether a choice ended with a token by which the model ends a turn.

    Args:
        choice: what the engine said.
        stop_token_ids: those that the request asked to stop at.
    """
    if choice.finish_reason not in _OWN_ENDS:
        return False
    # Some engines name the token that ended a turn, others say nothing then; a text is a stop that was asked for.
    asked = cast("list[Any]", stop_token_ids) if isinstance(stop_token_ids, list) else []
    return choice.stop_reason is None or (isinstance(choice.stop_reason, int) and choice.stop_reason not in asked)


def with_prompt_checked(reply: Reply, prompt: Sequence[int]) -> Reply:
    """Refuse the tokens of every choice that was sampled from another prompt; the same reply where none was.

    Args:
        reply: what the engine said.
        prompt: the ids that it was given.
    """
    sent = list(prompt)
    named = {choice.index: choice.prompt_ids for choice in reply.choices if choice.prompt_ids is not None}
    differs = {index for index, prompt_ids in named.items() if list(prompt_ids) != sent}
    if not differs:
        return reply
    detail = f"the engine was given a prompt of {len(sent)} tokens, and its reply names another one"
    made = tuple(
        msgspec.structs.replace(choice, reason=choice.reason or Code.PROMPT_IDS_DIFFER, detail=choice.detail or detail)
        if choice.index in differs
        else choice
        for choice in reply.choices
    )
    return msgspec.structs.replace(reply, choices=made)


def admitted_ids(call_id: str, choices: int) -> Sequence[str]:
    """Name the calls of a request's choices."""
    return [choice_call_id(call_id, index) for index in range(choices)]


def tokens_of(records: Sequence[CallRecord]) -> tuple[int, int]:
    """Count prompt and sampled tokens of usable calls."""
    usable = [record for record in records if record.usable]
    return sum(record.prompt_len for record in usable), sum(record.cum_len - record.prompt_len for record in usable)
