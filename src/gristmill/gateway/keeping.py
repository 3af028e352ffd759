"""An outcome made durable: from a reply and what the client was served to committed calls.

Invariant: what is in memory of an attempt is never behind what the ledger acknowledged, and is dropped where it may be
ahead of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import monotonic, time
from typing import Any, NamedTuple

import msgspec

from gristmill.captures import CallContext, Reply, ReplyChoice
from gristmill.captures.request import sampling_of
from gristmill.errors import LedgerError
from gristmill.gateway.asked import Asked
from gristmill.gateway.attempts import Attempt
from gristmill.gateway.desk import Desk
from gristmill.gateway.front import JsonObject
from gristmill.gateway.outcome import as_served, ended_itself, stored_calls, tokens_of, with_prompt_checked
from gristmill.gateway.upstream.replicas import Replica
from gristmill.ledger import StoredCall
from gristmill.ledger.writes import Commit, PreparedCall, prepare_call
from gristmill.records import CallRecord, Continuation, ContinuationReason, ContinuationState, Dialect

__all__ = ["Ended", "Intent", "Order", "keep"]


class Order(NamedTuple):
    """How a call is sent on.

    Attributes:
        call_id: of its first choice.
        replica: the engine.
        body: for it, with the model its own.
        notes: what was changed in the request.
        continuation: for the record; None where it was not asked for.
        prompt: the ids that the engine has to sample from; None where it renders.
        ordinary: the body without them.
    """

    call_id: str
    replica: Replica
    body: JsonObject
    notes: tuple[str, ...]
    continuation: Continuation | None = None
    prompt: Sequence[int] | None = None
    ordinary: JsonObject | None = None

    def rendered_anew(self) -> Order:
        """Return the order of an ordinary call, after an engine has refused the prompt."""
        said = self.continuation
        again = Continuation(
            state=ContinuationState.REFUSED,
            reason=ContinuationReason.ENGINE_UNABLE,
            model=None if said is None else said.model,
            settings_digest=None if said is None else said.settings_digest,
        )
        body = self.body if self.ordinary is None else self.ordinary
        return self._replace(body=body, continuation=again, prompt=None, ordinary=None)


class Intent(NamedTuple):
    """A call as it was admitted: dialect, unix seconds, and the weights that the engine was said to have then."""

    dialect: Dialect
    admitted_at: float
    weights: str | None


class Ended(NamedTuple):
    """How it ended: the engine's reply, the whole reply as the client got it, the HTTP status it was told."""

    reply: Reply
    served: JsonObject | None
    status: int | None


async def keep(
    desk: Desk, attempt: Attempt, asked: Asked, order: Order, intent: Intent, ended: Ended
) -> tuple[CallRecord, ...] | None:
    """Commit a call's outcome and make it known to the calls that come after.

    Returns the records, None where they could not be made durable; the call stays admitted, and counts as lost.
    """
    ended = ended._replace(reply=_checked(desk, order, ended.reply))
    async with attempt.writing:
        records = await _committed(desk, attempt, asked, order, intent, ended)
    if records is not None:
        _count(desk, intent.dialect, records)
    return records


def _checked(desk: Desk, order: Order, reply: Reply) -> Reply:
    """Compare the prompt of a reply with the one that was sent; where it differs, the engine is given none any more."""
    checked = reply if order.prompt is None else with_prompt_checked(reply, order.prompt)
    if checked is not reply:
        order.replica.stop_continuing()
        desk.metrics.continuation_alarms.labels(order.replica.label).inc()
        desk.log.error("another prompt than was sent", call_id=order.call_id, engine=order.replica.label)
    return checked


async def _committed(
    desk: Desk, attempt: Attempt, asked: Asked, order: Order, intent: Intent, ended: Ended
) -> tuple[CallRecord, ...] | None:
    began = monotonic()
    try:
        await desk.attempts.refresh(attempt)
        prepare = partial(_prepared, desk, attempt, asked, order, intent, ended)
        # Of the attempt nothing else is written meanwhile, so a thread may.
        calls, prepared = await desk.blocking(prepare) if asked.large else prepare()
        await desk.write(Commit(attempt.key, prepared))
    except LedgerError as error:
        desk.attempts.forget(attempt.key)
        desk.log.error("not durable", call_id=order.call_id, code=str(error.code), **desk.names(attempt.key))
        desk.metrics.calls.labels(str(intent.dialect), "not_durable").inc()
        return None
    desk.metrics.commit_seconds.observe(monotonic() - began)
    records = tuple(call.record for call in calls)
    for record in records:
        attempt.add(record, stream=asked.translated.stream)
    return records


