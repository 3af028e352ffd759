"""Tables of any length: one line a row, written while rows still come.

Invariant: a row is written at most a batch after it came; columns are as wide as the first batch needs them, and a
cell that is wider pushes its own line only. Off a terminal no line is cut; on one, columns that
are not needed are left out where there is no room, and lines end at its edge.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from gristmill.cli.screen import remark, show, terminal_width
from gristmill.cli.visible import visible

__all__ = ["Listing"]

_BATCH: Final = 500
_GAP: Final = "  "


class Listing:
    """A table that grows at its end.

    Args:
        headings: of the columns.
        right: columns of numbers.
        optional: columns that are left out, in this order, where a terminal is too narrow for all.
    """

    def __init__(self, headings: Sequence[str], *, right: Sequence[str] = (), optional: Sequence[str] = ()) -> None:
        self._headings = headings
        self._optional = optional
        self._left_out: set[int] = set()
        self._right = [heading in right for heading in headings]
        self._width = terminal_width()
        self._widths: list[int] | None = None
        self._rows: list[tuple[Sequence[str], Sequence[str]]] = [(headings, ["dim"] * len(headings))]

    def add(self, cells: Sequence[str], styles: Sequence[str] = ()) -> None:
        """Add a row; cells are text of any origin, styles may be fewer than cells."""
        self._rows.append(([visible(cell) for cell in cells], styles))
        if len(self._rows) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Write what has come."""
        if self._widths is None:
            self._widths = [
                max(map(cell_len, column)) for column in zip(*(cells for cells, _ in self._rows), strict=True)
            ]
            self._leave_out(self._widths)
        for cells, styles in self._rows:
            if self._width is None:
                sys.stdout.write("".join(self._pieces(cells)).rstrip() + "\n")
            else:
                line = Text.assemble(
                    *(
                        (piece, style)
                        for at, (piece, style) in enumerate(zip_longest(self._pieces(cells), styles, fillvalue=""))
                        if at not in self._left_out
                    )
                )
                line.rstrip()
                line.truncate(self._width, overflow="ellipsis")
                show(line)
        self._rows.clear()

    def finish(self) -> None:
        """Write what has come, and say which columns were left out."""
        self.flush()
        names = [heading for at, heading in enumerate(self._headings) if at in self._left_out]
        if names:
            remark("note", f"the terminal is too narrow for {', '.join(names)}")

    def _leave_out(self, widths: Sequence[int]) -> None:
        """Choose the columns that there is no room for."""
        if self._width is None:
            return
        total = sum(widths) + len(_GAP) * (len(widths) - 1)
        for name in self._optional:
            if total <= self._width:
                break
            at = self._headings.index(name)
            total -= widths[at] + len(_GAP)
            self._left_out.add(at)

    def _pieces(self, cells: Sequence[str]) -> list[str]:
        widths = self._widths or ()
        pieces: list[str] = []
        for cell, width, right in zip(cells, widths, self._right, strict=True):
            padding = " " * (width - (len(cell) if cell.isascii() else cell_len(cell)))
            pieces.append(f"{padding}{cell}{_GAP}" if right else f"{cell}{padding}{_GAP}")
        return pieces
