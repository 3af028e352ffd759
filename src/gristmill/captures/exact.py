"""Writes what `canonical.loads` reads, without changing it.

Invariant: number texts, repeated keys and lone surrogates stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from math import isfinite
from typing import Any, Final, cast

import orjson

from gristmill.canonical import MAX_DEPTH, JsonNumber, JsonValue, RepeatedKeys
from gristmill.captures.reply import Unexpected
from gristmill.errors import InternalError

__all__ = ["dumps", "plain_numbers", "written_string"]

_LONG: Final = 48
"""From this length on looking for the fast way pays."""


class _Written(str):
    """Text that is already JSON."""

    __slots__ = ()


def dumps(value: JsonValue) -> bytes:
    """Write a JSON value as one line of ASCII, however deep it is nested.

    Raises:
        InternalError: the value is none that JSON has.
    """
    written: list[str] = []
    waiting: list[Any] = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            members = cast("Mapping[str, JsonValue]", part)
            waiting.extend(reversed(list(_object_parts(members))))
        elif isinstance(part, list | tuple):
            waiting.extend(reversed(list(_array_parts(cast("Sequence[JsonValue]", part)))))
        else:
            written.append(_scalar(part))
    return "".join(written).encode("ascii")


def written_string(text: str) -> str:
    """Write a string as ASCII JSON: what `encode_basestring_ascii` gives, faster where most of it is plain."""
    if len(text) >= _LONG and text.isascii() and "\x7f" not in text:
        return orjson.dumps(text).decode("ascii")
    return encode_basestring_ascii(text)


def _object_parts(members: Mapping[str, JsonValue]) -> Iterator[JsonValue]:
    pairs = members.pairs if isinstance(members, RepeatedKeys) else members.items()
    opening = "{"
    for key, member in pairs:
        yield _Written(f"{opening}{written_string(key)}:")
        yield member
        opening = ","
    yield _Written("}" if opening == "," else "{}")


def _array_parts(members: Sequence[JsonValue]) -> Iterator[JsonValue]:
    yield _Written("[")
    for position, member in enumerate(members):
        if position:
            yield _Written(",")
        yield member
    yield _Written("]")


def _scalar(value: JsonValue) -> str:
    if isinstance(value, _Written):
        return value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return written_string(value)
    if isinstance(value, JsonNumber):
        return value.text
    if isinstance(value, int) or (isinstance(value, float) and isfinite(value)):
        return repr(value)
    raise InternalError(f"expected a JSON value, got {type(value).__name__}")


def plain_numbers(value: JsonValue, where: str, depth_left: int = MAX_DEPTH) -> JsonValue:
    """Copy a value with its numbers as ints and floats, for settings that are numbers and not evidence.

    A number that no float can hold stays as it is.

    Raises:
        Unexpected: the value is nested deeper than an item may be.
    """
    if isinstance(value, JsonNumber):
        plain = float(value.text)
        return plain if isfinite(plain) else value
    if not isinstance(value, dict | list):
        return value
    if not depth_left:
        raise Unexpected(f"nesting of at most {MAX_DEPTH}", "more", where)
    if isinstance(value, list):
        return [plain_numbers(member, where, depth_left - 1) for member in cast("list[JsonValue]", value)]
    members = cast("dict[str, JsonValue]", value)
    return {key: plain_numbers(member, where, depth_left - 1) for key, member in members.items()}