def _prepared(
    desk: Desk, attempt: Attempt, asked: Asked, order: Order, intent: Intent, ended: Ended
) -> tuple[Sequence[StoredCall], Sequence[PreparedCall]]:
    calls = stored_calls(
        as_served(
            ended.reply,
            intent.dialect,
            ended.served,
            response_id=_response_id(ended.served) or order.call_id,
            no_ids=order.replica.engine.missing(),
            choices=asked.translated.choices,
        ),
        _context(desk, attempt, asked, order, intent, ended.reply),
        attempt.book,
        _exchange(asked, ended) if desk.config.keep_exchanges else None,
        _as_asked(order, ended.reply),
        None if order.continuation is None else partial(_continuation, order, order.continuation),
    )
    return calls, _encoded(attempt, calls)


def _continuation(order: Order, said: Continuation, choice: ReplyChoice) -> Continuation:
    """Say of one choice what became of continuing the call, and how the choice ended."""
    return msgspec.structs.replace(said, ended=ended_itself(choice, order.body.get("stop_token_ids")))


def _encoded(attempt: Attempt, calls: Sequence[StoredCall]) -> list[PreparedCall]:
    """Encode the choices of one reply; the exchange that they share is cut once."""
    first = prepare_call(attempt.key, calls[0])
    rest = (msgspec.structs.replace(call, exchange=None) for call in calls[1:])
    return [first, *(prepare_call(attempt.key, call)._replace(exchange=first.exchange) for call in rest)]


def _context(desk: Desk, attempt: Attempt, asked: Asked, order: Order, intent: Intent, reply: Reply) -> CallContext:
    return CallContext(
        model_call_id=order.call_id,
        rollout_id=attempt.key.rollout_id,
        attempt=attempt.key.attempt,
        parent_call_id=asked.parent.parent_call_id,
        parent_resolution=asked.parent.resolution,
        request=asked.evidence,
        session_id=asked.session.session_id,
        parent_session_id=asked.session.parent_session_id,
        admitted_at=intent.admitted_at,
        completed_at=time(),
        purpose=asked.purpose,
        requested_model=asked.model,
        upstream=order.replica.label,
        upstream_id=reply.response_id,
        engine_epoch=order.replica.epoch,
        weights_at_start=intent.weights,
        weights_at_end=desk.weights(order.replica.label),
        changes=order.notes,
        retry_of=asked.retry_of,
        request_digest=asked.digest,
    )


def _exchange(asked: Asked, ended: Ended) -> dict[str, Any]:
    return {"request": asked.evidence, "reply": ended.served, "headers": asked.headers, "status": ended.status}


def _as_asked(order: Order, reply: Reply) -> dict[str, Any]:
    """Return settings as the engine was asked, its model's own name, and how its log-probabilities are meant."""
    mode = order.replica.capabilities.logprobs_mode
    return {
        "sampling": msgspec.structs.replace(sampling_of(order.body), logprobs_mode=mode),
        "model": reply.model or order.body.get("model"),
    }


def _response_id(served: JsonObject | None) -> str | None:
    found = None if served is None else served.get("id")
    return found if isinstance(found, str) else None


def _count(desk: Desk, dialect: Dialect, records: tuple[CallRecord, ...]) -> None:
    name = str(dialect)
    said = records[0].continuation if records else None
    if said is not None:
        desk.metrics.continuations.labels(str(said.reason or said.state)).inc()
    for record in records:
        desk.metrics.calls.labels(name, "usable" if record.usable else "unusable").inc()
        if record.unusable_reason is not None:
            desk.metrics.unusable.labels(str(record.unusable_reason)).inc()
        desk.metrics.parents.labels(str(record.parent_resolution)).inc()
    prompt, sampled = tokens_of(records)
    desk.metrics.prompt_tokens.labels(name).inc(prompt)
    desk.metrics.sampled_tokens.labels(name).inc(sampled)
