"""The engine's side of one call: asked, read as it comes, aborted if need be, and let go.

Invariant: what the engine says is put together exactly as it came, and encoded for the client on the way; from the
first held byte on, everything is held. A request is sent once, or twice where an engine refuses a prompt of ids.

Not here: when anything is durable, and how a call ends for its client (call).
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from time import time
from typing import Any, Final

from gristmill.captures import Reply, chat, decode_reply
from gristmill.captures.assembly import StreamAssembly, truncated
from gristmill.captures.choices import error_text
from gristmill.captures.fields import object_at
from gristmill.captures.reply import Unexpected, encodable, malformed_reply
from gristmill.errors import Code, DecodeError
from gristmill.gateway.asked import Asked
from gristmill.gateway.client import Client, HeaderList
from gristmill.gateway.config import GatewayConfig
from gristmill.gateway.dialects.passthrough import PassEncoder, without_tokens
from gristmill.gateway.events import EventSplitter
from gristmill.gateway.front import Encoder, Front, JsonObject, ServedNames
from gristmill.gateway.json_text import dump, parse_reply
from gristmill.gateway.keeping import Order
from gristmill.gateway.outcome import unfinished
from gristmill.gateway.upstream.protocol import UpstreamError, UpstreamReply
from gristmill.records import Dialect

__all__ = ["EngineSaid", "Exchange"]

_DONE: Final = b"[DONE]"
_REFUSED: Final = frozenset({400, 422})
_EVENT_STREAM: Final = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_TOO_LONG: Final = ("context length", "maximum model length", "max_model_len", "longer than the model")
_RETRY_AFTER: Final = re.compile(r"\d{1,9}|[A-Za-z]{3,9}, [A-Za-z0-9: -]{10,30}", re.ASCII)
_LINGER_s: Final = 0.2
"""How long an engine may take to end its body after the protocol's end."""


class EngineSaid(Exception):
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


