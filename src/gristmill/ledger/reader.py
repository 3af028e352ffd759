"""An attempt out of the database.

Invariant: what is returned is what was stored; every row that is read is checked against its checksum or digest.

Not here: connections and transactions (database), lines of `ls` (summaries).
"""

from __future__ import annotations

from typing import cast

from gristmill.canonical import JsonValue, loads
from gristmill.captures.credit import read_credit, with_credit
from gristmill.captures.exact import plain_numbers
from gristmill.captures.reply import Unexpected
from gristmill.errors import Code, LedgerError
from gristmill.ledger.book import unknown_attempt
from gristmill.ledger.calls import label_checksum, own_purpose, read_delta, read_record, result_checksum
from gristmill.ledger.exchanges import StoredExchanges, stored_texts
from gristmill.ledger.protocol import LATE_REASON, AttemptKey, StoredCall
from gristmill.ledger.schema import (
    ATTEMPTS,
    BODIES,
    CALLS,
    DELIVERIES,
    EXCHANGES,
    INTENTS,
    LABELS,
    RESULTS,
    TOKENS,
    AttemptRow,
    CallRow,
    part_range,
)
from gristmill.ledger.session import Session
from gristmill.ledger.setups import read_setup
from gristmill.ledger.snapshot import snapshot_id
from gristmill.records import CallRecord, Capture, Delivery, LostCall, Purpose, PurposeLabel, Result, TokenDelta

__all__ = ["find_attempt", "read_calls", "read_capture", "read_late", "read_result", "stored_digest"]

_IN_ATTEMPT = "WHERE {0} BETWEEN ? AND ? ORDER BY {0}"
_CALLS_IN_ATTEMPT = _IN_ATTEMPT.format("call_no")


def find_attempt(connection: Session, key: AttemptKey) -> AttemptRow:
    """Read the row of an attempt.

    Raises:
        LedgerError: `rollout_unknown`.
    """
    fits = -(2**63) <= key.attempt < 2**63
    row = ATTEMPTS.one(connection, "WHERE rollout_id = ? AND attempt = ?", key) if fits else None
    if row is None:
        raise unknown_attempt(key)
    return row


def read_capture(connection: Session, attempt: AttemptRow, *, tokens: bool = True, exchanges: bool = False) -> Capture:
    """Read what was captured of an attempt, without late outcomes.

    Raises:
        LedgerError: `ledger_damaged`, `schema_unsupported`.
    """
    bounds = part_range(attempt.attempt_no)
    calls = read_calls(connection, attempt)
    by_no = {row.call_no: record for row, record in calls if not row.late}
    lost = [
        LostCall(model_call_id=row.call_id, parent_call_id=row.parent_call_id, maybe_received=bool(row.maybe_received))
        if row.reason is None
        else LostCall(
            model_call_id=row.call_id,
            parent_call_id=row.parent_call_id,
            reason=row.reason,
            maybe_received=bool(row.maybe_received),
        )
        for row in INTENTS.rows(connection, _IN_ATTEMPT.format("intent_no"), bounds)
    ]
    lost += [
        LostCall(model_call_id=row.call_id, parent_call_id=record.parent_call_id, reason=LATE_REASON)
        for row, record in calls
        if row.late
    ]
    return Capture(
        rollout_id=attempt.rollout_id,
        attempt=attempt.attempt,
        records=tuple(by_no.values()),
        tokens=_deltas(connection, bounds, by_no) if tokens else {},
        lost=tuple(lost),
        exchanges=_exchanges(connection, bounds, by_no) if exchanges else {},
    )


def read_late(connection: Session, attempt: AttemptRow) -> tuple[StoredCall, ...]:
    """Read the outcomes that came after an attempt had finished; `LedgerError` as `read_capture`."""
    bounds = part_range(attempt.attempt_no)
    by_no = {row.call_no: record for row, record in read_calls(connection, attempt) if row.late}
    if not by_no:
        return ()
    deltas = _deltas(connection, bounds, by_no)
    exchanges = _exchanges(connection, bounds, by_no)
    return tuple(
        StoredCall(record=record, tokens=deltas.get(record.model_call_id), exchange=exchanges.get(record.model_call_id))
        for record in by_no.values()
    )


