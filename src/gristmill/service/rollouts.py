"""The life of a rollout beside its calls: opened with a key, finished with a result, frozen, abandoned, revoked.

Invariant: the acts on one attempt happen one after the other; each is durable when it returns, and none of them is
possible with a rollout's own key. A result is stored only after the last call of the attempt had its outcome or was
aborted, so that what a policy sees does not depend on who was faster.

Not here: HTTP (api), model calls (gateway).
"""

from __future__ import annotations

import asyncio
import secrets
from time import time
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from gristmill.captures.purpose import label_calls
from gristmill.errors import CaptureError, Code, LedgerError
from gristmill.gateway.app import Gateway
from gristmill.gateway.keys import key_digest, mint_key
from gristmill.ledger import AttemptElsewhere, AttemptKey, AttemptSetup, AttemptState, LedgerWriter, Summary
from gristmill.ledger.writes import prepare_result
from gristmill.records import Purpose
from gristmill.service.asked import FinishAsked, ListAsked, MintAsked
from gristmill.service.outcome import Outcome, outcome_of

__all__ = ["Finished", "Minted", "Rollouts"]

_TAKES_CALLS: Final = AttemptState.OPEN
_TAKEN: Final = frozenset({Code.KEY_EXISTS, Code.ATTEMPT_ELSEWHERE})
_MOST_TRIES: Final = 20


class Minted(NamedTuple):
    """A new attempt and its key, which is not stored anywhere."""

    key: AttemptKey
    secret: str


class Finished(NamedTuple):
    """How many calls were still running and were aborted, and what the attempt comes to."""

    aborted: int
    outcome: Outcome


