"""Connections to engines: one request out, one answer back piece by piece.

Invariant: what is sent is what was asked, no more: no cookie, no proxy of the environment, no redirect followed, no
encoding but identity. A request that samples is sent once: after a connection broke nobody knows whether the engine
began to sample, so that its caller is told and nothing is repeated. Silence alone ends nothing: only an engine that is
silent and not well is given up, and time that the caller spends elsewhere is not silence.

Idle connections are closed before the engine closes them (`keepalive_s`), since a request that meets a closing
connection would be lost.

Not here: what is asked (vllm, sglang, generic), which engine is asked (replicas), what an answer means (captures).
"""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple, Self

import aiohttp
import orjson
from yarl import URL

from gristmill.captures.exact import dumps
from gristmill.gateway.upstream.protocol import Ask, UpstreamError, UpstreamFault
from gristmill.gateway.upstream.spec import UpstreamSettings, UpstreamSpec

__all__ = ["Alive", "Answer", "Client", "Reply"]

Alive = Callable[[], Awaitable[bool]]
"""Says whether an engine that has been silent is well."""

_RECEIVED: Final = frozenset({"content-type", "retry-after", "server", "via"})
_READ_AHEAD_bytes: Final = 256 * 1024
_SPARE: Final = 32
"""Connections beside those that sample, so that an abort never waits for the call that it aborts."""
_IN_ONE_WRITE_bytes: Final = 512 * 1024
_NO_ANSWER: Final = "the engine answered nothing in time"


