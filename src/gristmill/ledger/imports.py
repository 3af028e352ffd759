"""Whole attempts, captured elsewhere, into a ledger.

Invariant: an import adds all of its attempts or none. An attempt that is there with the same content is passed over,
one with other content refuses the import by name. Memory does not grow with the number of attempts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from gristmill.errors import Code, LedgerError
from gristmill.ledger.book import AttemptBook, Library, name_of
from gristmill.ledger.calls import as_read, check_delta
from gristmill.ledger.protocol import AttemptKey, AttemptState, Imported, StoredCall
from gristmill.ledger.reader import find_attempt, stored_digest
from gristmill.ledger.schema import INTENTS, RESULTS, IntentRow, part_no
from gristmill.ledger.snapshot import snapshot_id
from gristmill.ledger.writes import add_call, check_base, prepare_call, prepare_result
from gristmill.records import Capture, LostCall, Result, TokenDelta

__all__ = ["Import", "calls_of", "differs", "own_capture"]


def own_capture(capture: Capture) -> Capture:
    """Return a capture whose records name its attempt, and are as they will be read back.

    Raises:
        LedgerError: `option_invalid`, a record cannot be stored.
    """
    key = AttemptKey(capture.rollout_id, capture.attempt)
    records = tuple(as_read(key, record) for record in capture.records)
    return msgspec.structs.replace(capture, records=records)


def calls_of(capture: Capture) -> list[StoredCall]:
    """Join records with their tokens and exchanges, in commit order.

    Of several records with one call id, the first that agrees with the tokens has them, and the last the exchange.

    Raises:
        LedgerError: `call_unknown`, tokens or exchanges of a call that has no record.
    """
    last = {record.model_call_id: place for place, record in enumerate(capture.records)}
    holders = dict(last)
    for place in range(len(capture.records) - 1, -1, -1):
        call_id = capture.records[place].model_call_id
        if place == last[call_id] or _agrees(capture, place, capture.tokens.get(call_id)):
            holders[call_id] = place
    for call_id in (*capture.tokens, *capture.exchanges):
        if call_id not in last:
            raise LedgerError(
                f"expected tokens and exchanges of calls that have a record, got those of {call_id}",
                code=Code.CALL_UNKNOWN,
                where=f"call={call_id}",
            )
    return [
        StoredCall(
            record=record,
            tokens=capture.tokens.get(record.model_call_id) if holders[record.model_call_id] == place else None,
            exchange=capture.exchanges.get(record.model_call_id) if last[record.model_call_id] == place else None,
        )
        for place, record in enumerate(capture.records)
    ]


def _agrees(capture: Capture, place: int, delta: TokenDelta | None) -> bool:
    if delta is None:
        return False
    try:
        check_delta(capture.records[place], delta)
    except LedgerError:
        return False
    return True


def differs(key: AttemptKey) -> LedgerError:
    """Make the error for an attempt that is there with other content."""
    return LedgerError(
        f"expected a new attempt or the one that is stored, {name_of(key)} is there with other content",
        code=Code.ATTEMPT_DIFFERS,
        where=key.rollout_id,
        hint="import it under another rollout id or attempt number",
    )


class Import(NamedTuple):
    """All attempts of an iterable, read while they are stored."""

    attempts: Iterable[tuple[Capture, Result | None]]

    def apply(self, library: Library) -> Imported:
        """Add the attempts."""
        added = unchanged = 0
        for given, result in self.attempts:
            capture = own_capture(given)
            key = AttemptKey(capture.rollout_id, capture.attempt)
            digest = snapshot_id(capture, result)
            book = library.look(key)
            if not book.attempt_no:
                _add(library, key, capture, result, digest)
                added += 1
            elif digest == _stored_digest(library, key):
                unchanged += 1
            else:
                raise differs(key)
            library.flush()
            library.close_book(key)
        return Imported(added, unchanged)


def _stored_digest(library: Library, key: AttemptKey) -> str:
    # What the attempt's row says of its content may have been edited; the content decides.
    library.write_rows()
    connection = library.connection
    return stored_digest(connection, find_attempt(connection, key), with_setup=False)


def _add(library: Library, key: AttemptKey, capture: Capture, result: Result | None, digest: str) -> None:
    calls = [prepare_call(key, call) for call in calls_of(capture)]
    prepared = None if result is None else prepare_result(result)
    book = library.begin(key)
    for call in calls:
        if call.tokens is not None:
            check_base(call.record, book.outcomes)
        add_call(library, book, call, call.record.ordinal, late=False)
    for position, lost in enumerate(capture.lost):
        _add_lost(library, book, position, lost)
    if prepared is not None:
        library.insert(RESULTS, prepared.row(book.attempt_no))
    book.state = AttemptState.FROZEN
    library.change(book)
    book.snapshot_id = digest


def _add_lost(library: Library, book: AttemptBook, position: int, lost: LostCall) -> None:
    intent_no = part_no(book.attempt_no, position)
    row = IntentRow(
        intent_no,
        lost.model_call_id,
        lost.parent_call_id,
        library.instance,
        library.now_s(),
        lost.reason,
        lost.maybe_received,
    )
    library.insert(INTENTS, row)
    book.next_intent = position + 1
    book.lost += 1