class Rollouts:
    """The rollouts of one gateway.

    Args:
        gateway: serves the calls.
        ledger: the gateway's, open for writing.

    Attributes:
        opening: new rollouts are opened; False while the gateway ends.
    """

    def __init__(self, gateway: Gateway, ledger: LedgerWriter) -> None:
        self.gateway: Final = gateway
        self.ledger: Final = ledger
        self.opening = True
        self._locks: Final[WeakValueDictionary[str, asyncio.Lock]] = WeakValueDictionary()

    def _lock(self, key: AttemptKey) -> asyncio.Lock:
        """Return the lock of a rollout: attempts of one rollout are rarely changed at once."""
        lock = self._locks.get(key.rollout_id)
        if lock is None:
            lock = self._locks[key.rollout_id] = asyncio.Lock()
        return lock

    async def mint(self, asked: MintAsked) -> Minted:
        """Open an attempt and make its key.

        Raises:
            LedgerError: `key_exists`, `attempt_closed`: the attempt is there already; or it cannot be written.
            CaptureError: `gateway_busy`: the gateway is ending.
        """
        if not self.opening:
            raise CaptureError(
                "the gateway is ending and opens no more rollouts", code=Code.GATEWAY_BUSY, hint="try again"
            )
        rollout_id = asked.rollout_id if asked.rollout_id is not None else f"r-{secrets.token_hex(8)}"
        secret = mint_key()
        setup = AttemptSetup(
            key_digest=key_digest(secret),
            group_id=asked.group_id,
            metadata=asked.metadata,
            overrides=asked.overrides,
            created_at=time(),
        )
        async with self._lock(AttemptKey(rollout_id)):
            tries = 0
            while True:
                attempt = asked.attempt
                if attempt is None:
                    known = await self.gateway.ledger_call(self.ledger.rollout, rollout_id)
                    attempt = known[-1].attempt + 1 if known else 0
                key = AttemptKey(rollout_id, attempt)
                try:
                    await self.gateway.attempts.begin(key, setup)
                except LedgerError as error:
                    # Another gateway was quicker to take the next number.
                    tries += 1
                    if asked.attempt is not None or error.code not in _TAKEN or tries > _MOST_TRIES:
                        raise
                else:
                    return Minted(key, secret)

    async def elsewhere(self, key: AttemptKey) -> AttemptElsewhere | None:
        """Return whose an attempt is where another gateway has it.

        Raises:
            LedgerError: the ledger cannot be read.
        """
        return await self.gateway.ledger_call(self.ledger.owner, key) if self.ledger.shared else None

    async def summary(self, key: AttemptKey) -> Summary:
        """Return the line of one attempt.

        Raises:
            LedgerError: `rollout_unknown`.
        """
        return await self.gateway.ledger_call(self.ledger.summary, key)

    async def attempts(self, rollout_id: str) -> tuple[Summary, ...]:
        """Return the lines of a rollout's attempts by number.

        Raises:
            LedgerError: `rollout_unknown`: it has none.
        """

        def read() -> tuple[Summary, ...]:
            # One that is not known is told as its first attempt is.
            keys = self.ledger.rollout(rollout_id) or (AttemptKey(rollout_id),)
            return tuple(map(self.ledger.summary, keys))

        return await self.gateway.ledger_call(read)

    async def list(self, asked: ListAsked) -> list[Summary]:
        """Return the lines of attempts in the order in which they began.

        Raises:
            LedgerError: `rollout_unknown`: there is no attempt `after`.
        """

        def page() -> list[Summary]:
            found: list[Summary] = []
            if asked.limit:
                for summary in self.ledger.summaries(after=asked.after, state=asked.state, group_id=asked.group_id):
                    found.append(summary)
                    if len(found) == asked.limit:
                        break
            return found

        return await self.gateway.ledger_call(page)

    async def finish(self, key: AttemptKey, asked: FinishAsked, drain_s: float) -> Finished:
        """Take no more calls, wait for those in flight, store labels and result, and count what it comes to.

        The same result again changes nothing. Where the result cannot be stored, the attempt takes calls again.

        Args:
            key: which attempt.
            asked: the result, and the policy of the count.
            drain_s: how long calls in flight may go on where `asked` does not say.

        Raises:
            LedgerError: `rollout_unknown`; `attempt_differs`; `attempt_closed` where it was frozen without a result.
        """
        async with self._lock(key):
            summary = await self.summary(key)
            setup = await self.gateway.ledger_call(self.ledger.setup, key)
            given = AttemptSetup() if setup is None else setup
            result = asked.result(given.group_id)
            if given.metadata:
                result = msgspec.structs.replace(result, metadata={**given.metadata, **result.metadata})
            prepare_result(result)
            aborted = 0
            if summary.state is _TAKES_CALLS:
                aborted = await self._close(key, drain_s if asked.drain_s is None else asked.drain_s)
                try:
                    await self._label(key)
                    await self.gateway.ledger_call(self.ledger.finish, key, result)
                except BaseException:
                    self.gateway.attempts.reopen(key)
                    raise
            else:
                await self.gateway.ledger_call(self.ledger.finish, key, result)
            self.gateway.attempts.forget(key)
            outcome = await self.gateway.ledger_call(outcome_of, self.ledger, key, asked.policy)
        return Finished(aborted, outcome)

    async def freeze(self, key: AttemptKey, drain_s: float) -> str:
        """Take no more calls and nothing else, and return the snapshot id; again, it is the same.

        Raises:
            LedgerError: `rollout_unknown`.
        """
        async with self._lock(key):
            if (await self.summary(key)).state is _TAKES_CALLS:
                await self._close(key, drain_s)
                await self._label(key)
            return await self._frozen(key, AttemptState.FROZEN)

    async def abandon(self, key: AttemptKey, drain_s: float) -> str:
        """Freeze an attempt that nobody will finish; otherwise as `freeze`.

        Raises:
            LedgerError: `rollout_unknown`; `attempt_closed`: it has finished.
        """
        async with self._lock(key):
            summary = await self.summary(key)
            if summary.state is _TAKES_CALLS:
                await self._close(key, drain_s)
                await self._label(key)
            return await self._frozen(key, AttemptState.ABANDONED)

    async def _frozen(self, key: AttemptKey, state: AttemptState) -> str:
        act = self.ledger.freeze if state is AttemptState.FROZEN else self.ledger.abandon
        snapshot_id = await self.gateway.ledger_call(act, key)
        await self.gateway.attempts.revoke(key)
        self.gateway.attempts.forget(key)
        return snapshot_id

    async def revoke(self, key: AttemptKey, drain_s: float) -> int:
        """Make the attempt's key worthless at once, let calls in flight end, and return how many were aborted.

        What was captured stays, and the attempt can still be finished.

        Raises:
            LedgerError: `rollout_unknown`.
        """
        async with self._lock(key):
            summary = await self.summary(key)
            await self.gateway.attempts.revoke(key)
            return await self._close(key, drain_s) if summary.state is _TAKES_CALLS else 0

    async def _close(self, key: AttemptKey, drain_s: float) -> int:
        return await self.gateway.attempts.close(key, drain_s=drain_s)

    async def _label(self, key: AttemptKey) -> None:
        """Store what each call was for, as advice to policies and people."""
        labels = await self.gateway.ledger_call(self._labels, key)
        if labels:
            await self.gateway.ledger_call(self.ledger.label, key, labels)

    def _labels(self, key: AttemptKey) -> dict[str, Purpose]:
        capture, _ = self.ledger.read(key, tokens=False, exchanges=True)
        return label_calls(capture.records, capture.exchanges)
