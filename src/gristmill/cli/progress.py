"""How far a long command is: a bar on a terminal, and lines where there is none.

Invariant: progress goes to standard error, and is never part of what a command answers.

Not here: what is counted (the commands).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Final

__all__ = ["Step", "bytes_text", "progress"]

Step = Callable[[int], None]
"""Called with how much more is done."""

_QUIET: Final = 10_000
_QUIET_bytes: Final = 50_000_000
_UNITS: Final = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def bytes_text(size: int) -> str:
    """Write a size as people read it."""
    for unit, factor in _UNITS:
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


@contextlib.contextmanager
def progress(what: str, total: int | None = None, *, in_bytes: bool = False) -> Generator[Step]:
    """Show progress while a block runs.

    Args:
        what: is counted: `rollouts`.
        total: how much there is, None where that is not known.
        in_bytes: it is bytes that are counted.

    Off a terminal a line is written for each tenth of the total, but at most one every 10,000 or 50 MB.
    """
    if _is_terminal():
        with _bar(what, total, in_bytes) as step:
            yield step
    else:
        yield _Lines(what, total, in_bytes).step


def _is_terminal() -> bool:
    return sys.stderr.isatty()


class _Lines:
    def __init__(self, what: str, total: int | None, in_bytes: bool) -> None:
        self._what, self._total, self._in_bytes = what, total, in_bytes
        self._every = max((total or 0) // 10, _QUIET_bytes if in_bytes else _QUIET)
        self._done = self._told = 0

    def step(self, more: int) -> None:
        self._done += more
        if self._done - self._told < self._every or self._done == self._total:
            return
        self._told = self._done
        done = bytes_text(self._done) if self._in_bytes else f"{self._done:,}"
        of = "" if self._total is None else f" of {bytes_text(self._total) if self._in_bytes else f'{self._total:,}'}"
        sys.stderr.write(f"progress: {done}{of} {self._what}\n")


@contextlib.contextmanager
def _bar(what: str, total: int | None, in_bytes: bool) -> Generator[Step]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn(what), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda more: bar.advance(task, more)
