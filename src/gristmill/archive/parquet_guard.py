"""Parquet files from anywhere, opened so that no claim in them is believed.

Invariant: before pyarrow allocates anything for a column, the footer's length, every offset, size and count of its
chunks, and every page header are compared with the bytes of the file and with limits that the writer keeps too.
Dictionaries and delta encodings, in which few bytes become many, are refused: our writer makes none. So reading a row
group takes at most a few times the bytes that its pages hold, whatever a file says.

A row group is fetched with one read for each run of neighbouring columns, which is what object stores want.

Not here: what the columns mean (parquet_part), and digests of files (manifest).
"""

from __future__ import annotations

import io
from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import Any, BinaryIO, Final

from gristmill.archive.arrow import pa, pq
from gristmill.archive.page_headers import BadPage, ChunkClaims, check_chunk
from gristmill.archive.place import reading
from gristmill.errors import Code, DecodeError

__all__ = ["MOST_CHUNK_BYTES", "MOST_GROUP_BYTES", "MOST_ROWS", "MOST_VALUES", "GuardedFile"]

MOST_ROWS: Final = 2**17
"""Rows of a row group."""

MOST_VALUES: Final = 2**25
"""Values of one column of a row group, and so tokens that one call adds to its base."""

MOST_CHUNK_BYTES: Final = 2**29
"""Bytes of one column of a row group after decompression."""

MOST_GROUP_BYTES: Final = 2**30
"""Bytes of all columns of a row group after decompression."""

_MAGIC: Final = b"PAR1"
_MOST_FOOTER: Final = 2**24
_MOST_GROUPS: Final = 2**14
_CODECS: Final = frozenset({"ZSTD", "UNCOMPRESSED"})
_TAIL: Final = 2**16
"""Pyarrow looks at so many bytes at the end of a file to find its footer."""


