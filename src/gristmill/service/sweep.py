"""Abandons rollouts that nobody finishes: idle for long enough, with no call in flight.

Invariant: an attempt is abandoned only after the ledger and the gateway's memory both say that nothing touched it for
that long; its key is worthless afterwards, it is frozen as it is, and it is counted.

Not here: what abandoning is (rollouts).
"""

from __future__ import annotations

import asyncio
from time import time
from typing import Final

from gristmill.errors import GristmillError
from gristmill.ledger import AttemptElsewhere, AttemptKey, AttemptState
from gristmill.service.rollouts import Rollouts

__all__ = ["Sweep"]

_MOST_OFTEN_s: Final = 1.0
_LEAST_OFTEN_s: Final = 300.0


class Sweep:
    """Looks for idle rollouts now and then.

    Args:
        rollouts: where to look.
        abandon_after_s: idle time after which one is abandoned.
        drain_s: how long a call that begins meanwhile may go on.
    """

    def __init__(self, rollouts: Rollouts, abandon_after_s: float, drain_s: float) -> None:
        self._rollouts: Final = rollouts
        self._after_s: Final = abandon_after_s
        self._drain_s: Final = drain_s

    async def run(self) -> None:
        """Sweep until cancelled."""
        pause_s = min(_LEAST_OFTEN_s, max(_MOST_OFTEN_s, self._after_s / 20))
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self.once(time())
            except GristmillError as error:
                # The ledger cannot be read for now; the next sweep tries again.
                self._rollouts.gateway.log.warning("sweep_failed", code=error.code)

    async def once(self, now_s: float) -> list[AttemptKey]:
        """Abandon what is idle at a time (unix seconds), and return which attempts that were."""
        ledger, gateway = self._rollouts.ledger, self._rollouts.gateway
        untouched = await gateway.ledger_call(
            lambda: [
                summary.key
                for summary in ledger.summaries(state=AttemptState.OPEN)
                if summary.touched_at is not None and now_s - summary.touched_at >= self._after_s
            ]
        )
        abandoned: list[AttemptKey] = []
        for key in untouched:
            if not self._idle(key, now_s):
                continue
            try:
                await self._rollouts.abandon(key, self._drain_s)
            except AttemptElsewhere:
                # Its own gateway sees to it.
                continue
            except GristmillError as error:
                # It was finished meanwhile, or the ledger cannot be written to; the next sweep looks again.
                gateway.log.warning("abandon_failed", rollout_id=key.rollout_id, attempt=key.attempt, code=error.code)
                continue
            gateway.metrics.abandoned.inc()
            gateway.log.info("abandoned", rollout_id=key.rollout_id, attempt=key.attempt)
            abandoned.append(key)
        return abandoned

    def _idle(self, key: AttemptKey, now_s: float) -> bool:
        attempts = self._rollouts.gateway.attempts
        touched_s = attempts.touched_at(key)
        return attempts.in_flight(key) == 0 and (touched_s is None or now_s - touched_s >= self._after_s)