def read_calls(connection: Session, attempt: AttemptRow) -> list[tuple[CallRow, CallRecord]]:
    """Read the rows of an attempt's outcomes, late ones included, with the records they hold; as `read_capture`."""
    bounds = part_range(attempt.attempt_no)
    deliveries = {
        row.call_id: Delivery(row.state)
        for row in DELIVERIES.rows(connection, _IN_ATTEMPT.format("delivery_no"), bounds)
    }
    labels = _labels(connection, bounds)
    rows = CALLS.rows(connection, _CALLS_IN_ATTEMPT, bounds)
    return [(row, read_record(row, deliveries.get(row.call_id), labels.get(row.call_id))) for row in rows]


def _labels(connection: Session, bounds: tuple[int, int]) -> dict[str, Purpose]:
    labels: dict[str, Purpose] = {}
    for row in LABELS.rows(connection, _IN_ATTEMPT.format("label_no"), bounds):
        purpose = own_purpose(Purpose(PurposeLabel(row.label), row.evidence))
        if label_checksum(row.call_id, purpose) != row.checksum:
            raise LedgerError(
                f"expected the labels of call {row.call_id} as they were written, got other bytes",
                code=Code.LEDGER_DAMAGED,
                where=f"call={row.call_id}",
            )
        labels[row.call_id] = purpose
    return labels


def _deltas(connection: Session, bounds: tuple[int, int], by_no: dict[int, CallRecord]) -> dict[str, TokenDelta]:
    deltas: dict[str, TokenDelta] = {}
    for row in TOKENS.rows(connection, _CALLS_IN_ATTEMPT, bounds):
        record = by_no.get(row.call_no)
        if record is not None:
            deltas[record.model_call_id] = read_delta(record, row)
    return deltas


def _exchanges(connection: Session, bounds: tuple[int, int], by_no: dict[int, CallRecord]) -> StoredExchanges:
    rows = {
        by_no[row.call_no].model_call_id: row
        for row in EXCHANGES.rows(connection, _CALLS_IN_ATTEMPT, bounds)
        if row.call_no in by_no
    }
    texts = stored_texts(BODIES.rows(connection, _IN_ATTEMPT.format("body_no"), bounds)) if rows else {}
    return StoredExchanges(rows, texts)


def read_result(connection: Session, attempt: AttemptRow) -> Result | None:
    """Read what the harness of an attempt handed back.

    Raises:
        LedgerError: `ledger_damaged`, `schema_unsupported`.
    """
    row = RESULTS.one(connection, "WHERE attempt_no = ?", (attempt.attempt_no,))
    if row is None:
        return None
    if result_checksum(row.value, row.metadata, row.reward, row.group_id) != row.checksum:
        raise LedgerError(
            f"expected the result of {attempt.rollout_id}/{attempt.attempt} as it was written, got other bytes",
            code=Code.LEDGER_DAMAGED,
            where=attempt.rollout_id,
        )
    plain, _, credit = row.metadata.partition(b"\n")
    metadata = plain_numbers(loads(plain, "$.metadata"), "$.metadata")
    result = Result(
        value=loads(row.value, "$.result"),
        reward=row.reward,
        group_id=row.group_id,
        metadata=cast("dict[str, object]", metadata),
    )
    if not credit:
        return result
    try:
        return with_credit(result, read_credit(cast("dict[str, JsonValue]", loads(credit))))
    except Unexpected as error:
        raise LedgerError(
            f"expected the credit of {attempt.rollout_id}/{attempt.attempt} as this version writes it: {error.message}",
            code=Code.SCHEMA_UNSUPPORTED,
            where=attempt.rollout_id,
            hint="it was written by a newer version of Gristmill",
        ) from error


def stored_digest(connection: Session, attempt: AttemptRow, *, with_setup: bool = True) -> str:
    """Read an attempt whole and digest it as its snapshot id does; `LedgerError` as `read_capture`."""
    capture = read_capture(connection, attempt, exchanges=True)
    result, late = read_result(connection, attempt), read_late(connection, attempt)
    return snapshot_id(capture, result, late, read_setup(connection, attempt) if with_setup else None)