class _Window(io.RawIOBase):
    """The parts of a file that were fetched and checked, at their places; there is nothing else."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._at = 0
        self.parts: dict[int, memoryview] = {}

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def size(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0 if whence == io.SEEK_SET else self._at if whence == io.SEEK_CUR else self._size)
        return self._at

    def read(self, size: int = -1) -> Any:
        wanted = self._size - self._at if size < 0 else min(size, self._size - self._at)
        for start, part in self.parts.items():
            if start <= self._at and self._at + wanted <= start + len(part):
                first = self._at - start
                self._at += wanted
                return part[first : first + wanted].tobytes()
        raise OSError(f"bytes {self._at} to {self._at + wanted} were not checked")


class GuardedFile:
    """One file of a data set.

    Args:
        file: its bytes; it is closed with this.
        where: its path, for errors.
        schema: the columns that it has to have, exactly.
        lists: those of them whose values are lists.

    Raises:
        DecodeError: `file_unreadable`; `file_malformed`: it is no Parquet file with these columns, or claims what
            cannot be.
    """

    def __init__(self, file: BinaryIO, where: str, schema: Any, lists: Collection[str]) -> None:
        self.where = where
        self._file = file
        self._lists = frozenset(lists)
        with reading(where):
            size = file.seek(0, io.SEEK_END)
            tail = self._footer(size)
        self._end = size - len(tail)
        self._window = _Window(size)
        self._window.parts[self._end] = tail
        with self._decoding():
            read = pq.ParquetFile(
                pa.PythonFile(self._window, mode="r"),
                thrift_string_size_limit=_MOST_FOOTER,
                thrift_container_size_limit=_MOST_GROUPS,
            )
            found = read.schema_arrow
        if not found.equals(schema):
            raise self._malformed(f"the columns {', '.join(schema.names)}", ", ".join(map(str, found.names)))
        self._read = read
        self._columns = [read.schema.column(index) for index in range(len(read.schema))]
        self._check_footer()

    def _footer(self, size: int) -> memoryview:
        """Read the end of the file, which holds its footer."""
        self._file.seek(max(size - _TAIL, 0))
        tail = self._file.read(_TAIL)
        if size < 12 or tail[-4:] != _MAGIC:
            raise self._malformed("a Parquet file", "one that does not end like one")
        footer = int.from_bytes(tail[-8:-4], "little")
        if footer > size - 12 or footer > _MOST_FOOTER:
            raise self._malformed("a footer within the file", f"one of {footer:,} bytes in {size:,}")
        if footer + 8 > len(tail):
            self._file.seek(size - footer - 8)
            tail = self._file.read(footer + 8)
        self._data_end = size - footer - 8
        return memoryview(tail)

    def _malformed(self, expected: str, got: str) -> DecodeError:
        return DecodeError(f"expected {expected}, got {got}", where=self.where)

    @contextmanager
    def _decoding(self) -> Generator[None]:
        """Turn what pyarrow says of a file into an error of ours."""
        try:
            yield
        except (OSError, ValueError, OverflowError, MemoryError, pa.ArrowException) as error:
            message = f"expected a Parquet file: {error}"
            raise DecodeError(message, code=Code.FILE_MALFORMED, where=self.where) from error

    def _check_footer(self) -> None:
        metadata = self._read.metadata
        groups = metadata.num_row_groups
        self.starts: list[int] = [0]
        for number in range(groups):
            group = metadata.row_group(number)
            rows = group.num_rows
            if not 0 <= rows <= MOST_ROWS:
                raise self._malformed(f"at most {MOST_ROWS:,} rows in a row group", f"{rows:,}")
            self.starts.append(self.starts[-1] + rows)
            total = sum(self._check_column(group, index, rows) for index in range(len(self._columns)))
            if total > MOST_GROUP_BYTES:
                raise self._malformed(f"at most {MOST_GROUP_BYTES:,} bytes in a row group", f"{total:,}")
        if metadata.num_rows != self.starts[-1]:
            raise self._malformed(f"{self.starts[-1]:,} rows, as in its row groups", f"{metadata.num_rows:,}")

    def _check_column(self, group: Any, index: int, rows: int) -> int:
        column = group.column(index)
        name = self._columns[index].path
        at, size = column.data_page_offset, column.total_compressed_size
        if column.path_in_schema != name or column.file_path or column.has_dictionary_page:
            raise self._malformed(f"the pages of column {name}", "a dictionary, or those of another column or file")
        if column.compression not in _CODECS:
            raise self._malformed("zstd", f"compression {column.compression} in column {name}")
        if not 4 <= at <= at + size <= self._data_end or (size == 0) is not (rows == 0):
            raise self._malformed("columns within the file", f"{size:,} bytes from {at:,} for column {name}")
        if not 0 <= column.total_uncompressed_size <= MOST_CHUNK_BYTES:
            got = f"{column.total_uncompressed_size:,}"
            raise self._malformed(f"at most {MOST_CHUNK_BYTES:,} bytes in a column", f"{got} in {name}")
        values = column.num_values
        is_list = name.partition(".")[0] in self._lists
        if not rows <= values <= MOST_VALUES or (values != rows and not is_list):
            raise self._malformed("values for the rows of a column", f"{values:,} for {rows:,} rows in {name}")
        return column.total_uncompressed_size

    @property
    def groups(self) -> range:
        """The row groups."""
        return range(len(self.starts) - 1)

    def read(self, group: int, names: Collection[str]) -> Any:
        """Read some columns of a row group as a table.

        Raises:
            DecodeError: `file_unreadable`, `file_malformed`.
        """
        wanted = [index for index, column in enumerate(self._columns) if column.path.partition(".")[0] in names]
        claims = self._read.metadata.row_group(group)
        try:
            self._fetch([claims.column(index) for index in wanted])
            with self._decoding():
                table = self._read.read_row_group(group, columns=list(names), use_threads=False)
                table.validate(full=True)
        finally:
            self._window.parts = {self._end: self._window.parts[self._end]}
        if table.num_rows != self.starts[group + 1] - self.starts[group]:
            raise self._malformed("the rows of a row group", f"{table.num_rows:,}")
        return table.combine_chunks()

    def _fetch(self, chunks: list[Any]) -> None:
        """Read the bytes of column chunks, neighbours together, and check their pages."""
        there = (chunk for chunk in chunks if chunk.total_compressed_size)
        runs: list[list[Any]] = []
        for chunk in sorted(there, key=lambda one: one.data_page_offset):
            end = runs[-1][-1].data_page_offset + runs[-1][-1].total_compressed_size if runs else -1
            if chunk.data_page_offset < end:
                raise self._malformed("columns beside each other", "columns that share bytes")
            if chunk.data_page_offset == end:
                runs[-1].append(chunk)
            else:
                runs.append([chunk])
        for run in runs:
            start = run[0].data_page_offset
            size = run[-1].data_page_offset + run[-1].total_compressed_size - start
            with reading(self.where):
                self._file.seek(start)
                data = memoryview(self._file.read(size))
            if len(data) != size:
                raise self._malformed(f"{size:,} bytes of columns", f"{len(data):,}")
            for chunk in run:
                first = chunk.data_page_offset - start
                claims = ChunkClaims(chunk.num_values, chunk.total_uncompressed_size)
                try:
                    check_chunk(data[first : first + chunk.total_compressed_size], claims)
                except BadPage as error:
                    raise DecodeError(f"{error} ({chunk.path_in_schema})", where=self.where) from error
            self._window.parts[start] = data

    def close(self) -> None:
        """Close the file."""
        self._read.close()
        self._file.close()
