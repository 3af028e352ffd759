"""Tables whose columns are declared once: a row type gives the DDL, the insert and the reader.

Invariant: no column name or order is written down anywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Final, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from gristmill.ledger.session import Session

__all__ = ["Table", "kinds_of"]

RowT = TypeVar("RowT", bound=NamedTuple)

_TYPES: Final = {int: "INTEGER", str: "TEXT", bytes: "BLOB", float: "REAL"}


def kinds_of(hint: Any) -> tuple[type, ...]:
    """Return the types that a column's annotation allows."""
    return get_args(hint) if get_origin(hint) is UnionType else (hint,)


def _column(name: str, kinds: tuple[type, ...], rest: str) -> str:
    (kind,) = (kind for kind in kinds if kind is not NoneType)
    return f"{name} {_TYPES[kind]}{'' if NoneType in kinds else ' NOT NULL'}{rest}"


class Table(Generic[RowT]):
    """One table.

    Args:
        name: as in SQL.
        row: NamedTuple of `int`, `str`, `bytes`, `float` or one of them `| None`; its first field is the key, an
            integer.
        unique: columns that together name a row.
        indexed: columns with an index of their own.
        references: table whose key this table's key refers to.
        monotonic: a key is never used again.
    """

    def __init__(
        self,
        name: str,
        row: type[RowT],
        *,
        unique: Sequence[str] = (),
        indexed: Sequence[str] = (),
        references: str | None = None,
        monotonic: bool = False,
    ) -> None:
        self.name = name
        self.row = row
        self.columns: tuple[str, ...] = row._fields
        self.key = self.columns[0]
        self.unique: Final = tuple(unique)
        self.indexed: Final = tuple(indexed)
        names = ", ".join(self.columns)
        self.insert: Final = f"INSERT INTO {name} ({names}) VALUES ({', '.join('?' * len(self.columns))})"
        changed = ", ".join(f"{column} = ?" for column in self.columns[1:])
        self.update: Final = f"UPDATE {name} SET {changed} WHERE {self.key} = ?"
        self._select: Final = f"SELECT {names} FROM {name}"
        rest = " PRIMARY KEY" + " AUTOINCREMENT" * monotonic
        if references is not None:
            rest += f" REFERENCES {references}"
        hints: Mapping[str, Any] = get_type_hints(row)
        self.kinds: Final = tuple(kinds_of(hints[column]) for column in self.columns)
        columns = zip(self.columns, self.kinds, strict=True)
        lines = [_column(column, kinds, rest if column == self.key else "") for column, kinds in columns]
        if unique:
            lines.append(f"UNIQUE ({', '.join(unique)})")
        self.ddl: Final = (
            f"CREATE TABLE {name} (\n  " + ",\n  ".join(lines) + "\n)",
            *(f"CREATE INDEX {name}_{column} ON {name} ({column})" for column in indexed),
        )

    def update_row(self, row: RowT) -> tuple[Any, ...]:
        """Return the parameters of `update`."""
        return (*row[1:], row[0])

    def rows(self, connection: Session, where: str = "", parameters: Sequence[Any] = ()) -> Iterator[RowT]:
        """Read rows; `where` is SQL behind the table's name.

        Raises:
            TypeError: a value is not of its column's type, which only a damaged file has.
        """
        for values in connection.execute(f"{self._select} {where}", parameters):
            for value, kinds in zip(values, self.kinds, strict=True):
                if type(value) not in kinds:
                    raise TypeError(f"table {self.name}: expected {kinds}, got {type(value)}")
            yield self.row._make(values)

    def one(self, connection: Session, where: str, parameters: Sequence[Any]) -> RowT | None:
        """Read the row that a condition names, None where there is none."""
        return next(self.rows(connection, where, parameters), None)
