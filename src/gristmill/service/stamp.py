"""Which version of a file one sees: told before a run, so that an older run's is not taken for this one's.

Invariant: a file that nothing wrote to, or put in its place, between two looks has the same stamp at both. A clock is
not asked: file systems keep times as coarse as two seconds, and those of another machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["Stamp", "is_stale", "stamp_of"]


class Stamp(NamedTuple):
    """What changes when a file is written or replaced."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int


def stamp_of(path: Path | None) -> Stamp | None:
    """Look at a file; None where there is none to look at."""
    if path is None:
        return None
    try:
        seen = path.stat()
    except OSError:
        # Reading it will say why it cannot be read.
        return None
    return Stamp(seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)


def is_stale(path: Path, before: Stamp | None) -> bool:
    """Tell whether a file is still the one that was there before."""
    return before is not None and stamp_of(path) == before
