"""A folder of rows as JSON lines: `rows.jsonl`, `rejected.jsonl` and `manifest.json`.

Invariant: the folder is whole or has no manifest. Files are written beside their places, synced and renamed, the
manifest last; what was there before is replaced only on request. Rollouts are written as they come: memory does not
grow with their number.

Not here: rows (row_json), what the manifest holds (manifest).
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Generator, Mapping
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from gristmill.captures.exact import dumps
from gristmill.errors import Code, ExportError
from gristmill.export.manifest import MANIFEST_NAME, FileEntry, Manifest, RolloutCounts, sealed
from gristmill.export.row_json import encode_row
from gristmill.pipeline import Funnel, RebuiltRollout, funnel_of
from gristmill.reconstruction import RowMode
from gristmill.records import Capture
from gristmill.selection import Rejected

__all__ = ["MANIFEST_NAME", "REJECTED_NAME", "ROWS_NAME", "RowsWriter", "Totals", "rejected_line"]

ROWS_NAME: Final = "rows.jsonl"
REJECTED_NAME: Final = "rejected.jsonl"
FORMAT: Final = "jsonl"


class Totals(msgspec.Struct):
    """The counts of a manifest, while rollouts come; `rows_digest` is over the row ids so far."""

    selected: int = 0
    rejected: int = 0
    funnel: Funnel = Funnel()
    codes: Counter[str] = msgspec.field(default_factory=Counter[str])
    forks: Counter[str] = msgspec.field(default_factory=Counter[str])
    context_tokens: int = 0

    def add(self, capture: Capture, outcome: RebuiltRollout | Rejected) -> None:
        """Count one attempt."""
        self.funnel = self.funnel.plus(funnel_of(capture, outcome))
        if isinstance(outcome, Rejected):
            self.rejected += 1
            self.codes[str(outcome.code)] += 1
            return
        self.selected += 1
        self.context_tokens += outcome.rebuilt.context_tokens
        for cause, count in outcome.rebuilt.forks.items():
            self.forks[str(cause)] += count


def rejected_line(rejected: Rejected) -> bytes:
    """Write a refusal as one line of ASCII JSON, with its line end."""
    line = {name: getattr(rejected, name) for name in rejected.__struct_fields__ if name != "verdicts"}
    line["options"] = dict(rejected.options)
    line["verdicts"] = [
        {name: getattr(verdict, name) for name in verdict.__struct_fields__} for verdict in rejected.verdicts
    ]
    return dumps(line) + b"\n"


class _Part:
    """A file that is being written beside its place."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.place = folder / name
        self.path = folder / f".{name}.{os.getpid()}.part"
        self.lines = 0
        self.size = 0
        self._digest = sha256()
        self._file = self.path.open("wb")

    def write(self, line: bytes) -> None:
        self._file.write(line)
        self._digest.update(line)
        self.lines += 1
        self.size += len(line)

    def close(self) -> FileEntry:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileEntry(self.name, self.size, self._digest.hexdigest(), self.lines)

    def discard(self) -> None:
        # What is discarded may be on a full disk: closing it may fail, and must not hide why.
        with contextlib.suppress(OSError):
            self._file.close()
        self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ExportError(
            f"cannot write to {folder}: {error.strerror or error}",
            code=Code.FILE_UNREADABLE,
            where=str(folder),
            hint="check the path, its permissions and the space on the disk",
        ) from error


class RowsWriter:
    """Writes a folder of rows; leaving the `with` block without `finish` leaves no manifest and no part behind.

    Args:
        folder: made if it is not there.
        policy, options, train_model: how calls are selected, for the manifest.
        mode: how they become rows.
        overwrite: replace what is there.

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
    ) -> None:
        self.folder = folder
        self.totals = Totals()
        self._policy, self._options, self._train_model = policy, dict(options), train_model
        self._mode = mode
        self._ids = sha256()
        self._parts: list[_Part] = []
        with _writing(folder):
            self._made = not folder.exists()
            if not self._made and not overwrite and any(folder.iterdir()):
                raise ExportError(
                    f"expected a new or empty folder, {folder} holds files",
                    code=Code.OUTPUT_EXISTS,
                    where=str(folder),
                    hint="name another folder, or replace its rows with --overwrite",
                )
            folder.mkdir(parents=True, exist_ok=True)
            self._rows = self._part(ROWS_NAME)
            self._rejected = self._part(REJECTED_NAME)

    def _part(self, name: str) -> _Part:
        part = _Part(self.folder, name)
        self._parts.append(part)
        return part

    def add(self, capture: Capture, outcome: RebuiltRollout | Rejected) -> None:
        """Write the rows of an attempt, or its refusal.

        Raises:
            ExportError: `row_malformed`, `file_unreadable`.
        """
        self.totals.add(capture, outcome)
        with _writing(self.folder):
            if isinstance(outcome, Rejected):
                self._rejected.write(rejected_line(outcome))
                return
            for row in outcome.rows:
                self._rows.write(encode_row(row) + b"\n")
                self._ids.update(f"{row.row_id}\n".encode())

    def finish(self) -> Manifest:
        """Put the files in their places, the manifest last.

        Raises:
            ExportError: `file_unreadable`.
        """
        with _writing(self.folder):
            entries = [part.close() for part in self._parts]
            totals = self.totals
            manifest = sealed(
                Manifest(
                    format=FORMAT,
                    files=tuple(sorted(entries, key=lambda entry: entry.name)),
                    policy=self._policy,
                    options=self._options,
                    train_model=self._train_model,
                    mode=self._mode,
                    rows_digest=self._ids.hexdigest(),
                    rollouts=RolloutCounts(totals.selected, totals.rejected),
                    funnel=totals.funnel,
                    rejected=dict(totals.codes),
                    forks=dict(totals.forks),
                    context_tokens=totals.context_tokens,
                )
            )
            written = self._part(MANIFEST_NAME)
            written.write(manifest.encode())
            written.close()
            # An old manifest must never stand beside new rows.
            (self.folder / MANIFEST_NAME).unlink(missing_ok=True)
            for part in self._parts:
                part.path.replace(part.place)
                _sync_folder(self.folder)
        self._parts = []
        return manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part in self._parts:
            part.discard()
        if self._parts and self._made:
            # A folder that somebody else has put something in stays.
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
