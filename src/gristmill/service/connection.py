"""HTTP/1.1 connections that no client can fill the memory with.

Invariant: of a request at most the limit (and one read) is held before its head is complete, and as much again of what
is neither head nor body (trailers, chunk extensions); a head that does not come is not waited for. Bodies are bounded
by whoever reads them.

Not here: requests and answers (the server's own protocol).
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["BoundedConnection"]

_HEAD_bytes: Final = 64 * 1024
_HEAD_s: Final = 60.0
_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedConnection(HttpToolsProtocol):
    """One connection."""

    head_s: float = _HEAD_s
    """How long a head may take, from the connection or the answer before it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._unread_bytes = 0
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Take what arrived; a connection that sends only what leads nowhere is closed."""
        self._unread_bytes += len(data)
        if self._waiting is None and self._between_requests():
            self._wait()
        super().data_received(data)
        if self._unread_bytes > _HEAD_bytes and not self.transport.is_closing():
            if self._between_requests():
                self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        """Take note that the head is complete."""
        self._progress()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take note of a piece of the body."""
        self._progress()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Take note that the request is complete."""
        self._progress()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._progress()
        super().connection_lost(exc)

    def _between_requests(self) -> bool:
        """Tell whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    def _wait(self) -> None:
        self._waiting = asyncio.get_running_loop().call_later(self.head_s, self.transport.close)

    def _progress(self) -> None:
        self._unread_bytes = 0
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
