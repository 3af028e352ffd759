"""A harness's own record of its session, as a result that a policy reads.

Invariant: what is returned was written by the harness during the run, in its order and in its words; nothing is added,
corrected or guessed. A record that cannot be read as a whole is not returned, and the reason is.

Not here: where a harness keeps its record and what stands in it (one module each), what is selected (selection).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple, cast

import msgspec

from gristmill.canonical import JsonNumber, JsonValue, RepeatedKeys, loads
from gristmill.errors import DecodeError

__all__ = [
    "JsonObject",
    "ReturnedHistory",
    "Unreadable",
    "Written",
    "file_object",
    "history_of",
    "json_lines",
    "json_object",
    "list_in",
    "no_history",
    "object_in",
    "seconds_of",
    "text_in",
]

JsonObject = Mapping[str, JsonValue]

_MOST_bytes: Final = 1024**3


class Unreadable(Exception):
    """A record is not what its harness writes; the text says what and where."""


class Written(NamedTuple):
    """A piece of a session: one reply with the id it was served under, or a whole conversation without one."""

    items: Sequence[JsonValue]
    response_id: str | None = None


class ReturnedHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What a harness returned.

    Attributes:
        value: a result, None where there is none.
        sources: the files it was read from.
        missing: why there is none, one sentence.
    """

    value: JsonValue = None
    sources: tuple[str, ...] = ()
    missing: str | None = None


def no_history(missing: str) -> ReturnedHistory:
    """Say why there is no history."""
    return ReturnedHistory(missing=missing)


def history_of(
    sessions: Mapping[str, Sequence[Written]], sources: Sequence[Path], scored: str | None = None
) -> ReturnedHistory:
    """Make a result of what sessions hold.

    Args:
        sessions: pieces by session id, in the order of the session.
        sources: where they were read.
        scored: response id of the last reply, where the harness wrote it beside its items.
    """
    envelopes: list[JsonValue] = []
    last: str | None = scored
    for session_id, pieces in sessions.items():
        for piece in pieces:
            envelope: dict[str, JsonValue] = {} if piece.response_id is None else {"id": piece.response_id}
            envelope |= {"output": list(piece.items), "metadata": {"session_id": session_id}}
            envelopes.append(envelope)
            last = piece.response_id if piece.response_id is not None else last
    if not envelopes:
        return no_history("the harness wrote down no reply of this run")
    value: dict[str, JsonValue]
    if len(envelopes) == 1:
        only = cast("dict[str, JsonValue]", envelopes[0])
        value = {"response": {"id": last, **only} if last is not None else only}
    else:
        value = {"responses": envelopes}
        if last is not None and len(sessions) == 1:
            value["response"] = {"id": last}
    return ReturnedHistory(value=value, sources=tuple(map(str, sources)))


def json_lines(path: Path) -> Iterator[tuple[str, JsonObject]]:
    """Read a file of JSON objects, a line each, with the place of each.

    Raises:
        Unreadable: the file cannot be read, or a line is no object.
    """
    for number, line in enumerate(_bytes(path).split(b"\n"), 1):
        if line.strip():
            where = f"{path.name}:{number}"
            yield where, json_object(line, where)


def json_object(data: bytes, where: str) -> JsonObject:
    """Read one JSON object exactly.

    Raises:
        Unreadable: it is none.
    """
    try:
        value = loads(data, where)
    except DecodeError as error:
        raise Unreadable(f"{where}: {error.message}") from error
    if isinstance(value, RepeatedKeys) or not isinstance(value, dict):
        raise Unreadable(f"{where}: expected an object with unique keys")
    return cast(JsonObject, value)


def file_object(path: Path) -> JsonObject:
    """Read a file that is one JSON object.

    Raises:
        Unreadable: it cannot be read, or is none.
    """
    return json_object(_bytes(path), path.name)


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_bytes + 1)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from error
    if len(data) > _MOST_bytes:
        raise Unreadable(f"{path}: expected at most {_MOST_bytes} bytes")
    return data


def text_in(holder: JsonObject, name: str, where: str) -> str | None:
    """Return a string member; absent and null are None.

    Raises:
        Unreadable: it is something else.
    """
    value = holder.get(name)
    if value is None or isinstance(value, str):
        return value
    raise Unreadable(f"{where}: expected a string as {name}")


def object_in(holder: JsonObject, name: str, where: str) -> JsonObject:
    """Return a member that is an object.

    Raises:
        Unreadable: it is something else, or absent.
    """
    value = holder.get(name)
    if isinstance(value, dict) and not isinstance(value, RepeatedKeys):
        return cast(JsonObject, value)
    raise Unreadable(f"{where}: expected an object as {name}")


def list_in(holder: JsonObject, name: str, where: str) -> Sequence[JsonValue]:
    """Return a member that is an array.

    Raises:
        Unreadable: it is something else, or absent.
    """
    value = holder.get(name)
    if isinstance(value, list):
        return cast("Sequence[JsonValue]", value)
    raise Unreadable(f"{where}: expected an array as {name}")


def seconds_of(value: JsonValue, where: str) -> float:
    """Read a time: ISO 8601, or milliseconds since 1970; unix seconds.

    Raises:
        Unreadable: it is neither.
    """
    if isinstance(value, JsonNumber):
        return float(value.text) / 1000
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value / 1000
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            pass
    raise Unreadable(f"{where}: expected a time")
