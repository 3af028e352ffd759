"""A PostgreSQL connection that takes the statements and values which SQLite's takes.

Invariant: every value reads back as it was written. PostgreSQL's text has no character 0, so a text with one is stored
with an escape (`\\x01` before `0`, and `\\x01` twice for itself); a truth is stored as 0 or 1, no number as NULL, as in
SQLite.

Not here: opening connections (connection), transactions (writer, ledger).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import isnan
from types import NoneType
from typing import Any, Final

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import Dumper, Loader
from psycopg.pq import Format
from psycopg.rows import TupleRow
from psycopg.types.numeric import FloatBinaryDumper, Int8BinaryDumper

from gristmill.ledger.session import Found
from gristmill.ledger.table import Table

__all__ = ["Connection", "PostgresSession", "adapt", "column_type"]

Connection = psycopg.Connection[TupleRow]


_TYPES: Final[Mapping[type, str]] = {int: "int8", str: "text", bytes: "bytea", float: "float8"}


def column_type(kinds: Sequence[type]) -> str:
    """Return the type of a column that holds these kinds of values."""
    [found] = [_TYPES[kind] for kind in kinds if kind is not NoneType]
    return found


def escaped(text: str) -> str:
    """Write a text so that PostgreSQL can hold it."""
    if "\0" in text or "\x01" in text:
        return text.replace("\x01", "\x01\x01").replace("\0", "\x010")
    return text


def plain(data: bytes) -> str:
    """Read a text that `escaped` wrote."""
    text = data.decode()
    if "\x01" in text:
        parts = text.split("\x01\x01")
        return "\x01".join(part.replace("\x010", "\0") for part in parts)
    return text


class _TextDumper(Dumper):
    format = Format.BINARY
    oid = psycopg.adapters.types["text"].oid

    def dump(self, obj: str) -> Buffer:
        return escaped(obj).encode()


class _TextLoader(Loader):
    format = Format.BINARY

    def load(self, data: Buffer) -> str:
        return plain(bytes(data))


class _TruthDumper(Int8BinaryDumper):
    def dump(self, obj: Any) -> Buffer | None:
        return super().dump(int(obj))


class _NumberDumper(FloatBinaryDumper):
    def dump(self, obj: float) -> Buffer | None:
        return None if isnan(obj) else super().dump(obj)


class _WholeDumper(Int8BinaryDumper):
    """Every integer as the same type, so that a statement is prepared once."""

    def dump(self, obj: int) -> Buffer | None:
        if not -(2**63) <= obj < 2**63:
            raise OverflowError(f"expected an integer of 64 bits, got {obj}")
        return super().dump(obj)


def adapt(connection: Connection) -> None:
    """Let a connection write and read values as the ledger means them."""
    adapters = connection.adapters
    adapters.register_dumper(str, _TextDumper)
    adapters.register_dumper(int, _WholeDumper)
    adapters.register_dumper(bool, _TruthDumper)
    adapters.register_dumper(float, _NumberDumper)
    adapters.register_loader("text", _TextLoader)


@lru_cache(maxsize=512)
def _placed(sql: str) -> str:
    return sql.replace("%", "%%").replace("?", "%s")


class _Found:
    """A cursor as `Found`."""

    __slots__ = ("_cursor",)

    def __init__(self, cursor: psycopg.Cursor[TupleRow]) -> None:
        self._cursor: Final = cursor

    @property
    def rowcount(self) -> int:
        return self._cursor.rowcount

    def fetchone(self) -> Any:
        return self._cursor.fetchone()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._cursor.fetchall())


class PostgresSession:
    """A connection as `Session`.

    Args:
        connection: adapted.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection: Final = connection

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Found:
        """Run one statement."""
        return _Found(self.connection.execute(_placed(sql), parameters, binary=True))  # pyright: ignore[reportArgumentType]

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> None:
        """Run one statement for each row of parameters."""
        with self.connection.cursor() as cursor:
            cursor.executemany(_placed(sql), list(parameters))  # pyright: ignore[reportArgumentType]

    def copy(self, table: Table[Any], rows: Iterable[Sequence[Any]]) -> None:
        """Add many rows to a table at once."""
        statement = f"COPY {table.name} ({', '.join(table.columns)}) FROM STDIN (FORMAT BINARY)"
        with self.connection.cursor() as cursor, cursor.copy(statement) as copy:  # pyright: ignore[reportArgumentType]
            copy.set_types([column_type(kinds) for kinds in table.kinds])
            for row in rows:
                copy.write_row(row)
