"""Tools and the choice between them: what the client runs becomes a function, what a server runs is left out.

Invariant: the model is offered exactly the tools that the client declared with a schema of their own, in order; every
other one is noted by its type. A choice that needs a tool that was left out refuses the request.

Left out are tools of servers (web search, code execution, MCP toolsets, tool search) and the dialect's typed tools
whose schema only its own models know (`bash_…`, `text_editor_…`, `computer_…`, `memory_…`). With the search for tools
gone, `defer_loading` is too: all tools are offered at once.

Not here: calls and results of tools in the conversation (conversation).
"""

from __future__ import annotations

from typing import Any, Final, cast

from gristmill.captures.fields import name_at, object_at
from gristmill.captures.reply import Unexpected
from gristmill.gateway.dialects.messages.blocks import note_left_out, refused, required_text
from gristmill.gateway.dialects.messages.notes import Notes
from gristmill.gateway.front import JsonObject

__all__ = ["chat_tools"]

_CARRIED: Final = frozenset({"name", "description", "input_schema", "strict", "eager_input_streaming"})
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(body: JsonObject, notes: Notes) -> JsonObject:
    """Turn `tools` and `tool_choice` into fields of a Chat request, none where no tool is left.

    Raises:
        RequestRefused: `parameter_refused` for a choice that cannot be carried over.
        Unexpected: something is not what the dialect says.
    """
    tools = _functions(body.get("tools"), notes)
    fields: JsonObject = {"tools": tools} if tools else {}
    given = body.get("tool_choice")
    if given is None:
        return fields
    where = "$.tool_choice"
    choice = object_at(given, where)
    note_left_out(choice, frozenset({"name", "disable_parallel_tool_use"}), "tool_choice", notes)
    kind = name_at(choice, "type", where)
    if kind == "tool":
        name = required_text(choice, "name", where)
        if all(tool["function"]["name"] != name for tool in tools):
            raise refused(f"expected the choice of a tool that the client runs, got {name!r}", f"{where}.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif kind not in _CHOICES:
        raise Unexpected("auto, any, tool or none", repr(kind)[:40], f"{where}.type")
    elif tools:
        fields["tool_choice"] = _CHOICES[kind]
    elif kind == "any":
        raise refused("expected a tool that the client runs to choose from, got none", where)
    if tools and choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields


def _functions(tools: Any, notes: Notes) -> list[JsonObject]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise Unexpected("an array of tools", "something else", "$.tools")
    made: list[JsonObject] = []
    for index, raw in enumerate(cast("list[Any]", tools)):
        where = f"$.tools[{index}]"
        tool = object_at(raw, where)
        kind = name_at(tool, "type", where)
        if kind is not None and kind != "custom":
            notes.removed(f"tools.{kind}")
            continue
        note_left_out(tool, _CARRIED, "tools", notes)
        function: JsonObject = {"name": required_text(tool, "name", where)}
        if tool.get("description") is not None:
            function["description"] = required_text(tool, "description", where)
        function["parameters"] = object_at(tool.get("input_schema"), f"{where}.input_schema")
        if isinstance(tool.get("strict"), bool):
            function["strict"] = tool["strict"]
        made.append({"type": "function", "function": function})
    return made
