"""Locations of any file system that fsspec serves.

Invariant: files go first and the manifest of a folder last; what such a file system raises becomes an `OSError`. A
password that a URL holds is in no name and no message.

Not here: local folders (place).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from gristmill.archive.place import MANIFEST_NAME, Place, Publication, reading, writing
from gristmill.errors import ConfigError, DecodeError, ExportError
from gristmill.extras import install_hint
from gristmill.ledger.address import without_passwords

__all__ = ["open_remote"]

_STORES: Final = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""Protocols that obstore serves where fsspec has no other implementation installed."""


class RemotePlace(Place):
    """A folder of a file system of fsspec."""

    def __init__(self, files: Any, path: str, url: str) -> None:
        self._files = files
        self._path = path.rstrip("/")
        self.address = url
        self.name = without_passwords(url)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def inside(self, name: str) -> Place:
        return RemotePlace(self._files, self._at(name), f"{self.address.rstrip('/')}/{name}")

    def folders(self) -> list[str]:
        return self._entries("directory")

    def files(self) -> list[str]:
        return self._entries("file")

    def _entries(self, kind: str) -> list[str]:
        with reading(self.name), _translated(self.name):
            self._files.invalidate_cache()
            try:
                found: list[dict[str, Any]] = self._files.ls(self._path, detail=True)
            except FileNotFoundError:
                return []
        names = (str(one["name"]).rstrip("/").rpartition("/")[2] for one in found if one["type"] == kind)
        return sorted(name for name in names if name and name[0] != ".")

    def size(self, name: str) -> int | None:
        with _translated(self.path_of(name)):
            self._files.invalidate_cache()
            try:
                found: dict[str, Any] = self._files.info(self._at(name))
            except FileNotFoundError:
                return None
        return int(found["size"]) if found["type"] == "file" else None

    def open(self, name: str) -> BinaryIO:
        with _translated(self.path_of(name)):
            return cast(BinaryIO, self._files.open(self._at(name), "rb"))

    @contextlib.contextmanager
    def publishing(self, name: str) -> Generator[Publication]:
        replaces = self.inside(name).size(MANIFEST_NAME) is not None
        with writing(self.path_of(name)), _translated(self.path_of(name)):
            if not replaces and self._files.exists(self._at(name)):
                self.remove(name)
            self._files.makedirs(self._at(name), exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="gristmill-") as held:
            folder = Path(held) / "work"
            folder.mkdir()
            yield _Upload(self, name, folder, replaces=replaces)

    def put(self, name: str, file: Path) -> None:
        """Copy a local file to a path in this folder."""
        with writing(self.path_of(name)), _translated(self.path_of(name)):
            self._files.put_file(str(file), self._at(name))

    def write(self, name: str, data: bytes) -> None:
        with writing(self.path_of(name)), _translated(self.path_of(name)):
            self._files.makedirs(self._path, exist_ok=True)
            self._files.pipe_file(self._at(name), data)

    def remove(self, name: str) -> None:
        target = self._at(name)
        with writing(self.path_of(name)), _translated(self.path_of(name)):
            manifest = f"{target}/{MANIFEST_NAME}"
            if self._files.exists(manifest):
                self._files.rm_file(manifest)
            if self._files.exists(target):
                self._files.rm(target, recursive=True)
            self._files.invalidate_cache()

    @contextlib.contextmanager
    def local(self, names: list[str]) -> Generator[Path]:
        with tempfile.TemporaryDirectory(prefix="gristmill-") as held:
            folder = Path(held)
            for name in names:
                with reading(self.path_of(name)), _translated(self.path_of(name)):
                    # A name of a manifest is no path: it was checked to be plain.
                    self._files.get_file(self._at(name), str(folder / name))
            yield folder


class _Upload(Publication):
    """A folder whose files go to a file system of fsspec, each when it is finished.

    Where a whole folder is there, it stays until everything is ready: whoever is stopped before has lost nothing.
    """

    def __init__(self, place: RemotePlace, name: str, folder: Path, *, replaces: bool) -> None:
        super().__init__(folder)
        self._place, self._name, self._replaces = place, name, replaces

    def ship(self) -> None:
        if not self._replaces:
            self._ship()

    def _ship(self) -> None:
        for entry in sorted(self.folder.iterdir()):
            if entry.name != MANIFEST_NAME:
                self._place.put(f"{self._name}/{entry.name}", entry)
                entry.unlink()

    def finish(self) -> None:
        if self._replaces:
            self._place.remove(self._name)
        self._ship()
        self._place.put(f"{self._name}/{MANIFEST_NAME}", self.folder / MANIFEST_NAME)


@contextlib.contextmanager
def _translated(where: str) -> Generator[None]:
    """Turn what a file system of fsspec raises beside `OSError` into one: each has errors of its own."""
    try:
        yield
    except (OSError, ConfigError, DecodeError, ExportError):
        raise
    # The named boundary: somebody else's file system.
    except Exception as error:
        raise OSError(without_passwords(f"{type(error).__name__}: {error}")) from error


def open_remote(protocol: str, url: str) -> Place:
    """Give the folder of a URL.

    Raises:
        ConfigError: `option_invalid`: nothing that is installed serves such URLs.
    """
    shown = without_passwords(url)
    try:
        core = import_module("fsspec.core")
    except ImportError as error:
        raise ConfigError(
            f"expected a local path, got {shown}: other places need fsspec, which is not installed",
            where=shown,
            hint=install_hint("archive"),
        ) from error
    try:
        files, path = _file_system(core, protocol, url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"expected a place that fsspec serves, got {shown}: {without_passwords(str(error))}",
            where=shown,
            hint="install the package of this kind of storage, s3fs for example",
        ) from error
    return RemotePlace(files, path, url)


def _file_system(core: Any, protocol: str, url: str) -> tuple[Any, str]:
    try:
        return core.url_to_fs(url)
    except ImportError:
        if protocol not in _STORES:
            raise
        # fsspec knows the protocol but its package is not there; obstore is part of the extra.
        import_module("obstore.fsspec").register(protocol)
        return core.url_to_fs(url)
