"""Finds the records of an attempt in finished files, by their places.

Invariant: every byte of a file is digested and every record is at one place; what names no attempt is kept apart and
reported. Memory grows with the number of records only by a place each.

Not here: whether records are right (check), and Parquet files (parquet_scan).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

from gristmill.canonical import loads
from gristmill.errors import Code, DecodeError
from gristmill.export.manifest import FileEntry
from gristmill.export.writer import RecordDigest
from gristmill.reconstruction import Finding, Row

__all__ = ["Held", "Key", "LineScan", "Record", "Scan", "as_finding"]

Key = tuple[str, int]
"""Rollout id and attempt."""

Record = Row | bytes
"""A record as its format reads it: a row, or a line."""


class Held(NamedTuple):
    """A record as it stands in its file: a number that grows by one from record to record, its place, its value."""

    number: int
    where: str
    value: Record | DecodeError


class Scan(Protocol):
    """The records of one kind in a folder."""

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """The files that are there."""
        ...

    @property
    def ids(self) -> RecordDigest: ...

    def take(self, key: Key) -> list[Held]:
        """Read the records of an attempt, once."""
        ...

    def left(self) -> Iterator[tuple[Key, int, str]]:
        """Give the attempts that nobody took, how many records each has, and the place of the first."""
        ...

    def strays(self) -> Iterator[Finding]:
        """Say what is there that is no record of any attempt, and which files are not there."""
        ...


def as_finding(error: DecodeError, path: Path) -> Finding:
    """Give an error of one record as a finding."""
    return Finding(error.code, error.where or str(path), error.message)


class _Named(msgspec.Struct):
    """What every line names."""

    rollout_id: str
    attempt: int
    row_id: str = ""
    record_id: str = ""


class _Line(NamedTuple):
    """Where a line stands: number from 1, byte offset, length in bytes."""

    number: int
    offset: int
    length: int


_named: Final = msgspec.json.Decoder(_Named)


def _named_of(data: bytes) -> _Named:
    """Read what a line names; a lone surrogate, which JSON can escape and msgspec refuses, is kept."""
    try:
        return _named.decode(data)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return msgspec.convert(loads(data), _Named)


class LineScan:
    """A file of JSON lines.

    Args:
        path: of the file.
        decode: reads a line, given its place; raises `DecodeError`.

    Raises:
        DecodeError: `file_unreadable`.
    """

    def __init__(self, path: Path, decode: Callable[[bytes, str], Record]) -> None:
        self.path = path
        self.ids = RecordDigest()
        self._decode = decode
        self._lines: dict[Key, list[_Line]] = {}
        self._nameless: list[_Line] = []
        self.missing = False
        digest, offset, number = sha256(), 0, 0
        try:
            with path.open("rb") as file:
                for number, data in enumerate(file, 1):
                    digest.update(data)
                    self._place(_Line(number, offset, len(data)), data)
                    offset += len(data)
        except FileNotFoundError:
            self.missing = True
        except OSError as error:
            message = f"cannot read {path}: {error.strerror or error}"
            raise DecodeError(message, code=Code.FILE_UNREADABLE, where=str(path)) from error
        self.entries = (FileEntry(path.name, offset, digest.hexdigest(), number),)

    def _place(self, line: _Line, data: bytes) -> None:
        try:
            named = _named_of(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, DecodeError):
            self._nameless.append(line)
            return
        self.ids.add(named.row_id or named.record_id)
        self._lines.setdefault((named.rollout_id, named.attempt), []).append(line)

    def _read(self, lines: Sequence[_Line]) -> Iterator[bytes]:
        if not lines:
            return
        with self.path.open("rb") as file:
            for line in lines:
                file.seek(line.offset)
                yield file.read(line.length)

    def _where(self, line: _Line) -> str:
        return f"{self.path} line {line.number}"

    def _held(self, lines: Sequence[_Line]) -> Iterator[Held]:
        for line, data in zip(lines, self._read(lines), strict=True):
            where = self._where(line)
            try:
                value: Record | DecodeError = self._decode(data, where)
            except DecodeError as error:
                value = error
            yield Held(line.number, where, value)

    def take(self, key: Key) -> list[Held]:
        """Read the lines of an attempt, once."""
        return list(self._held(self._lines.pop(key, [])))

    def left(self) -> Iterator[tuple[Key, int, str]]:
        """Give the attempts that nobody took, how many lines each has, and the place of the first."""
        for key, lines in self._lines.items():
            yield key, len(lines), self._where(lines[0])

    def strays(self) -> Iterator[Finding]:
        """Say which lines name no attempt, and whether the file is not there."""
        if self.missing:
            yield Finding(Code.MANIFEST_DIFFERS, str(self.path), f"expected {self.path.name}, it is not there")
        for held in self._held(self._nameless):
            if isinstance(held.value, DecodeError):
                yield as_finding(held.value, self.path)
            else:
                yield Finding(Code.FILE_MALFORMED, held.where, "expected a record of an attempt, got something else")
