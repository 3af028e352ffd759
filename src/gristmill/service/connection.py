"""HTTP/1.1 connections that no client can fill the memory with, or hold open by saying nothing.

Invariant: of a request at most the limit (and one read) is held before its head is complete, and as much again of what
is neither head nor body (trailers, chunk extensions); a request that stops half-way is not waited for. Bodies are
bounded by whoever reads them.

Not here: requests and answers (the server's own protocol).
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["BoundedConnection"]

_HEAD_bytes: Final = 64 * 1024
_SILENT_s: Final = 60.0
_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedConnection(HttpToolsProtocol):
    """One connection."""

    silent_s: float = _SILENT_s
    """How long the next piece of a request may take."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._unread_bytes = 0
        self._in_body = False
        self._progress_at = 0.0
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Take what arrived; a connection that sends only what leads nowhere is closed."""
        self._unread_bytes += len(data)
        if self._waiting is None:
            self._wait()
        super().data_received(data)
        if self._unread_bytes > _HEAD_bytes and not self.transport.is_closing():
            if self._answered():
                self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        """Take note that the head is complete."""
        self._in_body = True
        self._progress()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take note of a piece of the body."""
        self._progress()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Take note that the request is complete."""
        self._in_body = False
        self._unread_bytes = 0
        self._wait_no_more()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._wait_no_more()
        super().connection_lost(exc)

    def _answered(self) -> bool:
        """Tell whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    def _progress(self) -> None:
        self._unread_bytes = 0
        self._progress_at = asyncio.get_running_loop().time()

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._progress_at = loop.time()
        self._waiting = loop.call_later(self.silent_s, self._waited)

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _waited(self) -> None:
        loop = asyncio.get_running_loop()
        # A body that nobody reads yet is not the client's silence, nor is a head that came while another is answered.
        excused = self.flow.read_paused if self._in_body else not self._answered()
        if not excused and loop.time() - self._progress_at >= self.silent_s:
            self.transport.close()
        else:
            self._waiting = loop.call_later(self.silent_s, self._waited)
