"""Thrift's compact protocol, as far as Parquet's footers and page headers need it.

Invariant: reading makes nothing but the values that are asked for; what a length claims is compared with the bytes that
are there before it is passed over. Whatever the bytes are, reading ends.

Not here: what the fields mean (footer, page_headers).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

__all__ = [
    "BINARY",
    "INT32",
    "INT64",
    "LIST",
    "STRUCT",
    "BadBytes",
    "CompactReader",
    "field",
    "integer",
    "listed",
    "text",
]

_TRUE, _FALSE, _BYTE, _I16, INT32, INT64, _DOUBLE, BINARY, LIST, _SET, _MAP, STRUCT = range(1, 13)
_INTEGERS: Final = frozenset({_I16, INT32, INT64})
_DEPTH: Final = 16


class BadBytes(ValueError):
    """Bytes that are not what they claim to be."""


class CompactReader:
    """Reads from a place in a buffer.

    Args:
        data: the bytes.
        position: where to begin; moves on.
        end: where the bytes end.
    """

    def __init__(self, data: memoryview, position: int, end: int) -> None:
        self._data, self.position, self._end = data, position, end

    def _byte(self) -> int:
        if self.position >= self._end:
            raise BadBytes("expected more bytes, they end")
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
                raise BadBytes("expected a number of 64 bits, got a longer one")

    def _pass(self, count: int) -> None:
        if count > self._end - self.position:
            raise BadBytes(f"expected {count} more bytes, they end")
        self.position += count

    def fields(self) -> Iterator[tuple[int, int]]:
        """Give number and type of each field of a struct; its value has to be read or skipped before the next."""
        number = 0
        while True:
            head = self._byte()
            kind = head & 0x0F
            if not kind:
                return
            number = number + (head >> 4) if head >> 4 else self.integer(_I16)
            yield number, kind

    def integer(self, kind: int) -> int:
        """Read an integer."""
        if kind not in _INTEGERS:
            raise BadBytes(f"expected an integer, got type {kind}")
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def binary(self, kind: int, most: int = 256) -> bytes:
        """Read a string of at most so many bytes."""
        if kind != BINARY:
            raise BadBytes(f"expected a string, got type {kind}")
        size = self._varint()
        if size > most:
            raise BadBytes(f"expected a string of at most {most} bytes, got {size}")
        self._pass(size)
        return self._data[self.position - size : self.position].tobytes()

    def elements(self, kind: int, inner: int, most: int) -> Iterator[None]:
        """Step through a list of elements of a type; each has to be read or skipped before the next."""
        found, count = self._list_head(kind)
        if count and found != inner:
            raise BadBytes(f"expected a list of type {inner}, got type {found}")
        if count > most:
            raise BadBytes(f"expected at most {most} elements, got {count}")
        for _ in range(count):
            yield

    def _list_head(self, kind: int) -> tuple[int, int]:
        if kind not in {LIST, _SET}:
            raise BadBytes(f"expected a list, got type {kind}")
        head = self._byte()
        count = head >> 4 if head >> 4 < 15 else self._varint()
        # An element takes a byte at least.
        if count > self._end - self.position:
            raise BadBytes(f"expected a list within its bytes, got {count} elements")
        return head & 0x0F, count

    def skip(self, kind: int, depth: int = 0) -> None:
        """Pass over a value."""
        if depth > _DEPTH:
            raise BadBytes(f"expected nesting of at most {_DEPTH}, got more")
        if kind in {_TRUE, _FALSE}:
            return
        if kind == _BYTE:
            self._pass(1)
        elif kind in _INTEGERS:
            self._varint()
        elif kind == _DOUBLE:
            self._pass(8)
        elif kind == BINARY:
            self._pass(self._varint())
        elif kind in {LIST, _SET}:
            inner, count = self._list_head(kind)
            for _ in range(count):
                self.skip(_BYTE if inner in {_TRUE, _FALSE} else inner, depth + 1)
        elif kind == STRUCT:
            for _, held in self.fields():
                self.skip(held, depth + 1)
        else:
            raise BadBytes(f"expected a type that Parquet uses, got {kind}")


# Writing


def _unsigned(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def integer(value: int) -> bytes:
    """Write an integer of at most 64 bits."""
    return _unsigned((value << 1) ^ (value >> 63))


def field(step: int, kind: int, value: bytes) -> bytes:
    """Write a field whose number is `step` (1 to 15) above that of the field before."""
    return bytes([step << 4 | kind]) + value


def listed(kind: int, values: Iterable[bytes]) -> bytes:
    """Write a list."""
    held = list(values)
    return bytes([0xF0 | kind]) + _unsigned(len(held)) + b"".join(held)


def text(value: bytes) -> bytes:
    """Write a string."""
    return _unsigned(len(value)) + value
