"""The floor under every proxy: bytes from one socket to another, neither looked at.

`python -m bench.gateway_stack.relay ENGINE_PORT` prints its port.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvloop


class _Side(asyncio.Protocol):
    def __init__(self) -> None:
        self.other: Any = None
        self.transport: Any = None
        self.early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self.early += data
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class _Front(_Side):
    port: int

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        _, back = await asyncio.get_running_loop().create_connection(_Side, "127.0.0.1", self.port)
        back.other, self.other = self, back
        if self.early:
            back.transport.write(self.early)


async def _main(port: int) -> None:
    _Front.port = port
    server = await asyncio.get_running_loop().create_server(_Front, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_main(int(sys.argv[1])))
