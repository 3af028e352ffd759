"""Rows as JSON lines: `rows.jsonl`, a row a line.

Invariant: a row is written whole or not at all, in the order of the attempts; rows of one attempt stand together.

Not here: one row as a line (row_json), and the folder around the file (folder, writer).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from gristmill.errors import Code, ExportError
from gristmill.export.folder import ROWS_NAME, Folder, writing
from gristmill.export.manifest import Manifest
from gristmill.export.row_json import encode_row
from gristmill.export.writer import ExportSettings, ExportWriter, Outcome, RecordDigest
from gristmill.pipeline import RebuiltRollout
from gristmill.reconstruction import Row, RowMode
from gristmill.records import Capture, Result
from gristmill.selection import Rejected, Selection

__all__ = ["JSONL", "JsonlRows", "RowsWriter", "rows_needed"]

JSONL: Final = "jsonl"


def rows_needed(outcome: RebuiltRollout | Selection) -> tuple[Row, ...]:
    """Return the rows of an attempt.

    Raises:
        ExportError: `option_invalid`: it was selected and not rebuilt.
    """
    if isinstance(outcome, Selection):
        message = f"expected the rows of rollout {outcome.rollout_id!r}, got its selection only"
        raise ExportError(message, code=Code.OPTION_INVALID, hint="this format needs rebuilt rollouts")
    return outcome.rows


class JsonlRows:
    """Writes rows as JSON lines."""

    def __init__(self, folder: Folder) -> None:
        self.ids = RecordDigest()
        self.losses = Counter[str]()
        self._part = folder.part(ROWS_NAME)

    def add(self, capture: Capture, result: Result, outcome: RebuiltRollout | Selection) -> Outcome:
        """Write the rows of an attempt, all of them or none.

        Raises:
            ExportError: `row_malformed`.
        """
        rows = rows_needed(outcome)
        for row, line in zip(rows, [encode_row(row) + b"\n" for row in rows], strict=True):
            self._part.write_record(line)
            self.ids.add(row.row_id)
            self.losses["extras_as_bytes"] += len(row.extras.arrays)
        return outcome

    def close(self) -> None:
        """Nothing is held back."""


class RowsWriter:
    """Writes a folder of JSON lines; what `gristmill rows` uses. `formats.open_export` opens every format.

    Args:
        folder: made if it is not there.
        policy, options, train_model: how calls are selected, for the manifest.
        mode: how they become rows.
        overwrite: replace what is there.
        inputs: files that are read for this export: where one of them would be replaced, nothing is written.

    Raises:
        ExportError: `output_exists`, `file_unreadable`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        policy: str,
        options: Mapping[str, str],
        mode: RowMode,
        train_model: str | None = None,
        overwrite: bool = False,
        inputs: Collection[Path] = (),
    ) -> None:
        settings = ExportSettings(format=JSONL, policy=policy, options=options, train_model=train_model, mode=mode)
        place = Folder(folder, overwrite=overwrite, inputs=inputs)
        with writing(folder):
            self.writer = ExportWriter(place, JsonlRows(place), settings)

    def add(self, capture: Capture, outcome: RebuiltRollout | Rejected) -> None:
        """Write the rows of an attempt, or its refusal.

        Raises:
            ExportError: `row_malformed`, `file_unreadable`.
        """
        self.writer.add(capture, Result(), outcome)

    def finish(self) -> Manifest:
        """Put the files in their places, the manifest last.

        Raises:
            ExportError: `file_unreadable`.
        """
        return self.writer.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.__exit__(kind, error, trace)
