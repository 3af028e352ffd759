"""The path of one call: admitted, sent on, served as it comes, durable, and only then finished for the client.

Invariant: no call is sent to an engine before its intent is durable, and no client learns of a finish before the record
is. Whatever happens in between has a record or leaves the intent, which counts as lost. An interruption (the client
gone, the attempt closed) never reaches into a commit.

Not here: which request becomes a call (app), what it means (asked), what is stored of it (outcome).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from time import monotonic, time
from typing import Any, Final

from gristmill.captures import Reply, chat, decode_reply
from gristmill.captures.assembly import StreamAssembly, truncated
from gristmill.captures.choices import error_text
from gristmill.captures.fields import object_at
from gristmill.captures.reply import Unexpected, encodable, malformed_reply
from gristmill.errors import Code, DecodeError
from gristmill.gateway.asked import Asked
from gristmill.gateway.attempts import Attempt
from gristmill.gateway.client import Client, HeaderList
from gristmill.gateway.desk import Desk
from gristmill.gateway.dialects.passthrough import PassEncoder, without_tokens
from gristmill.gateway.events import EventSplitter
from gristmill.gateway.front import Encoder, Front, JsonObject, ServedNames
from gristmill.gateway.json_text import dump, parse_reply
from gristmill.gateway.keeping import Ended, Intent, Order, keep
from gristmill.gateway.outcome import admitted_ids, as_aborted, as_broken, as_failed, unfinished
from gristmill.gateway.upstream.protocol import Ask, UpstreamError, UpstreamFault, UpstreamReply
from gristmill.ledger.writes import Admit, AdmitAll
from gristmill.records import CallRecord, Delivery, Dialect

__all__ = ["Call", "Ending"]

_DONE: Final = b"[DONE]"
_FAULT_STATUS: Final = {
    UpstreamFault.UNREACHABLE: 502,
    UpstreamFault.RESET: 502,
    UpstreamFault.SILENT: 504,
    UpstreamFault.OVERSIZED: 502,
    UpstreamFault.PROTOCOL: 502,
}
_TOO_LONG: Final = ("context length", "maximum model length", "max_model_len", "longer than the model")
_BROKEN: Final = frozenset({Code.ENGINE_LOST, Code.ENGINE_UNREACHABLE, Code.NOT_DURABLE})
"""A stream that breaks for these ends as a broken stream does: every harness asks again then, and some take an error
event for the end of their run. Responses has an event for it that its clients ask again after."""
_LINGER_s: Final = 0.2
"""How long an engine may take to end its body after the protocol's end."""
_EVENT_STREAM: Final = (b"content-type", b"text/event-stream; charset=utf-8")


class Ending(StrEnum):
    """Why a call was broken off."""

    CLIENT_GONE = "the client closed its connection"
    ATTEMPT_CLOSED = "the rollout was finished while the call ran"
    SHUTDOWN = "the gateway was shut down"


