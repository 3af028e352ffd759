"""The client's side of one exchange: an answer written piece by piece, and word of a client that goes away.

Invariant: `gone` is true as soon as the server has seen the connection close; what was written before is not known to
have arrived. A slow client makes `write` wait, so that nothing piles up here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any, Final

__all__ = ["Client", "HeaderList", "Message", "Scope"]

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
HeaderList = list[tuple[bytes, bytes]]


class Client:
    """Answers one HTTP request.

    Args:
        receive, send: of the server.
    """

    def __init__(self, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]) -> None:
        self._receive: Final = receive
        self._send: Final = send
        self._watch: asyncio.Task[None] | None = None
        self.started = False
        self.ended = False
        self.gone = False

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Begin to watch for the client going away; the request's body has been read."""
        self._watch = asyncio.ensure_future(self._wait(on_gone))

    async def _wait(self, on_gone: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.ended:
            self.gone = True
            on_gone()

    async def stop_watching(self) -> None:
        """End the watch."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send status and headers."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, data: bytes) -> None:
        """Send a piece of the body."""
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> bool:
        """Send the last piece; True where the connection was open until all of it was handed to the system."""
        await self.write(data)
        # The server tells of a completed answer and of a closed connection by the same message, so the last look is
        # before the answer is complete; one round of the loop brings a message that is on its way.
        await asyncio.sleep(0)
        self.ended = True
        if not self.gone:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        return not self.gone

    def drop(self) -> None:
        """Leave a stream as it is: the server closes a connection whose answer was not completed."""
        self.ended = True

    async def answer(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> bool:
        """Send a whole JSON answer; True as `end`."""
        await self.start(
            status,
            [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                *headers,
            ],
        )
        return await self.end(body)
