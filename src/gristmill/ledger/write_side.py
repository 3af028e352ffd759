"""Writing to a ledger that lies in tables: each method of the protocol as a write that is submitted and waited for.

Invariant: a method returns when its write is durable, and raises when it was not made.

Not here: who applies the writes, and when (group, and the databases' own writers).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from gristmill.ledger.book import check_names
from gristmill.ledger.imports import Import
from gristmill.ledger.protocol import (
    AttemptElsewhere,
    AttemptKey,
    AttemptSetup,
    AttemptState,
    Imported,
    StoredCall,
)
from gristmill.ledger.read_side import LedgerReader
from gristmill.ledger.reader import find_attempt, stored_digest
from gristmill.ledger.schema import part_range
from gristmill.ledger.writes import (
    Admit,
    Begin,
    Commit,
    Deliver,
    Finish,
    Freeze,
    KeepSnapshot,
    Label,
    Lose,
    Retire,
    Revoke,
    Write,
    prepare_call,
    prepare_result,
)
from gristmill.records import Capture, Delivery, Purpose, Result

__all__ = ["LedgerWriter"]

ValueT = TypeVar("ValueT")


class LedgerWriter(LedgerReader):
    """A ledger that this process writes to; any thread may call it.

    Attributes:
        shared: others may write to it at the same time; each attempt then belongs to one of them.
        lost_on_open: how many calls of earlier writers were in flight and are lost.
    """

    shared: bool
    lost_on_open: int

    @property
    @abstractmethod
    def instance(self) -> str:
        """Id of this writer, in every intent and call it writes; a new one where its lease had expired."""

    @abstractmethod
    def submit(self, write: Write[ValueT]) -> Future[ValueT]:
        """Queue a write for callers that do not want to block; the future is done when the write is durable.

        Raises:
            LedgerError: `ledger_closed`, `ledger_busy`, `ledger_write_failed`.
        """

    @abstractmethod
    def waiting(self) -> int:
        """Return about how many writes wait."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Return how much room the ledger's disk has for this process, None where that cannot be known.

        Raises:
            LedgerError: `file_unreadable`.
        """

    @abstractmethod
    def announce(self, address: str) -> None:
        """Say where this writer can be reached."""

    @abstractmethod
    def owner(self, key: AttemptKey) -> AttemptElsewhere | None:
        """Return whose an attempt is where it is another writer's that lives; None: this one may have it.

        Raises:
            LedgerError: the ledger cannot be read.
        """

    def begin(self, key: AttemptKey, setup: AttemptSetup) -> None:
        """Open an attempt before its first call; see `Ledger.begin`."""
        self.submit(Begin(key, setup)).result()

    def revoke(self, key: AttemptKey) -> None:
        """Let the attempt's key never open it again; see `Ledger.revoke`."""
        self.submit(Revoke(key)).result()

    def label(self, key: AttemptKey, labels: Mapping[str, Purpose]) -> None:
        """Append purposes by call id, all or none; see `Ledger.label`."""
        self.submit(Label(key, dict(labels))).result()

    def admit(self, key: AttemptKey, model_call_id: str, parent_call_id: str | None = None) -> None:
        """Record that a call is about to be made; see `Ledger.admit`."""
        check_names(key, model_call_id, parent_call_id)
        self.submit(Admit(key, model_call_id, parent_call_id)).result()

    def commit(self, key: AttemptKey, call: StoredCall) -> int:
        """Store the outcome of a call and return its ordinal; see `Ledger.commit`."""
        return self.commit_choices(key, (call,))[0]

    def commit_choices(self, key: AttemptKey, calls: Sequence[StoredCall]) -> tuple[int, ...]:
        """Store the calls of one reply, all or none, and return their ordinals."""
        check_names(key)
        return self.submit(Commit(key, [prepare_call(key, call) for call in calls])).result()

    def lose(self, key: AttemptKey, model_call_id: str, reason: str) -> None:
        """Say why an admitted call has no outcome and will get none; see `Ledger.lose`."""
        check_names(key, model_call_id, reason)
        self.submit(Lose(key, model_call_id, reason)).result()

    def deliver(self, key: AttemptKey, model_call_id: str, delivery: Delivery) -> None:
        """Append whether the client got the reply; see `Ledger.deliver`."""
        check_names(key, model_call_id)
        self.submit(Deliver(key, model_call_id, delivery)).result()

    def finish(self, key: AttemptKey, result: Result) -> None:
        """Store what the harness handed back; see `Ledger.finish`."""
        check_names(key, result.group_id)
        self.submit(Finish(key, prepare_result(result))).result()

    def import_attempts(self, attempts: Iterable[tuple[Capture, Result | None]]) -> Imported:
        """Add whole attempts, frozen: all of them or none; see `Ledger.import_attempts`.

        The attempts are read in the writer's thread, in one transaction; other writes wait for it.
        """
        return self.submit(Import(attempts)).result()

    def freeze(self, key: AttemptKey) -> str:
        """Admit no more calls and return the snapshot id."""
        return self._freeze(key, AttemptState.FROZEN)

    def abandon(self, key: AttemptKey) -> str:
        """Freeze an attempt that its harness never finished; see `Ledger.abandon`."""
        return self._freeze(key, AttemptState.ABANDONED)

    def _freeze(self, key: AttemptKey, state: AttemptState) -> str:
        known = self.submit(Freeze(key, state)).result()
        while known is None:
            with self._reading() as connection:
                row = find_attempt(connection, key)
                digest = stored_digest(connection, row)
                count = "SELECT count(*) FROM deliveries WHERE delivery_no BETWEEN ? AND ?"
                (deliveries,) = connection.execute(count, part_range(row.attempt_no)).fetchone()
            if self.submit(KeepSnapshot(key, digest, deliveries)).result():
                return digest
        return known

    def retire(self, key: AttemptKey, snapshot_id: str) -> None:
        """Delete a frozen attempt that has not changed; see `Ledger.retire`."""
        with self._reading() as connection:
            state = AttemptState(find_attempt(connection, key).state)
        if state in {AttemptState.FROZEN, AttemptState.ABANDONED}:
            self.freeze(key)
        self.submit(Retire(key, snapshot_id)).result()
