"""Ledger files that a command line names: told by their content, opened for readers or as the one writer.

Invariant: a path is taken for a ledger by the bytes in it, never by its name; whoever reads does not write.

Not here: what a ledger does (gristmill.ledger).
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gristmill.ledger import SqliteLedger, SqliteReader

__all__ = ["is_ledger", "reading", "writing"]

_MAGIC: Final = b"SQLite format 3\0"


def is_ledger(path: Path) -> bool:
    """Say whether a file is a database; opening it says whether it is one of ours."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        # Reading it will say why it cannot be read.
        return False


@contextlib.contextmanager
def reading(path: Path) -> Generator[SqliteReader]:
    """Open a ledger to read, while another process may write to it.

    Raises:
        LedgerError: there is no ledger of this version at the path, or it cannot be read.
    """
    from gristmill.ledger import SqliteReader

    with SqliteReader(path) as ledger:
        yield ledger


@contextlib.contextmanager
def writing(path: Path) -> Generator[SqliteLedger]:
    """Open a ledger as its one writer; it is made where there is none.

    Raises:
        LedgerError: another process writes to it, or it cannot be written to.
    """
    from gristmill.ledger import SqliteLedger

    with SqliteLedger(path) as ledger:
        yield ledger
