"""What reading captures had to say: notes, lines that were passed over, keys that nobody knows.

Invariant: at most ten remarks and ten unknown keys are told, and how many there are beyond, whatever the size of the
captures; every line that was passed over is kept for the document.

Not here: reading (attempts), how a remark looks (screen).
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from gristmill.errors import Code, DecodeError

if TYPE_CHECKING:
    from gristmill.captures import CaptureFile
    from gristmill.cli.sources import Source

__all__ = ["Remarks", "with_hint"]

_MOST_TOLD: Final = 10
_MOST_UNKNOWN: Final = 1000


class _Unknown(msgspec.Struct):
    """A key that no line of its kind has: where it came first, what was probably meant, and on how many lines it is."""

    where: str
    meant: str
    lines: int = 1


class Remarks(msgspec.Struct):
    """What reading said.

    Attributes:
        bad_word: what is said of a line that was passed over.
        quiet: nothing is said.
        bad_lines: those that were passed over, as `{where, message}`.
        said: how many remarks there were since they were last summed up.
        unknown: keys that no line has, by path and name.
    """

    bad_word: str = "skipped"
    quiet: bool = False
    bad_lines: list[dict[str, str]] = []
    said: int = 0
    unknown: dict[tuple[str, str], _Unknown] = {}

    def take(self, part: CaptureFile, source: Source) -> None:
        """Say what reading one part of a source noted."""
        from gristmill.captures.lines import unknown_keys

        for note in part.notes:
            keys = unknown_keys(note)
            if keys:
                self._count_unknown(note.where, keys, source)
            else:
                self.say("note", f"{note.where}: {note.message}")
        for error in part.bad_lines:
            self.bad_lines.append({"where": error.where or str(source.path), "message": error.message})
            self.say("warning", f"{self.bad_word} {error.where}: {error.message}")

    def say(self, kind: str, text: str) -> None:
        """Say one thing on standard error, unless there were too many."""
        from gristmill.cli.screen import remark

        self.said += 1
        if self.said <= _MOST_TOLD and not self.quiet:
            remark(kind, text)

    def _count_unknown(self, where: str, keys: Iterable[str], source: Source) -> None:
        """Count the keys that no line of this kind has, to tell each of them once."""
        from gristmill.captures.lines import nearest_key

        for key in keys:
            found = self.unknown.get((str(source.path), key))
            if found is not None:
                found.lines += 1
            elif len(self.unknown) < _MOST_UNKNOWN:
                place = where if str(source.path) in where else f"{source.path} {where}"
                self.unknown[str(source.path), key] = _Unknown(place, nearest_key(key))

    def tell_unsaid(self) -> None:
        """Say how many remarks were left out, and which keys of lines are not known."""
        from gristmill.cli.plural import counted
        from gristmill.cli.screen import remark

        if self.quiet:
            return
        if self.said > _MOST_TOLD:
            remark("note", f"{self.said - _MOST_TOLD} more of these")
        for number, ((_, key), found) in enumerate(self.unknown.items()):
            if number == _MOST_TOLD:
                remark("note", f"{counted(len(self.unknown) - number, 'more unknown key')}")
                break
            meant = f"; did you mean {found.meant}?" if found.meant else ""
            on = f"on {counted(found.lines, 'line')}, first at {found.where}"
            remark("note", f"unknown key {key!r} {on}{meant}")
        self.said = 0
        self.unknown = {}


@contextlib.contextmanager
def with_hint(skip_bad: bool, *, foreign: bool = False) -> Generator[None]:
    """Say of a line that cannot be read how it is passed over."""
    try:
        yield
    except DecodeError as error:
        if not skip_bad and error.code is Code.FILE_MALFORMED and not error.hint and _passed_over(error, foreign):
            error.hint = "--skip-bad passes over bad lines"
        raise


def _passed_over(error: DecodeError, foreign: bool) -> bool:
    """Tell whether what cannot be read is one of several."""
    return foreign or "line " in (error.where or "")
