"""An attempt as it lies in one ledger, into another: every row as it is, under the other ledger's numbers.

Invariant: a copied attempt has the state, setup, results, calls, ordinals, late outcomes, deliveries, labels, reasons
and times of the one it was copied from, and its snapshot id: the copy is read back and digested before it is committed.
One that is there already with the same content is passed over, one with other content is refused by name.

Whose an attempt is is not copied: in the other ledger it belongs to nobody.

Not here: which attempts are copied, and from where to where (transfer).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gristmill.errors import Code, InternalError, LedgerError
from gristmill.ledger.book import Library, name_of
from gristmill.ledger.protocol import AttemptKey
from gristmill.ledger.reader import find_attempt, stored_digest
from gristmill.ledger.schema import ATTEMPTS, PARTS, SETUPS, TABLES, AttemptRow, SetupRow, part_no, part_range
from gristmill.ledger.session import Session
from gristmill.ledger.setups import key_exists
from gristmill.ledger.table import Table

__all__ = ["AttemptRows", "CopyAttempt", "read_rows"]


class AttemptRows(NamedTuple):
    """Everything that is stored of an attempt; `digest` is what its snapshot id is, or would be."""

    attempt: AttemptRow
    parts: Mapping[Table[Any], list[tuple[Any, ...]]]
    digest: str

    @property
    def key(self) -> AttemptKey:
        """Which attempt it is."""
        return AttemptKey(self.attempt.rollout_id, self.attempt.attempt)

    @property
    def setup(self) -> SetupRow | None:
        """What it was opened with."""
        rows = self.parts[SETUPS]
        return SetupRow._make(rows[0]) if rows else None


def read_rows(connection: Session, attempt: AttemptRow) -> AttemptRows:
    """Read an attempt row by row, and digest it, so that each row is compared with its checksum.

    Raises:
        LedgerError: `ledger_damaged`, `schema_unsupported`.
    """
    number = attempt.attempt_no
    parts: dict[Table[Any], list[tuple[Any, ...]]] = {}
    for table in TABLES[1:]:
        if table.key == ATTEMPTS.key:
            parts[table] = list(table.rows(connection, f"WHERE {table.key} = ?", (number,)))
        else:
            where = f"WHERE {table.key} BETWEEN ? AND ? ORDER BY {table.key}"
            parts[table] = list(table.rows(connection, where, part_range(number)))
    return AttemptRows(attempt, parts, stored_digest(connection, attempt))


class CopyAttempt(NamedTuple):
    """An attempt of another ledger; returns whether it was added."""

    rows: AttemptRows

    def apply(self, library: Library) -> bool:
        """Add the rows, unless they are there."""
        key, connection = self.rows.key, library.connection
        setup = self.rows.setup
        if library.exists(key):
            library.write_rows()
            if self._is(connection, find_attempt(connection, key)):
                return False
            raise LedgerError(
                f"expected a new attempt or the one that is copied, {name_of(key)} is there with other content",
                code=Code.ATTEMPT_DIFFERS,
                where=key.rollout_id,
                hint="copy into another ledger, or retire the attempt that is there first",
            )
        digest = None if setup is None else setup.key_digest
        if digest is not None and SETUPS.one(connection, "WHERE key_digest = ?", (digest,)) is not None:
            raise key_exists(key, "another attempt has its key")
        number = library.adopt(self.rows.attempt)
        for table, rows in self.rows.parts.items():
            for row in rows:
                own = number if table.key == ATTEMPTS.key else part_no(number, row[0] % PARTS)
                library.insert(table, (own, *row[1:]))
        self._compare(connection, number)
        return True

    def _compare(self, connection: Session, number: int) -> None:
        """Read the copy back; nothing of the transaction may last where it is not what was copied."""
        try:
            digest = stored_digest(connection, self.rows.attempt._replace(attempt_no=number))
        except LedgerError as error:
            raise InternalError(f"the copy of {name_of(self.rows.key)} cannot be read: {error.message}") from error
        if digest != self.rows.digest:
            raise InternalError(f"the copy of {name_of(self.rows.key)} has the digest {digest}, not {self.rows.digest}")

    def _is(self, connection: Session, there: AttemptRow) -> bool:
        """Tell whether the attempt that is there is this one, whatever its rows are numbered."""
        setup = SETUPS.one(connection, "WHERE attempt_no = ?", (there.attempt_no,))
        own = self.rows.setup
        if own is not None:
            own = own._replace(attempt_no=there.attempt_no)
        return (
            there.state == self.rows.attempt.state
            and setup == own
            and stored_digest(connection, there) == self.rows.digest
        )
