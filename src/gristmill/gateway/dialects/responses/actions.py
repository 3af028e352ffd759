"""Tools that Responses has types of its own for, and a client runs: a shell, patches, a computer.

Invariant: the model is offered a function whose arguments are the action; what it writes goes back as the native item
only if the item holds all of it, unchanged, else as the plain function call that it is.

Not here: tools that a server would run; nobody could, so they are removed (tools).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, cast

from gristmill.canonical import JsonNumber, JsonValue, RepeatedKeys, loads
from gristmill.errors import DecodeError
from gristmill.gateway.front import JsonObject

__all__ = ["ACTIONS", "ACTION_CALLS", "Action", "action_of", "arguments_of", "is_plain", "plain_object"]


class Action(NamedTuple):
    """One such tool.

    Attributes:
        tool: its type, and the name of the function that stands for it.
        item: the type of its call.
        prefix: of the call's id.
        fields: where a call holds its input, the first that is given.
        filled: what the input says where the arguments do not; clients expect it, and leaving it out means the same.
        fits: whether arguments can be its input.
        description, parameters: of the function; None for a tool that is not offered, only read in a history.
    """

    tool: str
    item: str
    prefix: str
    fields: tuple[str, ...]
    filled: Mapping[str, Any]
    fits: Callable[[JsonObject], bool]
    description: str = ""
    parameters: JsonObject | None = None


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in cast("list[Any]", value))


def _fits_local_shell(arguments: JsonObject) -> bool:
    return _is_strings(arguments.get("command")) and "type" not in arguments


def _fits_shell(arguments: JsonObject) -> bool:
    return _is_strings(arguments.get("commands"))


def _fits_patch(arguments: JsonObject) -> bool:
    return all(isinstance(arguments.get(key), str) for key in ("type", "path"))


_STRINGS: Final = {"type": "array", "items": {"type": "string"}}

_LOCAL_SHELL: Final = Action(
    tool="local_shell",
    item="local_shell_call",
    prefix="lsh",
    fields=("action",),
    filled={"type": "exec", "env": {}},
    fits=_fits_local_shell,
    description="Runs a command on the local machine and returns its output.",
    parameters={
        "type": "object",
        "properties": {
            "command": {**_STRINGS, "description": "The program and its arguments."},
            "env": {"type": "object", "additionalProperties": {"type": "string"}},
            "timeout_ms": {"type": "integer"},
            "user": {"type": "string"},
            "working_directory": {"type": "string"},
        },
        "required": ["command"],
    },
)
_SHELL: Final = Action(
    tool="shell",
    item="shell_call",
    prefix="sh",
    fields=("action",),
    filled={"timeout_ms": None, "max_output_length": None},
    fits=_fits_shell,
    description="Runs shell commands and returns their output.",
    parameters={
        "type": "object",
        "properties": {
            "commands": {**_STRINGS, "description": "Commands to run."},
            "timeout_ms": {"type": "integer"},
            "max_output_length": {"type": "integer"},
        },
        "required": ["commands"],
    },
)
_APPLY_PATCH: Final = Action(
    tool="apply_patch",
    item="apply_patch_call",
    prefix="apc",
    fields=("operation", "input"),
    filled={},
    fits=_fits_patch,
    description="Creates, updates or deletes one file.",
    parameters={
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": {"type": "string"},
            "diff": {"type": "string", "description": "The change as a V4A diff; not for delete_file."},
        },
        "required": ["type", "path"],
    },
)
_COMPUTER: Final = Action(
    tool="computer", item="computer_call", prefix="cu", fields=("actions", "action"), filled={}, fits=bool
)

ACTIONS: Final[Mapping[str, Action]] = {each.tool: each for each in (_LOCAL_SHELL, _SHELL, _APPLY_PATCH)}
"""The tools that are offered, by type."""

ACTION_CALLS: Final[Mapping[str, Action]] = {each.item: each for each in (*ACTIONS.values(), _COMPUTER)}
"""All of them, by the type of their call."""


def plain_object(text: str) -> JsonObject | None:
    """Decode arguments that are an object whose decoded form says all of it, None for any others.

    A repeated key or a number that a float would change would be lost.
    """
    try:
        value = loads(text)
    except DecodeError:
        return None
    return cast(JsonObject, value) if isinstance(value, dict) and is_plain(value) else None


def is_plain(value: JsonValue) -> bool:
    """Tell whether a decoded value holds no repeated key and no number that only its text says exactly."""
    waiting: list[JsonValue] = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, RepeatedKeys | JsonNumber):
            return False
        if isinstance(part, dict):
            waiting.extend(cast(JsonObject, part).values())
        elif isinstance(part, list):
            waiting.extend(cast("list[JsonValue]", part))
    return True


def action_of(action: Action, arguments: str) -> JsonObject | None:
    """Return the input of a native call, None where the model's arguments cannot stand there."""
    given = plain_object(arguments)
    return {**action.filled, **given} if given is not None and action.fits(given) else None


def arguments_of(action: Action, item: JsonObject) -> JsonValue:
    """Return the arguments that a native call stands for: an object, or what else it holds."""
    given = next((item[name] for name in action.fields if item.get(name) is not None), None)
    if isinstance(given, dict):
        said = cast(JsonObject, given)
        return {key: value for key, value in said.items() if key not in action.filled or value != action.filled[key]}
    return {action.fields[0]: cast("list[JsonValue]", given)} if isinstance(given, list) else given
