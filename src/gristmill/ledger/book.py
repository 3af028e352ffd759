"""What the writer knows of the attempts that it writes to, so that a write costs the same however long they are.

Invariant: a book says what the database says, as of the transaction that is being written; after a transaction that
failed, its books are thrown away and read again. Nobody else writes, so nothing else can make a book wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import msgspec

from gristmill.errors import Code, LedgerError
from gristmill.ledger.bodies import Piece
from gristmill.ledger.protocol import AttemptKey, AttemptState
from gristmill.ledger.schema import (
    ATTEMPTS,
    BODIES,
    CALLS,
    DELIVERIES,
    EXCHANGES,
    LABELS,
    PARTS,
    TOKENS,
    AttemptRow,
    BodyRow,
    part_no,
    part_range,
)
from gristmill.ledger.session import Session
from gristmill.ledger.table import Table
from gristmill.records import CallRecord

__all__ = ["AttemptBook", "Library", "check_names", "closed_error", "name_of", "unknown_attempt"]

_BOOKS: Final = 4096
_ENTRIES: Final = 500_000
_ROW_bytes: Final = 4096
INSERTED_LAST: Final = (CALLS, TOKENS, EXCHANGES, BODIES, DELIVERIES, LABELS)
_INT64: Final = 2**63


def name_of(key: AttemptKey) -> str:
    """Name an attempt in a message."""
    return f"{key.rollout_id}/{key.attempt}"


def unknown_attempt(key: AttemptKey) -> LedgerError:
    """Make the error for an attempt that is not there."""
    return LedgerError(
        f"expected a captured rollout, got {name_of(key)}", code=Code.ROLLOUT_UNKNOWN, where=key.rollout_id
    )


def check_names(key: AttemptKey, *names: str | None) -> None:
    """Refuse what cannot be stored as an attempt's key, or as the name of something in it.

    Raises:
        LedgerError: `option_invalid`: a lone surrogate, or a number beyond 64 bits.
    """
    try:
        for name in (key.rollout_id, *names):
            if name is not None:
                name.encode()
    except UnicodeEncodeError as error:
        raise LedgerError(
            f"expected names that are valid Unicode, got {error.object!r}", code=Code.OPTION_INVALID
        ) from error
    if not -_INT64 <= key.attempt < _INT64:
        raise LedgerError(
            f"expected an attempt number, got {key.attempt}", code=Code.OPTION_INVALID, where=key.rollout_id
        )


def closed_error(key: AttemptKey, state: AttemptState, expected: str) -> LedgerError:
    """Make the error for an attempt that does not take a write any more."""
    return LedgerError(
        f"expected an attempt that {expected}, {name_of(key)} is {state}",
        code=Code.ATTEMPT_CLOSED,
        where=key.rollout_id,
    )


def _after_last(connection: Session, table: Table[Any], bounds: tuple[int, int]) -> int:
    """Return the position behind the last row of an attempt."""
    select = f"SELECT max({table.key}) FROM {table.name} WHERE {table.key} BETWEEN ? AND ?"
    (number,) = connection.execute(select, bounds).fetchone()
    return 0 if number is None else number % PARTS + 1


class AttemptBook:
    """One attempt: its row, and where its calls, intents and bodies stand."""

    def __init__(self, row: AttemptRow) -> None:
        self.attempt_no = row.attempt_no
        self.key = AttemptKey(row.rollout_id, row.attempt)
        self.state = AttemptState(row.state)
        self.calls, self.lost, self.usable_calls = row.calls, row.lost, row.usable_calls
        self.sampled_tokens, self.prompt_tokens = row.sampled_tokens, row.prompt_tokens
        self.models: list[str] = msgspec.json.decode(row.models, type=list[str])
        self.first_at, self.last_at = row.first_at, row.last_at
        self.snapshot_id = row.snapshot_id
        self.intents: dict[str, tuple[int, bool]] = {}
        """Key of each intent by call id, and whether it is still open."""
        self.outcomes: dict[str, int | None] = {}
        """Tokens of the whole sequence by call id, None where no tokens are stored."""
        self.next_ordinal = 0
        self.next_call = self.next_intent = self.next_delivery = self.next_label = self.next_body = 0
        self._bodies: dict[bytes, int] | None = None

    def row(self, now_s: float) -> AttemptRow:
        """Return the row as it has to be stored."""
        return AttemptRow(
            attempt_no=self.attempt_no,
            rollout_id=self.key.rollout_id,
            attempt=self.key.attempt,
            state=self.state,
            calls=self.calls,
            lost=self.lost,
            usable_calls=self.usable_calls,
            sampled_tokens=self.sampled_tokens,
            prompt_tokens=self.prompt_tokens,
            models=msgspec.json.encode(self.models).decode(),
            first_at=self.first_at,
            last_at=self.last_at,
            touched_at=now_s,
            snapshot_id=self.snapshot_id,
        )

    def load(self, connection: Session) -> None:
        """Read where calls, intents, deliveries and labels stand."""
        bounds = part_range(self.attempt_no)
        intents = "SELECT intent_no, call_id, reason IS NULL FROM intents WHERE intent_no BETWEEN ? AND ? ORDER BY 1"
        for intent_no, call_id, is_open in connection.execute(intents, bounds):
            self.intents[call_id] = (intent_no, bool(is_open))
            self.next_intent = intent_no % PARTS + 1
        calls = "SELECT call_no, call_id, ordinal, cum_len FROM calls WHERE call_no BETWEEN ? AND ? ORDER BY call_no"
        for call_no, call_id, ordinal, cum_len in connection.execute(calls, bounds):
            self.outcomes[call_id] = cum_len
            self.next_call = call_no % PARTS + 1
            self.next_ordinal = max(self.next_ordinal, ordinal + 1)
        self.next_delivery = _after_last(connection, DELIVERIES, bounds)
        self.next_label = _after_last(connection, LABELS, bounds)

    def bodies(self, connection: Session) -> dict[bytes, int]:
        """Return the numbers of the stored pieces by digest."""
        if self._bodies is None:
            select = "SELECT digest, body_no FROM bodies WHERE body_no BETWEEN ? AND ?"
            found = connection.execute(select, part_range(self.attempt_no))
            self._bodies = {digest: body_no % PARTS for digest, body_no in found}
            self.next_body = max(self._bodies.values(), default=-1) + 1
        return self._bodies

    def entries(self) -> int:
        """Return about how much memory the book takes, in entries of its dictionaries."""
        return len(self.intents) + len(self.outcomes) + len(self._bodies or ())

    def count(self, record: CallRecord) -> None:
        """Add a selectable call to the sums."""
        self.calls += 1
        self.usable_calls += record.usable
        self.sampled_tokens += record.cum_len - record.prompt_len
        self.prompt_tokens += record.prompt_len
        if record.model is not None and record.model not in self.models:
            self.models.append(record.model)
        if record.admitted_at is not None:
            self.first_at = record.admitted_at if self.first_at is None else min(self.first_at, record.admitted_at)
        if record.completed_at is not None:
            self.last_at = record.completed_at if self.last_at is None else max(self.last_at, record.completed_at)


class Library:
    """The books in use, and the rows that the open transaction adds.

    Args:
        connection: the writer's.
        instance: id of this writer.
        clock: unix seconds.
    """

    def __init__(self, connection: Session, instance: str, clock: Callable[[], float]) -> None:
        self.connection = connection
        self.instance = instance
        self.now_s: Final = clock
        self.unsaved_bytes = 0
        """About how much the log holds that the database does not."""
        self._books: OrderedDict[AttemptKey, AttemptBook] = OrderedDict()
        self._changed: dict[AttemptKey, AttemptBook] = {}
        self._rows: dict[Table[Any], list[tuple[Any, ...]]] = {table: [] for table in INSERTED_LAST}

    def find(self, key: AttemptKey) -> AttemptBook | None:
        """Return the book of an attempt, None where there is no such attempt."""
        book = self._books.get(key)
        if book is not None:
            self._books.move_to_end(key)
            return book
        row = ATTEMPTS.one(self.connection, "WHERE rollout_id = ? AND attempt = ?", key)
        if row is None:
            return None
        book = self._books[key] = AttemptBook(row)
        book.load(self.connection)
        return book

    def known(self, key: AttemptKey) -> AttemptBook:
        """Return the book of an attempt that is there.

        Raises:
            LedgerError: `rollout_unknown`.
        """
        book = self.find(key) if -_INT64 <= key.attempt < _INT64 else None
        if book is None:
            raise unknown_attempt(key)
        return book

    def look(self, key: AttemptKey) -> AttemptBook:
        """Return the book of an attempt, a blank one where it is not there: to check a write before it begins."""
        return self.find(key) or AttemptBook(self._blank(key))

    def exists(self, key: AttemptKey) -> bool:
        """Tell whether an attempt is there."""
        return self.find(key) is not None

    def adopt(self, row: AttemptRow) -> int:
        """Insert the row of an attempt that another ledger has, and return the number it has here."""
        number = self._insert_attempt(row)
        self.unsaved_bytes += _ROW_bytes
        return number

    def begin(self, key: AttemptKey) -> AttemptBook:
        """Return the book of an attempt, which begins where it is not there."""
        book = self.find(key)
        if book is not None:
            return book
        row = self._blank(key)
        book = self._books[key] = AttemptBook(row._replace(attempt_no=self._insert_attempt(row)))
        return book

    def _insert_attempt(self, row: AttemptRow) -> int:
        """Insert the row of a new attempt and return its number."""
        # A NULL key lets SQLite give the next number.
        self.connection.execute(ATTEMPTS.insert, (None, *row[1:]))
        (number,) = self.connection.execute("SELECT last_insert_rowid()").fetchone()
        return number

    def _blank(self, key: AttemptKey) -> AttemptRow:
        return AttemptRow(0, *key, AttemptState.OPEN, 0, 0, 0, 0, 0, "[]", None, None, self.now_s(), None)

    def change(self, book: AttemptBook) -> None:
        """Note that an attempt changes: its row will be written, and its snapshot id no longer holds."""
        book.snapshot_id = None
        self._changed[book.key] = book

    def add(self, table: Table[Any], row: tuple[Any, ...]) -> None:
        """Insert a row, with others of its table when the transaction ends.

        For tables whose rows nothing in a transaction looks at; `INSERTED_LAST` names them.
        """
        self._rows[table].append(row)
        self.unsaved_bytes += _ROW_bytes

    def insert(self, table: Table[Any], row: tuple[Any, ...]) -> None:
        """Insert a row now."""
        self.connection.execute(table.insert, row)
        self.unsaved_bytes += _ROW_bytes

    def store(self, book: AttemptBook, piece: Piece) -> bytes:
        """Store what is new of a piece and return its text, in which references stand for bodies."""
        numbers = book.bodies(self.connection)
        rows = self._rows[BODIES]

        def number_of(inner: Piece) -> int:
            number = numbers.get(inner.digest)
            if number is None:
                text = inner.text(number_of)
                number = numbers[inner.digest] = book.next_body
                book.next_body += 1
                rows.append(BodyRow(part_no(book.attempt_no, number), inner.digest, text))
                self.unsaved_bytes += len(text)
            return number

        return piece.text(number_of)

    def write_rows(self) -> None:
        """Insert the rows that wait."""
        for table, rows in self._rows.items():
            if rows:
                self.connection.executemany(table.insert, rows)
                rows.clear()

    def flush(self) -> None:
        """Write what the transaction still holds back."""
        self.write_rows()
        now_s = self.now_s()
        rows = [ATTEMPTS.update_row(book.row(now_s)) for book in self._changed.values()]
        self.connection.executemany(ATTEMPTS.update, rows)
        self._changed.clear()

    def close_book(self, key: AttemptKey) -> None:
        """Put a book away, its row unwritten."""
        self._books.pop(key, None)
        self._changed.pop(key, None)

    def forget(self) -> None:
        """Throw all books away: the database no longer says what they say."""
        self._books.clear()
        self._changed.clear()
        for rows in self._rows.values():
            rows.clear()

    def trim(self) -> None:
        """Put away the books that were not used for longest, between transactions."""
        entries = sum(book.entries() for book in self._books.values()) if len(self._books) > 16 else 0
        while len(self._books) > _BOOKS or (entries > _ENTRIES and len(self._books) > 1):
            _, book = self._books.popitem(last=False)
            entries -= book.entries()
