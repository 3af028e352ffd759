"""One part of a partition: the three files with its number, written and read.

Invariant: an attempt is whole in one part; its rows stand together in each table, in the order of the attempts. Reading
the attempts one after the other reads every row group once, reading one of them only the row groups that hold it.

Not here: how an attempt becomes rows (attempt_rows), and which parts there are (writer, reader).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

from gristmill.archive.arrow import pa, pq
from gristmill.archive.attempt_reading import unpack
from gristmill.archive.attempt_rows import ArchivedAttempt, Packed, RowValues
from gristmill.archive.columns import ATTEMPTS, BODIES, CALLS, TABLES, Table, file_name
from gristmill.archive.manifest import ArchiveFile
from gristmill.archive.parquet_guard import MOST_CHUNK_BYTES, MOST_ROWS, MOST_VALUES, GuardedFile
from gristmill.archive.parquet_tables import SCHEMAS, RowBlock, row_bytes, table_of, write_options
from gristmill.archive.place import Place, reading, writing
from gristmill.errors import Code, DecodeError, LedgerError

__all__ = ["GROUP_BYTES", "PartReader", "PartWriter"]

GROUP_BYTES: Final = 16 * 2**20
"""A row group holds rows of about this much memory, or one larger row."""

_MOST_GROUP_ROWS: Final = MOST_ROWS // 2
_KEPT_BLOCKS: Final = 2
_ALWAYS: Final = ("rollout_id", "attempt")
_WIRE: Final = frozenset({"request", "reply", "headers", "status"})
_TOKENS: Final = frozenset({"token_ids", "logprobs", "extras"})


class _Sink:
    """A file as pyarrow wants one; what goes through it is digested."""

    closed = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self.digest = sha256()
        self._file = path.open("wb")

    def write(self, data: Any) -> int:
        # A writer that is given up still writes its footer when Python takes it away.
        if not self._file.closed:
            self._file.write(data)
            self.digest.update(data)
            self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """The file is synced when it is published."""

    def close(self) -> None:
        self.closed = True
        self._file.close()


class _TableWriter:
    """One file of a part; rows are held back until a row group is full."""

    def __init__(self, folder: Path, table: Table, part: int) -> None:
        self.table = table
        self.rows = 0
        self._waiting: list[RowValues] = []
        self._waiting_bytes = 0
        self.sink = _Sink(folder / file_name(table, part))
        self._output: Any = pa.PythonFile(self.sink, mode="w")
        self._writer: Any = pq.ParquetWriter(self._output, SCHEMAS[table.name], **write_options(table))

    def add(self, row: RowValues) -> int:
        """Take a row and return about how much memory it takes."""
        size = row_bytes(row)
        if self._waiting and (self._waiting_bytes + size > GROUP_BYTES or len(self._waiting) >= _MOST_GROUP_ROWS):
            self._flush()
        self._waiting.append(row)
        self._waiting_bytes += size
        self.rows += 1
        return size

    def _flush(self) -> None:
        rows, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if rows:
            self._writer.write_table(table_of(self.table, rows), row_group_size=len(rows))

    def close(self) -> ArchiveFile:
        """Write what was held back and the footer."""
        self._flush()
        self._writer.close()
        self._output.close()
        self.sink.close()
        sink = self.sink
        return ArchiveFile(sink.path.name, sink.bytes, sink.digest.hexdigest(), self.rows)


class PartWriter:
    """Writes one part into a local folder.

    Args:
        folder: that is being written.
        part: number of the part.
    """

    def __init__(self, folder: Path, part: int) -> None:
        self.bytes = 0
        self._where = str(folder)
        with writing(self._where):
            self._tables = {table.name: _TableWriter(folder, table, part) for table in TABLES}

    def add(self, packed: Packed) -> None:
        """Write an attempt.

        Raises:
            LedgerError: `item_too_large`: a row is larger than a reader takes.
            ExportError: `file_unreadable`.
        """
        attempts, calls, bodies = (self._tables[table.name] for table in TABLES)
        places = {
            "first_call": calls.rows,
            "call_rows": len(packed.calls),
            "first_body": bodies.rows,
            "body_rows": len(packed.bodies),
        }
        attempt = {**packed.attempt, **places}
        for row in (attempt, *packed.calls, *packed.bodies):
            _check_size(row)
        with writing(self._where):
            self.bytes += attempts.add(attempt)
            self.bytes += sum(map(calls.add, packed.calls)) + sum(map(bodies.add, packed.bodies))

    def close(self) -> list[ArchiveFile]:
        """Finish the files.

        Raises:
            ExportError: `file_unreadable`.
        """
        with writing(self._where):
            return [table.close() for table in self._tables.values()]

    def discard(self) -> None:
        """Close the files without finishing them."""
        for table in self._tables.values():
            table.sink.close()


def _check_size(row: RowValues) -> None:
    """Refuse a row that makes a row group by itself which no reader takes."""
    ids = row.get("token_ids")
    largest = max((len(value) for value in row.values() if isinstance(value, bytes)), default=0)
    tokens = 0 if ids is None else ids.size
    if max(2 * largest, row_bytes(row)) <= MOST_CHUNK_BYTES and tokens <= MOST_VALUES // 2:
        return
    where = f"rollout={row['rollout_id']}"
    raise LedgerError(
        f"expected a call of at most {MOST_VALUES // 2:,} new tokens and {MOST_CHUNK_BYTES // 2:,} bytes in one field, "
        f"got {row_bytes(row):,} bytes",
        code=Code.ITEM_TOO_LARGE,
        where=where,
    )


class _TableReader:
    """One file of a part, row by row; some row groups are kept at hand."""

    def __init__(self, file: BinaryIO, where: str, table: Table) -> None:
        self.where = where
        self._table = table
        self._file = GuardedFile(file, where, table)
        self._kept: OrderedDict[tuple[int, frozenset[str]], RowBlock] = OrderedDict()

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self._file.starts[-1]

    def _block(self, group: int, names: frozenset[str]) -> RowBlock:
        key = (group, names)
        block = self._kept.get(key)
        if block is None:
            read = self._file.read(group, names)
            block = self._kept[key] = RowBlock.of(self._file.starts[group], self._table, read, names)
        self._kept.move_to_end(key)
        while len(self._kept) > _KEPT_BLOCKS:
            self._kept.popitem(last=False)
        return block

    def range(self, first: int, count: int, names: Collection[str]) -> Iterator[RowValues]:
        """Give rows by their numbers.

        Raises:
            DecodeError: `file_unreadable`; `file_malformed`, there are no such rows.
        """
        if not 0 <= first <= first + count <= self.rows:
            got = f"rows {first:,} to {first + count:,}"
            raise DecodeError(f"expected rows of a table of {self.rows:,}, got {got}", where=self.where)
        wanted = frozenset(names)
        starts = self._file.starts
        for group in self._file.groups:
            begin, end = max(first, starts[group]), min(first + count, starts[group + 1])
            if begin < end:
                block = self._block(group, wanted)
                for number in range(begin, end):
                    yield block.row(number)

    def close(self) -> None:
        self._kept.clear()
        self._file.close()


class PartReader:
    """Reads one part.

    Args:
        place: the partition's folder.
        part: number of the part.
        prove: is given the name and the open file before anything of it is used; what it raises, reading raises.

    Raises:
        DecodeError: `file_unreadable`, `file_malformed`.
    """

    def __init__(self, place: Place, part: int, prove: Callable[[str, BinaryIO], None] | None = None) -> None:
        self.part = part
        self.where = place.path_of(f"part {part}")
        self._place = place
        self._prove = prove
        self._tables: dict[str, _TableReader] = {}
        self._attempts = self._open(ATTEMPTS)

    def _open(self, table: Table) -> _TableReader:
        read = self._tables.get(table.name)
        if read is None:
            name = file_name(table, self.part)
            where = self._place.path_of(name)
            with reading(where):
                file = self._place.open(name)
            try:
                if self._prove is not None:
                    with reading(where):
                        self._prove(name, file)
                        file.seek(0)
                read = self._tables[table.name] = _TableReader(file, where, table)
            except BaseException:
                file.close()
                raise
        return read

    def __len__(self) -> int:
        """Return the number of attempts."""
        return self._attempts.rows

    def rows(
        self, names: Collection[str] = ATTEMPTS.names, *, first: int = 0, count: int | None = None
    ) -> Iterator[RowValues]:
        """Give the rows of `attempts`, or some columns of them; nothing else is read."""
        yield from self._attempts.range(first, len(self) - first if count is None else count, names)

    def read(self, number: int, *, tokens: bool = True, exchanges: bool = True) -> ArchivedAttempt:
        """Read one attempt, by its number in the part.

        Raises:
            DecodeError: `file_unreadable`, `file_malformed`, `schema_unsupported`.
        """
        [row] = self.rows(first=number, count=1)
        return self.attempt(row, tokens=tokens, exchanges=exchanges)

    def attempt(self, row: RowValues, *, tokens: bool = True, exchanges: bool = True) -> ArchivedAttempt:
        """Read the attempt of a row of `attempts`; `DecodeError` as `read`."""
        calls, bodies = self.parts(row, tokens=tokens, exchanges=exchanges)
        return unpack(row, calls, bodies, f"{self.where} rollout={row['rollout_id']}", tokens=tokens)

    def parts(
        self, row: RowValues, *, tokens: bool = True, exchanges: bool = True
    ) -> tuple[list[RowValues], list[RowValues]]:
        """Give the rows of an attempt in the other tables; `DecodeError` as `read`."""
        wanted = set(CALLS.names) if tokens and exchanges else {*_ALWAYS, "kind", "record"}
        wanted |= _TOKENS if tokens else frozenset()
        wanted |= _WIRE if exchanges else frozenset()
        calls = list(self._open(CALLS).range(row["first_call"], row["call_rows"], wanted))
        if not exchanges or not row["body_rows"]:
            return calls, []
        return calls, list(self._open(BODIES).range(row["first_body"], row["body_rows"], BODIES.names))

    def __iter__(self) -> Iterator[ArchivedAttempt]:
        """Read all attempts in their order."""
        for row in self.rows():
            yield self.attempt(row)

    def close(self) -> None:
        """Close the files."""
        for table in self._tables.values():
            table.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
