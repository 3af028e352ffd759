"""What a writer to a PostgreSQL ledger knows of the attempts that are its own.

Invariant: a book is kept only while its attempt belongs to this instance, and nobody else writes to it; of every other
attempt a book lasts as long as the transaction that locked its row. An attempt belongs to an instance from its first
write on, as long as calls can still come: until it is frozen, or has finished with no call in flight. One whose owner
has ended is taken over, and what it had in flight is lost.

Not here: leases (instances), what is written (gristmill.ledger.writes).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gristmill.ledger.book import AttemptBook, Library
from gristmill.ledger.postgres.instances import reach
from gristmill.ledger.postgres.session import PostgresSession
from gristmill.ledger.protocol import LOST_WITH_WRITER, AttemptElsewhere, AttemptKey, AttemptState
from gristmill.ledger.schema import ATTEMPTS, AttemptRow, part_range
from gristmill.ledger.table import Table

__all__ = ["OwnedLibrary"]

_COPIED_FROM_rows: Final = 16
_BULK_bytes: Final = 8 * 1024 * 1024
_COLUMNS: Final = ", ".join(ATTEMPTS.columns)
_INSERT: Final = (
    f"INSERT INTO attempts ({', '.join(ATTEMPTS.columns[1:])}, owner) "
    f"VALUES ({', '.join('?' * len(ATTEMPTS.columns))}) RETURNING attempt_no"
)


class OwnedLibrary(Library):
    """The books in use, and the rows that the open transaction adds.

    Args:
        session: the writer's.
        instance: id of this writer.
        clock: unix seconds.

    Attributes:
        bulk: rows are held back until there are many, and copied; for an import, which has a transaction of its own.
    """

    def __init__(self, session: PostgresSession, instance: str, clock: Callable[[], float]) -> None:
        super().__init__(session, instance, clock)
        self.session = session
        self.bulk = False
        self._guests: dict[AttemptKey, AttemptBook] = {}

    def use(self, session: PostgresSession) -> None:
        """Go on with another connection; what is known may be wrong by now."""
        self.session = self.connection = session
        self.forget()

    def exists(self, key: AttemptKey) -> bool:
        """Tell whether an attempt is there, whoever has it."""
        select = "SELECT 1 FROM attempts WHERE rollout_id = ? AND attempt = ?"
        return self.session.execute(select, key).fetchone() is not None

    def find(self, key: AttemptKey) -> AttemptBook | None:
        """Return the book of an attempt, None where there is no such attempt.

        Raises:
            AttemptElsewhere: it belongs to another instance that lives.
        """
        book = self._books.get(key)
        if book is not None:
            self._books.move_to_end(key)
            return book
        select = f"SELECT {_COLUMNS}, owner FROM attempts WHERE rollout_id = ? AND attempt = ? FOR NO KEY UPDATE"
        found = self.session.execute(select, key).fetchone()
        if found is None:
            return None
        *values, owner = found
        book = AttemptBook(AttemptRow._make(values))
        if book.state in {AttemptState.OPEN, AttemptState.FINISHED} and owner != self.instance:
            self._take(book, owner)
        book.load(self.session)
        self._books[key] = self._guests[key] = book
        return book

    def _take(self, book: AttemptBook, owner: str | None) -> None:
        """See that an attempt is nobody else's, and make it this instance's where it takes calls."""
        if owner is not None:
            alive, address = reach(self.session, owner)
            if alive:
                raise AttemptElsewhere(book.key, address)
        elif book.state != AttemptState.OPEN:
            return
        self.session.execute("UPDATE attempts SET owner = ? WHERE attempt_no = ?", (self.instance, book.attempt_no))
        # What was in flight when the attempt was copied from another ledger; an owner's own was lost with its lease.
        self.session.execute(
            "UPDATE intents SET reason = ? WHERE reason IS NULL AND intent_no BETWEEN ? AND ? AND instance <> ?",
            (LOST_WITH_WRITER, *part_range(book.attempt_no), self.instance),
        )

    def begin(self, key: AttemptKey) -> AttemptBook:
        """Return the book of an attempt, which begins where it is not there, as this instance's."""
        book = super().begin(key)
        self._guests[key] = book
        return book

    def adopt(self, row: AttemptRow) -> int:
        """Insert the row of an attempt that another ledger has, as nobody's, and return the number it has here."""
        return self._insert(row, None)

    def _insert_attempt(self, row: AttemptRow) -> int:
        return self._insert(row, self.instance)

    def _insert(self, row: AttemptRow, owner: str | None) -> int:
        (number,) = self.session.execute(_INSERT, (*row[1:], owner)).fetchone()
        return number

    def insert(self, table: Table[Any], row: tuple[Any, ...]) -> None:
        """Insert a row now, of an import with the others."""
        if self.bulk:
            self._rows.setdefault(table, [])
            self.add(table, row)
        else:
            super().insert(table, row)

    def write_rows(self) -> None:
        """Insert the rows that wait."""
        for table, rows in self._rows.items():
            if not rows:
                continue
            if self.bulk and len(rows) >= _COPIED_FROM_rows:
                self.session.copy(table, rows)
            else:
                self.session.executemany(table.insert, rows)
            rows.clear()
        self.unsaved_bytes = 0

    def flush(self) -> None:
        """Write what the transaction still holds back, and let go of attempts that take no more calls."""
        if not self.bulk or self.unsaved_bytes >= _BULK_bytes:
            self.write_rows()
        now_s = self.now_s()
        rows = [ATTEMPTS.update_row(book.row(now_s)) for book in self._changed.values()]
        if rows:
            self.session.executemany(ATTEMPTS.update, rows)
        free = [book for book in {**self._guests, **self._changed}.values() if not _kept(book)]
        if free:
            numbers = [book.attempt_no for book in free]
            self.session.execute(
                "UPDATE attempts SET owner = NULL WHERE owner IS NOT NULL AND attempt_no = ANY(?)", (numbers,)
            )
        self._changed.clear()
        self._guests.clear()
        for book in free:
            self.close_book(book.key)

    def close_book(self, key: AttemptKey) -> None:
        """Put a book away, its row unwritten."""
        super().close_book(key)
        self._guests.pop(key, None)

    def forget(self) -> None:
        """Throw all books away: the database no longer says what they say."""
        super().forget()
        self._guests.clear()
        self.unsaved_bytes = 0


def _kept(book: AttemptBook) -> bool:
    """Tell whether an attempt belongs to whoever writes to it: calls can come, or have yet to end."""
    if book.state == AttemptState.OPEN:
        return True
    return book.state == AttemptState.FINISHED and any(is_open for _, is_open in book.intents.values())
