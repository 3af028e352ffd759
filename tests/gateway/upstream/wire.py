"""An HTTP/1.1 server on loopback whose every byte a test decides."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, Self

Handler = Callable[["Seen", "Wire"], Awaitable[None]]


class Seen(NamedTuple):
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    connection: int


class Wire:
    """The server's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.closing = False

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: int = 200, **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} X", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
        await self.send("\r\n".join([*lines, "", ""]).encode())

    async def json(self, value: Any, status: int = 200, **headers: str) -> None:
        await self.text(json.dumps(value), status, content_type="application/json", **headers)

    async def text(self, text: str, status: int = 200, **headers: str) -> None:
        body = text.encode()
        await self.head(status, content_length=str(len(body)), **headers)
        await self.send(body)

    async def stream(self) -> None:
        await self.head(200, content_type="text/event-stream", transfer_encoding="chunked")

    async def piece(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def events(self, sse: str, size: int = 700) -> None:
        """Send an event stream in pieces that have nothing to do with its events."""
        await self.stream()
        data = sse.encode()
        for start in range(0, len(data), size):
            await self.piece(data[start : start + size])
        await self.end()

    def close(self) -> None:
        """Close the connection in good order."""
        self.closing = True
        self.writer.close()

    def reset(self) -> None:
        """Break the connection."""
        self.closing = True
        sock: socket.socket = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class FakeEngine:
    """Serves the handlers of its routes; every other path is 404."""

    def __init__(self, port: int = 0) -> None:
        self.routes: dict[str, Handler] = {}
        self.seen: list[Seen] = []
        self.connections = 0
        self._port = port
        self._server: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def on(self, path: str, handler: Handler) -> None:
        self.routes[path] = handler

    def says(self, path: str, value: Any, status: int = 200, **headers: str) -> None:
        """Answer a path with a JSON value."""

        async def handler(_: Seen, wire: Wire) -> None:
            await wire.json(value, status, **headers)

        self.routes[path] = handler

    def asked(self, path: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.path == path]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """End at once, connections too, as a killed process does."""
        if self._server is not None:
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            for _ in range(5):
                # A connection that is half made when its server closes would never be closed itself.
                await asyncio.sleep(0)
            self._server.close()
            self._server = None
        for task, writer in self._serving.items():
            task.cancel()
            writer.transport.abort()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self._serving.clear()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._serving[asyncio.create_task(self._serve(reader, writer, self.connections))] = writer

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        wire = Wire(reader, writer)
        with contextlib.suppress(ConnectionError):
            while not wire.closing and (seen := await _request(reader, number)) is not None:
                self.seen.append(seen)
                await self.routes.get(seen.path, _not_found)(seen, wire)
        with contextlib.suppress(ConnectionError):
            writer.close()


async def _not_found(_: Seen, wire: Wire) -> None:
    await wire.json({"detail": "Not Found"}, 404)


async def _request(reader: asyncio.StreamReader, number: int) -> Seen | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Seen(method, path, headers, json.loads(body) if body else None, number)


def running(main: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine, with a deadline against hanging."""

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await main

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, for as long as the test may take."""
    while not condition():
        await asyncio.sleep(0.005)