class Answer(NamedTuple):
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Client:
    """Opens requests; made and closed in a running event loop.

    Args:
        settings: limits.
    """

    def __init__(self, settings: UpstreamSettings) -> None:
        self._settings = settings
        kept = aiohttp.TCPConnector(
            limit=0, limit_per_host=settings.connections + _SPARE, keepalive_timeout=settings.keepalive_s
        )
        self._session = self._session_over(kept)
        # Its own connections: a check must not wait behind the requests whose silence it is about.
        self._fresh = self._session_over(aiohttp.TCPConnector(limit=0, force_close=True))

    def _session_over(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s),
            trust_env=False,
            auto_decompress=False,
            raise_for_status=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
            read_bufsize=_READ_AHEAD_bytes,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; answers that are being read break off."""
        await self._session.close()
        await self._fresh.close()

    async def open(self, spec: UpstreamSpec, ask: Ask, alive: Alive) -> Reply:
        """Send a request and wait for the head of its answer.

        Args:
            spec: the engine.
            ask: the request.
            alive: asked when the engine has sent nothing for `idle_timeout_s`.

        Raises:
            UpstreamError: `unreachable`, `reset`, `silent`, or `protocol`: the answer is a redirect, encoded, or no
                HTTP.
        """
        sending = asyncio.ensure_future(_send(self._session, spec, ask))
        try:
            while not sending.done():
                await asyncio.wait({sending}, timeout=self._settings.idle_timeout_s)
                if not sending.done() and not await alive() and not sending.done():
                    raise _silent(self._settings.idle_timeout_s)
        except BaseException:
            sending.add_done_callback(_drop)
            sending.cancel()
            raise
        return Reply(sending.result(), self._settings, alive)

    async def answer(self, spec: UpstreamSpec, ask: Ask, timeout_s: float) -> Answer:
        """Send a small request on a connection of its own and return the whole answer.

        Raises:
            UpstreamError: as `open`; `silent` when the time is over.
        """
        try:
            async with asyncio.timeout(timeout_s):
                reply = Reply(await _send(self._fresh, spec, ask), self._settings, _well)
                try:
                    return Answer(reply.status, reply.headers, await reply.read())
                finally:
                    await reply.close()
        except TimeoutError:
            raise UpstreamError(UpstreamFault.SILENT, f"{_NO_ANSWER}: {timeout_s:g} s") from None


async def _well() -> bool:
    return True


def _drop(sending: asyncio.Future[aiohttp.ClientResponse]) -> None:
    if not sending.cancelled() and sending.exception() is None:
        sending.result().close()


def _silent(idle_s: float) -> UpstreamError:
    return UpstreamError(UpstreamFault.SILENT, f"the engine sent nothing for {idle_s:g} s, and its health check failed")


async def _send(session: aiohttp.ClientSession, spec: UpstreamSpec, ask: Ask) -> aiohttp.ClientResponse:
    headers = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "gristmill", **ask.headers}
    data: bytes | io.BytesIO | None = None
    if ask.body is not None:
        headers["Content-Type"] = "application/json"
        written = _written(ask.body)
        data = written if len(written) <= _IN_ONE_WRITE_bytes else io.BytesIO(written)
    if spec.api_key is not None:
        headers["Authorization"] = f"Bearer {spec.api_key}"
    url = URL(f"{spec.label}{ask.path}", encoded=True)
    try:
        response = await session.request(ask.method, url, data=data, headers=headers, allow_redirects=False)
    except aiohttp.ClientConnectorError as error:
        cause = error.os_error
        why = os.strerror(cause.errno) if isinstance(cause, ConnectionError) and cause.errno else cause
        raise UpstreamError(UpstreamFault.UNREACHABLE, f"cannot connect to the engine: {why}") from error
    except aiohttp.ConnectionTimeoutError as error:
        raise UpstreamError(UpstreamFault.UNREACHABLE, "cannot connect to the engine in time") from error
    except aiohttp.ClientResponseError as error:
        raise UpstreamError(UpstreamFault.PROTOCOL, f"the engine's answer is no HTTP: {error.message}") from error
    except (aiohttp.ClientError, OSError) as error:
        message = f"the engine dropped the connection before it answered: {error or type(error).__name__}"
        raise UpstreamError(UpstreamFault.RESET, message) from error
    refused = _refused(response)
    if refused is not None:
        response.close()
        raise UpstreamError(UpstreamFault.PROTOCOL, refused)
    return response


def _written(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body, option=orjson.OPT_PASSTHROUGH_SUBCLASS)
    except orjson.JSONEncodeError:
        # Lone surrogates, numbers kept as text, repeated keys: all that a client may send.
        return dumps(dict(body))


def _refused(response: aiohttp.ClientResponse) -> str | None:
    if 300 <= response.status < 400:
        return f"the engine answered with a redirect ({response.status}), which is not followed"
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in {"", "identity"}:
        return f"the engine's answer is encoded as {encoding!r}, though identity was asked for"
    return None


class Reply:
    """An answer whose body is read once, as `UpstreamReply`."""

    def __init__(self, response: aiohttp.ClientResponse, settings: UpstreamSettings, alive: Alive) -> None:
        self._response = response
        self._content = response.content
        self._settings = settings
        self._alive = alive
        self._taken = 0

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> Mapping[str, str]:
        """The header fields that mean something here, names in lower case."""
        return {name.lower(): value for name, value in self._response.headers.items() if name.lower() in _RECEIVED}

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, as `UpstreamReply.pieces`."""
        while piece := await self._next():
            yield piece

    async def read(self) -> bytes:
        """Return the whole body, as `UpstreamReply.read`."""
        pieces = list[bytes]()
        while piece := await self._next():
            pieces.append(piece)
        return b"".join(pieces)

    async def close(self) -> None:
        """Drop the connection if the body was not read to its end, else give it back."""
        if not self._content.at_eof():
            self._response.close()
        self._response.release()

    async def _next(self) -> bytes:
        """Return what has arrived, waiting for it if need be; nothing at the end."""
        try:
            # What is there already needs no timer, and most pieces of a busy stream are.
            piece = await (self._content.readany() if self._content.total_bytes > self._taken else self._awaited())
        except (aiohttp.ClientError, OSError) as error:
            piece = self._left_over()
            if not piece:
                self._response.close()
                message = f"the engine's answer broke off: {error or type(error).__name__}"
                raise UpstreamError(UpstreamFault.RESET, message) from error
        self._taken += len(piece)
        if self._taken > self._settings.reply_limit_bytes:
            self._response.close()
            message = f"the engine's answer is longer than {self._settings.reply_limit_bytes:,} bytes"
            raise UpstreamError(UpstreamFault.OVERSIZED, message)
        return piece

    def _left_over(self) -> bytes:
        """Return what came before a break and was not read: those tokens were sampled.

        The reader's public methods raise the break first, and would keep them.
        """
        if self._content.total_bytes <= self._taken:
            return b""
        return self._content._read_nowait(-1)  # pyright: ignore[reportPrivateUsage]

    async def _awaited(self) -> bytes:
        while True:
            if self._response.closed and not self._content.is_eof():
                raise UpstreamError(UpstreamFault.RESET, "the answer was closed before its end")
            try:
                async with asyncio.timeout(self._settings.idle_timeout_s):
                    return await self._content.readany()
            except TimeoutError:
                pass
            if not await self._alive() and not self._moved():
                self._response.close()
                raise _silent(self._settings.idle_timeout_s)

    def _moved(self) -> bool:
        content = self._content
        return content.total_bytes > self._taken or content.is_eof() or content.exception() is not None
