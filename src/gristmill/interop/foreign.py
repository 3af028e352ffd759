"""JSON that other programs wrote: read exactly, with the non-numbers that Python's own writer lets through.

Invariant: `NaN` and `Infinity` are floats that are not finite, and nothing else is one; they may stand among
log-probabilities, where they make a call unusable, and `kept` refuses them wherever a value is kept as it is.

Not here: what the values mean (the importers).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Final, cast

from gristmill.canonical import JsonNumber, JsonValue, RepeatedKeys, loads, nesting_depth
from gristmill.captures.fields import JsonObject, list_at
from gristmill.captures.fields import object_at as any_object_at
from gristmill.captures.reply import Unexpected, encodable
from gristmill.errors import Code, DecodeError

__all__ = ["bytes_of", "kept", "loads_foreign", "object_at", "objects_at", "unknown_keys", "unreadable"]

_NO_NUMBERS: Final = (b"NaN", b"Infinity")
_LONGEST_INT: Final = 4000
_MAX_DEPTH: Final = 400


def bytes_of(path: Path) -> bytes:
    """Read a file.

    Raises:
        DecodeError: `file_unreadable`.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> DecodeError:
    """Say that a path cannot be read."""
    return DecodeError(
        f"cannot read {path}: {error.strerror or error}",
        code=Code.FILE_UNREADABLE,
        where=str(path),
        hint="check that the path exists and may be read",
    )


def loads_foreign(data: bytes, where: str) -> JsonValue:
    """Decode one JSON document as `canonical.loads` does; non-numbers become floats.

    Raises:
        DecodeError: `file_malformed`.
    """
    try:
        return loads(data, where)
    except DecodeError:
        if not any(word in data for word in _NO_NUMBERS):
            raise
        try:
            text = data.decode()
            if nesting_depth(text) <= _MAX_DEPTH:
                return _decoder.decode(text)
        except ValueError as error:
            raise DecodeError(f"expected JSON: {encodable(str(error))}", where=where) from error
        raise


def _pairs(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    made = dict(pairs)
    return made if len(made) == len(pairs) else RepeatedKeys(pairs)


def _integer(text: str) -> int | JsonNumber:
    return int(text) if len(text) <= _LONGEST_INT else JsonNumber(text)


_decoder: Final = json.JSONDecoder(
    object_pairs_hook=_pairs, parse_int=_integer, parse_float=JsonNumber, parse_constant=float
)


def kept(value: JsonValue, where: str) -> JsonValue:
    """Return a value that is kept as it is.

    Raises:
        Unexpected: it holds a number that is not finite, which no JSON has.
    """
    waiting: list[tuple[Any, str]] = [(value, where)]
    while waiting:
        part, place = waiting.pop()
        if isinstance(part, float) and not isfinite(part):
            raise Unexpected("a JSON value", str(part), place)
        if isinstance(part, RepeatedKeys):
            waiting.extend((member, f"{place}.{key}") for key, member in part.pairs)
        elif isinstance(part, dict):
            waiting.extend((member, f"{place}.{key}") for key, member in cast(JsonObject, part).items())
        elif isinstance(part, list):
            members = cast("list[JsonValue]", part)
            waiting.extend((member, f"{place}[{index}]") for index, member in enumerate(members))
    return value


def object_at(value: JsonValue, where: str) -> JsonObject:
    """Return an object in which each key occurs once.

    Raises:
        Unexpected: it is something else.
    """
    if isinstance(value, RepeatedKeys):
        raise Unexpected("each key once", "one repeated", where)
    return any_object_at(value, where)


def objects_at(holder: Mapping[str, JsonValue], key: str, where: str) -> Iterator[tuple[JsonObject, str]]:
    """Give the objects of an array field with their places, none where it is absent or null; `Unexpected` as above."""
    for index, member in enumerate(list_at(holder, key, where) or ()):
        place = f"{where}.{key}[{index}]"
        yield object_at(member, place), place


def unknown_keys(holder: Mapping[str, JsonValue], known: frozenset[str]) -> list[str]:
    """Give the keys that a format does not have and that hold something."""
    return [encodable(key) for key, value in holder.items() if key not in known and value not in (None, "", [], {})]
