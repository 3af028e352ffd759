"""A stored attempt compared with itself: what is written twice has to say the same.

Invariant: what `read` and `late` return of a frozen attempt whose snapshot id is stored is covered by that id; of any
attempt, records, labels, tokens, exchanges, result and setup are covered by checksums, counters and columns by the
records.

Not covered without a snapshot id: reasons and parents of lost calls, states of deliveries. Never covered: whether a key
was revoked. Nor is somebody found who
writes checksums and snapshot id anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite

from gristmill.errors import Code, LedgerError
from gristmill.ledger.book import AttemptBook
from gristmill.ledger.protocol import AttemptState
from gristmill.ledger.reader import read_calls, stored_digest
from gristmill.ledger.schema import (
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
from gristmill.records import CallRecord

__all__ = ["check_attempt"]

_FROZEN = frozenset({AttemptState.FROZEN, AttemptState.ABANDONED})


def check_attempt(connection: Session, attempt: AttemptRow) -> Iterator[str]:
    """Say, a sentence each, where what is stored of an attempt contradicts itself."""
    try:
        calls = read_calls(connection, attempt)
        yield from _columns(connection, attempt, calls)
        yield from _counters(connection, attempt, [(bool(row.late), record) for row, record in calls])
        yield from _state(connection, attempt)
        yield from _snapshot(connection, attempt)
    except LedgerError as error:
        if error.code != Code.LEDGER_DAMAGED:
            raise
        yield error.message


def _differs(what: str, expected: object, got: object) -> Iterator[str]:
    if expected != got:
        yield f"expected {what} {expected!r}, got {got!r}"


def _columns(connection: Session, attempt: AttemptRow, calls: Sequence[tuple[CallRow, CallRecord]]) -> Iterator[str]:
    """Compare what is stored beside the records with the records."""
    bounds = part_range(attempt.attempt_no)
    with_tokens = _numbers(connection, TOKENS.name, bounds)
    known = {row.call_no for row, _ in calls}
    for name, numbers in ((TOKENS.name, with_tokens), (EXCHANGES.name, _numbers(connection, EXCHANGES.name, bounds))):
        if not numbers <= known:
            yield f"expected {name} of stored calls only, got {len(numbers - known)} of others"
    # `read_record` puts the column in the place of the record's own ordinal, which only an import keeps.
    ordinals = [row.ordinal for row, _ in calls]
    if attempt.state not in _FROZEN:
        yield from _differs("ordinals in commit order", list(range(len(calls))), ordinals)
    for row, record in calls:
        call_id = record.model_call_id
        yield from _differs("the id of a call", call_id, row.call_id)
        yield from _differs(f"the rollout of call {call_id}", record.rollout_id, attempt.rollout_id)
        yield from _differs(f"the attempt of call {call_id}", record.attempt, attempt.attempt)
        length = record.cum_len if row.call_no in with_tokens else None
        yield from _differs(f"the stored length of call {call_id}", length, row.cum_len)
    ids = {record.model_call_id for _, record in calls}
    ids.update(row.call_id for row in INTENTS.rows(connection, "WHERE intent_no BETWEEN ? AND ?", bounds))
    for row in DELIVERIES.rows(connection, "WHERE delivery_no BETWEEN ? AND ?", bounds):
        if row.call_id not in ids:
            yield f"expected deliveries of the attempt's calls only, got one of {row.call_id!r}"
    for row in LABELS.rows(connection, "WHERE label_no BETWEEN ? AND ?", bounds):
        if row.call_id not in ids:
            yield f"expected labels of the attempt's calls only, got one of {row.call_id!r}"


def _numbers(connection: Session, table: str, bounds: tuple[int, int]) -> set[int]:
    select = f"SELECT call_no FROM {table} WHERE call_no BETWEEN ? AND ?"
    return {number for (number,) in connection.execute(select, bounds)}


def _counters(connection: Session, attempt: AttemptRow, calls: Sequence[tuple[bool, CallRecord]]) -> Iterator[str]:
    """Count the calls again."""
    blank = {"calls": 0, "lost": 0, "usable_calls": 0, "sampled_tokens": 0, "prompt_tokens": 0, "models": "[]"}
    book = AttemptBook(attempt._replace(**blank, state=AttemptState.OPEN, first_at=None, last_at=None))
    times: list[float] = []
    for late, record in calls:
        if late:
            book.lost += 1
            continue
        book.count(record)
        times += [at for at in (record.admitted_at, record.completed_at) if at is not None]
    bounds = part_range(attempt.attempt_no)
    select = f"SELECT count(*) FROM {INTENTS.name} WHERE {INTENTS.key} BETWEEN ? AND ?"
    book.lost += connection.execute(select, bounds).fetchone()[0]
    counted = book.row(attempt.touched_at)
    # SQLite has no NaN: a time that is none is not kept.
    names = (*blank, "first_at", "last_at") if all(map(isfinite, times)) else tuple(blank)
    for name in names:
        yield from _differs(f"{name} of the attempt", getattr(counted, name), getattr(attempt, name))


def _state(connection: Session, attempt: AttemptRow) -> Iterator[str]:
    """Compare the state with what brings it about."""
    if attempt.state not in set(AttemptState):
        yield f"expected a state of an attempt, got {attempt.state!r}"
    elif attempt.state not in _FROZEN:
        stored = RESULTS.one(connection, "WHERE attempt_no = ?", (attempt.attempt_no,))
        state = AttemptState.OPEN if stored is None else AttemptState.FINISHED
        yield from _differs("the state", state.value, attempt.state)
        if attempt.snapshot_id is not None:
            yield f"expected no snapshot of an attempt that is {attempt.state}, got {attempt.snapshot_id!r}"


def _snapshot(connection: Session, attempt: AttemptRow) -> Iterator[str]:
    """Read everything, so that each checksum is compared, and digest it again where the digest is known."""
    digest = stored_digest(connection, attempt)
    if attempt.snapshot_id is not None and attempt.state in _FROZEN:
        yield from _differs("the snapshot id of what is stored", digest, attempt.snapshot_id)