class _EngineSaid(Exception):
    """The engine answered with an error, or with what is no answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        malformed: bool = False,
        retry_after: str | None = None,
        code: str = str(Code.CALL_FAILED),
    ) -> None:
        self.status = status
        self.code = code
        self.message = encodable(message)
        self.malformed = malformed
        self.retry_after = retry_after
        super().__init__(message)


class Call:
    """One call from admission to delivery; used once.

    Args:
        desk: what all calls share.
        attempt: whose call it is.
        front: of the client's dialect.
        asked: the request.
        client: who is answered.
        order: how it is sent on.
    """

    def __init__(
        self,
        desk: Desk,
        attempt: Attempt,
        front: Front,
        asked: Asked,
        client: Client,
        order: Order,
    ) -> None:
        self._desk: Final = desk
        self._attempt: Final = attempt
        self._front: Final = front
        self._asked: Final = asked
        self._client: Final = client
        self._order: Final = order
        self._id: Final = order.call_id
        self._replica: Final = order.replica
        self._body: Final = order.body
        self._notes: Final = order.notes
        names = ServedNames(order.call_id, asked.model, int(time()))
        self._encoder: Final[Encoder] = front.encoder(asked.body, asked.translated, names)
        route = asked.translated.route
        self._assembly: Final = (
            self._encoder.assembly
            if isinstance(self._encoder, PassEncoder)
            # Every other dialect is served from the Chat route; its encoder takes log-probabilities from the chunks.
            else StreamAssembly(route, chat.stream_items, slim=True)
        )
        self._route: Final = route
        self._opening: asyncio.Future[Any] | None = None
        self._upstream: UpstreamReply | None = None
        self._task: asyncio.Task[Any] | None = None
        self._ending: Ending | None = None
        self._open_to_interruption = False
        self._held: list[bytes] = []
        self._intent = Intent(front.dialect, time(), None)
        self._began = monotonic()
        self._records: tuple[CallRecord, ...] = ()

    # ---- from outside ------------------------------------------------------------------------------------------------

    def interrupt(self, ending: Ending) -> None:
        """Break the call off as soon as it is not committing; the first reason counts."""
        if self._ending is not None:
            return
        self._ending = ending
        if self._open_to_interruption and self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Take the call all the way.

        Raises:
            LedgerError: it could not be admitted; nothing was sent anywhere.
        """
        self._task = asyncio.current_task()
        desk, attempt = self._desk, self._attempt
        # Counted in before the first wait, so that whoever closes the attempt waits for this call.
        attempt.enter(self._id, lambda going: self.interrupt(Ending.SHUTDOWN if going else Ending.ATTEMPT_CLOSED))
        try:
            await self._admit()
            self._intent = self._intent._replace(weights=desk.weights(self._replica.label))
            self._client.watch(lambda: self.interrupt(Ending.CLIENT_GONE))
            await self._serve()
        finally:
            attempt.leave(self._id)
            await self._client.stop_watching()
            await self._let_go()

    async def _let_go(self) -> None:
        """Give the engine's connection back; one that has nothing more to say is kept for other calls."""
        if self._opening is not None and self._upstream is None:
            self._opening.cancel()
            with suppress(UpstreamError, asyncio.CancelledError):
                self._upstream = await self._opening
        if self._upstream is None:
            return
        if self._assembly.done:
            with suppress(UpstreamError, TimeoutError):
                async with asyncio.timeout(_LINGER_s):
                    async for _ in self._upstream.pieces():
                        pass
        await self._upstream.close()

    async def _admit(self) -> None:
        """Make the intent of every choice durable."""
        choices, parent = self._asked.translated.choices, self._asked.parent.parent_call_id
        key = self._attempt.key
        await self._desk.write(AdmitAll([Admit(key, call_id, parent) for call_id in admitted_ids(self._id, choices)]))

    # ---- the stages --------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            reply = await self._interruptible(self._exchange())
        except _EngineSaid as error:
            await self._engine_failed(error)
        except UpstreamError as error:
            self._desk.metrics.engine_errors.labels(self._replica.label, error.fault).inc()
            await self._engine_broke(error)
        except _Interrupted:
            await self._broken_off()
        else:
            await self._complete(reply)

    async def _interruptible(self, work: Any) -> Any:
        self._open_to_interruption = True
        try:
            if self._ending is not None:
                work.close()
                raise _Interrupted
            return await work
        except asyncio.CancelledError:
            task = self._task
            if self._ending is None or task is None or task.uncancel() > 0:
                raise
            raise _Interrupted from None
        finally:
            self._open_to_interruption = False

    async def _exchange(self) -> Reply:
        """Send the request on and serve what comes, up to what is held; return the engine's reply."""
        stream = self._asked.translated.stream
        ask = self._replica.engine.ask(self._route, self._body, self._id, stream=stream)
        # A task of its own: an engine that is asked to abort answers this very request.
        opening = self._opening = asyncio.ensure_future(self._replica.open(ask))
        upstream: UpstreamReply = await asyncio.shield(opening)
        self._upstream = upstream
        if upstream.status >= 300:
            raise await _engine_error(upstream)
        if not stream:
            return self._read_body(upstream.status, await upstream.read())
        if not upstream.headers.get("content-type", "").lower().startswith("text/event-stream"):
            body = await upstream.read()
            raise _EngineSaid(502, f"expected an event stream from the engine, got {len(body)} bytes", malformed=True)
        await self._client.start(200, [_EVENT_STREAM, (b"cache-control", b"no-cache"), *self._headers()])
        await self._client.write(self._encoder.begin())
        await self._pump(upstream, served=True)
        return self._assembly.reply()

    def _read_body(self, status: int, raw: bytes) -> Reply:
        reply = decode_reply(str(self._route), status, raw, echo=self._body.get("echo") is True)
        if reply.error is not None:
            raise _EngineSaid(502, reply.error, malformed=reply.choices[0].reason is Code.REPLY_MALFORMED)
        reply = unfinished(reply)
        asked = self._asked.body
        keeps_ids = self._front.dialect is self._route and asked.get("return_token_ids") is True
        logprobs = self._asked.translated.body.get("logprobs")
        keeps = logprobs is not None and logprobs is not False
        try:
            served = self._encoder.body(parse_reply(without_tokens(raw, logprobs=keeps, ids=keeps_ids)))
        except (DecodeError, Unexpected) as error:
            raise _EngineSaid(502, str(error), malformed=True) from error
        self._held.append(dump(served))
        return reply

    async def _pump(self, upstream: UpstreamReply, *, served: bool) -> None:
        """Pass events on as they come; `served` False only puts them together."""
        splitter = EventSplitter(self._desk.config.max_reply_bytes)
        async for piece in upstream.pieces():
            now: list[bytes] = []
            for name, data in splitter.feed(piece):
                if data.strip() == _DONE:
                    end = self._encoder.end()
                    self._assembly.done = True
                    self._hold(now, end.now, end.held)
                    break
                self._take(name, data, now)
            if now and served:
                await self._client.write(b"".join(now))
            if self._assembly.error is not None:
                raise _EngineSaid(502, self._assembly.error)
            if self._assembly.done:
                # The protocol's end; when the engine closes its body is no part of it.
                return

    def _take(self, name: str, data: bytes, now: list[bytes]) -> None:
        try:
            chunk = object_at(parse_reply(data), "$")
            if isinstance(self._encoder, PassEncoder):
                said = self._encoder.chunk(chunk, name)
            else:
                self._assembly.add_chunk(chunk, name)
                if self._assembly.error is not None or name == "sglext":
                    return
                said = self._encoder.chunk(chunk)
        except (DecodeError, Unexpected) as error:
            raise _EngineSaid(502, f"the engine's stream cannot be read: {error}", malformed=True) from error
        self._hold(now, said.now, said.held)

    def _hold(self, now: list[bytes], passed: bytes, held: bytes) -> None:
        if passed:
            (self._held if self._held else now).append(passed)
        if held:
            self._held.append(held)

    # ---- endings -----------------------------------------------------------------------------------------------------

    async def _complete(self, reply: Reply) -> None:
        """Make the call durable, then give the client the rest."""
        cut = next((choice for choice in reply.choices if choice.reason is Code.STREAM_TRUNCATED), None)
        if cut is not None:
            self._desk.metrics.engine_errors.labels(self._replica.label, "cut").inc()
            await self._finish_badly(reply, 502, Code.ENGINE_LOST, cut.detail or "the stream ended early")
            return
        if self._aborted_body(reply):
            await self._finish_badly(reply, 503, Code.ABORTED, "the engine aborted the generation")
            return
        if not await self._commit(reply, self._encoder.served(), 200):
            await self._fail_client(503, Code.NOT_DURABLE, "the call could not be made durable; its reply is withheld")
            return
        await self._release()

    def _aborted_body(self, reply: Reply) -> bool:
        """Tell whether a whole reply is of a generation that the engine aborted, which not every dialect can say."""
        aborted = any(choice.reason is Code.ABORTED for choice in reply.choices)
        return aborted and not self._client.started and self._front.dialect is not self._route

    async def _release(self) -> None:
        held = b"".join(self._held)
        if self._client.started:
            delivered = await self._client.end(held)
        else:
            delivered = await self._client.answer(200, held, self._headers())
        self._delivered(Delivery.DELIVERED if delivered else Delivery.PARTIAL)
        self._log("served", 200)

    async def _engine_failed(self, error: _EngineSaid) -> None:
        self._desk.metrics.engine_errors.labels(self._replica.label, "malformed" if error.malformed else "error").inc()
        if self._assembly.choices_seen:
            reply = self._partial()
        else:
            said = error.message if error.malformed else f"HTTP {error.status}: {error.message}"
            reason = Code.REPLY_MALFORMED if error.malformed else Code.CALL_FAILED
            reply = as_failed(self._front.dialect, said, self._asked.translated.choices, reason)
        await self._finish_badly(reply, error.status, error.code, error.message, retry_after=error.retry_after)

    async def _engine_broke(self, error: UpstreamError) -> None:
        code = Code.ENGINE_UNREACHABLE if error.fault is UpstreamFault.UNREACHABLE else Code.ENGINE_LOST
        if self._assembly.choices_seen:
            reply = as_broken(self._partial(), f"{code}: {error.message}")
        else:
            reply = as_failed(self._front.dialect, f"{code}: {error.message}", self._asked.translated.choices)
        await self._finish_badly(reply, _FAULT_STATUS[error.fault], code, error.message)

    def _partial(self) -> Reply:
        """Return what had come of a stream that broke."""
        self._assembly.error = None
        try:
            reply = self._assembly.reply()
        except Unexpected as error:
            return malformed_reply(self._route, str(error))
        return reply if self._assembly.missing_end() is not None else truncated(reply, "what came next cannot be read")

    async def _broken_off(self) -> None:
        """Abort the generation; keep what had been sampled where the engine says it."""
        ending = self._ending or Ending.CLIENT_GONE
        self._desk.metrics.aborts.labels(ending.name.lower()).inc()
        reply = await self._aborted()
        if reply is None:
            reply = self._partial()
        reply = as_aborted(reply, ending, self._asked.translated.choices)
        served = self._encoder.served() if self._client.started and self._assembly.choices_seen else None
        await self._commit(reply, served, None)
        if not self._client.gone:
            await self._fail_client(503 if ending is Ending.SHUTDOWN else 409, Code.ATTEMPT_CLOSED, ending)
        self._delivered(Delivery.PARTIAL if self._client.started else Delivery.ABORTED)
        self._log("aborted", 499, ending=ending.name.lower())

    async def _aborted(self) -> Reply | None:
        """Abort by id and read on, where the engine then says what it sampled; else drop the connection."""
        ask = self._replica.engine.abort(self._route, self._id)
        opening = self._opening
        if ask is None or opening is None:
            return None
        with suppress(UpstreamError, TimeoutError, _EngineSaid):
            async with asyncio.timeout(self._desk.config.abort_wait_s):
                await self._abort(ask)
                upstream: UpstreamReply = await asyncio.shield(opening)
                self._upstream = upstream
                if upstream.status >= 300:
                    return None
                if self._asked.translated.stream:
                    await self._pump(upstream, served=False)
                    return self._assembly.reply()
                return self._read_body(upstream.status, await upstream.read())
        return None

    async def _abort(self, ask: Ask) -> None:
        answer = await self._replica.open(ask)
        try:
            await answer.read()
        finally:
            await answer.close()

    async def _finish_badly(
        self, reply: Reply, status: int, code: str, message: str, *, retry_after: str | None = None
    ) -> None:
        """Store what there is, and tell the client."""
        served = self._encoder.served() if self._client.started and self._assembly.choices_seen else None
        await self._commit(reply, served, status)
        await self._fail_client(status, code, message, retry_after=retry_after)
        self._delivered(Delivery.PARTIAL)
        self._log("failed", status, code=code)

    async def _fail_client(self, status: int, code: str, message: str, *, retry_after: str | None = None) -> None:
        if self._client.gone:
            return
        if self._client.started:
            if code not in _BROKEN or self._front.dialect is Dialect.RESPONSES:
                await self._client.end(self._encoder.failure(status, message))
            else:
                self._client.drop()
            return
        headers = self._headers()
        if retry_after is not None or status == 503:
            headers.append((b"retry-after", (retry_after or "1").encode("latin-1", "replace")))
        await self._client.answer(status, dump(self._front.error(status, code, message)), headers)

    # ---- the record --------------------------------------------------------------------------------------------------

    async def _commit(self, reply: Reply, served: JsonObject | None, status: int | None) -> bool:
        """Store the outcome; False where it could not be made durable, and the call stays lost."""
        records = await keep(
            self._desk, self._attempt, self._asked, self._order, self._intent, Ended(reply, served, status)
        )
        if records is None:
            return False
        self._records = records
        # Settled: what the client now does with its reply keeps nobody waiting.
        self._attempt.leave(self._id)
        return True

    def _delivered(self, delivery: Delivery) -> None:
        self._desk.metrics.deliveries.labels(str(delivery)).inc()
        for record in self._records:
            self._attempt.deliver(record.model_call_id, delivery)
            self._desk.deliver(self._attempt.key, record.model_call_id, delivery)

    def _headers(self) -> HeaderList:
        headers: HeaderList = [(b"x-gristmill-call-id", self._id.encode())]
        if self._notes:
            headers.append((b"x-gristmill-notes", _notes_header(self._notes)))
        return headers

    def _log(self, event: str, status: int, **said: Any) -> None:
        desk = self._desk
        seconds = monotonic() - self._began
        desk.metrics.seconds.labels(str(self._front.dialect)).observe(seconds)
        desk.log.info(
            event,
            call_id=self._id,
            dialect=str(self._front.dialect),
            status=status,
            seconds=round(seconds, 4),
            stream=self._asked.translated.stream,
            engine=self._replica.label,
            usable=all(record.usable for record in self._records) if self._records else False,
            **desk.names(self._attempt.key),
            **said,
        )


