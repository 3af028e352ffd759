"""What people read: tables and paragraphs on standard output, remarks on standard error.

Invariant: text is never read as markup or emoji codes; decoration only on a terminal, colour never with `NO_COLOR`;
off a terminal no line is wrapped, cut or padded; what may be copied is wrapped by the terminal alone.

Not here: making text safe (visible), which whoever builds a `Text` from foreign words does first, by `words`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, NamedTuple, TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gristmill.cli.visible import visible

__all__ = ["Marks", "columns", "marks", "remark", "show", "show_whole", "terminal_width", "words"]

_UNBOUNDED: Final = 1_000_000


class Marks(NamedTuple):
    """Signs of a call in a selection, an arrow, and a dash where there is nothing."""

    included: str
    excluded: str
    scored: str
    arrow: str
    nothing: str


def marks() -> Marks:
    """Return signs that standard output can show."""
    signs = Marks("●", "○", "★", "→", "–")
    try:
        "".join(signs).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return Marks("+", "-", "*", "->", "-")
    return signs


def words(text: str, style: str = "") -> Text:
    """Make text of any origin ready to be shown."""
    return Text(visible(text), style=style)


def columns(headings: Sequence[str], *, right: Sequence[str] = (), fold: Sequence[str] = ()) -> Table:
    """Make a table without lines.

    Args:
        headings: of the columns.
        right: those that are numbers.
        fold: those that are folded on a narrow terminal; the others are cut.
    """
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in headings:
        justify = "right" if heading in right else "left"
        folded = heading in fold
        table.add_column(heading, justify=justify, no_wrap=not folded, overflow="fold" if folded else "ellipsis")
    return table


class _Console(Console):
    """A console that leaves a closed pipe to the boundary of the command line."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console(stream: TextIO) -> Console:
    console = _Console(file=stream, markup=False, emoji=False, highlight=False)
    if console.is_terminal:
        return console
    return _Console(file=stream, markup=False, emoji=False, highlight=False, no_color=True, width=_UNBOUNDED)


def _print(stream: TextIO, renderable: RenderableType, *, whole: bool = False) -> None:
    console = _console(stream)
    unwrapped = whole or not console.is_terminal
    with console.capture() as captured:
        console.print(renderable, soft_wrap=unwrapped and not isinstance(renderable, Table))
    stream.write("".join(f"{line.rstrip()}\n" for line in captured.get().removesuffix("\n").split("\n")))


def terminal_width() -> int | None:
    """Return how many characters a line of standard output has room for; None where it is no terminal."""
    console = _console(sys.stdout)
    return console.width if console.is_terminal else None


def show(*renderables: RenderableType) -> None:
    """Print on standard output, each from the start of a line; a string must be visible text."""
    for renderable in renderables:
        _print(sys.stdout, renderable)


def show_whole(*renderables: RenderableType) -> None:
    """Print as `show` does, each on one line however long: a path or a command in it can be copied."""
    for renderable in renderables:
        _print(sys.stdout, renderable, whole=True)


def remark(kind: str, text: str) -> None:
    """Say something on standard error: `KIND: TEXT`, on one line however long, so that it can be copied."""
    style = {"warning": "yellow", "next": "dim", "note": "dim"}.get(kind, "")
    _print(sys.stderr, Text.assemble((f"{kind}: ", style), visible(text)), whole=True)
