"""How an attempt ends: its result, the freeze, the digest of what is frozen, and its deletion.

Invariant: a result is stored once; what was frozen is deleted only under the digest that it still has. As every write,
these check everything before they change anything.

Not here: calls and what is said of them (writes).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, cast

from gristmill.canonical import JsonValue, loads
from gristmill.captures.credit import credit_json, read_credit
from gristmill.captures.reply import Unexpected
from gristmill.errors import Code, LedgerError
from gristmill.ledger.bodies import written, written_plain
from gristmill.ledger.book import Library, closed_error, name_of
from gristmill.ledger.calls import result_checksum
from gristmill.ledger.protocol import AttemptKey, AttemptState
from gristmill.ledger.schema import RESULTS, TABLES, ResultRow, part_range
from gristmill.records import Result

__all__ = ["FROZEN_STATES", "Finish", "Freeze", "KeepSnapshot", "PreparedResult", "Retire", "prepare_result"]

FROZEN_STATES: Final = frozenset({AttemptState.FROZEN, AttemptState.ABANDONED})


class PreparedResult(NamedTuple):
    """A result, encoded; its credit, if it has any, is a second line of `metadata`."""

    reward: float | None
    group_id: str | None
    value: bytes
    metadata: bytes

    def row(self, attempt_no: int) -> ResultRow:
        """Return the row of an attempt's result."""
        crc = result_checksum(self.value, self.metadata, self.reward, self.group_id)
        return ResultRow(attempt_no, *self, crc)


def prepare_result(result: Result) -> PreparedResult:
    """Check and encode a result.

    Raises:
        LedgerError: `option_invalid`, it is no JSON, or its reward or credit is none.
    """
    reward = result.reward
    if reward is not None and not -float("inf") < reward < float("inf"):
        raise LedgerError(f"expected a finite reward, got {reward}", code=Code.OPTION_INVALID, where="$.reward")
    value, metadata = written(result.value, "$.result"), written_plain(result.metadata, "$.metadata")
    credit = credit_json(result)
    if credit:
        text = written(credit, "$")
        try:
            read_credit(cast("dict[str, JsonValue]", loads(text)))
        except Unexpected as error:
            raise LedgerError(error.message, code=Code.OPTION_INVALID, where=error.where) from error
        metadata += b"\n" + text
    # SQLite keeps no sign of a nought.
    return PreparedResult(None if reward is None else float(reward) + 0.0, result.group_id, value, metadata)


class Finish(NamedTuple):
    """What the harness handed back."""

    key: AttemptKey
    result: PreparedResult

    def apply(self, library: Library) -> None:
        """Store the result; the same one again changes nothing."""
        library.look(self.key)
        book = library.begin(self.key)
        row = self.result.row(book.attempt_no)
        stored = RESULTS.one(library.connection, "WHERE attempt_no = ?", (book.attempt_no,))
        if stored == row:
            return
        if stored is not None:
            raise LedgerError(
                f"expected the result that {name_of(self.key)} has already, got another",
                code=Code.ATTEMPT_DIFFERS,
                where=self.key.rollout_id,
            )
        if book.state in FROZEN_STATES:
            raise closed_error(self.key, book.state, "takes a result")
        library.insert(RESULTS, row)
        book.state = AttemptState.FINISHED
        library.change(book)


class Freeze(NamedTuple):
    """No more calls; returns the snapshot id where it is known."""

    key: AttemptKey
    state: AttemptState

    def apply(self, library: Library) -> str | None:
        """Set the state."""
        book = library.known(self.key)
        if self.state == AttemptState.ABANDONED and book.state != AttemptState.OPEN:
            raise closed_error(self.key, book.state, "is open")
        if book.state not in FROZEN_STATES:
            book.state = self.state
            library.change(book)
        return book.snapshot_id


class KeepSnapshot(NamedTuple):
    """The digest of a frozen attempt after `deliveries` delivery events; returns whether it still is the one."""

    key: AttemptKey
    snapshot_id: str
    deliveries: int

    def apply(self, library: Library) -> bool:
        """Keep the snapshot id."""
        book = library.known(self.key)
        if book.next_delivery != self.deliveries:
            return False
        library.change(book)
        book.snapshot_id = self.snapshot_id
        return True


class Retire(NamedTuple):
    """An attempt that is stored elsewhere may go."""

    key: AttemptKey
    snapshot_id: str

    def apply(self, library: Library) -> None:
        """Delete everything of the attempt."""
        book = library.known(self.key)
        if book.state not in FROZEN_STATES or book.snapshot_id != self.snapshot_id:
            raise LedgerError(
                f"expected a frozen attempt with snapshot {self.snapshot_id}, {name_of(self.key)} is another",
                code=Code.MANIFEST_DIFFERS,
                where=self.key.rollout_id,
            )
        library.write_rows()
        bounds = part_range(book.attempt_no)
        for table in reversed(TABLES):
            if table.key == "attempt_no":
                delete: tuple[str, tuple[Any, ...]] = (f"{table.key} = ?", (book.attempt_no,))
            else:
                delete = (f"{table.key} BETWEEN ? AND ?", bounds)
            library.connection.execute(f"DELETE FROM {table.name} WHERE {delete[0]}", delete[1])
        library.close_book(self.key)
