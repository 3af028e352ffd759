"""Where captures stand: the files and folders behind the paths of a command line.

Invariant: every path gives at least one source, in the order given and then by name; what is passed over in a folder
is counted, so that it can be said.

A format that is named is that of every path that is no ledger; else a path is a foreign one only where an importer is
certain of it.

A folder is a story (`capture.jsonl` in it), holds stories and files of capture lines, or else recorded exchanges.

Not here: reading them (attempts).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from gristmill.cli.store import is_ledger
from gristmill.errors import DecodeError

if TYPE_CHECKING:
    from gristmill.ledger import LedgerAddress

__all__ = ["Kind", "Source", "refuse_other", "size_bytes", "sources"]

_STORY: Final = "capture.jsonl"
_PASSED_OVER: Final = frozenset({".json", ".gristmill", ".db"})


class Kind(Enum):
    """What a source is read as."""

    LEDGER = "ledger"
    FILES = "files"
    FOREIGN = "foreign"


class Source(NamedTuple):
    """One ledger, or one file or folder of captured calls.

    `passed_over` counts files of its folder, told once; `format_name` is that of a foreign one.
    """

    path: LedgerAddress
    kind: Kind = Kind.FILES
    passed_over: int = 0
    format_name: str | None = None

    @property
    def file(self) -> Path:
        """The path of what is no ledger."""
        assert isinstance(self.path, Path)
        return self.path


def sources(paths: Iterable[LedgerAddress], format_name: str | None = None) -> Iterator[Source]:
    """Give the sources behind paths."""
    for path in paths:
        if not isinstance(path, Path) or is_ledger(path):
            yield Source(path, Kind.LEDGER)
            continue
        if format_name is not None:
            yield Source(path, Kind.FOREIGN, format_name=format_name)
            continue
        inside, passed_over = _inside(path)
        found = _as_it_is(path)
        if not inside or found.kind is Kind.FOREIGN:
            yield found
            continue
        yield _as_it_is(inside[0])._replace(passed_over=passed_over)
        yield from map(_as_it_is, inside[1:])


def _as_it_is(path: Path) -> Source:
    """Tell whether a path is certainly a foreign one; a story never is."""
    from gristmill.interop import importer_of

    importer = None if (path / _STORY).is_file() else importer_of(path)
    return Source(path) if importer is None else Source(path, Kind.FOREIGN, format_name=importer.name)


def _inside(path: Path) -> tuple[list[Path], int]:
    """Return the stories and files of lines in a folder that is none itself, and how many files are not read."""
    try:
        if not path.is_dir() or (path / _STORY).exists():
            return [], 0
        entries = sorted(path.iterdir())
        inside = [entry for entry in entries if (entry / _STORY).is_file() or _is_lines(entry)]
        return inside, sum(entry.suffix in _PASSED_OVER for entry in entries) if inside else 0
    except OSError:
        # Reading it will say why it cannot be read.
        return [], 0


def _is_lines(entry: Path) -> bool:
    return entry.suffix == ".jsonl" and entry.is_file()


def refuse_other(path: LedgerAddress) -> None:
    """Refuse what Gristmill wrote but is no capture.

    Raises:
        DecodeError: the path is a folder of rows, or the lock file of a ledger.
    """
    if not isinstance(path, Path):
        return
    if (path / "summary.json").is_file() and any(path.glob("run=*/part=*")):
        raise DecodeError(
            f"expected captures, {path} holds rows that were built",
            where=str(path),
            hint="name the archive that they were built from first",
        )
    if (path / "manifest.json").is_file() and not (path / "capture.jsonl").exists():
        if (path / "rejected.jsonl").is_file():
            raise DecodeError(
                f"expected captures, {path} holds training data",
                where=str(path),
                hint="this is an export folder; name the captures first",
            )
    elif path.suffix == ".lock" and path.with_suffix("").is_file():
        raise DecodeError(
            f"expected captures, {path} is the lock file of a ledger",
            where=str(path),
            hint=f"name the ledger: {path.with_suffix('')}",
        )


def size_bytes(path: Path) -> int:
    """Return the size of a file, or of the files in a folder."""
    try:
        files = path.iterdir() if path.is_dir() else (path,)
        return sum(file.stat().st_size for file in files if file.is_file())
    except OSError:
        # It only serves a progress bar; reading will say what is wrong.
        return 0