class _Interrupted(Exception):
    """The call was broken off while it could be."""


async def _engine_error(upstream: UpstreamReply) -> _EngineSaid:
    """Read an error of the engine's, whatever it looks like."""
    status = upstream.status
    body = await upstream.read()
    said: str | None = None
    with suppress(DecodeError, Unexpected):
        value = object_at(parse_reply(body), "$")
        detail = value.get("detail") or value.get("message")
        said = error_text(value) or (detail if isinstance(detail, str) else None)
    message = said if said is not None else f"the engine answered with status {status}"
    if status < 400 or status in {401, 403, 407}:
        # A redirect is never followed, and the engine's key is not the harness's business.
        return _EngineSaid(502, f"the engine answered with status {status}")
    code = str(Code.CALL_FAILED)
    if status == 400 and any(sign in message.lower() for sign in _TOO_LONG):
        # The words by which harnesses know that it is time to compact.
        message, code = f"prompt is too long: {message}", "context_length_exceeded"
    return _EngineSaid(status, message[:4000], retry_after=upstream.headers.get("retry-after"), code=code)


def _notes_header(notes: Sequence[str]) -> bytes:
    """Write notes as a header's value: printable ASCII whatever a request named its fields, and of bounded length."""
    safe = (re.sub(r"[^!-+\--~ ]", "?", note)[:200] for note in notes)
    return ",".join(safe).encode("ascii")[:4000]
