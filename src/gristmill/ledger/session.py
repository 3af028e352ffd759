"""What readers and writes ask of a database connection, so that they are the same on every database.

Invariant: statements are written once, with `?` for a parameter; a database that wants something else translates them.
`sqlite3.Connection` is such a connection as it stands.

Not here: transactions, which each database has its own way with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

__all__ = ["Found", "Session"]


class Found(Protocol):
    """What a statement gave."""

    @property
    def rowcount(self) -> int:
        """How many rows the statement changed."""
        ...

    def fetchone(self) -> Any:
        """Return the next row as a tuple, None behind the last."""
        ...

    def __iter__(self) -> Iterator[Any]: ...


class Session(Protocol):
    """A connection in a transaction of its owner's."""

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Found:
        """Run one statement."""
        ...

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> object:
        """Run one statement for each row of parameters."""
        ...
