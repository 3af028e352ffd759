"""Where data sets and built rows are: a local folder, or a location of any fsspec file system.

Invariant: a folder that is published is there whole or has no manifest. Locally it appears at once, by a rename;
elsewhere its files go first and its manifest last, since an object store shows an object only when it is complete.

A local path needs nothing installed; any other URL (`s3://bucket/runs`) needs the extra `archive`.

Not here: file systems of fsspec (remote), and what is in the folders (writer, engine).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO, Final

from gristmill.archive.work import sweep, work_folder
from gristmill.errors import Code, DecodeError, ExportError

__all__ = ["MANIFEST_NAME", "Place", "Publication", "as_url", "place_of", "reading", "sweep_work", "writing"]

MANIFEST_NAME: Final = "manifest.json"
"""Name of the file that says what else is in a folder, and is written last."""

_URL: Final = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)
_LOCAL: Final = frozenset({"file"})
_ROOTED: Final = frozenset({"file", "local"})


class Publication(ABC):
    """A folder that is being written.

    Attributes:
        folder: a local one, where its files are made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def ship(self) -> None:
        """Let go of the files that are finished, all that are in the folder now."""

    @abstractmethod
    def finish(self) -> None:
        """Put the folder in its place, its manifest last.

        Raises:
            ExportError: `file_unreadable`.
        """


class Place(ABC):
    """A folder.

    Attributes:
        name: path or URL, for messages and for other processes.
    """

    name: str

    @abstractmethod
    def inside(self, name: str) -> Place:
        """Give the folder of this name in it."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Name the folders in it, sorted; none where it is not there; hidden ones are left out."""

    @abstractmethod
    def files(self) -> list[str]:
        """Name the files in it, sorted; none where it is not there; hidden ones are left out."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return the bytes of a file, None where there is none."""

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Open a file to be read at any place; raises `OSError`."""

    @abstractmethod
    def publishing(self, name: str) -> contextlib.AbstractContextManager[Publication]:
        """Begin a folder of this name, in the place of what is there; without `finish` it leaves no manifest."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a small file, whole or not at all."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Take away a file or a folder; its manifest goes first."""

    @abstractmethod
    def local(self, names: list[str]) -> contextlib.AbstractContextManager[Path]:
        """Give a local folder that holds these files; a copy, where they are elsewhere."""

    def read(self, name: str, most: int) -> bytes:
        """Read a small file.

        Args:
            name: of the file.
            most: bytes; what is larger is refused before it is read.

        Raises:
            DecodeError: `file_unreadable`; `file_malformed`, it is too large.
        """
        where = self.path_of(name)
        with reading(where):
            size = self.size(name)
            if size is None:
                raise DecodeError(f"cannot read {where}: it is not there", code=Code.FILE_UNREADABLE, where=where)
            if size > most:
                raise DecodeError(f"expected a file of at most {most:,} bytes, got {size:,}", where=where)
            with self.open(name) as file:
                data = file.read(most + 1)
        if len(data) > most:
            raise DecodeError(f"expected a file of at most {most:,} bytes, got more", where=where)
        return data

    def path_of(self, name: str) -> str:
        """Write the path of a file, for messages."""
        return f"{self.name.rstrip('/')}/{name}"


@contextlib.contextmanager
def reading(where: str) -> Generator[None]:
    """Turn what a file system says while something is read into a `DecodeError`."""
    try:
        yield
    except OSError as error:
        message = f"cannot read {where}: {error.strerror or error}"
        raise DecodeError(message, code=Code.FILE_UNREADABLE, where=where) from error


@contextlib.contextmanager
def writing(where: str) -> Generator[None]:
    """Turn what a file system says while something is written into an `ExportError`."""
    try:
        yield
    except OSError as error:
        raise ExportError(
            f"cannot write to {where}: {error.strerror or error}",
            where=where,
            hint="check the path, its permissions and the space there",
        ) from error


class _Local(Place):
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def inside(self, name: str) -> Place:
        return _Local(self.path / name)

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
            if target.exists():
                self.remove(name)
            folder.replace(target)
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

    def __init__(self, place: _Local, name: str, folder: Path) -> None:
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


def as_url(given: str | os.PathLike[str]) -> str | None:
    """Give the URL that is meant, also where a path type has taken one of its slashes; None: it is a local path."""
    text = str(given)
    match = _URL.fullmatch(text)
    if match is None or Path(text).exists():
        return None
    protocol, rest = match.groups()
    return f"{protocol}://{'/' if protocol in _ROOTED else ''}{rest}"


def place_of(given: str | os.PathLike[str]) -> Place:
    """Give the folder of a path or URL.

    Raises:
        ConfigError: `option_invalid`: nothing that is installed serves such URLs.
    """
    url = as_url(given)
    if url is None:
        return _Local(Path(given))
    protocol, _, rest = url.partition("://")
    if protocol in _LOCAL:
        return _Local(Path(rest))
    from gristmill.archive.remote import open_remote  # noqa: PLC0415 - only where something is elsewhere

    return open_remote(protocol, url)


def sweep_work(place: Place) -> None:
    """Take away what writers that were killed left in a local folder; elsewhere they leave nothing that is hidden."""
    if isinstance(place, _Local):
        sweep(place.path)
