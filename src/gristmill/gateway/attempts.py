"""Attempts that take calls: what the gateway holds in memory of each, and who may call.

Invariant: memory is a cache of the ledger. Of an attempt that is not in memory everything is read back before its next
call; parents and bases come out as if it had always been there. A key is known by its digest alone. Where several
gateways have one ledger, memory holds only attempts that are this one's by the ledger's word, under its present lease.

Not here: the path of a call (call), minting and finishing rollouts (service).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from time import time
from typing import Any, Final, NamedTuple, cast

from gristmill.errors import Code
from gristmill.gateway.continuation.conditions import Past
from gristmill.gateway.keys import KEY_PREFIX, key_digest
from gristmill.ledger import AttemptElsewhere, AttemptKey, AttemptSetup, LedgerWriter
from gristmill.ledger.writes import Begin, Claim, Revoke
from gristmill.lineage import LineageIndex, RequestDigests
from gristmill.records import CallRecord, Capture, Delivery, Exchange, TokenDelta
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
    """One attempt in memory; the same object for as long as anything uses it.

    Attributes:
        key: which attempt.
        setup: what it was begun with.
        book: its tokens.
        index: its calls as possible parents.
        past: committed calls by request digest, oldest first.
        deliveries: by call id.
        continuable: committed calls by id, as far as continuing them depends on their records.
        in_flight: running calls by id, each with what breaks it off (True: the gateway is going).
        writing: held while an outcome is prepared and committed, so that memory and ledger stay in step.
        stale: memory may be ahead of the ledger; it is read again before it is used.
        users: requests that hold the attempt.
        closed: no more calls are admitted.
        touched_at: unix seconds of the last admission or commit.
        instance: the ledger's writer whose attempt it is.
    """

    def __init__(self, key: AttemptKey, setup: AttemptSetup, instance: str = "") -> None:
        self.key: Final = key
        self.setup = setup
        self.instance = instance
        self.in_flight: dict[str, Callable[[bool], None]] = {}
        self.writing: Final = asyncio.Lock()
        self.stale = False
        self.users = 0
        self.closed = False
        self.touched_at = time()
        self.drained: Final = asyncio.Event()
        self.drained.set()
        self._empty()

    def _empty(self) -> None:
        self.book = TokenBook()
        self.index = LineageIndex()
        self.past: dict[str, list[PastCall]] = {}
        self.deliveries: dict[str, Delivery] = {}
        self.continuable: dict[str, Past] = {}
        self._of_response: dict[str, list[str]] = {}

    def fill(self, capture: Capture) -> None:
        """Put an attempt's committed calls into memory, in commit order, in place of what was there."""
        self._empty()
        for record in capture.records:
            _add_tokens(self.book, record, capture.tokens.get(record.model_call_id))
            self.add(record, stream=_streamed(capture.exchanges.get(record.model_call_id)))
            self.deliveries[record.model_call_id] = record.delivery
        self.stale = False

    def enter(self, call_id: str, abort: Callable[[bool], None]) -> None:
        """Count a call in; `abort` breaks it off."""
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
        self.continuable[record.model_call_id] = Past.of(record)
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
        ledger: LedgerWriter,
        most: int,
        run: Callable[..., Awaitable[Any]],
    ) -> None:
        self._ledger: Final = ledger
        self._most: Final = most
        self._run: Final = run
        # The keys of a ledger that others write to are looked up, except for those minted here.
        self._keys: dict[str, AttemptKey] = {} if ledger.shared else dict(ledger.grants())
        self._digests: dict[AttemptKey, str] = {key: digest for digest, key in self._keys.items()}
        self._live: OrderedDict[AttemptKey, Attempt] = OrderedDict()
        self._instance = ledger.instance

    async def holder(self, key: str | None) -> AttemptKey | None:
        """Return the attempt that a rollout key belongs to; None for any other key.

        Digests are looked up, not keys compared, so that time tells nothing about a key.

        Raises:
            LedgerError: the ledger cannot be asked.
        """
        if key is None:
            return None
        self._notice_new_lease()
        digest = key_digest(key)
        found = self._keys.get(digest)
        if found is None and self._ledger.shared and key.startswith(KEY_PREFIX):
            return await self._run(self._ledger.grant, digest)
        return found

    def _notice_new_lease(self) -> None:
        """Believe nothing that was known under a lease that has ended: others may have the attempts by now."""
        if self._ledger.instance != self._instance:
            self._instance = self._ledger.instance
            self._keys.clear()
            self._digests.clear()

    def holds(self, key: AttemptKey) -> bool:
        """Tell whether an attempt is in memory here."""
        return key in self._live

    async def begin(self, key: AttemptKey, setup: AttemptSetup) -> None:
        """Open an attempt, durably; its key works from now on.

        Raises:
            LedgerError: `key_exists`, `attempt_closed`, or the ledger cannot be written to.
        """
        self._notice_new_lease()
        instance = self._instance
        await asyncio.wrap_future(self._ledger.submit(Begin(key, setup)))
        if setup.key_digest is not None:
            self._keys[setup.key_digest] = key
            self._digests[key] = setup.key_digest
        self._keep(Attempt(key, setup, instance))

    @asynccontextmanager
    async def use(self, key: AttemptKey) -> AsyncGenerator[Attempt]:
        """Hold an attempt for a request, read from the ledger where it is not in memory.

        Raises:
            AttemptElsewhere: it belongs to another gateway that lives.
            LedgerError: `rollout_unknown`, or it cannot be read.
        """
        attempt = await self._get(key)
        attempt.users += 1
        try:
            if attempt.stale:
                async with attempt.writing:
                    await self.refresh(attempt)
            yield attempt
        finally:
            attempt.users -= 1

    async def refresh(self, attempt: Attempt) -> None:
        """Read a stale attempt again; `attempt.writing` is held.

        Raises:
            LedgerError: it cannot be read.
        """
        if attempt.stale:
            capture, _ = await self._run(lambda: self._ledger.read(attempt.key, exchanges=True))
            # In the event loop: nobody else sees it half filled.
            attempt.fill(capture)

    async def _get(self, key: AttemptKey) -> Attempt:
        instance = self._ledger.instance
        live = self._live.get(key)
        if live is not None and live.instance != instance:
            await self._claim(key)
            # Others may have written to it in between.
            live.instance, live.stale = instance, True
            self._live.setdefault(key, live)
        if live is None:
            await self._claim(key)
            setup = await self._run(self._ledger.setup, key)
            # Whoever else was waiting for it may have been first.
            live = self._live.get(key)
            if live is None:
                live = Attempt(key, setup if setup is not None else AttemptSetup(), instance)
                live.stale = True
                self._keep(live)
        self._live.move_to_end(key)
        return live

    async def _claim(self, key: AttemptKey) -> None:
        """Make an attempt this gateway's, where others could have it."""
        if not self._ledger.shared:
            return
        try:
            await asyncio.wrap_future(self._ledger.submit(Claim(key)))
        except AttemptElsewhere:
            self.forget(key)
            raise

    def _keep(self, attempt: Attempt) -> None:
        self._live[attempt.key] = attempt
        excess = len(self._live) - self._most
        if excess > 0:
            idle = (key for key, live in self._live.items() if live is not attempt and not _used(live))
            for key in list(islice(idle, excess)):
                del self._live[key]

    def forget(self, key: AttemptKey) -> None:
        """Drop what is in memory of an attempt: it has finished, or memory may be ahead of the ledger.

        One that was closed is dropped, too: from now on the ledger refuses its calls.
        """
        live = self._live.get(key)
        if live is None:
            return
        live.stale = True
        if not (live.users or live.in_flight):
            del self._live[key]
        if self._ledger.shared:
            # Whoever asks for it again finds out whose it is.
            self._keys.pop(self._digests.pop(key, ""), None)

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
        async with self.use(key) as attempt:
            attempt.closed = True
            return await self._drain([attempt], drain_s, going=False)

    async def close_all(self, *, drain_s: float) -> int:
        """Do the same with every attempt, because the gateway is going."""
        running = list(self._live.values())
        for attempt in running:
            attempt.closed = True
        return await self._drain(running, drain_s, going=True)

    async def _drain(self, attempts: Iterable[Attempt], drain_s: float, *, going: bool) -> int:
        waiting = [asyncio.ensure_future(attempt.drained.wait()) for attempt in attempts if attempt.in_flight]
        if waiting:
            await asyncio.wait(waiting, timeout=drain_s)
        aborted = 0
        for attempt in attempts:
            for abort in list(attempt.in_flight.values()):
                abort(going)
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


def _used(attempt: Attempt) -> bool:
    """Tell whether dropping an attempt would lose something: a request that holds it, a call, that it is closed."""
    return bool(attempt.users or attempt.in_flight or attempt.closed)


def _add_tokens(book: TokenBook, record: CallRecord, delta: TokenDelta | None) -> None:
    """Add a stored call's tokens to a book, as they were stored."""
    if delta is None:
        return
    context = record.prompt_len - record.prev_len
    call_id, parent = record.model_call_id, record.parent_call_id
    arrays = delta.ids_T[:context], delta.ids_T[context:], delta.logprobs_T[context:]
    if record.base_call_id is None:
        book.add(call_id, *arrays, parent=parent, extras=delta.extras)
    else:
        book.extend(call_id, record.base_call_id, *arrays, parent=parent, extras=delta.extras)


def _streamed(exchange: Exchange | None) -> bool:
    request = None if exchange is None else exchange.request
    return isinstance(request, Mapping) and cast("Mapping[str, Any]", request).get("stream") is True
