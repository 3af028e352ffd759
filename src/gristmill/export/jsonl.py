"""Rows as JSON lines: `rows.jsonl`, a row a line.

Invariant: a row is written whole or not at all, in the order of the attempts; rows of one attempt stand together.

Not here: one row as a line (row_json), and the folder around the file (folder, writer).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from gristmill.errors import Code, ExportError
from gristmill.export.folder import ROWS_NAME, Folder
from gristmill.export.row_json import encode_row
from gristmill.export.writer import Outcome, RecordDigest
from gristmill.pipeline import RebuiltRollout
from gristmill.reconstruction import Row
from gristmill.records import Capture, Result
from gristmill.selection import Selection

__all__ = ["JSONL", "JsonlRows", "losses_of_rows", "rows_needed"]

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


def losses_of_rows(result: Result, rows: Sequence[Row]) -> Counter[str]:
    """Count what rows in a file of rows leave out or change of one attempt."""
    return Counter(
        extras_as_bytes=sum(len(row.extras.arrays) for row in rows),
        credits_untrained=len(result.credits) - sum(len(row.credits) for row in rows),
        advantages=result.advantage is not None and any(row.advantage is None for row in rows),
        failures=result.failure is not None,
    )


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
        self.losses += losses_of_rows(result, rows)
        return outcome

    def close(self) -> None:
        """Nothing is held back."""
