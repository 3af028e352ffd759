"""Attempts that take calls: what the gateway holds in memory of each, and who may call.

Invariant: memory is a cache of the ledger. Of an attempt that is not in memory everything is read back before its next
call; parents and bases come out as if it had always been there. A key is known by its digest alone.

Not here: the path of a call (call), minting and finishing rollouts (service).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from time import time
from typing import Any, Final, NamedTuple, cast

from gristmill.errors import Code
from gristmill.gateway.keys import key_digest
from gristmill.ledger import AttemptKey, AttemptSetup, SqliteLedger
from gristmill.ledger.writes import Begin, Revoke
from gristmill.lineage import LineageIndex, RequestDigests
from gristmill.records import CallRecord, Capture, Delivery, Exchange
from gristmill.tokens import TokenBook

__all__ = ["Attempt", "LiveAttempts", "PastCall"]


class PastCall(NamedTuple):
    """A committed call, as far as a retry may ask for it."""

    call_id: str
    response_id: str
    parent_call_id: str | None
    stream: bool
    completed: bool


class Attempt:
    """One attempt in memory.

    Attributes:
        key: which attempt.
        setup: what it was begun with.
        book: its tokens.
        index: its calls as possible parents.
        past: committed calls by request digest, oldest first.
        deliveries: by call id.
        in_flight: running calls by id, each with what aborts it.
        closed: no more calls are admitted.
        touched_at: unix seconds of the last admission or commit.
    """

    def __init__(self, key: AttemptKey, setup: AttemptSetup) -> None:
        self.key: Final = key
        self.setup = setup
        self.book = TokenBook()
        self.index = LineageIndex()
        self.past: dict[str, list[PastCall]] = {}
        self._of_response: dict[str, list[str]] = {}
        self.deliveries: dict[str, Delivery] = {}
        self.in_flight: dict[str, Callable[[], None]] = {}
        self.closed = False
        self.touched_at = time()
        self.drained = asyncio.Event()
        self.drained.set()

    def enter(self, call_id: str, abort: Callable[[], None]) -> None:
        """Count a call in; `abort` ends it early."""
        self.in_flight[call_id] = abort
        self.touched_at = time()
        self.drained.clear()

    def leave(self, call_id: str) -> None:
        """Count a call out."""
        self.in_flight.pop(call_id, None)
        self.touched_at = time()
        if not self.in_flight:
            self.drained.set()

    def add(self, record: CallRecord, *, stream: bool) -> None:
        """Make a committed call known to those that come after it."""
        digests = RequestDigests(
            record.context_digest,
            record.continuation_digest,
            record.continuation_digest_bare,
            record.system_digest,
            record.tools_digest,
        )
        self.index.add(record.model_call_id, digests, record.delivery)
        self._of_response.setdefault(record.response_id, []).append(record.model_call_id)
        if record.request_digest is not None and record.choice_index == 0:
            completed = record.response_status in {"completed", "incomplete"} and record.unusable_reason not in {
                Code.ABORTED,
                Code.STREAM_TRUNCATED,
                Code.CALL_FAILED,
                Code.REPLY_MALFORMED,
            }
            past = PastCall(record.model_call_id, record.response_id, record.parent_call_id, stream, completed)
            self.past.setdefault(record.request_digest, []).append(past)

    def calls_of(self, response_id: str) -> Sequence[str]:
        """Return the calls of one response, one for each choice; empty where it was not captured."""
        return self._of_response.get(response_id, ())

    def deliver(self, call_id: str, delivery: Delivery) -> None:
        """Note what became of a reply; whoever continues it has received it."""
        self.deliveries[call_id] = delivery
        self.index.deliver(call_id, delivery)


class LiveAttempts:
    """All attempts that take calls.

    Args:
        ledger: where they are kept.
        most: how many idle ones stay in memory.
        run: runs a blocking function off the event loop.
    """

    def __init__(
        self,
        ledger: SqliteLedger,
        most: int,
        run: Callable[..., Awaitable[Any]],
    ) -> None:
        self._ledger: Final = ledger
        self._most: Final = most
        self._run: Final = run
        self._keys: dict[str, AttemptKey] = dict(ledger.grants())
        self._digests: dict[AttemptKey, str] = {key: digest for digest, key in self._keys.items()}
        self._live: OrderedDict[AttemptKey, Attempt] = OrderedDict()
        self._loading: dict[AttemptKey, asyncio.Future[Attempt]] = {}

    def holder(self, key: str | None) -> AttemptKey | None:
        """Return the attempt that a rollout key belongs to; None for any other key.

        Digests are looked up, not keys compared, so that time tells nothing about a key.
        """
        return None if key is None else self._keys.get(key_digest(key))

    async def begin(self, key: AttemptKey, setup: AttemptSetup) -> None:
        """Open an attempt, durably; its key works from now on.

        Raises:
            LedgerError: `key_exists`, `attempt_closed`, or the ledger cannot be written to.
        """
        await asyncio.wrap_future(self._ledger.submit(Begin(key, setup)))
        if setup.key_digest is not None:
            self._keys[setup.key_digest] = key
            self._digests[key] = setup.key_digest
        self._keep(Attempt(key, setup))

    async def get(self, key: AttemptKey) -> Attempt:
        """Return an attempt, read from the ledger where it is not in memory.

        Raises:
            LedgerError: `rollout_unknown`, or it cannot be read.
        """
        live = self._live.get(key)
        if live is not None:
            self._live.move_to_end(key)
            return live
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = asyncio.ensure_future(self._load(key))
            loading.add_done_callback(lambda done: self._loaded(key, done))
        return await asyncio.shield(loading)

    def _loaded(self, key: AttemptKey, done: asyncio.Future[Attempt]) -> None:
        self._loading.pop(key, None)
        if not done.cancelled() and done.exception() is None:
            self._keep(done.result())

    async def _load(self, key: AttemptKey) -> Attempt:
        setup = await self._run(self._ledger.setup, key)
        capture, _ = await self._run(lambda: self._ledger.read(key, exchanges=True))
        attempt = Attempt(key, setup if setup is not None else AttemptSetup())
        await self._run(lambda: _fill(attempt, capture))
        return attempt

    def _keep(self, attempt: Attempt) -> None:
        self._live[attempt.key] = attempt
        self._live.move_to_end(attempt.key)
        for key in list(self._live) if len(self._live) > self._most else ():
            if len(self._live) <= self._most:
                break
            if not self._live[key].in_flight and not self._live[key].closed:
                del self._live[key]

    def forget(self, key: AttemptKey) -> None:
        """Drop what is in memory of an attempt: it is frozen, or what is in memory may be ahead of the ledger."""
        self._live.pop(key, None)

    def in_flight(self, key: AttemptKey) -> int:
        """Return how many calls of an attempt are running."""
        live = self._live.get(key)
        return 0 if live is None else len(live.in_flight)

    def running(self) -> int:
        """Return how many calls are running."""
        return sum(len(live.in_flight) for live in self._live.values())

    def touched_at(self, key: AttemptKey) -> float | None:
        """Return when an attempt last had a call, in unix seconds; None where it is not in memory."""
        live = self._live.get(key)
        return None if live is None else live.touched_at

    async def close(self, key: AttemptKey, *, drain_s: float) -> int:
        """Admit no more calls, let those in flight end, abort the rest; return how many were aborted.

        Raises:
            LedgerError: `rollout_unknown`.
        """
        attempt = await self.get(key)
        attempt.closed = True
        return await self._drain([attempt], drain_s)

    async def close_all(self, *, drain_s: float) -> int:
        """Do the same with every attempt."""
        running = list(self._live.values())
        for attempt in running:
            attempt.closed = True
        return await self._drain(running, drain_s)

    async def _drain(self, attempts: Iterable[Attempt], drain_s: float) -> int:
        waiting = [asyncio.ensure_future(attempt.drained.wait()) for attempt in attempts if attempt.in_flight]
        if waiting:
            await asyncio.wait(waiting, timeout=drain_s)
        aborted = 0
        for attempt in attempts:
            for abort in list(attempt.in_flight.values()):
                abort()
                aborted += 1
        if waiting:
            await asyncio.gather(*waiting)
        return aborted

    async def revoke(self, key: AttemptKey) -> None:
        """Make an attempt's key worthless, durably."""
        digest = self._digests.pop(key, None)
        if digest is not None:
            self._keys.pop(digest, None)
        await asyncio.wrap_future(self._ledger.submit(Revoke(key)))

    def reopen(self, key: AttemptKey) -> None:
        """Admit calls again: what the attempt was closed for did not happen."""
        live = self._live.get(key)
        if live is not None:
            live.closed = False


def _fill(attempt: Attempt, capture: Capture) -> None:
    """Put an attempt's committed calls back, in commit order."""
    for record in capture.records:
        delta = capture.tokens.get(record.model_call_id)
        if delta is not None:
            context = record.prompt_len - record.prev_len
            arguments = (
                delta.ids_T[:context],
                delta.ids_T[context:],
                delta.logprobs_T[context:],
            )
            if record.base_call_id is None:
                attempt.book.add(record.model_call_id, *arguments, parent=record.parent_call_id, extras=delta.extras)
            else:
                attempt.book.extend(
                    record.model_call_id,
                    record.base_call_id,
                    *arguments,
                    parent=record.parent_call_id,
                    extras=delta.extras,
                )
        exchange = capture.exchanges.get(record.model_call_id)
        attempt.add(record, stream=_streamed(exchange))
        attempt.deliveries[record.model_call_id] = record.delivery


def _streamed(exchange: Exchange | None) -> bool:
    request = None if exchange is None else exchange.request
    return isinstance(request, Mapping) and cast("Mapping[str, Any]", request).get("stream") is True
