"""The input of a tool call: the text that a model wrote, and the JSON object that the Messages dialect wants.

Invariant: text to input to text gives the same JSON value, or, for text that is no JSON object, the same text.

A model can write arguments that are not a JSON object: cut by the token limit, misquoted, an array. This dialect has
no place for them. Client libraries parse `partial_json` as it comes, and one bad character makes them raise; a cut text
is worse, because they complete it, and half a shell command looks like a whole one. So nothing of a call's input is
streamed before its text is complete, and text that is no object is served as `{"INVALID_JSON": TEXT}`, the form that
the dialect's own documentation gives for it. A tool refuses it for its missing arguments, the model's words stay
readable, the served item and the harness's echo of it have equal fingerprints, and `arguments_of` gives the engine the
text back.

An object that repeats a key is served with its last value, which is what every client would read.

Not here: which event carries the input (encoder).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, cast

import orjson

from gristmill.canonical import MAX_DEPTH, JsonValue, RepeatedKeys, loads, nesting_depth
from gristmill.captures.exact import dumps
from gristmill.errors import DecodeError

__all__ = ["INVALID", "ToolInput", "arguments_of", "input_of"]

INVALID: Final = "INVALID_JSON"
"""The one key of an input that stands for text which is no JSON object."""

_BLANK: Final = " \t\r\n"


class ToolInput(NamedTuple):
    """What is served as `input`, the JSON text of it ("" for an empty one), and whether the model wrote an object."""

    value: dict[str, Any]
    text: str
    valid: bool


_NO_INPUT: Final = ToolInput({}, "", True)


def input_of(arguments: str) -> ToolInput:
    """Turn the arguments of a Chat tool call into an input; no arguments and `null` are an empty object."""
    if not arguments.strip(_BLANK):
        return _NO_INPUT._replace(value={})
    if arguments.count("{") + arguments.count("[") > MAX_DEPTH and nesting_depth(arguments) > MAX_DEPTH:
        # As a value it would be deeper than an item may be.
        return _invalid(arguments)
    try:
        orjson.loads(arguments)  # stricter than `loads`: a lone surrogate or a number too large is no client's JSON
        value: JsonValue = loads(arguments)
    except (orjson.JSONDecodeError, DecodeError):
        return _invalid(arguments)
    if value is None:
        return _NO_INPUT._replace(value={})
    if not isinstance(value, dict) or _stands_for_text(cast("dict[str, Any]", value)):
        return _invalid(arguments)
    plain = _last_values(value)
    return ToolInput(cast("dict[str, Any]", plain), arguments if plain is value else dumps(plain).decode(), True)


def _invalid(arguments: str) -> ToolInput:
    value = {INVALID: arguments}
    return ToolInput(value, dumps(value).decode(), False)


def _stands_for_text(value: dict[str, Any]) -> bool:
    return len(value) == 1 and isinstance(value.get(INVALID), str)


def _last_values(value: JsonValue) -> JsonValue:
    """Return a value without repeated keys: the same one if it has none."""
    if isinstance(value, list):
        members = cast("list[JsonValue]", value)
        made = [_last_values(member) for member in members]
        return made if any(new is not old for new, old in zip(made, members, strict=True)) else members
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, JsonValue]", value)
    changed = {key: _last_values(member) for key, member in fields.items()}
    same = type(fields) is not RepeatedKeys and all(changed[key] is fields[key] for key in fields)
    return fields if same else changed


def arguments_of(value: dict[str, Any]) -> str:
    """Turn an input back into the arguments of a Chat tool call, keys in the order given."""
    return cast(str, value[INVALID]) if _stands_for_text(value) else dumps(value).decode()
