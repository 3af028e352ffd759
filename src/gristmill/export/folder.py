"""A folder that is being written: parts beside their places, and the manifest last.

Invariant: the folder is whole or has no manifest. Files are written beside their places, synced and renamed, the
manifest last; what was there before is replaced only on request, and then nothing older stays beside the new files.

Not here: what the files hold (jsonl, parquet_writer, messages), and what the manifest says (writer).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Generator
from hashlib import sha256
from pathlib import Path
from typing import Final

from gristmill.captures.exact import dumps
from gristmill.errors import Code, ExportError
from gristmill.export.manifest import MANIFEST_NAME, FileEntry
from gristmill.selection import Rejected

__all__ = [
    "MESSAGES_NAME",
    "REJECTED_NAME",
    "ROWS_NAME",
    "SAMPLES_NAME",
    "Folder",
    "Part",
    "is_parquet_part",
    "parquet_name",
    "rejected_line",
    "writing",
]

ROWS_NAME: Final = "rows.jsonl"
MESSAGES_NAME: Final = "messages.jsonl"
SAMPLES_NAME: Final = "samples.jsonl"
REJECTED_NAME: Final = "rejected.jsonl"
_PARQUET: Final = re.compile(r"rows-\d{5,}\.parquet")


def parquet_name(number: int) -> str:
    """Name the Parquet file of a number from 0."""
    return f"rows-{number:05d}.parquet"


def is_parquet_part(name: str) -> bool:
    """Tell whether a file of a folder is one of its Parquet files, by its name."""
    return _PARQUET.fullmatch(name) is not None


def _is_ours(name: str) -> bool:
    return name in {ROWS_NAME, MESSAGES_NAME, SAMPLES_NAME, REJECTED_NAME} or is_parquet_part(name)


def rejected_line(rejected: Rejected) -> bytes:
    """Write a refusal as one line of ASCII JSON, with its line end."""
    line = {name: getattr(rejected, name) for name in rejected.__struct_fields__ if name != "verdicts"}
    line["options"] = dict(rejected.options)
    line["verdicts"] = [
        {name: getattr(verdict, name) for name in verdict.__struct_fields__} for verdict in rejected.verdicts
    ]
    return dumps(line) + b"\n"


@contextlib.contextmanager
def writing(folder: Path) -> Generator[None]:
    """Turn what the operating system says while a folder is written into an `ExportError`."""
    try:
        yield
    except OSError as error:
        raise ExportError(
            f"cannot write to {folder}: {error.strerror or error}",
            code=Code.FILE_UNREADABLE,
            where=str(folder),
            hint="check the path, its permissions and the space on the disk",
        ) from error


class Part:
    """A file that is being written beside its place; `records` is counted by whoever writes it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.place = folder / name
        self.path = folder / f".{name}.{os.getpid()}.part"
        self.records = 0
        self.size = 0
        self.discarded = False
        self._digest = sha256()
        self._entry: FileEntry | None = None
        self._file = self.path.open("wb")

    def write(self, data: bytes) -> None:
        """Append bytes, or anything that holds some."""
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)

    def write_record(self, data: bytes) -> None:
        """Append one record."""
        self.write(data)
        self.records += 1

    def close(self) -> FileEntry:
        """Sync the file; a second time, only say again what it holds."""
        if self._entry is None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._entry = FileEntry(self.name, self.size, self._digest.hexdigest(), self.records)
        return self._entry

    def discard(self) -> None:
        """Take the file away."""
        self.discarded = True
        # What is discarded may be on a full disk: closing it may fail, and must not hide why.
        with contextlib.suppress(OSError):
            self._file.close()
        self.path.unlink(missing_ok=True)


class Folder:
    """The parts of a folder until they are put in their places.

    Args:
        path: of the folder, made if it is not there.
        overwrite: replace what is there.
        inputs: files that are read for this export and must not be replaced.

    Raises:
        ExportError: `output_exists`, `file_unreadable`.
    """

    def __init__(self, path: Path, *, overwrite: bool, inputs: Collection[Path] = ()) -> None:
        self.path = path
        self.parts: list[Part] = []
        with writing(path):
            _refuse_inputs(path, inputs)
            _refuse_other(path)
            self._made = not path.exists()
            if not self._made and not overwrite and any(path.iterdir()):
                raise ExportError(
                    f"expected a new or empty folder, {path} holds files",
                    code=Code.OUTPUT_EXISTS,
                    where=str(path),
                    hint="name another folder, or replace its rows with --overwrite",
                )
            path.mkdir(parents=True, exist_ok=True)

    def part(self, name: str) -> Part:
        """Begin a file."""
        with writing(self.path):
            part = Part(self.path, name)
        self.parts.append(part)
        return part

    def close(self) -> tuple[FileEntry, ...]:
        """Sync all parts and say what they hold, in order of their names."""
        with writing(self.path):
            return tuple(sorted((part.close() for part in self.parts), key=lambda entry: entry.name))

    def place(self, manifest: bytes) -> None:
        """Put the parts in their places and the manifest after them.

        Raises:
            ExportError: `file_unreadable`.
        """
        with writing(self.path):
            written = self.part(MANIFEST_NAME)
            written.write(manifest)
            written.close()
            # An old manifest must never stand beside new rows, nor old rows beside a new manifest.
            (self.path / MANIFEST_NAME).unlink(missing_ok=True)
            names = {part.name for part in self.parts}
            for entry in list(self.path.iterdir()):
                if _is_ours(entry.name) and entry.name not in names:
                    entry.unlink()
            for part in self.parts:
                part.path.replace(part.place)
                _sync(self.path)
        self.parts = []

    def discard(self) -> None:
        """Take the parts away that are not in their places, and the folder if it was made for them."""
        for part in self.parts:
            part.discard()
        if self.parts and self._made:
            # A folder that somebody else has put something in stays.
            with contextlib.suppress(OSError):
                self.path.rmdir()
        self.parts = []


def _refuse_inputs(folder: Path, inputs: Collection[Path]) -> None:
    """Refuse a folder whose files, those that an export replaces or takes away, are among the inputs."""
    there = list(folder.iterdir()) if inputs and folder.is_dir() else []
    replaced = [entry for entry in there if _is_ours(entry.name) or entry.name == MANIFEST_NAME]
    for given in inputs:
        for entry in (folder, *replaced):
            # The input itself or, where it is a folder of inputs, the folder that is written to.
            if given.exists() and entry.exists() and given.samefile(entry):
                raise ExportError(
                    f"expected another folder to write to: {entry} is an input and would be replaced",
                    code=Code.OUTPUT_EXISTS,
                    where=str(entry),
                    hint="name another folder for the output; inputs are never replaced",
                )


def _refuse_other(path: Path) -> None:
    """Refuse a path where something stands that is no folder, and say what."""
    if path.is_dir():
        return
    if path.is_symlink() and not path.exists():
        got = f"a symbolic link to {path.readlink()}, which is not there"
    elif path.exists():
        got = "a file" if path.is_file() else "neither a folder nor a file"
    else:
        return
    raise ExportError(
        f"expected a folder or nothing yet, {path} is {got}",
        code=Code.OUTPUT_EXISTS,
        where=str(path),
        hint="name another folder for the output",
    )


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
