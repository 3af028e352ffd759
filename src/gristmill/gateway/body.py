"""Request bodies: read under a limit, decompressed under the same limit, decoded once.

Invariant: no more than the limit (and one read) is ever in memory, whatever the sender claims or compresses.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Protocol

import zstandard

from gristmill.errors import Code
from gristmill.gateway.front import RequestRefused

__all__ = ["ClientClosed", "Receive", "read_body"]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_STEP_bytes: Final = 256 * 1024


class ClientClosed(Exception):
    """The client went away before its request was complete."""


class _Inflate(Protocol):
    def feed(self, data: bytes) -> None: ...
    def finish(self) -> bytes: ...


async def read_body(receive: Receive, encoding: str, length: int | None, limit_bytes: int) -> bytes:
    """Read a request's body.

    Args:
        receive: of the server.
        encoding: `Content-Encoding` in lower case, "" without one.
        length: `Content-Length`, None where it is not said.
        limit_bytes: largest body, as sent and as decompressed.

    Raises:
        RequestRefused: 413 `body_too_large`; 415 for an encoding that is none of identity, gzip, deflate, zstd; 400
            where the compressed data is broken.
        ClientClosed: the client went away.
    """
    if encoding not in {"", "identity", "gzip", "deflate", "zstd"}:
        raise RequestRefused(
            415, Code.REQUEST_MALFORMED, f"expected identity, gzip, deflate or zstd, got {encoding[:40]!r}", "encoding"
        )
    if length is not None and length > limit_bytes:
        raise _too_large(limit_bytes)
    plain = encoding in {"", "identity"}
    inflate: _Inflate = (
        _Plain(limit_bytes) if plain else _Zlib(limit_bytes) if encoding != "zstd" else _Zstd(limit_bytes)
    )
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientClosed
        data = message.get("body", b"")
        if data:
            inflate.feed(data)
        if not message.get("more_body", False):
            return inflate.finish()


def _too_large(limit_bytes: int) -> RequestRefused:
    return RequestRefused(
        413,
        Code.BODY_TOO_LARGE,
        f"expected a request body of at most {limit_bytes} bytes (setting max_body_bytes), got a larger one",
        "body",
    )


class _Plain:
    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit:
            raise _too_large(self._limit)
        self._pieces.append(data)

    feed = add

    def finish(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)


def _broken(what: str) -> RequestRefused:
    return RequestRefused(400, Code.REQUEST_MALFORMED, f"expected {what} data, got something else", "body")


class _Zlib(_Plain):
    """gzip and deflate, one stream."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self._stream = zlib.decompressobj(zlib.MAX_WBITS | 32)

    def feed(self, data: bytes) -> None:
        try:
            while data:
                if self._stream.eof:
                    raise _broken("one gzip or deflate stream, then nothing:")
                self.add(self._stream.decompress(data, _STEP_bytes))
                data = self._stream.unconsumed_tail or self._stream.unused_data
        except zlib.error as error:
            raise _broken("gzip or deflate") from error

    def finish(self) -> bytes:
        if not self._stream.eof:
            raise _broken("complete gzip or deflate")
        return super().finish()


class _Zstd(_Plain):
    """zstd, one frame."""

    def finish(self) -> bytes:
        unpacked = _Plain(self._limit)
        try:
            # Reading in steps bounds what any input unpacks to, which feeding in steps would not.
            with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(super().finish()) as reader:
                while step := reader.read(_STEP_bytes):
                    unpacked.add(step)
        except zstandard.ZstdError as error:
            raise _broken("zstd") from error
        return unpacked.finish()
