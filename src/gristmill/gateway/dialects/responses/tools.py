"""The tools of a request: what the engine is told, and how a call is told back.

Invariant: every name that the engine can call leads back to one tool of the client's. What nobody could run here, such
as a search that a server does, is removed with a note.

Not here: calls in a history (conversation), calls in a reply (encoder).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from gristmill.canonical import JsonValue
from gristmill.captures.fields import list_at, object_at, text_at
from gristmill.captures.reply import Unexpected
from gristmill.errors import Code
from gristmill.gateway.dialects.responses.actions import ACTIONS, Action
from gristmill.gateway.front import JsonObject, RequestRefused

__all__ = ["CUSTOM_FIELD", "Choice", "Tool", "ToolKind", "Tools", "choice_of", "flat_name", "noted", "tools_of"]

CUSTOM_FIELD: Final = "input"
"""The one parameter of the function that stands for a custom tool."""

_not_noted = re.compile(r"[^A-Za-z0-9_.-]+")


class ToolKind(StrEnum):
    """What kind of tool a function of the engine's stands for."""

    FUNCTION = "function"
    CUSTOM = "custom"
    ACTION = "action"


class Tool(NamedTuple):
    """A tool as the client knows it."""

    kind: ToolKind
    name: str
    namespace: str | None = None
    action: Action | None = None


class Tools(NamedTuple):
    """The tools of a request.

    Attributes:
        chat: as Chat takes them, by the name that the engine knows.
        origins: the client's tool for each of these names.
        notes: what was removed or replaced.
    """

    chat: Mapping[str, JsonObject]
    origins: Mapping[str, Tool]
    notes: tuple[str, ...]


class Choice(NamedTuple):
    """Which tools may or must be called.

    Attributes:
        tool_choice: as Chat takes it, None where the request does not say.
        allowed: names of the tools that are offered, None for all.
        notes: what was replaced.
    """

    tool_choice: str | JsonObject | None = None
    allowed: frozenset[str] | None = None
    notes: tuple[str, ...] = ()


def noted(name: str) -> str:
    """Write a client's word so that a note can hold it."""
    return _not_noted.sub("_", name)[:64]


