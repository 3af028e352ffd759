"""What all calls of a gateway share: settings, ledger, attempts, engines' weights, counters, log.

Invariant: a write that a call waits for is durable when the wait ends; one that nobody waits for (a delivery) is
written before the gateway closes, and a failure of it is logged and counted, never dropped in silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from gristmill.errors import LedgerError
from gristmill.gateway.attempts import LiveAttempts
from gristmill.gateway.config import GatewayConfig
from gristmill.gateway.log import Log
from gristmill.gateway.metrics import Metrics
from gristmill.ledger import AttemptKey, LedgerWriter
from gristmill.ledger.writes import Deliver, Write
from gristmill.records import Delivery

__all__ = ["Desk"]

ValueT = TypeVar("ValueT")


class Desk:
    """Shared by all calls.

    Args:
        config: settings.
        ledger: where calls go.
        metrics: counters.
        log: the log.
    """

    def __init__(self, config: GatewayConfig, ledger: LedgerWriter, metrics: Metrics, log: Log) -> None:
        self.config: Final = config
        self.ledger: Final = ledger
        self.metrics: Final = metrics
        self.log: Final = log
        self.attempts: Final = LiveAttempts(ledger, config.max_attempts_in_memory, self.blocking)
        self._weights: dict[str | None, str] = {}
        self._unwaited: set[asyncio.Future[Any]] = set()

    async def blocking(self, work: Callable[..., ValueT], *arguments: Any) -> ValueT:
        """Run what blocks off the event loop."""
        return await asyncio.to_thread(work, *arguments)

    def write(self, write: Write[ValueT]) -> Awaitable[ValueT]:
        """Queue a write of the ledger; what is awaited is done when it is durable.

        Raises:
            LedgerError: `ledger_busy`, `ledger_closed`, `ledger_write_failed`, at once.
        """
        return asyncio.wrap_future(self.ledger.submit(write))

    def deliver(self, key: AttemptKey, call_id: str, delivery: Delivery) -> None:
        """Store what became of a reply; nobody waits for it."""
        try:
            future = asyncio.ensure_future(self.write(Deliver(key, call_id, delivery)))
        except LedgerError as error:
            self._undelivered(key, call_id, error)
            return
        self._unwaited.add(future)
        future.add_done_callback(lambda done: self._written(key, call_id, done))

    def _written(self, key: AttemptKey, call_id: str, done: asyncio.Future[Any]) -> None:
        self._unwaited.discard(done)
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._undelivered(key, call_id, error)

    def _undelivered(self, key: AttemptKey, call_id: str, error: BaseException) -> None:
        code = str(error.code) if isinstance(error, LedgerError) else type(error).__name__
        self.metrics.deliveries.labels("not_stored").inc()
        self.log.warning("delivery not stored", call_id=call_id, code=code, **self.names(key))

    async def settle(self) -> None:
        """Wait for the writes that nobody waited for."""
        while self._unwaited:
            await asyncio.wait(set(self._unwaited))

    def announce_weights(self, version: str, label: str | None) -> None:
        """Note the version that an engine, or every engine, samples with from now on."""
        if label is None:
            self._weights.clear()
        self._weights[label] = version

    def weights(self, label: str) -> str | None:
        """Return the version that was last announced for an engine."""
        return self._weights.get(label, self._weights.get(None))

    @staticmethod
    def names(key: AttemptKey) -> dict[str, Any]:
        """Name an attempt in the log."""
        return {"rollout_id": key.rollout_id, "attempt": key.attempt}
