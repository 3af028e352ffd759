"""What an importer is: files that another program wrote in, captured attempts out.

Invariant: an importer carries a fact as it stands, counts it under a loss that it has a statement for, or refuses the
line; it guesses nothing. A line or file that cannot be read is refused by its place, and passed over only where that
was asked for; then it leaves a lost call in its attempt, so that no attempt with a hole looks complete.

Not here: the importers (a module each), where captures go (ledger), what is read of our own files (captures).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from gristmill.captures import CapturedRollout, Note
from gristmill.errors import DecodeError

__all__ = ["Importer", "Report"]


class Report(msgspec.Struct):
    """What an import says beside the attempts that it gives.

    Attributes:
        skip_bad: pass over lines that cannot be read; else the first one is raised.
        completed: whoever imports states that every call finished of which the format says neither status nor finish
            reason; otherwise it stays unknown, and rows of it are refused.
        losses: how often each named loss occurred; the statements stand with the importer.
        bad: lines or files that were passed over: `code`, `where` (file, number of the line, JSON path), `message`.
        notes: what was tolerated, and where.
    """

    skip_bad: bool = False
    completed: bool = False
    losses: Counter[str] = msgspec.field(default_factory=Counter[str])
    bad: list[DecodeError] = []
    notes: list[Note] = []

    def refuse(self, error: DecodeError) -> None:
        """Take a line or file that cannot be read.

        Raises:
            DecodeError: the one given, unless bad lines are passed over.
        """
        if not self.skip_bad:
            raise error
        self.bad.append(error)

    def lose(self, name: str, count: int = 1) -> None:
        """Count something that the records have no place for."""
        if count:
            self.losses[name] += count

    def note(self, where: str, message: str) -> None:
        """Say something that was tolerated."""
        self.notes.append(Note(where, message))


class Importer(msgspec.Struct, frozen=True, kw_only=True):
    """A foreign format that captures are read from.

    Attributes:
        name: as given to `--from`.
        title: one sentence: what it reads.
        made_for: program and version whose classes or documents it follows.
        losses: the statements that its report can make, by name.
        read: reads a file or folder attempt by attempt, in an order that the same files always give; each attempt
            comes once. Raises `DecodeError` for what cannot be read (`file_unreadable`, `file_malformed`,
            `schema_unsupported`) as `Report.refuse` says.
        certain: whether a path can be nothing but this format, by what the format itself says; it opens no more of
            it than it must, and says no where a look at it fails.
    """

    name: str
    title: str
    made_for: str
    losses: Mapping[str, str]
    read: Callable[[Path, Report], Iterator[CapturedRollout]]
    certain: Callable[[Path], bool] = lambda _: False
