"""One attempt in the memory of a process.

Invariant: it says of itself what the tables of every other ledger say.

Not here: what may be done to it in which state (memory).
"""

from __future__ import annotations

import msgspec

from gristmill.ledger.bodies import written
from gristmill.ledger.calls import check_delta
from gristmill.ledger.imports import calls_of
from gristmill.ledger.protocol import AttemptKey, AttemptSetup, AttemptState, StoredCall, Summary
from gristmill.ledger.writes import check_base, prepare_result
from gristmill.records import CallRecord, Capture, Delivery, LostCall, Purpose, Result

__all__ = ["HeldAttempt", "check_call", "imported_attempt", "summary_of"]


class HeldAttempt:
    """What is kept of an attempt; calls and deliveries as they were written, in their order."""

    def __init__(self) -> None:
        self.state = AttemptState.OPEN
        self.lost: list[LostCall] = []
        self.open: set[str] = set()
        self.calls: list[StoredCall] = []
        self.late: list[StoredCall] = []
        self.ids: dict[str, int | None] = {}
        self.next_ordinal = 0
        self.deliveries: dict[str, Delivery] = {}
        self.labels: dict[str, Purpose] = {}
        self.setup: AttemptSetup | None = None
        self.revoked = False
        self.result: Result | None = None
        self.touched_at = 0.0

    def admitted(self, call_id: str) -> bool:
        """Tell whether a call was admitted and has no outcome."""
        return any(lost.model_call_id == call_id for lost in self.lost)

    def as_stated(self, call: StoredCall) -> StoredCall:
        """Put the last delivery and label in the place of the record's own."""
        record = call.record
        state = self.deliveries.get(record.model_call_id, record.delivery)
        purpose = self.labels.get(record.model_call_id, record.purpose)
        return msgspec.structs.replace(call, record=msgspec.structs.replace(record, delivery=state, purpose=purpose))


def check_call(call: StoredCall, ids: dict[str, int | None]) -> None:
    """Refuse tokens that disagree with their record or their base."""
    if call.exchange is not None:
        where = f"call={call.record.model_call_id}"
        for value in (call.exchange.request, call.exchange.reply, dict(call.exchange.headers)):
            written(value, where)
    if call.tokens is None:
        return
    check_delta(call.record, call.tokens)
    check_base(call.record, ids)


def imported_attempt(capture: Capture, result: Result | None) -> HeldAttempt:
    """Make a frozen attempt of a capture, whose calls are checked as those that are committed."""
    attempt = HeldAttempt()
    ids: dict[str, int | None] = {}
    for call in calls_of(capture):
        check_call(call, ids)
        ids[call.record.model_call_id] = None if call.tokens is None else call.record.cum_len
        attempt.calls.append(call)
        attempt.next_ordinal = call.record.ordinal + 1
    if result is not None:
        prepare_result(result)
    attempt.ids, attempt.lost, attempt.result = ids, list(capture.lost), result
    attempt.state = AttemptState.FROZEN
    return attempt


def summary_of(key: AttemptKey, attempt: HeldAttempt) -> Summary:
    """Count an attempt for its line of `ls`."""
    records: list[CallRecord] = [call.record for call in attempt.calls]
    admitted = [record.admitted_at for record in records if record.admitted_at is not None]
    completed = [record.completed_at for record in records if record.completed_at is not None]
    result = attempt.result
    return Summary(
        key=key,
        state=attempt.state,
        calls=len(records),
        lost=len(attempt.lost) + len(attempt.late),
        usable_calls=sum(record.usable for record in records),
        sampled_tokens=sum(record.cum_len - record.prompt_len for record in records),
        prompt_tokens=sum(record.prompt_len for record in records),
        models=tuple(dict.fromkeys(record.model for record in records if record.model is not None)),
        reward=None if result is None else result.reward,
        group_id=result.group_id if result is not None else None if attempt.setup is None else attempt.setup.group_id,
        has_result=result is not None,
        first_at=min(admitted, default=None),
        last_at=max(completed, default=None),
        touched_at=attempt.touched_at,
    )