class Exchange:
    """One request to an engine and its reply.

    Args:
        config: settings.
        front: of the client's dialect.
        asked: the request.
        order: how it is sent on.
        client: who is served what may go at once.
        headers: of the answer.

    Attributes:
        order: how it was sent on: as an ordinary call, where the engine refused the prompt that it was given.
        encoder: for the client.
        held: bytes that wait for the durable record.
    """

    def __init__(
        self, config: GatewayConfig, front: Front, asked: Asked, order: Order, client: Client, headers: HeaderList
    ) -> None:
        self._config: Final = config
        self._front: Final = front
        self._asked: Final = asked
        self.order = order
        self._client: Final = client
        self._headers: Final = headers
        self._route: Final = asked.translated.route
        names = ServedNames(order.call_id, asked.model, int(time()))
        self.encoder: Final[Encoder] = front.encoder(asked.body, asked.translated, names)
        self._assembly: Final = (
            self.encoder.assembly
            if isinstance(self.encoder, PassEncoder)
            # Every other dialect is served from the Chat route; its encoder takes log-probabilities from the chunks.
            else StreamAssembly(self._route, chat.stream_items, slim=True)
        )
        self._splitter: Final = EventSplitter(config.max_reply_bytes)
        self._opening: asyncio.Future[Any] | None = None
        self._upstream: UpstreamReply | None = None
        self.held: Final[list[bytes]] = []

    @property
    def begun(self) -> bool:
        """Whether anything of a stream has come."""
        return self._assembly.choices_seen > 0

    def served(self) -> JsonObject | None:
        """Return what the client was served of a stream so far, None where that is nothing."""
        return self.encoder.served() if self._client.started and self.begun else None

    async def run(self) -> Reply:
        """Send the request on and serve what comes, up to what is held; return the engine's reply.

        Raises:
            EngineSaid: the engine answered with an error, or with what is no answer.
            UpstreamError: it did not answer, or its answer broke off.
        """
        stream = self._asked.translated.stream
        upstream = await self._open()
        if upstream.status in _REFUSED and self.order.prompt is not None:
            # It sampled nothing. What an ordinary call would be refused for is told by refusing that.
            await upstream.close()
            self.order = self.order.rendered_anew()
            upstream = await self._open()
        if upstream.status >= 300:
            raise await _engine_error(upstream)
        if not stream:
            return self._read_body(upstream.status, await upstream.read())
        if not upstream.headers.get("content-type", "").lower().startswith("text/event-stream"):
            body = await upstream.read()
            raise EngineSaid(502, f"expected an event stream from the engine, got {len(body)} bytes", malformed=True)
        await self._client.start(200, [*_EVENT_STREAM, *self._headers])
        await self._client.write(self.encoder.begin())
        await self._pump(upstream, served=True)
        if self._assembly.done and not self.begun:
            raise EngineSaid(502, "the engine's stream held no choice", malformed=True)
        return self._assembly.reply()

    async def _open(self) -> UpstreamReply:
        order = self.order
        ask = order.replica.engine.ask(self._route, order.body, order.call_id, stream=self._asked.translated.stream)
        # A task of its own: an engine that is asked to abort answers this very request.
        self._upstream = None
        opening = self._opening = asyncio.ensure_future(order.replica.open(ask))
        upstream: UpstreamReply = await asyncio.shield(opening)
        self._upstream = upstream
        return upstream

    async def abort(self) -> Reply | None:
        """Abort the generation; return what it came to where the engine says it, None where it does not."""
        order, opening = self.order, self._opening
        ask = order.replica.engine.abort(self._route, order.call_id)
        if ask is None or opening is None:
            return None
        with suppress(UpstreamError, TimeoutError, EngineSaid):
            async with asyncio.timeout(self._config.abort_wait_s):
                answer = await order.replica.open(ask)
                try:
                    await answer.read()
                finally:
                    await answer.close()
                upstream: UpstreamReply = await asyncio.shield(opening)
                self._upstream = upstream
                if upstream.status >= 300:
                    return None
                if self._asked.translated.stream:
                    await self._pump(upstream, served=False)
                    return self._assembly.reply()
                return self._read_body(upstream.status, await upstream.read())
        return None

    def partial(self) -> Reply:
        """Return what had come of a stream that broke."""
        self._assembly.error = None
        try:
            reply = self._assembly.reply()
        except Unexpected as error:
            return malformed_reply(self._route, str(error))
        return reply if self._assembly.missing_end() is not None else truncated(reply, "what came next cannot be read")

    async def let_go(self) -> None:
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

    def _read_body(self, status: int, raw: bytes) -> Reply:
        asked = self._asked.body
        keeps_ids = self._front.dialect is self._route and asked.get("return_token_ids") is True
        logprobs = self._asked.translated.body.get("logprobs")
        keeps = logprobs is not None and logprobs is not False
        # Most replies of the Chat route can be read in one pass.
        once = self._route is Dialect.CHAT and not (keeps or keeps_ids)
        whole = chat.read_body_and_rest(raw) if once else None
        if whole is None:
            reply = decode_reply(str(self._route), status, raw, echo=self.order.body.get("echo") is True)
            rest = without_tokens(raw, logprobs=keeps, ids=keeps_ids)
        else:
            reply, rest = whole
        if reply.error is not None:
            raise EngineSaid(502, reply.error, malformed=reply.choices[0].reason is Code.REPLY_MALFORMED)
        reply = unfinished(reply)
        try:
            served = self.encoder.body(parse_reply(rest))
        except (DecodeError, Unexpected) as error:
            raise EngineSaid(502, str(error), malformed=True) from error
        self.held.append(dump(served))
        return reply

    async def _pump(self, upstream: UpstreamReply, *, served: bool) -> None:
        """Pass events on as they come; `served` False only puts them together."""
        assembly = self._assembly
        async for piece in upstream.pieces():
            now: list[bytes] = []
            for name, data in self._splitter.feed(piece):
                if data.strip() == _DONE:
                    self._end(now)
                    break
                self._take(name, data, now)
            if now and served:
                await self._client.write(b"".join(now))
            if assembly.error is not None:
                raise EngineSaid(502, assembly.error)
            if assembly.done:
                # The protocol's end; when the engine closes its body is no part of it.
                return

    def _take(self, name: str, data: bytes, now: list[bytes]) -> None:
        try:
            chunk = object_at(parse_reply(data), "$")
            if isinstance(self.encoder, PassEncoder):
                said = self.encoder.chunk(chunk, name)
            else:
                self._assembly.add_chunk(chunk, name)
                if self._assembly.error is not None or name == "sglext":
                    return
                said = self.encoder.chunk(chunk)
        except (DecodeError, Unexpected) as error:
            raise EngineSaid(502, f"the engine's stream cannot be read: {error}", malformed=True) from error
        self._hold(now, said.now, said.held)

    def _end(self, now: list[bytes]) -> None:
        try:
            said = self.encoder.end()
        except Unexpected as error:
            raise EngineSaid(502, f"the engine's stream cannot be read: {error}", malformed=True) from error
        self._assembly.done = True
        self._hold(now, said.now, said.held)

    def _hold(self, now: list[bytes], passed: bytes, held: bytes) -> None:
        if passed:
            (self.held if self.held else now).append(passed)
        if held:
            self.held.append(held)


async def _engine_error(upstream: UpstreamReply) -> EngineSaid:
    """Read an error of the engine's, whatever it looks like."""
    status = upstream.status
    body = await upstream.read()
    said: str | None = None
    with suppress(DecodeError, Unexpected):
        value = object_at(parse_reply(body), "$")
        detail = value.get("detail") or value.get("message")
        said = error_text(value) or (detail if isinstance(detail, str) else None)
        if said is None and detail:
            said = dump(detail).decode("utf-8", "replace")
    message = said if said is not None else f"the engine answered with status {status}"
    if not 400 <= status <= 599 or status in {401, 403, 407}:
        # A redirect is never followed, and the engine's key is not the harness's business.
        return EngineSaid(502, f"the engine answered with status {status}")
    code = str(Code.CALL_FAILED)
    if status == 400 and any(sign in message.lower() for sign in _TOO_LONG):
        # The words by which harnesses know that it is time to compact.
        message, code = f"prompt is too long: {message}", "context_length_exceeded"
    return EngineSaid(status, message[:4000], retry_after=_retry_after(upstream), code=code)


def _retry_after(upstream: UpstreamReply) -> str | None:
    """Return an engine's `Retry-After` where it is one: seconds, or a date."""
    said = upstream.headers.get("retry-after", "")
    return said if _RETRY_AFTER.fullmatch(said) else None
