"""What a store of captured calls must do, whatever it is made of.

Invariant: what was acknowledged stays; calls and deliveries are only ever added; a call admitted without an outcome is
reported as lost and never forgotten; attempts never mix. `commit` assigns the ordinal that "commit order" means.

Not here: any particular store (memory; SQLite and PostgreSQL have modules of their own).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import msgspec

from gristmill.records import CallRecord, Capture, Delivery, Exchange, Result, TokenDelta

__all__ = ["AttemptKey", "Ledger", "StoredCall"]


class AttemptKey(NamedTuple):
    """One attempt of one rollout."""

    rollout_id: str
    attempt: int = 0


class StoredCall(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one call: its record, its tokens if there are any, and what went over the wire if it is kept."""

    record: CallRecord
    tokens: TokenDelta | None = None
    exchange: Exchange | None = None


class Ledger(Protocol):
    """A durable store of captured calls.

    Every method that writes returns only when the write is durable.
    """

    def admit(self, key: AttemptKey, model_call_id: str, parent_call_id: str | None = None) -> None:
        """Record that a call is about to be made; without a commit it is lost.

        Raises:
            LedgerError: the attempt is frozen, or the call id was admitted before.
        """
        ...

    def commit(self, key: AttemptKey, call: StoredCall) -> int:
        """Store the outcome of a call and return its ordinal in the attempt.

        Raises:
            LedgerError: the attempt is frozen, or the call has an outcome already.
        """
        ...

    def deliver(self, key: AttemptKey, model_call_id: str, delivery: Delivery) -> None:
        """Append whether the client got the reply; the last statement counts."""
        ...

    def finish(self, key: AttemptKey, result: Result) -> None:
        """Store what the harness handed back."""
        ...

    def attempts(self) -> Iterator[AttemptKey]:
        """Yield the attempts in the order in which they began."""
        ...

    def read(self, key: AttemptKey) -> tuple[Capture, Result | None]:
        """Return everything captured of an attempt, and its result if it has finished.

        Raises:
            LedgerError: `rollout_unknown`.
        """
        ...

    def freeze(self, key: AttemptKey) -> str:
        """Admit no more calls and return the snapshot id: the digest of the whole attempt."""
        ...

    def retire(self, key: AttemptKey, snapshot_id: str) -> None:
        """Delete a frozen attempt whose snapshot id is still this one.

        Raises:
            LedgerError: it is not frozen, or has changed.
        """
        ...
