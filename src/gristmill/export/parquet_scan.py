"""Finds the rows of an attempt in the Parquet files of a folder.

Invariant: as of `scan`. A file that cannot be read is one finding; its rows are then missing.

A few row groups are kept in memory, so attempts are found fastest in the order in which they were written.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import file_digest
from pathlib import Path
from typing import NamedTuple

from gristmill.errors import Code, DecodeError
from gristmill.export.folder import is_parquet_part, parquet_name
from gristmill.export.manifest import FileEntry
from gristmill.export.parquet_reader import ParquetFile
from gristmill.export.scan import Held, Key, as_finding
from gristmill.export.writer import RecordDigest
from gristmill.reconstruction import Finding, Row

__all__ = ["ParquetScan"]

_NAMES = ("rollout_id", "attempt", "row_id")


class _Place(NamedTuple):
    """Where a row stands: number over all files, file, row group, place in the row group."""

    number: int
    file: ParquetFile
    group: int
    at: int


class ParquetScan:
    """The rows of a folder.

    Args:
        folder: that holds the files.

    Raises:
        DecodeError: `file_unreadable`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ids = RecordDigest()
        self._places: dict[Key, list[_Place]] = {}
        self._broken: list[Finding] = []
        self._count = 0
        names = (entry.name for entry in folder.iterdir() if is_parquet_part(entry.name))
        self.entries = tuple(self._scan(folder / name) for name in sorted(names, key=lambda name: (len(name), name)))

    def _scan(self, path: Path) -> FileEntry:
        try:
            with path.open("rb") as file:
                digest, size = file_digest(file, "sha256").hexdigest(), file.tell()
        except OSError as error:
            message = f"cannot read {path}: {error.strerror or error}"
            raise DecodeError(message, code=Code.FILE_UNREADABLE, where=str(path)) from error
        before = self._count
        try:
            read = ParquetFile(path)
            for group in read.groups:
                for index, (rollout_id, attempt, row_id) in enumerate(read.column(group, _NAMES)):
                    self.ids.add(row_id)
                    place = _Place(self._count, read, group, index)
                    self._places.setdefault((rollout_id, attempt), []).append(place)
                    self._count += 1
        except DecodeError as error:
            self._broken.append(as_finding(error, path))
        return FileEntry(path.name, size, digest, self._count - before)

    def take(self, key: Key) -> list[Held]:
        """Read the rows of an attempt, once."""
        return [Held(place.number, _where(place), _row(place)) for place in self._places.pop(key, [])]

    def left(self) -> Iterator[tuple[Key, int, str]]:
        """Give the attempts that nobody took, how many rows each has, and the place of the first."""
        for key, places in self._places.items():
            yield key, len(places), _where(places[0])

    def strays(self) -> Iterator[Finding]:
        """Say which files cannot be read, and whether there is none."""
        if not self.entries:
            path = self.folder / parquet_name(0)
            yield Finding(Code.MANIFEST_DIFFERS, str(path), f"expected {path.name}, it is not there")
        yield from self._broken


def _where(place: _Place) -> str:
    return place.file.where(place.file.starts[place.group] + place.at)


def _row(place: _Place) -> Row | DecodeError:
    try:
        return place.file.rows(place.group)[place.at]
    except DecodeError as error:
        return error
