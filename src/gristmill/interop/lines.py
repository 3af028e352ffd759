"""Files of foreign JSON lines, attempt by attempt, in whatever order their lines stand.

Invariant: a first pass reads every line, so that all lines that are no JSON are known before anything is given; a
second reads one attempt at a time. Memory grows with the largest attempt and a few numbers a line, not with the file.

Not here: what the lines mean (the importers).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from gristmill.captures.fields import JsonObject
from gristmill.captures.reply import Unexpected
from gristmill.errors import DecodeError
from gristmill.interop.attempt import hole, refused
from gristmill.interop.foreign import loads_foreign, object_at, unreadable
from gristmill.interop.importer import Report
from gristmill.records import LostCall

__all__ = ["Key", "KeyedLines", "Line", "first_object"]

_RUN: Final = 3  # numbers of a line: its offset and length in bytes, and its number
_LOOKED_AT: Final = 1 << 20


class Key(NamedTuple):
    """Whose line it is."""

    rollout_id: str
    attempt: int = 0


class Line(NamedTuple):
    """One line: the place to name in errors, its number, and the object on it."""

    place: str
    number: int
    value: JsonObject


class KeyedLines:
    """The lines of a file by attempt.

    Args:
        path: JSON lines; empty ones are passed over.
        report: gets the lines that cannot be read.
        key_of: tells whose line it is; raises `Unexpected`.

    Attributes:
        keys: the attempts in the order of their first lines.
        lost: what each attempt lost by lines that do not tell whose they are.

    Raises:
        DecodeError: `file_unreadable`; `file_malformed` as `Report.refuse` says.
    """

    def __init__(self, path: Path, report: Report, key_of: Callable[[JsonObject], Key]) -> None:
        self.lost: list[LostCall] = []
        self._path = path
        self._runs: dict[Key, array[int]] = {}
        try:
            with path.open("rb") as file:
                offset = 0
                for number, data in enumerate(file, 1):
                    if data.strip():
                        self._place(data, offset, number, report, key_of)
                    offset += len(data)
        except OSError as error:
            raise unreadable(path, error) from error

    def _place(
        self, data: bytes, offset: int, number: int, report: Report, key_of: Callable[[JsonObject], Key]
    ) -> None:
        place = f"{self._path} line {number}"
        try:
            key = key_of(object_at(loads_foreign(data, place), "$"))
        except (DecodeError, Unexpected) as error:
            report.refuse(refused(error, place))
            self.lost.append(hole(f"line-{number}", place))
            return
        self._runs.setdefault(key, array("q")).extend((offset, len(data), number))

    @property
    def keys(self) -> tuple[Key, ...]:
        """The attempts in the order of their first lines."""
        return tuple(self._runs)

    def lines(self, key: Key) -> Iterator[Line]:
        """Read the lines of one attempt."""
        runs = self._runs[key]
        try:
            with self._path.open("rb") as file:
                for at in range(0, len(runs), _RUN):
                    offset, size, number = runs[at : at + _RUN]
                    file.seek(offset)
                    place = f"{self._path} line {number}"
                    yield Line(place, number, object_at(loads_foreign(file.read(size), place), "$"))
        except OSError as error:
            raise unreadable(self._path, error) from error


def first_object(path: Path) -> JsonObject | None:
    """Look at the object on a file's first line that is not empty; None where there is none, or it is very long."""
    try:
        with path.open("rb") as file:
            data = b"\n"
            while data and not data.strip():
                data = file.readline(_LOOKED_AT)
        return object_at(loads_foreign(data, str(path)), "$")
    except (OSError, DecodeError, Unexpected):
        # A look says no more than that the file is not certainly of a format; reading it says what is wrong.
        return None
