"""The headers of the pages in a column chunk of a Parquet file, read before anything is decoded.

Invariant: what a header claims is compared with the bytes that are there, and with limits, before a decoder allocates
what it claims. Reading takes memory for one header at a time.

A header is a struct in Thrift's compact protocol; the field numbers are those of `parquet.thrift`.

Not here: which chunks there are (parquet_guard), and what is in the pages (pyarrow).
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["BadPage", "ChunkClaims", "check_chunk"]

_DATA_PAGE: Final = 0
_DATA_PAGE_V2: Final = 3
_PLAIN: Final = 0
_RLE: Final = 3
_BYTE_STREAM_SPLIT: Final = 9
_ENCODINGS: Final = frozenset({_PLAIN, _RLE, _BYTE_STREAM_SPLIT})
_MOST_INFLATION: Final = 2**15 + 1024
"""How much larger a zstd block can become at most: a run of 128 KiB takes four bytes."""
_SLACK: Final = 4096
_HEADER_BYTES: Final = 2**16
_DEPTH: Final = 8

_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)


class BadPage(ValueError):
    """A page header that cannot be one, or claims what its bytes cannot hold."""


class ChunkClaims(NamedTuple):
    """What the footer says of a column chunk: number of values, nulls included, and bytes after decompression."""

    values: int
    uncompressed_bytes: int


class _Header(NamedTuple):
    kind: int
    uncompressed: int
    compressed: int
    values: int
    encoding: int
    end: int


def check_chunk(data: memoryview, claims: ChunkClaims) -> None:
    """Compare the pages of a chunk with its bytes and with what the footer says of it.

    Args:
        data: the whole chunk, headers included.
        claims: of the footer; they have been compared with limits.

    Raises:
        BadPage: what a header, or the footer, claims is not so.
    """
    position = values = uncompressed = 0
    while position < len(data):
        header = _header(data, position)
        if header.kind not in {_DATA_PAGE, _DATA_PAGE_V2}:
            raise BadPage(f"expected data pages, got a page of kind {header.kind}")
        if header.encoding not in _ENCODINGS:
            raise BadPage(f"expected plain, run-length or byte-stream-split values, got encoding {header.encoding}")
        if not 0 <= header.compressed <= len(data) - header.end:
            raise BadPage(f"expected a page within its column, got one of {header.compressed} bytes")
        if not 0 <= header.uncompressed <= header.compressed * _MOST_INFLATION + _SLACK:
            got = f"{header.uncompressed} bytes out of {header.compressed}"
            raise BadPage(f"expected a page of a size that its bytes can hold, got {got}")
        uncompressed += header.uncompressed + header.end - position
        values += header.values
        if header.values < 0 or values > claims.values:
            raise BadPage(f"expected {claims.values} values in a column, its pages claim {values}")
        if uncompressed > claims.uncompressed_bytes:
            raise BadPage(f"expected {claims.uncompressed_bytes} bytes in a column, its pages claim {uncompressed}")
        position = header.end + header.compressed
    if values != claims.values:
        raise BadPage(f"expected {claims.values} values in a column, its pages hold {values}")


def _header(data: memoryview, start: int) -> _Header:
    reader = _Compact(data, start, min(len(data), start + _HEADER_BYTES))
    fields = reader.struct(0)
    kind = fields.get(1)
    inner = reader.inner.get(8 if kind == _DATA_PAGE_V2 else 5, {})
    numbers = (
        kind,
        fields.get(2),
        fields.get(3),
        inner.get(1, 0),
        inner.get(4 if kind == _DATA_PAGE_V2 else 2, -1),
        reader.position,
    )
    whole = [number for number in numbers if isinstance(number, int)]
    if len(whole) != len(numbers):
        raise BadPage("expected a page header with a kind and sizes, got none")
    return _Header._make(whole)


class _Compact:
    """Reads integers and structs; skips everything else without making it."""

    def __init__(self, data: memoryview, position: int, end: int) -> None:
        self._data, self.position, self._end = data, position, end
        self.inner: dict[int, dict[int, int]] = {}
        """The structs that the outermost one holds, by field number."""

    def _byte(self) -> int:
        if self.position >= self._end:
            raise BadPage("expected a page header, its bytes end")
        value = self._data[self.position]
        self.position += 1
        return value

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise BadPage("expected a number of 64 bits in a page header, got a longer one")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _skip(self, count: int) -> None:
        if count > self._end - self.position:
            raise BadPage("expected a page header, its bytes end")
        self.position += count

    def struct(self, depth: int) -> dict[int, int]:
        """Read a struct: its integers by field number."""
        if depth > _DEPTH:
            raise BadPage("expected a page header, got one that is nested deeper")
        fields: dict[int, int] = {}
        number = 0
        while True:
            head = self._byte()
            kind = head & 0x0F
            if kind == _STOP:
                return fields
            number = number + (head >> 4) if head >> 4 else self._integer()
            if kind in {_I16, _I32, _I64}:
                fields[number] = self._integer()
            elif kind == _STRUCT:
                inner = self.struct(depth + 1)
                if not depth:
                    self.inner[number] = inner
            else:
                self._pass_over(kind)

    def _pass_over(self, kind: int) -> None:
        if kind in {_TRUE, _FALSE}:
            return
        if kind == _BYTE:
            self._skip(1)
        elif kind == _DOUBLE:
            self._skip(8)
        elif kind == _BINARY:
            self._skip(self._varint())
        else:
            # Page headers have neither lists nor maps.
            raise BadPage(f"expected the fields of a page header, got one of type {kind}")
