"""The same stack without capture: uvicorn and aiohttp, bytes in, bytes out.

`python -m bench.gateway_stack.pass_through ENGINE_URL` prints its port.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import aiohttp
import uvicorn


class PassThrough:
    """Forwards every request."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        session = self._session = self._session or aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
        )
        pieces: list[bytes] = []
        while True:
            message = await receive()
            pieces.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        headers = {"content-type": "application/json"}
        async with session.request(
            scope["method"], self._upstream + scope["path"], data=b"".join(pieces), headers=headers
        ) as reply:
            kind = reply.headers.get("content-type", "").encode()
            await send({"type": "http.response.start", "status": reply.status, "headers": [(b"content-type", kind)]})
            async for piece in reply.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def serve(app: Any) -> None:
    """Serve an application on a free port, printed first."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host="127.0.0.1",
            port=0,
            interface="asgi3",
            lifespan="off",
            access_log=False,
            proxy_headers=False,
            loop="uvloop",
            http="httptools",
            log_level="warning",
        )
    )
    task = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await task


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(PassThrough(sys.argv[1])))
