"""A ledger that lasts as long as the process: for files read whole, conformance cases, and as the simplest example.

Invariant: behaves as every other ledger does, durability apart.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gristmill.errors import Code, LedgerError
from gristmill.ledger.protocol import AttemptKey, StoredCall
from gristmill.ledger.snapshot import snapshot_id as digest_attempt
from gristmill.records import Capture, Delivery, LostCall, Result

__all__ = ["MemoryLedger"]


class _Attempt:
    def __init__(self) -> None:
        self.admitted: dict[str, str | None] = {}
        self.calls: dict[str, StoredCall] = {}
        self.deliveries: dict[str, Delivery] = {}
        self.result: Result | None = None
        self.frozen = False


class MemoryLedger:
    """Keeps attempts in dictionaries."""

    def __init__(self) -> None:
        self._attempts: dict[AttemptKey, _Attempt] = {}

    def _open(self, key: AttemptKey) -> _Attempt:
        attempt = self._attempts.setdefault(key, _Attempt())
        if attempt.frozen:
            raise LedgerError(
                f"expected an attempt that takes calls, {key.rollout_id}/{key.attempt} is frozen",
                code=Code.OPTION_INVALID,
                where=key.rollout_id,
            )
        return attempt

    def _known(self, key: AttemptKey) -> _Attempt:
        attempt = self._attempts.get(key)
        if attempt is None:
            raise LedgerError(
                f"expected a captured rollout, got {key.rollout_id}/{key.attempt}",
                code=Code.ROLLOUT_UNKNOWN,
                where=key.rollout_id,
            )
        return attempt

    def admit(self, key: AttemptKey, model_call_id: str, parent_call_id: str | None = None) -> None:
        """Record that a call is about to be made."""
        attempt = self._open(key)
        if model_call_id in attempt.admitted:
            raise LedgerError(
                f"expected a new call id, got {model_call_id} again",
                code=Code.CALL_IDENTITY_REUSED,
                where=f"call={model_call_id}",
            )
        attempt.admitted[model_call_id] = parent_call_id

    def commit(self, key: AttemptKey, call: StoredCall) -> int:
        """Store the outcome of a call and return its ordinal."""
        attempt = self._open(key)
        call_id = call.record.model_call_id
        if call_id in attempt.calls:
            raise LedgerError(
                f"expected a call without outcome, {call_id} has one",
                code=Code.CALL_IDENTITY_REUSED,
                where=f"call={call_id}",
            )
        ordinal = len(attempt.calls)
        record = msgspec.structs.replace(call.record, rollout_id=key.rollout_id, attempt=key.attempt, ordinal=ordinal)
        attempt.calls[call_id] = msgspec.structs.replace(call, record=record)
        return ordinal

    def deliver(self, key: AttemptKey, model_call_id: str, delivery: Delivery) -> None:
        """Append whether the client got the reply."""
        self._known(key).deliveries[model_call_id] = delivery

    def finish(self, key: AttemptKey, result: Result) -> None:
        """Store what the harness handed back."""
        self._open(key).result = result

    def attempts(self) -> Iterator[AttemptKey]:
        """Yield the attempts in the order in which they began."""
        yield from self._attempts

    def read(self, key: AttemptKey) -> tuple[Capture, Result | None]:
        """Return everything captured of an attempt, and its result."""
        attempt = self._known(key)
        records = tuple(
            msgspec.structs.replace(call.record, delivery=attempt.deliveries.get(call_id, call.record.delivery))
            for call_id, call in attempt.calls.items()
        )
        capture = Capture(
            rollout_id=key.rollout_id,
            attempt=key.attempt,
            records=records,
            tokens={call_id: call.tokens for call_id, call in attempt.calls.items() if call.tokens is not None},
            lost=tuple(
                LostCall(model_call_id=call_id, parent_call_id=parent)
                for call_id, parent in attempt.admitted.items()
                if call_id not in attempt.calls
            ),
            exchanges={
                call_id: call.exchange for call_id, call in attempt.calls.items() if call.exchange is not None
            },
        )
        return capture, attempt.result

    def freeze(self, key: AttemptKey) -> str:
        """Admit no more calls and return the snapshot id."""
        self._known(key).frozen = True
        return digest_attempt(*self.read(key))

    def retire(self, key: AttemptKey, snapshot_id: str) -> None:
        """Delete a frozen attempt that has not changed."""
        attempt = self._known(key)
        if not attempt.frozen or digest_attempt(*self.read(key)) != snapshot_id:
            raise LedgerError(
                f"expected a frozen attempt with snapshot {snapshot_id}, {key.rollout_id}/{key.attempt} is another",
                code=Code.MANIFEST_DIFFERS,
                where=key.rollout_id,
            )
        del self._attempts[key]
