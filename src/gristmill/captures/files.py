"""Opens captures on disk: the one place of this package that does I/O.

A path is a file of capture lines (`.jsonl`), a story folder (`capture.jsonl`, `result.json`), one recorded
engine exchange (`.json`), or a folder of those.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from gristmill.captures.lines import (
    CapturedRollout,
    CaptureFile,
    Document,
    Note,
    read_documents,
    read_lines,
    read_result,
)
from gristmill.errors import Code, ConfigError, DecodeError
from gristmill.records import Result

__all__ = ["read_capture", "read_result_file"]

_STORY = "capture.jsonl"
_RESULT = "result.json"


def read_capture(path: Path | str, *, result: Path | str | None = None, skip_bad: bool = False) -> CaptureFile:
    """Read a capture from disk.

    Args:
        path: file or folder.
        result: file of the harness's result; without it `result.json` beside the lines is taken, if there is
            one and the file holds one attempt without a result of its own.
        skip_bad: collect lines that cannot be read instead of raising.

    Raises:
        DecodeError: `file_unreadable`, `file_malformed` or `schema_unsupported`; `where` names file and line.
        ConfigError: a result is given and the capture holds several attempts.
    """
    source = Path(path)
    if source.is_dir():
        story = source / _STORY
        if story.is_file():
            read, beside = _read_lines_of(story, skip_bad), source / _RESULT
        else:
            read, beside = _read_exchanges(source, skip_bad), source / _RESULT
    elif source.suffix == ".json":
        read, beside = _read_exchange(source), None
    else:
        read, beside = _read_lines_of(source, skip_bad), source.parent / _RESULT
    if result is not None:
        return _with_given_result(read, Path(result))
    if beside is not None and beside.is_file():
        return _with_result_beside(read, beside)
    return read


def read_result_file(path: Path | str) -> Result:
    """Read a result file.

    Raises:
        DecodeError: `file_unreadable`, `file_malformed`; `where` names the file and the JSON path.
    """
    source = Path(path)
    data = _bytes(source)
    try:
        return read_result(data)
    except DecodeError as error:
        raise _in_file(error, source) from error


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DecodeError:
    return DecodeError(
        f"cannot read {path}: {error.strerror or error}",
        code=Code.FILE_UNREADABLE,
        where=str(path),
        hint="check that the path exists and may be read",
    )


def _in_file(error: DecodeError, path: Path) -> DecodeError:
    where = f"{path} {error.where}" if error.where else str(path)
    return DecodeError(error.message, code=error.code, where=where, hint=error.hint)


def _read_lines_of(path: Path, skip_bad: bool) -> CaptureFile:
    try:
        with path.open("rb") as lines:
            read = read_lines(lines, skip_bad=skip_bad)
    except OSError as error:
        raise _unreadable(path, error) from error
    except DecodeError as error:
        raise _in_file(error, path) from error
    bad = tuple(_in_file(error, path) for error in read.bad_lines)
    return msgspec.structs.replace(read, bad_lines=bad)


def _read_exchange(path: Path) -> CaptureFile:
    read = read_documents([_document(path)], default_kind="exchange")
    if not any(rollout.capture.records for rollout in read.rollouts.values()):
        message = "expected the exchange of a model call, got a route that samples nothing"
        raise DecodeError(message, where=str(path))
    return read


def _read_exchanges(folder: Path, skip_bad: bool) -> CaptureFile:
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".json" and path.name != _RESULT)
    except OSError as error:
        raise _unreadable(folder, error) from error
    if not paths:
        message = f"expected {_STORY}, or engine exchanges as .json files, got neither"
        raise DecodeError(message, where=str(folder))
    return read_documents(map(_document, paths), default_kind="exchange", skip_bad=skip_bad)


def _document(path: Path) -> Document:
    return Document(str(path), _bytes(path), path.stem)


def _with_given_result(read: CaptureFile, path: Path) -> CaptureFile:
    if len(read.rollouts) != 1:
        raise ConfigError(
            f"expected one attempt to go with {path}, got {len(read.rollouts)}",
            hint="put `result` lines into the capture file",
        )
    [(key, rollout)] = read.rollouts.items()
    result = read_result_file(path)
    return msgspec.structs.replace(read, rollouts={key: CapturedRollout(rollout.capture, result)})


def _with_result_beside(read: CaptureFile, path: Path) -> CaptureFile:
    if len(read.rollouts) == 1 and next(iter(read.rollouts.values())).result is None:
        return _with_given_result(read, path)
    note = Note(str(path), "not used: the capture has results of its own, or several attempts")
    return msgspec.structs.replace(read, notes=(*read.notes, note))
