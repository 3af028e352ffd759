"""The headers of the pages in a column chunk of a Parquet file, read before anything is decoded.

Invariant: what a header claims is compared with the bytes that are there, and with the footer, before a decoder
allocates what it claims.

Field numbers are those of `parquet.thrift`.

Not here: which chunks there are (parquet_guard), and what is in the pages (pyarrow).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gristmill.archive.compact import STRUCT, BadBytes, CompactReader

__all__ = ["check_chunk"]

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


class _Header(NamedTuple):
    kind: int
    uncompressed: int
    compressed: int
    values: int
    encoding: int
    levels: int
    end: int


def check_chunk(data: memoryview, values: int, uncompressed: int) -> None:
    """Compare the pages of a chunk with its bytes and with what the footer says of it.

    Args:
        data: the whole chunk, headers included.
        values: its values, nulls included, as the footer says.
        uncompressed: its bytes after decompression, as the footer says.

    Raises:
        BadBytes: what a header, or the footer, claims is not so.
    """
    position = found = size = 0
    while position < len(data):
        header = _header(data, position)
        if header.kind not in {_DATA_PAGE, _DATA_PAGE_V2}:
            raise BadBytes(f"expected data pages, got a page of kind {header.kind}")
        if header.encoding not in _ENCODINGS:
            raise BadBytes(f"expected plain, run-length or byte-stream-split values, got encoding {header.encoding}")
        if not 0 <= header.compressed <= len(data) - header.end:
            raise BadBytes(f"expected a page within its column, got one of {header.compressed} bytes")
        if not 0 <= header.uncompressed <= header.compressed * _MOST_INFLATION + _SLACK:
            got = f"{header.uncompressed} bytes out of {header.compressed}"
            raise BadBytes(f"expected a page of a size that its bytes can hold, got {got}")
        if not 0 <= header.levels <= min(header.compressed, header.uncompressed):
            raise BadBytes(f"expected levels within a page, got {header.levels} bytes of them")
        size += header.uncompressed + header.end - position
        found += header.values
        if header.values < 0 or found > values:
            raise BadBytes(f"expected {values} values in a column, its pages claim {found}")
        if size > uncompressed:
            raise BadBytes(f"expected {uncompressed} bytes in a column, its pages claim {size}")
        position = header.end + header.compressed
    if found != values:
        raise BadBytes(f"expected {values} values in a column, its pages hold {found}")


def _header(data: memoryview, start: int) -> _Header:
    reader = CompactReader(data, start, min(len(data), start + _HEADER_BYTES))
    sizes = {1: -1, 2: -1, 3: -1}
    inner: dict[int, int] = {}
    for number, kind in reader.fields():
        if number in sizes:
            sizes[number] = reader.integer(kind)
        elif number in {5, 8} and kind == STRUCT:
            inner = _integers(reader)
        else:
            reader.skip(kind)
    second = sizes[1] == _DATA_PAGE_V2
    encoding = inner.get(4 if second else 2, -1)
    levels = inner.get(5, -1) + inner.get(6, -1) if second else 0
    return _Header(sizes[1], sizes[2], sizes[3], inner.get(1, -1), encoding, levels, reader.position)


def _integers(reader: CompactReader) -> dict[int, int]:
    values: dict[int, int] = {}
    for number, kind in reader.fields():
        if kind in {4, 5, 6}:
            values[number] = reader.integer(kind)
        else:
            reader.skip(kind)
    return values
