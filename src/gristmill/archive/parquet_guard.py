"""Parquet files from anywhere, opened so that no claim in them is believed.

Invariant: before pyarrow sees anything of a file, its footer is read by us, every offset, size and count in it is
compared with the bytes of the file and with limits that the writer keeps too, and a footer that says only that is put
in its place; before a column is decoded, every page header of it is compared likewise. Dictionaries and delta
encodings, in which few bytes become many, are refused: our writer makes none. So reading a row group takes at most a
few times the bytes that its pages hold, whatever a file says.

A row group is fetched with one read for each run of neighbouring columns, which is what object stores want.

Not here: what the columns mean (parquet_part), and digests of files (manifest).
"""

from __future__ import annotations

import functools
import io
from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import Any, BinaryIO, Final

from gristmill.archive.arrow import pa, pq
from gristmill.archive.columns import Table
from gristmill.archive.compact import BadBytes
from gristmill.archive.footer import Footer, FooterColumn, FooterGroup, footer_bytes, read_footer
from gristmill.archive.page_headers import check_chunk
from gristmill.archive.parquet_tables import LISTS, SCHEMAS
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
_MOST_FOOTER: Final = 2**23
_CODECS: Final = frozenset({0, 6})
"""Uncompressed and zstd."""
_TAIL: Final = 2**16
"""Read at the end of a file in the hope that the footer is in it."""


@functools.cache
def _template(name: str) -> tuple[Footer, tuple[str, ...]]:
    """Make the footer of a table without rows, and name the columns of its leaves."""
    written = io.BytesIO()
    pq.write_table(SCHEMAS[name].empty_table(), written)
    data = written.getvalue()
    size = int.from_bytes(data[-8:-4], "little")
    footer = read_footer(memoryview(data[-8 - size : -8]))
    return footer, tuple(path[0].decode() for _, path in footer.leaves)


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
        table: whose columns it has to have, exactly.

    Raises:
        DecodeError: `file_unreadable`; `file_malformed`: it is no Parquet file with these columns, or claims what
            cannot be.
    """

    def __init__(self, file: BinaryIO, where: str, table: Table) -> None:
        self.where = where
        self._file = file
        self._lists = LISTS[table.name]
        template, self._names = _template(table.name)
        with reading(where):
            size = file.seek(0, io.SEEK_END)
            data = self._footer(size)
        try:
            footer = read_footer(data)
        except BadBytes as error:
            raise DecodeError(f"expected the footer of a Parquet file: {error}", where=where) from error
        if footer.elements != template.elements:
            got = ", ".join(element.name.decode("ascii", "replace") for element in footer.elements[1:])
            raise self._malformed(f"the columns of {table.name}", got or "none")
        self._groups = footer.groups
        self._check(footer)
        self._window = _Window(size)
        with self._decoding():
            metadata = pq.read_metadata(pa.BufferReader(footer_bytes(template, footer.groups)))
            # Without `pre_buffer` it reads the wanted columns only, and not what lies between them.
            source = pa.PythonFile(self._window, mode="r")
            self._read = pq.ParquetFile(source, metadata=metadata, pre_buffer=False)

    def _footer(self, size: int) -> memoryview:
        """Read the footer at the end of the file."""
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
        return memoryview(tail)[-8 - footer : -8]

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

    def _check(self, footer: Footer) -> None:
        self.starts: list[int] = [0]
        for group in footer.groups:
            if not 0 < group.rows <= MOST_ROWS:
                raise self._malformed(f"a row group of at most {MOST_ROWS:,} rows", f"{group.rows:,}")
            if len(group.columns) != len(self._names):
                raise self._malformed(f"{len(self._names)} columns in a row group", str(len(group.columns)))
            for name, column in zip(self._names, group.columns, strict=True):
                self._check_column(name, column, group.rows)
            total = sum(column.uncompressed for column in group.columns)
            if total > MOST_GROUP_BYTES:
                raise self._malformed(f"at most {MOST_GROUP_BYTES:,} bytes in a row group", f"{total:,}")
            self.starts.append(self.starts[-1] + group.rows)
        if footer.rows != self.starts[-1]:
            raise self._malformed(f"{self.starts[-1]:,} rows, as in its row groups", f"{footer.rows:,}")

    def _check_column(self, name: str, column: FooterColumn, rows: int) -> None:
        if not column.plain:
            raise self._malformed(f"the pages of column {name}", "a dictionary, encrypted ones or another file")
        if column.codec not in _CODECS:
            raise self._malformed("zstd", f"compression {column.codec} in column {name}")
        if not (column.offset >= 4 and 0 < column.compressed <= self._data_end - column.offset):
            got = f"{column.compressed:,} bytes from {column.offset:,}"
            raise self._malformed("columns within the file", f"{got} for column {name}")
        if not 0 < column.uncompressed <= MOST_CHUNK_BYTES:
            raise self._malformed(
                f"at most {MOST_CHUNK_BYTES:,} bytes in a column", f"{column.uncompressed:,} in {name}"
            )
        if not rows <= column.values <= MOST_VALUES or (column.values != rows and name not in self._lists):
            raise self._malformed("values for the rows of a column", f"{column.values:,} for {rows:,} rows in {name}")

    @property
    def groups(self) -> range:
        """The row groups."""
        return range(len(self._groups))

    def read(self, group: int, names: Collection[str]) -> Any:
        """Read some columns of a row group as a table.

        Raises:
            DecodeError: `file_unreadable`, `file_malformed`.
        """
        wanted = [name in names for name in self._names]
        try:
            self._fetch(self._groups[group], wanted)
            with self._decoding():
                table = self._read.read_row_group(group, columns=list(names), use_threads=False)
                table.validate(full=True)
        finally:
            self._window.parts = {}
        if table.num_rows != self._groups[group].rows:
            raise self._malformed("the rows of a row group", f"{table.num_rows:,}")
        with self._decoding():
            return table.combine_chunks()

    def _fetch(self, group: FooterGroup, wanted: Collection[bool]) -> None:
        """Read the bytes of column chunks, neighbours together, and check their pages."""
        chunks = [column for column, is_wanted in zip(group.columns, wanted, strict=True) if is_wanted]
        runs: list[list[FooterColumn]] = []
        for chunk in sorted(chunks, key=lambda one: one.offset):
            end = runs[-1][-1].offset + runs[-1][-1].compressed if runs else -1
            if chunk.offset < end:
                raise self._malformed("columns beside each other", "columns that share bytes")
            if chunk.offset == end:
                runs[-1].append(chunk)
            else:
                runs.append([chunk])
        for run in runs:
            start = run[0].offset
            size = run[-1].offset + run[-1].compressed - start
            with reading(self.where):
                self._file.seek(start)
                data = memoryview(self._file.read(size))
            if len(data) != size:
                raise self._malformed(f"{size:,} bytes of columns", f"{len(data):,}")
            for chunk in run:
                first = chunk.offset - start
                try:
                    check_chunk(data[first : first + chunk.compressed], chunk.values, chunk.uncompressed)
                except BadBytes as error:
                    raise DecodeError(f"expected pages of a column: {error}", where=self.where) from error
            self._window.parts[start] = data

    def close(self) -> None:
        """Close the file."""
        self._read.close()
        self._file.close()
