"""Ledgers and archives that a command line names: told by their content, opened for readers or to be written to.

Invariant: a path is taken for a ledger by the bytes in it, for an archive by its partitions, and the URL of a database
for a ledger; whoever reads does not write.

Not here: what a ledger or an archive does (gristmill.ledger, gristmill.archive).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from gristmill.errors import DecodeError
    from gristmill.ledger import (
        AttemptKey,
        AttemptSetup,
        AttemptState,
        Counts,
        LedgerAddress,
        LedgerWriter,
        StoredCall,
        Summary,
    )
    from gristmill.records import Capture, Result

__all__ = ["Stored", "is_archive", "is_ledger", "open_stored", "reading", "writing"]

_MAGIC: Final = b"SQLite format 3\0"
_PARTITION: Final = "run="


class Stored(Protocol):
    """Attempts that stand in a ledger or an archive."""

    def attempts(self) -> Iterator[AttemptKey]: ...
    def rollout(self, rollout_id: str) -> tuple[AttemptKey, ...]: ...
    def summaries(
        self, *, after: AttemptKey | None = None, state: AttemptState | None = None, group_id: str | None = None
    ) -> Iterator[Summary]: ...
    def read(
        self, key: AttemptKey, *, tokens: bool = True, exchanges: bool = False
    ) -> tuple[Capture, Result | None]: ...
    def late(self, key: AttemptKey) -> tuple[StoredCall, ...]: ...
    def setup(self, key: AttemptKey) -> AttemptSetup | None: ...
    def check(self, key: AttemptKey) -> tuple[str, ...]: ...
    def counts(self) -> Counts: ...
    def close(self) -> None: ...


def is_archive(path: LedgerAddress) -> bool:
    """Say whether a path, or the URL that it stands for, is an archive or a partition of one."""
    if not isinstance(path, Path):
        return False
    try:
        if path.is_dir():
            if path.name.startswith(_PARTITION):
                return (path / "manifest.json").is_file() and any(path.glob("attempts-*.parquet"))
            partitions = (entry for entry in path.iterdir() if entry.name.startswith(_PARTITION))
            # Built rows have partitions, too, but no tables right in them.
            return any(any(entry.glob("attempts-*.parquet")) for entry in partitions)
    except OSError:
        # Reading it will say why it cannot be read.
        return False
    if ":/" not in str(path) or path.exists():
        return False
    from gristmill.archive import as_url
    from gristmill.archive import is_archive as is_archive_there

    return as_url(path) is not None and is_archive_there(path)


def is_ledger(place: LedgerAddress) -> bool:
    """Say whether a place is a database, or an archive, which is read as one; opening it says whether it is ours."""
    return not isinstance(place, Path) or _is_database(place) or is_archive(place)


def _is_database(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        # Reading it will say why it cannot be read.
        return False


def open_stored(place: LedgerAddress, on_damage: Callable[[DecodeError], None] | None = None) -> Stored:
    """Open a ledger or an archive to read; as `reading`, but whoever opens it closes it."""
    if isinstance(place, Path) and is_archive(place):
        from gristmill.archive import ArchiveReader

        return ArchiveReader(place, on_damage=on_damage)
    from gristmill.ledger import open_reader

    return open_reader(place)


@contextlib.contextmanager
def reading(place: LedgerAddress, on_damage: Callable[[DecodeError], None] | None = None) -> Generator[Stored]:
    """Open a ledger to read, while another process may write to it, or an archive.

    Args:
        place: where it is.
        on_damage: as of `ArchiveReader`; a ledger needs none, each of its rows has a digest.

    Raises:
        LedgerError: there is no ledger of this version at the place, or it cannot be read.
        DecodeError: the archive cannot be read.
    """
    stored = open_stored(place, on_damage)
    try:
        yield stored
    finally:
        stored.close()


@contextlib.contextmanager
def writing(place: LedgerAddress) -> Generator[LedgerWriter]:
    """Open a ledger to write, a file as its one writer; it is made where there is none.

    Raises:
        LedgerError: another process writes to it, or it cannot be written to.
    """
    from gristmill.ledger import open_ledger

    with open_ledger(place) as ledger:
        yield ledger
