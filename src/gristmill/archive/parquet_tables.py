"""The tables in Arrow: their schemas, how they are written, rows to columns and columns to rows.

Invariant: ids and log-probabilities are joined and cut as numpy buffers and never become Python numbers.

zstd at level 1; BYTE_STREAM_SPLIT for ids and log-probabilities. No dictionaries: a reader could be made to expand one
beyond any bound, and zstd finds the repeated names as well.

Not here: files (parquet_part).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from gristmill.archive.arrow import pa
from gristmill.archive.attempt_rows import RowValues
from gristmill.archive.columns import TABLES, Table
from gristmill.archive.manifest import ARCHIVE_SCHEMA

__all__ = ["LISTS", "SCHEMAS", "RowBlock", "row_bytes", "table_of", "write_options"]

_DTYPES: Final = {"ids": np.dtype(np.int32), "floats": np.dtype(np.float32)}
_ROW_BYTES: Final = 256


def _list(kind: Any) -> Any:
    return pa.list_(pa.field("element", kind, nullable=False))


_TYPES: Final[dict[str, Any]] = {
    "string": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "binary": pa.binary(),
    "ids": _list(pa.int32()),
    "floats": _list(pa.float32()),
    "names": _list(pa.string()),
}

SCHEMAS: Final[dict[str, Any]] = {
    table.name: pa.schema(
        [pa.field(column.name, _TYPES[column.kind], nullable=column.null) for column in table.columns],
        metadata={b"gristmill.archive_schema": str(ARCHIVE_SCHEMA).encode()},
    )
    for table in TABLES
}
"""Arrow's schema of each table, by name."""

LISTS: Final = {
    table.name: frozenset(column.name for column in table.columns if column.kind in {*_DTYPES, "names"})
    for table in TABLES
}
"""The columns of each table whose values are lists."""


def write_options(table: Table) -> dict[str, Any]:
    """Say how pyarrow writes a table."""
    split = (f"{column.name}.list.element" for column in table.columns if column.kind in _DTYPES)
    told = [column.name for column in table.columns if column.kind in {"string", "int", "float"}]
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": False,
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        "write_statistics": told,
    }


def row_bytes(row: RowValues) -> int:
    """Return about how much memory a row takes."""
    held = sum(len(value) if isinstance(value, bytes) else 0 for value in row.values())
    return _ROW_BYTES + held + sum(value.nbytes for value in row.values() if isinstance(value, np.ndarray))


def table_of(table: Table, rows: Sequence[RowValues]) -> Any:
    """Make an Arrow table of rows."""
    columns: list[Any] = []
    for column in table.columns:
        values = [row[column.name] for row in rows]
        kind = _TYPES[column.kind]
        if column.kind in _DTYPES:
            columns.append(_number_lists(values, kind, _DTYPES[column.kind]))
        else:
            columns.append(pa.array(values, kind))
    return pa.Table.from_arrays(columns, schema=SCHEMAS[table.name])


def _number_lists(arrays: Sequence[np.ndarray[Any, Any] | None], kind: Any, dtype: np.dtype[Any]) -> Any:
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([0 if array is None else array.size for array in arrays], out=offsets[1:])
    held = [array for array in arrays if array is not None]
    values = np.concatenate(held).astype(dtype, copy=False) if held else np.empty(0, dtype)
    missing = np.fromiter((array is None for array in arrays), bool, len(arrays))
    # A row group is bounded by bytes, so its offsets fit 32 bits.
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)), pa.array(values), type=kind, mask=pa.array(missing)
    )


class RowBlock(NamedTuple):
    """The rows of a row group, by column; `first` is the number of its first row over the file."""

    first: int
    rows: int
    columns: dict[str, list[Any]]

    @classmethod
    def of(cls, first: int, table: Table, read: Any, names: Collection[str]) -> RowBlock:
        """Make a block of a checked Arrow table."""
        columns: dict[str, list[Any]] = {}
        for column in table.columns:
            if column.name not in names:
                continue
            chunked = read.column(column.name)
            array = chunked.chunk(0) if chunked.num_chunks else pa.array([], chunked.type)
            columns[column.name] = _views(array) if column.kind in _DTYPES else array.to_pylist()
        return cls(first, read.num_rows, columns)

    def row(self, number: int) -> RowValues:
        """Give a row by its number over the file."""
        at = number - self.first
        return {name: values[at] for name, values in self.columns.items()}


def _views(lists: Any) -> list[Any]:
    offsets, values = lists.offsets.to_numpy(), lists.values.to_numpy()
    missing = lists.is_null().to_numpy(zero_copy_only=False)
    # Copies: an attempt that is kept must not keep the whole row group.
    return [
        None if none else values[start:end].copy()
        for none, start, end in zip(missing, offsets[:-1], offsets[1:], strict=True)
    ]
