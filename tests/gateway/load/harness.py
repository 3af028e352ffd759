"""One attempt of one rollout as a harness runs it: a conversation, with the failures and retries that harnesses have.

Invariant: what a harness does is decided by its seed and by what it gets; every request is in the journal before it is
sent. A reply is acknowledged when the protocol's end came, and only such a one is gone on with.

Not here: how a dialect is spoken (conversation, replies), what has to be in the ledger afterwards (verify).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from time import monotonic
from typing import Any, Final

import aiohttp
import msgspec
import orjson

from gristmill.ledger import AttemptState
from gristmill.records import Dialect
from tests.gateway.load.admin import HOPS, Admin, Minted, PATIENCE_s, Refused
from tests.gateway.load.conversation import PATHS, aside, conversation
from tests.gateway.load.journal import AttemptJournal, Fate, Journal, Sent
from tests.gateway.load.replies import read_reply
from tests.gateway.load.script import END, Kind, Nonce, question

__all__ = ["Harness", "evidence_digest"]

Json = dict[str, Any]

_DIALECTS: Final = (Dialect.CHAT, Dialect.COMPLETIONS, Dialect.RESPONSES, Dialect.MESSAGES)
_WORDS: Final = (
    *("mill", "stone", "grain", "river", "wheel", "water", "flour", "sack", "miller", "sieve", "gear", "belt"),
    *("hopper", "dust", "bread", "oven", "café", "Mühle", "粉", "🌾"),
)
_KINDS: Final = {
    Kind.PLAIN: 35,
    Kind.THINK: 20,
    Kind.TOOL: 22,
    Kind.SAME: 10,
    Kind.SLOW: 8,
    Kind.TRIP: 3,
    Kind.CUT: 2,
}
_CALL_TIMEOUT_s: Final = 90.0


def evidence_digest(body: Mapping[str, Any]) -> str:
    """Digest a request body apart from `stream`."""
    kept = {name: value for name, value in body.items() if name != "stream"}
    return sha256(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)).hexdigest()


class _Drop(msgspec.Struct, frozen=True):
    """When a client gives an answer up: after so many seconds, or so long after these bytes were in it."""

    after_s: float = _CALL_TIMEOUT_s
    seen: bytes | None = None
    linger_s: float = 0.0


class Harness:
    """Runs one attempt.

    Args:
        session: of HTTP.
        admin: ends the attempt.
        minted: its key and addresses.
        journal: of the run; gets an entry for this attempt.
        calls: how many replies it wants.
        seed: decides everything else.
    """

    def __init__(
        self, session: aiohttp.ClientSession, admin: Admin, minted: Minted, journal: Journal, calls: int, seed: str
    ) -> None:
        self._session: Final = session
        self._admin: Final = admin
        self._minted: Final = minted
        self._journal: Final = journal
        self._calls: Final = calls
        draw = self._draw = random.Random(seed)
        self._dialect: Final = draw.choice(_DIALECTS)
        self._marks: Final = draw.choice(("never", "count", "fallback"))
        self._by_id: Final = self._dialect is Dialect.RESPONSES and draw.random() < 0.4
        self._talk: Final = conversation(self._dialect, reasoning=draw.random() < 0.6, by_id=self._by_id)
        base = draw.choice((minted.base_url, minted.prefixed, minted.prefixed.rpartition("/")[0]))
        self._url: Final = base + PATHS[self._dialect]
        key = {"x-api-key": minted.secret} if draw.random() < 0.5 else {"authorization": f"Bearer {minted.secret}"}
        self._headers: Final = {**key, "content-type": "application/json"}
        self.attempt: Final = AttemptJournal(key=minted.key, dialect=self._dialect)
        journal.attempts[minted.key] = self.attempt
        self._asked = 0
        self._asides: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Hold the conversation and end the attempt.

        Raises:
            Refused: by the gateway, which says that this is no matter of asking again.
            TimeoutError: there was no reply however often it was asked.
        """
        try:
            for _ in range(self._calls):
                await self._turn()
            await asyncio.gather(*self._asides)
            await self._end()
        finally:
            for beside in self._asides:
                beside.cancel()

    def _nonce(self) -> Nonce:
        self._asked += 1
        return Nonce(*self._minted.key, self._asked, f"{self._draw.getrandbits(32):08x}")

    def _question(self, nonce: Nonce, kind: Kind) -> str:
        return question(nonce, kind, " ".join(self._draw.choices(_WORDS, k=self._draw.randint(2, 30))))

    def _kind(self) -> Kind:
        kinds = dict(_KINDS)
        if self._dialect is Dialect.COMPLETIONS:
            del kinds[Kind.TOOL]
        return self._draw.choices(list(kinds), list(kinds.values()))[0]

    async def _turn(self) -> None:
        """Ask one thing until there is a reply, and go on with that."""
        draw, talk = self._draw, self._talk
        kind, nonce = self._kind(), self._nonce()
        stream = draw.random() < 0.5
        many = self._dialect in {Dialect.CHAT, Dialect.COMPLETIONS} and kind is not Kind.TOOL and draw.random() < 0.1
        if draw.random() < 0.04:
            beside = self._nonce()
            body = aside(self._dialect, self._question(beside, Kind.PLAIN), stream=draw.random() < 0.5)
            self._asides.add(asyncio.ensure_future(self._aside(beside, body)))
        talk.ask(self._question(nonce, kind))
        drop = self._drop(kind, stream) if draw.random() < 0.1 else None
        failures, until = 0, monotonic() + PATIENCE_s
        while True:
            body = talk.body(stream=stream, n=2 if many else 1)
            sent = self._sent(nonce, body, failures)
            if self._dialect is not Dialect.COMPLETIONS and self.attempt.path:
                sent.parent = self.attempt.path[-1]
            await self._exchange(sent, body, drop, failures)
            if sent.fate is Fate.ACKNOWLEDGED:
                break
            if monotonic() > until:
                raise TimeoutError(f"no reply for {nonce} in {PATIENCE_s:.0f} s: {sent.problem or sent.status}")
            drop, failures = None, failures + 1
            if sent.fate is Fate.DROPPED and draw.random() < 0.35:
                # The user breaks in and wants something else.
                kind, nonce, failures = Kind.PLAIN, self._nonce(), 0
                talk.ask_instead(self._question(nonce, kind))
            elif stream and self._marks == "fallback":
                stream = False
            await asyncio.sleep(min(0.02 * 2**failures, 0.5))
        assert sent.call_id is not None
        index = draw.randrange(len(sent.reply.choices))
        self.attempt.path.append(sent.call_id if index == 0 else f"{sent.call_id}#{index}")
        talk.hear(sent.reply, sent.reply.choices[index])

    def _drop(self, kind: Kind, stream: bool) -> _Drop:
        draw = self._draw
        if not stream:
            return _Drop(after_s=draw.uniform(0.0, 0.3 if kind is Kind.SLOW else 0.1))
        # Close to the end the whole reply may be on its way to the disk, so that it is a record that nobody got.
        return _Drop(seen=draw.choice((b"heard", END.encode(), END.encode())), linger_s=draw.uniform(0.0, 0.04))

    async def _aside(self, nonce: Nonce, body: Json) -> None:
        """Ask something beside the conversation, until there is a reply."""
        until = monotonic() + PATIENCE_s
        while True:
            sent = self._sent(nonce, body, 0)
            await self._exchange(sent, body, None, 0)
            if sent.fate is Fate.ACKNOWLEDGED:
                return
            if monotonic() > until:
                raise TimeoutError(f"no reply for {nonce} in {PATIENCE_s:.0f} s: {sent.problem or sent.status}")
            await asyncio.sleep(0.2)

    def _sent(self, nonce: Nonce, body: Json, failures: int) -> Sent:
        sent = Sent(nonce=str(nonce), dialect=self._dialect, stream=body["stream"], n=body.get("n", 1))
        sent.marked = self._marks == "count" and failures % 3 > 0
        sent.evidence = None if "previous_response_id" in body else evidence_digest(body)
        self.attempt.sent.append(sent)
        return sent

    async def _exchange(self, sent: Sent, body: Json, drop: _Drop | None, failures: int) -> None:
        """Send a request and note what becomes of it."""
        headers = dict(self._headers)
        if self._marks == "count":
            headers["x-stainless-retry-count"] = str(failures % 3)
        raw, whole, streamed = bytearray(), False, False
        given_up = _Drop() if drop is None else drop
        try:
            async with (
                asyncio.timeout(given_up.after_s) as limit,
                self._answered(sent, orjson.dumps(body), headers) as response,
            ):
                sent.status = response.status
                sent.call_id = response.headers.get("x-gristmill-call-id")
                sent.replayed = "replayed" in response.headers.get("x-gristmill-notes", "")
                streamed = response.headers.get("content-type", "").startswith("text/event-stream")
                async for piece in response.content.iter_any():
                    raw += piece
                    if given_up.seen is not None and given_up.seen in raw:
                        limit.reschedule(asyncio.get_running_loop().time() + given_up.linger_s)
                        given_up = _Drop()
                whole = True
        except TimeoutError:
            sent.fate = Fate.DROPPED
            if drop is None:
                self._journal.violations.append(f"{sent.nonce}: no answer within {_CALL_TIMEOUT_s:.0f} s")
        except (aiohttp.ClientError, ConnectionError) as error:
            sent.fate, sent.problem = Fate.BROKEN, repr(error)
        self._judge(sent, bytes(raw), whole=whole, streamed=streamed)

    @asynccontextmanager
    async def _answered(self, sent: Sent, data: bytes, headers: Mapping[str, str]) -> AsyncGenerator[Any]:
        """Send a request, and send it on where a gateway says so; the key goes with it."""
        url = self._admin.fleet.through(self._url, self._draw)
        for _ in range(HOPS):
            async with self._session.post(url, data=data, headers=headers, allow_redirects=False) as response:
                if response.status != 307:
                    yield response
                    return
                url = response.headers["location"]
                sent.sent_on += 1
        raise aiohttp.ClientConnectionError(f"sent on {HOPS} times")

    def _judge(self, sent: Sent, raw: bytes, *, whole: bool, streamed: bool) -> None:
        if sent.status == 200:
            try:
                sent.reply = read_reply(self._dialect, raw, streamed=streamed, whole=whole)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                sent.fate, sent.problem = Fate.BROKEN, repr(error)
                self._journal.violations.append(f"{sent.nonce}: its client cannot read {raw[-300:]!r}: {error!r}")
        if sent.fate is not None:
            return
        if sent.status == 200 and sent.reply.complete:
            sent.fate = Fate.ACKNOWLEDGED
            self._journal.acknowledged += 1
            return
        sent.fate = Fate.REFUSED
        sent.problem = raw[-300:].decode(errors="replace")
        if 200 < sent.status < 500 and sent.status != 429:
            raise Refused(f"{sent.nonce} was refused with {sent.status}: {sent.problem}")

    async def _end(self) -> None:
        """Hand the result back, or do what else may happen to an attempt."""
        attempt, key, draw = self.attempt, self.attempt.key, self._draw
        way = draw.choices(("finish", "finish and freeze", "freeze", "abandon", "nothing"), (65, 20, 5, 5, 5))[0]
        if way.startswith("finish"):
            attempt.result, attempt.reward = self._talk.result(), draw.randrange(100) / 4
            told = await self._admin.act(key, "finish", result=attempt.result, reward=attempt.reward)
            attempt.state, attempt.outcome = AttemptState.FINISHED, told["outcome"]
        if way.endswith("freeze"):
            attempt.snapshot_id = (await self._admin.act(key, "freeze"))["snapshot_id"]
            attempt.state = AttemptState.FROZEN
        if way == "abandon":
            attempt.snapshot_id = (await self._admin.act(key, "abandon")).get("snapshot_id")
            attempt.state = AttemptState.ABANDONED
