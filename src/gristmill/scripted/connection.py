"""One HTTP exchange seen from below: request body in, head and pieces of the answer out, and ways to break it off.

Invariant: after a break nothing more is sent, and the server behind it is left in order.

Not here: what is sent when (delivery).
"""

from __future__ import annotations

import asyncio
import socket
import struct
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

__all__ = ["Connection", "Interruption", "Message", "Receive", "Send"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_RESET: Final = struct.pack("ii", 1, 0)


class Interruption:
    """Why an answer ends early: aborted by request, the client has gone, or the engine stops."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._happened = asyncio.Event()

    def happen(self, reason: str) -> None:
        """Interrupt; the first reason stands."""
        self.reason = self.reason or reason
        self._happened.set()

    async def pause(self, seconds: float | None) -> None:
        """Wait so long, or without end, or until it happens."""
        if seconds is not None and seconds <= 0:
            return
        try:
            await asyncio.wait_for(self._happened.wait(), seconds)
        except TimeoutError:
            return


class Connection:
    """One request and its answer.

    Args:
        receive, send: of the ASGI server.
        interruption: told when the client goes, once `watch` was called.
    """

    def __init__(self, receive: Receive, send: Send, interruption: Interruption) -> None:
        self._receive = receive
        self._send = send
        self._interruption = interruption
        self._watcher: asyncio.Task[None] | None = None
        self._packer: Any = None
        self.begun = False

    async def read(self) -> bytes:
        """Return the request's body."""
        pieces: list[bytes] = []
        while True:
            message = await self._receive()
            pieces.append(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body"):
                return b"".join(pieces)

    def watch(self) -> None:
        """Interrupt the answer when the client goes."""
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._interruption.happen("disconnected")

    async def head(self, status: int, headers: Mapping[str, str], *, packed: bool = False) -> None:
        """Send the head of the answer; `packed` answers go out with gzip from here on."""
        self.begun = True
        fields = dict(headers)
        if packed:
            self._packer = zlib.compressobj(wbits=31)
            fields["content-encoding"] = "gzip"
            fields.pop("content-length", None)
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def piece(self, data: bytes, *, more: bool = True) -> None:
        """Send a piece of the body."""
        if self._packer is not None:
            mode = zlib.Z_SYNC_FLUSH if more else zlib.Z_FINISH
            data = self._packer.compress(data) + self._packer.flush(mode)
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def hold(self) -> None:
        """Say nothing until the client goes or the engine stops, and then break the connection off."""
        self.watch()
        await self._interruption.pause(None)
        await self.drop(reset=False)

    async def drop(self, *, reset: bool) -> None:
        """Break the connection off: with a reset, or closed after what was sent."""
        transport = self._transport()
        if transport is None:
            # A server that does not let go of its connection closes it when its application fails.
            raise ConnectionAbortedError("the script breaks this connection off")
        if reset:
            held: socket.socket | None = transport.get_extra_info("socket")
            if held is not None:
                held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            transport.abort()
        else:
            transport.close()
        self.watch()
        await self._interruption.pause(5)

    def _transport(self) -> asyncio.Transport | None:
        """Find the transport: uvicorn's `send` is a method of an object that has it."""
        found = getattr(getattr(self._send, "__self__", None), "transport", None)
        return found if hasattr(found, "abort") else None

    async def close(self) -> None:
        """Stop watching."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
