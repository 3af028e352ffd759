"""Request bodies under their limit."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import MutableMapping
from typing import Any

import pytest
import zstandard

from gristmill.errors import Code
from gristmill.gateway.body import ClientClosed, read_body
from gristmill.gateway.front import RequestRefused


def _read(data: bytes, encoding: str = "", limit: int = 1000, length: int | None = None, piece: int = 7) -> bytes:
    pieces = [data[start : start + piece] for start in range(0, len(data), piece)] or [b""]
    messages = [
        {"type": "http.request", "body": each, "more_body": index < len(pieces) - 1}
        for index, each in enumerate(pieces)
    ]

    async def receive() -> MutableMapping[str, Any]:
        return messages.pop(0)

    return asyncio.run(read_body(receive, encoding, length, limit))


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_every_encoding_gives_the_same_body(piece: int) -> None:
    # Codex may compress its requests.
    body = b'{"model":"m","messages":[]}' * 10
    assert _read(body, piece=piece) == body
    assert _read(body, "identity", piece=piece) == body
    assert _read(gzip.compress(body), "gzip", piece=piece) == body
    assert _read(zlib.compress(body), "deflate", piece=piece) == body
    assert _read(zstandard.compress(body), "zstd", piece=piece) == body


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (b"a" * 1001, ""),
        (gzip.compress(b"a" * 50_000_000), "gzip"),
        (zlib.compress(b"a" * 1001), "deflate"),
        (zstandard.compress(b"a" * 50_000_000), "zstd"),
    ],
)
def test_no_encoding_gets_round_the_limit(data: bytes, encoding: str) -> None:
    # A few kilobytes that unpack to gigabytes would end the gateway, and with it every other rollout.
    with pytest.raises(RequestRefused, match="max_body_bytes") as raised:
        _read(data, encoding, piece=10_000)
    assert (raised.value.status, raised.value.code) == (413, Code.BODY_TOO_LARGE)
    assert "1000" in raised.value.message


def test_a_stated_length_is_believed_when_it_is_too_large() -> None:
    # Nothing of such a body needs to be read.
    with pytest.raises(RequestRefused) as raised:
        _read(b"", length=1001)
    assert raised.value.status == 413


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (b"no gzip at all", "gzip"),
        (gzip.compress(b"abc")[:-3], "gzip"),
        (gzip.compress(b"abc") + gzip.compress(b"def"), "gzip"),
        (b"no zstd at all", "zstd"),
    ],
)
def test_broken_compression_is_refused(data: bytes, encoding: str) -> None:
    # Half a body must not be taken for the whole one.
    with pytest.raises(RequestRefused) as raised:
        _read(data, encoding)
    assert (raised.value.status, raised.value.code) == (400, Code.REQUEST_MALFORMED)


def test_unknown_encodings_are_refused() -> None:
    # Forwarding what cannot be read would capture nothing.
    with pytest.raises(RequestRefused) as raised:
        _read(b"x", "br")
    assert raised.value.status == 415


def test_a_client_that_leaves_is_noticed() -> None:
    # The request would wait for ever.
    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientClosed):
        asyncio.run(read_body(receive, "", None, 10))
