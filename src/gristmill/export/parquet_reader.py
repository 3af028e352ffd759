"""Parquet files of rows, read strictly.

Invariant: a file is read by the schema it was written with and by no other; every row is given or an error with its
place. Row groups are read one at a time, so memory does not grow with the file.

Not here: rows as columns (parquet_rows), and whether rows are right (check).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from gristmill.errors import Code, DecodeError
from gristmill.export.arrow import pa, pq
from gristmill.export.parquet_rows import SCHEMA_KEY, SCHEMAS, rows_of
from gristmill.export.row_json import ROW_SCHEMA
from gristmill.reconstruction import Row

__all__ = ["ParquetFile", "read_parquet_rows"]

_KEPT_GROUPS: Final = 4


class ParquetFile:
    """One file of rows.

    Args:
        path: of the file.

    Raises:
        DecodeError: `file_unreadable`, `file_malformed` (not Parquet), `row_malformed` (other columns),
            `schema_unsupported` (written by a newer version).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: OrderedDict[int, list[Row | DecodeError]] = OrderedDict()
        try:
            self._file: Any = pq.ParquetFile(path)
            schema = self._file.schema_arrow
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(path, error) from error
        _check_schema(schema, path)
        sizes = (self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups))
        self.starts: list[int] = [0]
        for size in sizes:
            self.starts.append(self.starts[-1] + size)

    @property
    def groups(self) -> range:
        """The row groups."""
        return range(len(self.starts) - 1)

    def where(self, number: int) -> str:
        """Name the place of a row, by its number from 0."""
        return f"{self.path} row {number}"

    def column(self, group: int, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Give the values of some columns of a row group, row by row.

        Raises:
            DecodeError: `file_malformed`.
        """
        table = self._read(group, names)
        yield from zip(*(table.column(name).to_pylist() for name in names), strict=True)

    def rows(self, group: int) -> list[Row | DecodeError]:
        """Read the rows of a row group; an error stands for one that is none.

        Raises:
            DecodeError: `file_malformed`.
        """
        if group not in self._kept:
            made: list[Row | DecodeError] = []
            start = self.starts[group]
            for batch in self._read(group, None).to_batches():
                first = start + len(made)
                made += rows_of(batch, lambda index, first=first: self.where(first + index))
            self._kept[group] = made
        self._kept.move_to_end(group)
        while len(self._kept) > _KEPT_GROUPS:
            self._kept.popitem(last=False)
        return self._kept[group]

    def _read(self, group: int, names: Sequence[str] | None) -> Any:
        try:
            table = self._file.read_row_group(group, columns=names, use_threads=False)
            table.validate(full=True)
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(self.path, error) from error
        return table

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _unreadable(path: Path, error: Exception) -> DecodeError:
    if isinstance(error, OSError) and error.errno is not None:
        message = f"cannot read {path}: {error.strerror or error}"
        return DecodeError(message, code=Code.FILE_UNREADABLE, where=str(path))
    return DecodeError(f"expected a Parquet file: {error}", where=str(path))


def _check_schema(schema: Any, path: Path) -> None:
    metadata: dict[bytes, bytes] = schema.metadata or {}
    stated = metadata.get(SCHEMA_KEY, b"")
    version = int(stated) if stated.isdigit() and len(stated) < 10 else 0
    if version > ROW_SCHEMA:
        raise DecodeError(
            f"expected row schema {ROW_SCHEMA} or older, got {version}",
            code=Code.SCHEMA_UNSUPPORTED,
            where=str(path),
            hint="it was written by a newer version of Gristmill",
        )
    if version not in SCHEMAS:
        message = (
            f"expected row schema {ROW_SCHEMA} or older in the metadata, got {stated.decode('ascii', 'replace')!r}"
        )
        raise DecodeError(message, code=Code.ROW_MALFORMED, where=str(path))
    columns = SCHEMAS[version]
    if schema.equals(columns):
        return
    expected = {field.name: field for field in columns}
    for field in schema:
        if field.name not in expected or not expected[field.name].equals(field):
            message = f"expected {expected.get(field.name, 'no such column')}, got column {field}"
            raise DecodeError(message, code=Code.ROW_MALFORMED, where=f"{path} $.{field.name}")
    message = f"expected the columns {', '.join(columns.names)}, got {', '.join(schema.names)}"
    raise DecodeError(message, code=Code.ROW_MALFORMED, where=str(path))


def read_parquet_rows(path: Path) -> Iterator[Row]:
    """Read the rows of a Parquet file exactly as they were written.

    Raises:
        DecodeError: `file_unreadable`, `file_malformed`, `row_malformed`, `schema_unsupported`.
    """
    file = ParquetFile(path)
    try:
        for group in file.groups:
            for row in file.rows(group):
                if isinstance(row, DecodeError):
                    raise row
                yield row
    finally:
        file.close()
