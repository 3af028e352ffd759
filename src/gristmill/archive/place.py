"""Where data sets and built rows are: a local folder, or a location of any fsspec file system.

Invariant: a folder that is published is there whole or has no manifest. Locally it appears at once, by a rename;
elsewhere its files go first and its manifest last, since an object store shows an object only when it is complete.

A local path needs nothing installed; any other URL (`s3://bucket/runs`) needs the extra `archive`.

Not here: local folders (local), file systems of fsspec (remote), which of them is meant (opening), and what is in the
folders (writer, engine).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO, Final

from gristmill.errors import Code, DecodeError, ExportError

__all__ = ["MANIFEST_NAME", "Place", "Publication", "reading", "writing"]

MANIFEST_NAME: Final = "manifest.json"
"""Name of the file that says what else is in a folder, and is written last."""


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
        name: path or URL, for messages: without a password.
        address: path or URL, by which it is opened again.
    """

    name: str
    address: str

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
