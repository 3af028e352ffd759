"""Thrift's compact protocol, both ways, so that tests can write footers and page headers that no writer writes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Fields", "edit_footer", "edit_page_header", "footer_of"]

Fields = dict[int, list[Any]]
"""A struct: by field number, its type and its value; a list is a type and values."""

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)


class _Reader:
    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def integer(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def value(self, kind: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return None
        if kind == _BYTE:
            return self.byte()
        if kind in _INTEGERS:
            return self.integer()
        if kind in (_BINARY, _DOUBLE):
            size = 8 if kind == _DOUBLE else self.varint()
            self.at += size
            return self.data[self.at - size : self.at]
        if kind in (_LIST, _SET):
            head = self.byte()
            count = head >> 4 if head >> 4 < 15 else self.varint()
            inner = head & 15
            return [inner, [self.byte() if inner in (_TRUE, _FALSE) else self.value(inner) for _ in range(count)]]
        assert kind == _STRUCT
        return self.struct()

    def struct(self) -> Fields:
        fields: Fields = {}
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.integer()
            fields[number] = [head & 15, self.value(head & 15)]
        return fields


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _integer(value: int) -> bytes:
    return _varint((value << 1) ^ (value >> 63))


def _value(kind: int, value: Any) -> bytes:
    if kind in (_TRUE, _FALSE):
        return b""
    if kind == _BYTE:
        return bytes([value])
    if kind in _INTEGERS:
        return _integer(value)
    if kind in (_BINARY, _DOUBLE):
        return value if kind == _DOUBLE else _varint(len(value)) + value
    if kind in (_LIST, _SET):
        inner, values = value
        head = bytes([len(values) << 4 | inner]) if len(values) < 15 else bytes([0xF0 | inner]) + _varint(len(values))
        return head + b"".join(bytes([one]) if inner in (_TRUE, _FALSE) else _value(inner, one) for one in values)
    return _struct(value)


def _struct(fields: Fields) -> bytes:
    out = b""
    before = 0
    for number, (kind, value) in sorted(fields.items()):
        step = number - before
        out += bytes([step << 4 | kind]) if 0 < step < 16 else bytes([kind]) + _integer(number)
        out += _value(kind, value)
        before = number
    return out + b"\0"


def footer_of(data: bytes) -> Fields:
    """Read the footer of a Parquet file."""
    size = struct.unpack("<I", data[-8:-4])[0]
    return _Reader(data[-8 - size : -8]).struct()


def edit_footer(path: Path, change: Callable[[Fields], object]) -> None:
    """Change the footer of a file."""
    data = path.read_bytes()
    size = struct.unpack("<I", data[-8:-4])[0]
    fields = footer_of(data)
    change(fields)
    written = _struct(fields)
    path.write_bytes(data[: -8 - size] + written + struct.pack("<I", len(written)) + b"PAR1")


def edit_page_header(path: Path, column: int, change: Callable[[Fields], object]) -> None:
    """Change the first page header of a column; the new one takes as many bytes as the old one."""
    data = path.read_bytes()
    chunk = footer_of(data)[4][1][1][0][1][1][1][column][3][1]
    start = chunk[9][1]
    reader = _Reader(data, start)
    header = reader.struct()
    change(header)
    written = _struct(header)
    assert len(written) == reader.at - start, "the test needs a value that takes the same room"
    path.write_bytes(data[:start] + written + data[reader.at :])
