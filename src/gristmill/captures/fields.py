"""Typed reading of fields of decoded JSON: each function takes what is there, or says what it expected.

Invariant: a field that is absent or null is None; a field of another type than its dialect's is a malformed
reply, never a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import cast

from gristmill.canonical import JsonNumber, JsonValue
from gristmill.captures.reply import Unexpected, Usage, encodable

__all__ = [
    "JsonObject",
    "count_at",
    "kind_of",
    "list_at",
    "name_at",
    "number",
    "object_at",
    "text_at",
    "usage_of",
]

JsonObject = dict[str, JsonValue]


def kind_of(value: JsonValue) -> str:
    """Name the JSON type of a decoded value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float | JsonNumber):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _expected(what: str, value: JsonValue, where: str) -> Unexpected:
    return Unexpected(what, kind_of(value), where)


def object_at(value: JsonValue, where: str) -> JsonObject:
    """Return an object."""
    if not isinstance(value, dict):
        raise _expected("an object", value, where)
    return cast(JsonObject, value)


def list_at(holder: Mapping[str, JsonValue], key: str, where: str) -> list[JsonValue] | None:
    """Return an array field, None where it is absent or null."""
    value = holder.get(key)
    if value is None or isinstance(value, list):
        return cast("list[JsonValue] | None", value)
    raise _expected("an array", value, f"{where}.{key}")


def text_at(holder: Mapping[str, JsonValue], key: str, where: str) -> str | None:
    """Return a string field, None where it is absent or null."""
    value = holder.get(key)
    if value is None or isinstance(value, str):
        return value
    raise _expected("a string", value, f"{where}.{key}")


def name_at(holder: Mapping[str, JsonValue], key: str, where: str) -> str | None:
    """Return a string field that names something, so that it must be valid Unicode."""
    name = text_at(holder, key, where)
    if name is not None and encodable(name) != name:
        raise Unexpected("valid Unicode", "a lone surrogate", f"{where}.{key}")
    return name


def count_at(holder: Mapping[str, JsonValue], key: str, where: str) -> int | None:
    """Return a field that counts something, None where it is absent or null."""
    value = holder.get(key)
    if value is None or (type(value) is int and value >= 0):
        return value
    raise _expected("a count", value, f"{where}.{key}")


def number(value: JsonValue) -> float:
    """Return a number as a float, NaN for anything else; what is too large for a float is infinite."""
    if type(value) is float:
        return value
    if isinstance(value, JsonNumber):
        return float(value.text)
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")
    return nan


def usage_of(body: Mapping[str, JsonValue]) -> Usage:
    """Read the token counts that a Chat, Completions or generate reply reports."""
    value = body.get("usage")
    if value is None:
        return Usage()
    usage = object_at(value, "$.usage")
    details = usage.get("prompt_tokens_details")
    cached = None
    if details is not None:
        cached = count_at(
            object_at(details, "$.usage.prompt_tokens_details"),
            "cached_tokens",
            "$.usage.prompt_tokens_details",
        )
    return Usage(count_at(usage, "prompt_tokens", "$.usage"), count_at(usage, "completion_tokens", "$.usage"), cached)
