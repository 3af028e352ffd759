"""The footer of a Parquet file: what it says of its columns, and a footer that says only what was checked.

Invariant: pyarrow never sees a footer from elsewhere. What is needed of one is read here, compared with the schema that
the file has to have, and written anew; everything else in it is passed over.

Field numbers are those of `parquet.thrift`.

Not here: whether the claims can be true (parquet_guard).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from gristmill.archive.compact import (
    BINARY,
    INT32,
    INT64,
    LIST,
    STRUCT,
    BadBytes,
    CompactReader,
    field,
    integer,
    listed,
    text,
)

__all__ = ["Element", "Footer", "FooterColumn", "FooterGroup", "footer_bytes", "read_footer"]

_MOST_GROUPS: Final = 2**14
_MOST_ELEMENTS: Final = 256
_PLAIN, _RLE, _BYTE_STREAM_SPLIT = 0, 3, 9
_LEAF: Final = 0


class Element(NamedTuple):
    """An element of the schema: physical type, repetition, name, number of children; -1 where it has none."""

    kind: int
    repetition: int
    name: bytes
    children: int


class FooterColumn(NamedTuple):
    """What a footer says of a column of a row group; `plain` says that its pages are here and are no dictionary."""

    codec: int = -1
    values: int = -1
    uncompressed: int = -1
    compressed: int = -1
    offset: int = -1
    plain: bool = True


class FooterGroup(NamedTuple):
    """What a footer says of a row group."""

    rows: int
    columns: tuple[FooterColumn, ...]


class Footer(NamedTuple):
    """What is needed of a footer; the schema and the metadata of the file also as they are written."""

    rows: int
    elements: tuple[Element, ...]
    groups: tuple[FooterGroup, ...]
    schema: bytes
    metadata: bytes

    @property
    def leaves(self) -> list[tuple[int, list[bytes]]]:
        """Physical type and path of each column."""
        found: list[tuple[int, list[bytes]]] = []
        path: list[tuple[bytes, int]] = []
        for element in self.elements[1:]:
            while path and path[-1][1] == 0:
                path.pop()
            if path:
                path[-1] = (path[-1][0], path[-1][1] - 1)
            if element.children > _LEAF:
                path.append((element.name, element.children))
            else:
                found.append((element.kind, [*(name for name, _ in path), element.name]))
        return found


def read_footer(data: memoryview) -> Footer:
    """Read a footer.

    Raises:
        BadBytes: it is none.
    """
    reader = CompactReader(data, 0, len(data))
    rows = -1
    elements: tuple[Element, ...] = ()
    groups: tuple[FooterGroup, ...] = ()
    schema = metadata = b""
    for number, kind in reader.fields():
        start = reader.position
        if number == 2:
            elements = tuple(_element(reader) for _ in reader.elements(kind, STRUCT, _MOST_ELEMENTS))
            schema = data[start : reader.position].tobytes()
        elif number == 3:
            rows = reader.integer(kind)
        elif number == 4:
            groups = tuple(_group(reader) for _ in reader.elements(kind, STRUCT, _MOST_GROUPS))
        elif number == 5:
            reader.skip(kind)
            metadata = data[start : reader.position].tobytes()
        else:
            reader.skip(kind)
    if not elements:
        raise BadBytes("expected a footer with a schema, got none")
    return Footer(rows, elements, groups, schema, metadata)


def _element(reader: CompactReader) -> Element:
    values = {1: -1, 3: -1, 5: -1}
    name = b""
    for number, kind in reader.fields():
        if number in values:
            values[number] = reader.integer(kind)
        elif number == 4:
            name = reader.binary(kind)
        else:
            reader.skip(kind)
    return Element(values[1], values[3], name, values[5])


def _group(reader: CompactReader) -> FooterGroup:
    rows = -1
    columns: tuple[FooterColumn, ...] = ()
    for number, kind in reader.fields():
        if number == 1:
            columns = tuple(_chunk(reader) for _ in reader.elements(kind, STRUCT, _MOST_ELEMENTS))
        elif number == 3:
            rows = reader.integer(kind)
        else:
            reader.skip(kind)
    return FooterGroup(rows, columns)


def _chunk(reader: CompactReader) -> FooterColumn:
    column = FooterColumn()
    elsewhere = False
    for number, kind in reader.fields():
        if number == 3 and kind == STRUCT:
            column = _column(reader)
        else:
            # 1 is the path of another file, 8 and 9 are of encryption.
            elsewhere = elsewhere or number in {1, 8, 9}
            reader.skip(kind)
    return column._replace(plain=column.plain and not elsewhere)


def _column(reader: CompactReader) -> FooterColumn:
    values = {4: -1, 5: -1, 6: -1, 7: -1, 9: -1}
    plain = True
    for number, kind in reader.fields():
        if number in values:
            values[number] = reader.integer(kind)
        else:
            plain = plain and number != 11
            reader.skip(kind)
    return FooterColumn(values[4], values[5], values[6], values[7], values[9], plain)


def footer_bytes(template: Footer, groups: Sequence[FooterGroup]) -> bytes:
    """Write a file that has a footer and nothing else.

    Args:
        template: whose schema and metadata it has.
        groups: its row groups, with the columns of the template.
    """
    leaves = template.leaves
    rows = sum(group.rows for group in groups)
    body = field(1, INT32, integer(2)) + field(1, LIST, template.schema) + field(1, INT64, integer(rows))
    body += field(1, LIST, listed(STRUCT, (_group_bytes(leaves, group) for group in groups)))
    if template.metadata:
        body += field(1, LIST, template.metadata)
    body += b"\0"
    return b"PAR1" + body + len(body).to_bytes(4, "little") + b"PAR1"


def _group_bytes(leaves: Sequence[tuple[int, list[bytes]]], group: FooterGroup) -> bytes:
    columns = (_chunk_bytes(leaf, column) for leaf, column in zip(leaves, group.columns, strict=True))
    size = sum(column.uncompressed for column in group.columns)
    body = field(1, LIST, listed(STRUCT, columns)) + field(1, INT64, integer(size))
    return body + field(1, INT64, integer(group.rows)) + b"\0"


def _chunk_bytes(leaf: tuple[int, list[bytes]], column: FooterColumn) -> bytes:
    kind, path = leaf
    encodings = (integer(encoding) for encoding in (_PLAIN, _RLE, _BYTE_STREAM_SPLIT))
    body = field(1, INT32, integer(kind)) + field(1, LIST, listed(INT32, encodings))
    body += field(1, LIST, listed(BINARY, map(text, path))) + field(1, INT32, integer(column.codec))
    body += field(1, INT64, integer(column.values)) + field(1, INT64, integer(column.uncompressed))
    body += field(1, INT64, integer(column.compressed)) + field(2, INT64, integer(column.offset)) + b"\0"
    return field(2, INT64, integer(0)) + field(1, STRUCT, body) + b"\0"
