"""Rows as Parquet: `rows-00000.parquet` and so on.

Invariant: rows of one attempt stand together in one file. Rows are held back until a row group is full, so memory is
bounded by a row group and one attempt, whatever the number of rollouts.

zstd at level 1; BYTE_STREAM_SPLIT and no dictionary for ids and log-probabilities, whose bytes differ in how regular
they are; a dictionary for the mask, which has two values, and for names that repeat. Statistics only where they can
skip something.

Not here: rows as columns (parquet_rows), reading (parquet_reader), the folder around the files (folder, writer).
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from gristmill.export.arrow import pa, pq
from gristmill.export.folder import Folder, Part, parquet_name
from gristmill.export.jsonl import losses_of_rows, rows_needed
from gristmill.export.parquet_rows import SCHEMA, batch_of, row_bytes
from gristmill.export.writer import Outcome, RecordDigest
from gristmill.pipeline import RebuiltRollout
from gristmill.reconstruction import Row
from gristmill.records import Capture, Result
from gristmill.selection import Selection

__all__ = ["FILE_BYTES", "ROW_GROUP_BYTES", "WRITE_OPTIONS", "ParquetRows"]

ROW_GROUP_BYTES: Final = 16 * 2**20
"""A row group holds rows of about this much memory, or one larger row."""

FILE_BYTES: Final = 2**30
"""A file that has grown to this size is closed after the attempt, and the next one begun."""

_SPLIT: Final = ("token_ids.list.element", "logprobs.list.element")
_NAMES: Final = (
    *("rollout_id", "group_id", "finish_reason", "loss_mask.list.element"),
    *(f"spans.list.element.{name}" for name in ("call_id", "role", "owner", "weight_version", "logprobs_mode")),
    *(f"spans.list.element.certificate.{name}" for name in ("relation", "parent_call_id", "cause")),
    *(f"extras.arrays.list.element.{name}" for name in ("name", "call_id", "dtype")),
    *("extras.media.list.element.digest", "credits.list.element.call_id"),
)
WRITE_OPTIONS: Final[dict[str, Any]] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": list(_NAMES),
    "column_encoding": dict.fromkeys(_SPLIT, "BYTE_STREAM_SPLIT"),
    "write_statistics": ["row_id", "rollout_id", "attempt", "group_id", "reward"],
}
"""How pyarrow writes the files."""


class ParquetRows:
    """Writes rows as Parquet files, parts of a folder."""

    def __init__(self, folder: Folder) -> None:
        self.ids = RecordDigest()
        self.losses = Counter[str]()
        self._folder = folder
        self._files = 0
        self._waiting: list[Row] = []
        self._waiting_bytes = 0
        self._open()

    def _open(self) -> None:
        self._part: Part = self._folder.part(parquet_name(self._files))
        self._files += 1
        self._sink: Any = pa.PythonFile(_Sink(self._part), mode="w")
        self._writer: Any = pq.ParquetWriter(self._sink, SCHEMA, **WRITE_OPTIONS)

    def add(self, capture: Capture, result: Result, outcome: RebuiltRollout | Selection) -> Outcome:
        """Write the rows of an attempt.

        Raises:
            ExportError: `row_malformed`, `option_invalid`.
        """
        rows = rows_needed(outcome)
        if self._part.records and self._part.size >= FILE_BYTES:
            self._finish_file()
            self._open()
        for row in rows:
            size = row_bytes(row)
            if self._waiting and self._waiting_bytes + size > ROW_GROUP_BYTES:
                self._flush()
            self._waiting.append(row)
            self._waiting_bytes += size
            self.ids.add(row.row_id)
        self.losses += losses_of_rows(result, rows)
        return outcome

    def _flush(self) -> None:
        """Write the rows held back as one row group."""
        rows, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if rows:
            batch = batch_of(rows)
            self._writer.write_table(pa.Table.from_batches([batch]), row_group_size=len(rows))
            self._part.records += len(rows)

    def _finish_file(self) -> None:
        self._flush()
        self._writer.close()
        self._sink.close()
        self._part.close()

    def close(self) -> None:
        """Write what was held back."""
        self._finish_file()


class _Sink:
    """A part as pyarrow wants a file; the part itself is closed by its folder."""

    closed = False

    def __init__(self, part: Part) -> None:
        self._part = part

    def write(self, data: Any) -> int:
        # A writer that is given up still writes its footer when Python takes it away.
        if not self._part.discarded:
            self._part.write(data)
        return len(data)

    def flush(self) -> None:
        """The part is synced when it is closed."""

    def close(self) -> None:
        self.closed = True
