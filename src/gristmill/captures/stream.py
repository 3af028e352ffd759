"""Files of capture lines, attempt by attempt, however large they are and in whatever order their lines stand.

Invariant: every attempt comes out as `read_capture` gives it. A first pass notes where the lines of each attempt
stand, a second reads one attempt at a time: memory grows by a few numbers for each run of neighbouring lines of one
attempt, and with the largest attempt, never with the file.

A line that does not tell its attempt is refused in the first pass; skipped on request, it leaves a lost call in every
attempt, as it does where a file is read whole.

Not here: what lines mean (lines), and files that hold one attempt (files).
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import msgspec

from gristmill.captures.files import read_capture
from gristmill.captures.lines import DEFAULT_ROLLOUT, CaptureFile, Document, Note, read_documents
from gristmill.errors import Code, ConfigError, DecodeError

__all__ = ["CaptureStream"]

_STORY: Final = "capture.jsonl"
_RESULT: Final = "result.json"
_RUN: Final = 3  # numbers of a run: offset and length in bytes, and its first line


class _Key(msgspec.Struct):
    """What a line tells of its attempt; what is of another form is looked at by the reader of lines."""

    rollout_id: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    attempt: Annotated[int, msgspec.Meta(ge=0)] | None = None


_decode_key = msgspec.json.Decoder(_Key).decode


class CaptureStream:
    """A capture on disk, read one attempt at a time; what is no file of lines is read whole.

    Args:
        path, result, skip_bad: as `read_capture` takes them.

    Attributes:
        keys: rollout id and number of every attempt, in the order of their first lines.

    Raises:
        DecodeError, ConfigError: as `read_capture`; a line of an attempt is only read with the attempt.
    """

    def __init__(self, path: Path, *, result: Path | None = None, skip_bad: bool = False) -> None:
        self.path = path
        self._skip_bad = skip_bad
        self._lines = path / _STORY if path.is_dir() else path
        index = self._look() if self._lines.suffix != ".json" and self._lines.is_file() else None
        self._source: _Index | CaptureFile
        if index is not None and len(index.runs) > 1:
            self._source, self.keys = index, tuple(index.runs)
            if result is not None:
                raise ConfigError(
                    f"expected one attempt to go with {result}, got {len(index.runs)}",
                    where="--result",
                    hint="put `result` lines into the capture file",
                )
        else:
            whole = read_capture(path, result=result, skip_bad=skip_bad)
            self._source, self.keys = whole, tuple(whole.rollouts)

    def _look(self) -> _Index:
        with _reading(self._lines), self._lines.open("rb") as file:
            return _Index(file, self._skip_bad)

    def parts(self, wanted: Callable[[tuple[str, int]], bool] = lambda _: True) -> Iterator[CaptureFile]:
        """Read the attempts that are wanted, each as a part of its own.

        Notes and bad lines come with the part that they were found in.

        Raises:
            DecodeError: a line of a wanted attempt cannot be read.
        """
        if isinstance(self._source, CaptureFile):
            yield self._source
        else:
            with _reading(self._lines), self._lines.open("rb") as file:
                yield from self._parts(file, self._source, wanted)

    def _parts(self, file: BinaryIO, index: _Index, wanted: Callable[[tuple[str, int]], bool]) -> Iterator[CaptureFile]:
        beside = self._lines.parent / _RESULT
        notes: tuple[Note, ...] = ()
        if beside.is_file():
            notes = (Note(str(beside), "not used: the capture has results of its own, or several attempts"),)
        bad = tuple(index.bad)
        holes = {document.where for document in index.unplaced} | {error.where for error in index.bad}
        for key, runs in index.runs.items():
            if not wanted(key):
                continue
            read = read_documents(_documents(file, runs, index.unplaced), skip_bad=self._skip_bad)
            found = [error for error in read.bad_lines if error.where not in holes]
            yield msgspec.structs.replace(
                read,
                notes=(*notes, *(Note(f"{self._lines} {note.where}", note.message) for note in read.notes)),
                bad_lines=tuple(_in_file(error, self._lines) for error in (*bad, *found)),
            )
            notes, bad = (), ()


@contextlib.contextmanager
def _reading(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise DecodeError(
            f"cannot read {path}: {error.strerror or error}",
            code=Code.FILE_UNREADABLE,
            where=str(path),
            hint="check that the path exists and may be read",
        ) from error
    except DecodeError as error:
        raise _in_file(error, path) from error


class _Index:
    """Where the lines of each attempt stand in a file."""

    def __init__(self, file: BinaryIO, skip_bad: bool) -> None:
        self.runs: dict[tuple[str, int], array[int]] = {}
        self.unplaced: list[Document] = []
        self.bad: list[DecodeError] = []
        self._named: bool | None = None
        offset = 0
        last: array[int] | None = None
        for number, data in enumerate(file, 1):
            size = len(data)
            if data.strip():
                key = self._key(number, data, skip_bad)
                # A line without a place ends the run before it: it is not of that attempt.
                runs = None if key is None else self.runs.setdefault(key, array("q"))
                if runs is not None and runs is last:
                    runs[-2] = offset + size - runs[-3]
                elif runs is not None:
                    runs.extend((offset, size, number))
                last = runs
            offset += size

    def _key(self, number: int, data: bytes, skip_bad: bool) -> tuple[str, int] | None:
        try:
            data.decode()
            read = _decode_key(data)
            key, named = (read.rollout_id or DEFAULT_ROLLOUT, read.attempt or 0), read.rollout_id is not None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            document = _document(number, data)
            read = read_documents([document], skip_bad=skip_bad)
            [key] = read.rollouts
            named = key[0] != DEFAULT_ROLLOUT
            if read.bad_lines and not named:
                self.bad.append(read.bad_lines[0])
                self.unplaced.append(document)
                return None
        if self._named is None:
            self._named = named
        if self._named is not named:
            document = _document(number, data)
            message = "expected rollout_id on every line or on none, got it on some"
            error = DecodeError(message, where=f"{document.where} $.rollout_id")
            if not skip_bad:
                raise error
            self.bad.append(error)
            # Alone among other lines it could be read: it must not.
            self.unplaced.append(document._replace(data=b"{"))
            return None
        return key


def _documents(file: BinaryIO, runs: array[int], unplaced: list[Document]) -> Iterator[Document]:
    for at in range(0, len(runs), _RUN):
        offset, size, first = runs[at : at + _RUN]
        file.seek(offset)
        for number, data in enumerate(file.read(size).split(b"\n"), first):
            if data.strip():
                yield _document(number, data)
    # Behind the others: they are lost calls of this attempt too, and say nothing about its order.
    yield from unplaced


def _document(number: int, data: bytes) -> Document:
    return Document(f"line {number}", data, f"line-{number}")


def _in_file(error: DecodeError, path: Path) -> DecodeError:
    where = f"{path} {error.where}" if error.where else str(path)
    return DecodeError(error.message, code=error.code, where=where, hint=error.hint)