def flat_name(name: str, namespace: JsonValue) -> str:
    """Name a tool of a namespace as one function."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


class _Reading:
    def __init__(self) -> None:
        self.chat: dict[str, JsonObject] = {}
        self.origins: dict[str, Tool] = {}
        self.notes: list[str] = []

    def add_all(self, holder: JsonObject, where: str, namespace: str | None, preface: str) -> None:
        for index, raw in enumerate(list_at(holder, "tools", where) or ()):
            place = f"{where}.tools[{index}]"
            self.add(object_at(raw, place), place, namespace, preface)

    def add(self, tool: JsonObject, where: str, namespace: str | None, preface: str) -> None:
        kind = text_at(tool, "type", where) or "function"
        if kind == "function":
            function = _function(tool, where)
            self.put(Tool(ToolKind.FUNCTION, function["name"], namespace), function, preface, where)
        elif kind == "custom":
            function = self.custom(tool, where)
            self.put(Tool(ToolKind.CUSTOM, function["name"], namespace), function, preface, where)
        elif kind == "namespace" and namespace is None:
            name = text_at(tool, "name", where)
            if not name:
                raise Unexpected("the name of a namespace", "none", f"{where}.name")
            self.add_all(tool, where, name, text_at(tool, "description", where) or "")
        elif kind in ACTIONS and namespace is None and _runs_here(tool, where):
            action = ACTIONS[kind]
            function = {"name": kind, "description": action.description, "parameters": action.parameters}
            self.put(Tool(ToolKind.ACTION, kind, None, action), function, "", where)
        else:
            self.notes.append(f"removed:tool.{noted(kind)}")

    def put(self, tool: Tool, function: JsonObject, preface: str, where: str) -> None:
        flat = flat_name(tool.name, tool.namespace)
        if flat in self.origins:
            raise RequestRefused(400, Code.REQUEST_MALFORMED, f"two tools would be called {flat!r}", where)
        described = "\n\n".join(text for text in (preface, function.get("description") or "") if text)
        said = {"description": described} if described else {}
        rest = {key: value for key, value in function.items() if key not in {"name", "description"}}
        self.origins[flat] = tool
        self.chat[flat] = {"type": "function", "function": {"name": flat, **said, **rest}}

    def custom(self, tool: JsonObject, where: str) -> JsonObject:
        """Make the function that stands for a custom tool; a grammar is told to the model, nothing enforces it."""
        given: JsonObject = {"type": "string"}
        form = tool.get("format")
        if form is not None:
            form = object_at(form, f"{where}.format")
            if form.get("type") == "grammar":
                syntax, definition = form.get("syntax"), form.get("definition")
                given["description"] = f"Free text that this {syntax} grammar describes:\n{definition}"
                self.notes.append(f"replaced:tool.{noted(str(tool.get('name')))}.format")
        return {
            "name": _name(tool, where),
            "description": text_at(tool, "description", where),
            "parameters": {
                "type": "object",
                "properties": {CUSTOM_FIELD: given},
                "required": [CUSTOM_FIELD],
                "additionalProperties": False,
            },
        }


def _name(tool: JsonObject, where: str) -> str:
    name = text_at(tool, "name", where)
    if not name:
        raise Unexpected("the name of a tool", "none", f"{where}.name")
    return name


def _function(tool: JsonObject, where: str) -> JsonObject:
    parameters = tool.get("parameters")
    function: JsonObject = {
        "name": _name(tool, where),
        "description": text_at(tool, "description", where),
        "parameters": {"type": "object", "properties": {}} if parameters is None else parameters,
    }
    # Chat's default; saying it would change what templates show the model.
    return {**function, "strict": True} if tool.get("strict") is True else function


def _runs_here(tool: JsonObject, where: str) -> bool:
    """Tell whether the client runs an action tool, not a container of a server."""
    environment = tool.get("environment")
    return environment is None or object_at(environment, f"{where}.environment").get("type") == "local"


def tools_of(body: JsonObject) -> Tools:
    """Read the tools of a request.

    Raises:
        RequestRefused: `request_malformed`: two tools have one name.
        Unexpected: not a list of tools.
    """
    reading = _Reading()
    reading.add_all(body, "$", None, "")
    return Tools(reading.chat, reading.origins, tuple(reading.notes))


def choice_of(body: JsonObject, tools: Tools) -> Choice:
    """Read the tool choice of a request.

    Raises:
        RequestRefused: `parameter_refused`: it demands a tool that is not offered.
        Unexpected: not a tool choice.
    """
    where = "$.tool_choice"
    given = body.get("tool_choice")
    if given is None:
        return Choice()
    if isinstance(given, str):
        if given not in {"auto", "none", "required"}:
            raise Unexpected("auto, none, required or an object", "another word", where)
        return Choice(given)
    choice = object_at(given, where)
    kind = text_at(choice, "type", where)
    if kind != "allowed_tools":
        name = _chosen(choice, kind, tools)
        if name is None:
            raise RequestRefused(
                400, Code.PARAMETER_REFUSED, "the tool that must be called is none that can be offered", where
            )
        return Choice({"type": "function", "function": {"name": name}})
    mode = text_at(choice, "mode", where) or "auto"
    if mode not in {"auto", "required"}:
        raise Unexpected("auto or required", "another word", f"{where}.mode")
    listed = list_at(choice, "tools", where) or []
    names: set[str] = set()
    notes = ["replaced:tool_choice.allowed_tools"]
    for index, raw in enumerate(listed):
        place = f"{where}.tools[{index}]"
        one = object_at(raw, place)
        name = _chosen(one, text_at(one, "type", place), tools)
        if name is None:
            notes.append("removed:tool_choice.allowed_tools")
        else:
            names.add(name)
    return Choice(mode, frozenset(names), tuple(dict.fromkeys(notes)))


def _chosen(choice: JsonObject, kind: str | None, tools: Tools) -> str | None:
    """Find the engine's name of a tool that a choice names."""
    name = choice.get("name", kind if kind in ACTIONS else None)
    if not isinstance(name, str):
        return None
    flat = flat_name(name, choice.get("namespace"))
    if flat in tools.origins:
        return flat
    named = [flat for flat, tool in tools.origins.items() if tool.name == name]
    return named[0] if len(named) == 1 else None
