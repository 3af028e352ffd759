"""Folders of this machine as places.

Invariant: a folder appears at once, by a rename, after everything in it is on the disk.

Not here: folders while they are written (work).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO

from gristmill.archive.place import MANIFEST_NAME, Place, Publication, reading, writing
from gristmill.archive.work import sweep, work_folder

__all__ = ["LocalPlace", "sweep_work"]


class LocalPlace(Place):
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = self.address = str(path)

    def inside(self, name: str) -> Place:
        return LocalPlace(self.path / name)

    def folders(self) -> list[str]:
        return self._entries(Path.is_dir)

    def files(self) -> list[str]:
        return self._entries(Path.is_file)

    def _entries(self, kind: Callable[[Path], bool]) -> list[str]:
        with reading(self.name):
            if not self.path.is_dir():
                return []
            return sorted(entry.name for entry in self.path.iterdir() if entry.name[0] != "." and kind(entry))

    def size(self, name: str) -> int | None:
        path = self.path / name
        return path.stat().st_size if path.is_file() else None

    def open(self, name: str) -> BinaryIO:
        return (self.path / name).open("rb")

    @contextlib.contextmanager
    def publishing(self, name: str) -> Generator[Publication]:
        with writing(self.path_of(name)):
            self.path.mkdir(parents=True, exist_ok=True)
        with work_folder(self.path) as folder:
            yield _Rename(self, name, folder)

    def take(self, name: str, folder: Path) -> None:
        """Make a local folder the one of this name; it is moved."""
        target = self.path / name
        with writing(str(target)):
            for entry in folder.iterdir():
                _sync(entry)
            _sync(folder)
            # What is replaced is not taken away before the other is in its place; it goes with the work folder.
            old = folder.parent / "replaced"
            if target.exists():
                target.replace(old)
            try:
                folder.replace(target)
            except OSError:
                if old.exists():
                    old.replace(target)
                raise
            _sync(self.path)

    def write(self, name: str, data: bytes) -> None:
        part = self.path / f".{name}.{os.getpid()}.part"
        with writing(self.path_of(name)):
            self.path.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            _sync(part)
            part.replace(self.path / name)
            _sync(self.path)

    def remove(self, name: str) -> None:
        target = self.path / name
        with writing(str(target)):
            if target.is_dir():
                (target / MANIFEST_NAME).unlink(missing_ok=True)
                _sync(target)
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)

    @contextlib.contextmanager
    def local(self, names: list[str]) -> Generator[Path]:
        yield self.path


class _Rename(Publication):
    """A folder beside its place."""

    def __init__(self, place: LocalPlace, name: str, folder: Path) -> None:
        super().__init__(folder)
        self._place, self._name = place, name

    def ship(self) -> None:
        """Everything goes at once."""

    def finish(self) -> None:
        self._place.take(self._name, self.folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_work(place: Place) -> None:
    """Take away what writers that were killed left in a local folder; elsewhere they leave nothing that is hidden."""
    if isinstance(place, LocalPlace):
        sweep(place.path)
