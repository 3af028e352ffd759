"""From a reply to captured calls: one record per choice, with its tokens where they can be trusted.

Invariant: a call is usable exactly if the reply gave no reason against it and its tokens pass the token
check; the reason that is recorded is the first one found. Nothing served is left out, usable or not.

Not here: which earlier call a request continues (lineage), what is stored (ledger).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy.typing as npt

from gristmill.canonical import JsonValue
from gristmill.captures.reply import Reply, ReplyChoice
from gristmill.captures.request import media_digests, model_asked_for, sampling_of
from gristmill.errors import Code
from gristmill.fingerprint import output_items
from gristmill.lineage import request_digests
from gristmill.records import UNLABELLED, CallRecord, Delivery, ParentResolution, Purpose, TokenDelta, schema_of
from gristmill.tokens import TokenBook, UnusableTokens, check_tokens

__all__ = ["CallContext", "MadeCall", "calls_from_reply", "choice_call_id", "with_tokens"]


class CallContext(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a call beside its reply: ids, the request body, and what became of the reply.

    The fields from `purpose` on are those of `CallRecord`.
    """

    model_call_id: str
    rollout_id: str = "rollout"
    attempt: int = 0
    ordinal: int = 0
    parent_call_id: str | None = None
    parent_resolution: ParentResolution | None = None
    request: JsonValue = None
    session_id: str | None = None
    parent_session_id: str | None = None
    delivery: Delivery = Delivery.UNKNOWN
    admitted_at: float | None = None
    completed_at: float | None = None
    purpose: Purpose = UNLABELLED
    requested_model: str | None = None
    upstream: str | None = None
    upstream_id: str | None = None
    engine_epoch: int | None = None
    weights_at_start: str | None = None
    weights_at_end: str | None = None
    changes: tuple[str, ...] = ()
    retry_of: str | None = None
    request_digest: str | None = None


class MadeCall(NamedTuple):
    """A record and its token delta; None where there are no tokens that could be stored."""

    record: CallRecord
    tokens: TokenDelta | None


def choice_call_id(model_call_id: str, choice_index: int) -> str:
    """Name the call of one choice: the call's own id for choice 0, `ID#k` for the others."""
    return model_call_id if choice_index == 0 else f"{model_call_id}#{choice_index}"


def calls_from_reply(reply: Reply, context: CallContext, book: TokenBook) -> tuple[MadeCall, ...]:
    """Make the captured calls of one reply, in the order of its choices.

    Args:
        reply: what the engine answered.
        context: ids and request of the call; `ordinal` is that of the first choice.
        book: the attempt's tokens so far; the new ones are added.
    """
    resolution = None if context.parent_call_id is None else ParentResolution.RESOLVED
    sampling = sampling_of(context.request)
    media = media_digests(context.request)
    made: list[MadeCall] = []
    for offset, choice in enumerate(reply.choices):
        call_id = choice_call_id(context.model_call_id, choice.index)
        digests = request_digests(context.request, choice.items)
        record = CallRecord(
            model_call_id=call_id,
            # Only an error has no id of its own; the call's id keeps such replies apart.
            response_id=reply.response_id or context.model_call_id,
            rollout_id=context.rollout_id,
            attempt=context.attempt,
            choice_index=choice.index,
            ordinal=context.ordinal + offset,
            parent_call_id=context.parent_call_id,
            parent_resolution=context.parent_resolution or resolution,
            dialect=reply.dialect,
            model=reply.model or context.requested_model or model_asked_for(context.request),
            session_id=context.session_id,
            parent_session_id=context.parent_session_id,
            response_status=str(choice.response_status),
            finish_reason=choice.finish_reason,
            output_items=output_items(choice.items),
            context_digest=digests.context_digest,
            continuation_digest=digests.continuation_digest,
            continuation_digest_bare=digests.continuation_digest_bare,
            system_digest=digests.system_digest,
            tools_digest=digests.tools_digest,
            unusable_reason=choice.reason,
            unusable_detail=choice.detail,
            weight_versions=choice.weight_versions,
            sampling=sampling,
            request_media=media,
            delivery=context.delivery,
            admitted_at=context.admitted_at,
            completed_at=context.completed_at,
            purpose=context.purpose,
            requested_model=context.requested_model,
            upstream=context.upstream,
            upstream_id=context.upstream_id,
            engine_epoch=context.engine_epoch,
            weights_at_start=context.weights_at_start,
            weights_at_end=context.weights_at_end,
            changes=context.changes,
            retry_of=context.retry_of,
            request_digest=context.request_digest,
        )
        record = msgspec.structs.replace(record, schema=schema_of(record))
        made.append(with_tokens(record, choice, _reported(reply, choice), book))
    return tuple(made)


def _reported(reply: Reply, choice: ReplyChoice) -> int | None:
    """Return the engine's count where it is this choice's alone; sums were compared before."""
    alone = len(reply.choices) == 1 and choice.reason is None
    return reply.usage.completion_tokens if alone else None


def with_tokens(
    record: CallRecord,
    choice: ReplyChoice,
    reported: int | None,
    book: TokenBook,
    extras: Mapping[str, npt.NDArray[Any]] = {},
) -> MadeCall:
    """Check a call's tokens, add them to the attempt's, and finish the record.

    Args:
        record: the record without token fields; a reason it already has stays.
        choice: holds the ids and log-probabilities.
        reported: the number of sampled tokens that the engine reported, None where it said nothing.
        book: the attempt's tokens so far.
        extras: arrays that belong to the delta, by name.

    A second call of one id has no tokens of its own: they are kept by call id, and selection refuses the
    attempt.
    """
    checked = check_tokens(choice.prompt_ids, choice.token_ids, choice.logprobs, reported=reported)
    if isinstance(checked, UnusableTokens):
        reason, detail = checked.reason, checked.detail
        if choice.token_ids is None:  # before all else: no ids of the reply, no tokens
            reason = Code.TOKEN_IDS_MISSING
        if record.unusable_reason is not None:
            reason, detail = record.unusable_reason, record.unusable_detail
        return MadeCall(
            msgspec.structs.replace(record, usable=False, unusable_reason=reason, unusable_detail=detail),
            None,
        )
    again = record.model_call_id in book
    stored = (TokenBook() if again else book).add(
        record.model_call_id,
        checked.prompt_T,
        checked.generation_T,
        checked.logprobs_T,
        parent=record.parent_call_id,
        extras=extras,
    )
    finished = msgspec.structs.replace(
        record,
        usable=record.unusable_reason is None,
        prompt_len=stored.prompt_len,
        prev_len=stored.prev_len,
        delta_len=stored.delta_len,
        cum_len=stored.cum_len,
        base_call_id=stored.base_call_id,
        sequence_digest=stored.sequence_digest,
        logprobs_digest=stored.logprobs_digest,
        chain_digest=stored.chain_digest,
    )
    return MadeCall(finished, None if again else stored.delta)
