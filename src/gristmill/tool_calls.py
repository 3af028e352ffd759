"""Tool calls of any dialect as atoms: a name, an id, and arguments that are a JSON value or exact text.

Invariant: arguments that are JSON are compared as a value, whatever their spelling; everything else is exact text. No
arguments, null and an empty object are the same.

Not here: the items and messages that hold a call (atoms).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gristmill.canonical import JsonValue, canonical_text, canonical_text_of_json
from gristmill.item_fields import malformed, object_of, text_of, unsupported
from gristmill.records import Atom

__all__ = ["argument_atom", "chat_tool_call", "exact_atom", "function_atom", "tool_name"]

_NO_ARGUMENTS: Final = "{}"


def argument_atom(arguments: JsonValue, *, name: str, call_id: str, where: str = "$") -> Atom:
    """Make the atom of a function call: its arguments are a JSON value if they are JSON, else exact text."""
    # Of what Python calls false, JSON's 0, false and [] are arguments.
    if not arguments and (arguments is None or arguments == "" or isinstance(arguments, dict)):
        return Atom("tool_call", _NO_ARGUMENTS, "json", "function", name, call_id)
    if type(arguments) is str:
        text = canonical_text_of_json(arguments, where)
        if text is None:
            return Atom("tool_call", arguments, "text", "function", name, call_id)
    else:
        text = canonical_text(arguments, where)
    return Atom("tool_call", _NO_ARGUMENTS if text == "null" else text, "json", "function", name, call_id)


def tool_name(value: Mapping[str, JsonValue], where: str) -> str:
    """Return the name of a tool, with its namespace before it where there is one."""
    name = value.get("name")
    if type(name) is not str:
        raise malformed(where + ".name", "a string", name)
    namespace = value.get("namespace")
    if namespace:
        return f"{text_of(namespace, where + '.namespace')}__{name}"
    return name


def function_atom(value: Mapping[str, JsonValue], call_id: JsonValue, where: str, arguments: JsonValue) -> Atom:
    """Make the atom of a function call from the object that names the function."""
    return argument_atom(
        arguments, name=tool_name(value, where), call_id=text_of(call_id, where + ".call_id"), where=where
    )


def chat_tool_call(raw: JsonValue, where: str) -> Atom:
    """Make the atom of a member of a Chat message's `tool_calls`."""
    call = object_of(raw, where)
    kind = call.get("type")
    if kind is None or kind == "function":
        function = object_of(call.get("function"), where + ".function")
        return function_atom(function, call.get("id"), where + ".function", function.get("arguments"))
    if kind == "custom":
        custom = object_of(call.get("custom"), where + ".custom")
        return exact_atom("custom", tool_name(custom, where), call.get("id"), custom.get("input"), where)
    if not isinstance(kind, str):
        raise malformed(where + ".type", "a string", kind)
    raise unsupported(call, f"tool call of type {kind!r}", where)


def exact_atom(tool: str, name: str, call_id: JsonValue, given: JsonValue, where: str) -> Atom:
    """Make the atom of a call whose input is free-form: exact text, or the exact JSON object it was given as."""
    identity = text_of(call_id, where + ".call_id")
    if given is None or type(given) is str:
        return Atom("tool_call", text_of(given, where), "text", tool, name, identity)
    return Atom("tool_call", canonical_text(given, where), "json", tool, name, identity)
