"""Fields of messages and items, read by their type or refused with their path.

Invariant: a field of another type than its dialect's is a refusal, never a default; absent and null are the same.

Not here: what an item means (atoms).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

from gristmill.canonical import MAX_ITEM_CHARS, JsonValue, RepeatedKeys, json_kind
from gristmill.errors import Code, SelectionError

__all__ = ["item_id_of", "list_of", "malformed", "object_of", "text_of", "unsupported", "word_of"]

_SERVER_EXECUTED: Final = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "tool_search_call",
    }
)


def object_of(value: JsonValue, where: str) -> dict[str, JsonValue]:
    """Return an object whose keys are unique."""
    if isinstance(value, RepeatedKeys):
        raise SelectionError(
            Code.OUTPUT_MALFORMED, "expected an object whose keys are unique, got a repeated key", where=where
        )
    if isinstance(value, Mapping):
        return dict(cast(Mapping[str, JsonValue], value))
    raise malformed(where, "an object", value)


def malformed(where: str, expected: str, got: object) -> SelectionError:
    """Make the refusal of a field of another type."""
    return SelectionError(Code.OUTPUT_MALFORMED, f"expected {expected}, got {json_kind(got)}", where=where)


def unsupported(value: Mapping[str, JsonValue], what: str, where: str) -> SelectionError:
    """Make the refusal of an item that can neither be matched nor passed over."""
    item_id = word_of(value.get("id"))
    named = f" (id {item_id})" if item_id else ""
    reason = "it is executed by a server" if word_of(value.get("type")) in _SERVER_EXECUTED else "it is on no list"
    return SelectionError(
        Code.ITEM_TYPE_UNSUPPORTED,
        f"{what}{named} can neither be matched nor passed over: {reason}",
        where=where,
        evidence={key: word for key in ("type", "id", "role") if (word := word_of(value.get(key)))},
    )


def item_id_of(value: Mapping[str, JsonValue], where: str) -> str | None:
    """Return an item's id, None where it has none."""
    item_id = value.get("id")
    if item_id is None or isinstance(item_id, str):
        return item_id or None
    raise malformed(where + ".id", "a string or null", item_id)


def word_of(value: JsonValue) -> str:
    """Return a string as it is and anything else as the empty string, to look it up in a set of names."""
    return value if type(value) is str else ""


def text_of(value: JsonValue, where: str) -> str:
    """Read a string that may be null or absent."""
    if value is None:
        return ""
    if type(value) is not str:
        raise malformed(where, "a string or null", value)
    if len(value) > MAX_ITEM_CHARS:
        raise SelectionError(
            Code.ITEM_TOO_LARGE,
            f"expected at most {MAX_ITEM_CHARS} characters, got {len(value)}",
            where=where,
        )
    return value


def list_of(value: JsonValue, where: str) -> Sequence[JsonValue]:
    """Read an array that may be null or absent."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise malformed(where, "an array or null", value)
    return cast(Sequence[JsonValue], value)
