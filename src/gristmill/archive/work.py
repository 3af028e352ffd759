"""Folders in which something is being written, beside the place where it will be.

Invariant: whoever writes holds a lock on his folder, which his end gives back however he ends; folders without an owner
are taken away by the next one who writes beside them. Nothing reads such a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Final

__all__ = ["PREFIX", "sweep", "work_folder"]

PREFIX: Final = ".gristmill-work-"
_UNLOCKED: Final = ".gristmill-new-"


@contextlib.contextmanager
def work_folder(beside: Path) -> Generator[Path]:
    """Give an empty folder in a folder, on the same file system; what is left of it is taken away."""
    unlocked = beside / f"{_UNLOCKED}{secrets.token_hex(8)}"
    unlocked.mkdir()
    holder = beside / f"{PREFIX}{secrets.token_hex(8)}"
    descriptor = os.open(unlocked, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # It gets the name by which it is swept away only when it has an owner.
        unlocked.rename(holder)
        # What is published is inside the folder that is locked, so that its lock never moves with it.
        folder = holder / "work"
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(holder, ignore_errors=True)
        os.close(descriptor)


def sweep(beside: Path) -> None:
    """Take away the work of writers that have ended."""
    for holder in beside.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(holder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(holder)
            except BlockingIOError:
                continue
            finally:
                os.close(descriptor)
