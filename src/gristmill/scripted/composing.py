"""What a reply makes the model sample: one text with control tokens, as the model itself would have written it.

Invariant: the text is a function of the script, the request and the number of the choice.

Not here: its tokens (sampling), and how the engine parses it back (parsing).
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from gristmill.scripted.asked import Asked, EngineRefused, Tool
from gristmill.scripted.choice import Chosen, offered_name
from gristmill.scripted.fitting import fitted
from gristmill.scripted.placeholders import ValueOf, filled, filled_value
from gristmill.scripted.script import Reply, Settings, ToolCall
from gristmill.scripted.template import EMPTY_THOUGHT, think, tool_call

__all__ = ["Composed", "compose"]


class Composed(NamedTuple):
    """What is sampled: the text without the end of turn, and whether that follows."""

    text: str
    eos: bool


class _Call(NamedTuple):
    name: str
    arguments: str


def compose(chosen: Chosen, asked: Asked, settings: Settings, index: int) -> Composed:
    """Compose the sampled text of one choice.

    Args:
        chosen: the reply.
        asked: the request.
        settings: the script's.
        index: number of the choice.

    Raises:
        EngineRefused: 400, the reply calls a tool that is not offered.
    """
    reply = chosen.reply
    value_of = _values(chosen, asked, index)
    eos = reply.eos and reply.cut is None
    if reply.raw is not None:
        return Composed(filled(reply.raw, value_of), eos)
    calls = [_call(call, asked, settings, value_of) for call in reply.tool_calls] if asked.route == "chat" else []
    forced = asked.choice in ("required", "named")
    if forced:
        calls = _forced(calls, asked, value_of)
    content = _content(reply, asked, value_of)
    text = ""
    if settings.thinking and asked.thinking and asked.route == "chat":
        text = EMPTY_THOUGHT if reply.reasoning is None else think(filled(reply.reasoning, value_of))
        # A grammar that asks for a call leaves no room for line ends before it.
        text = text.rstrip("\n") if forced and not content else text
    text += content
    for number, call in enumerate(calls):
        text += "\n" if number or content else ""
        text += tool_call(call.name, call.arguments)
    return Composed(text, eos)


def _content(reply: Reply, asked: Asked, value_of: ValueOf) -> str:
    if reply.json is not None:
        values = filled_value(reply.json, value_of)
        return json.dumps(fitted(values, asked.format_schema or {}), ensure_ascii=False)
    return filled(reply.content or "", value_of)


def _call(call: ToolCall, asked: Asked, settings: Settings, value_of: ValueOf) -> _Call:
    name = offered_name(call.name, asked, settings)
    if name is None and isinstance(call.name, str) and not call.name.startswith("@"):
        # A model may call what nobody offered; several names are a choice among what is offered.
        name = call.name
    if name is None:
        offers = ", ".join(tool.name for tool in asked.tools) or "none"
        raise EngineRefused(400, f"script: expected a tool of {call.name} to be offered, got {offers}")
    if isinstance(call.arguments, str):
        return _Call(name, filled(call.arguments, value_of))
    tool = next((tool for tool in asked.tools if tool.name == name), Tool(name, {}))
    return _fitted_call(tool, filled_value(call.arguments, value_of))


def _fitted_call(tool: Tool, values: dict[str, Any]) -> _Call:
    return _Call(tool.name, json.dumps(fitted(values, tool.schema), ensure_ascii=False))


def _forced(calls: list[_Call], asked: Asked, value_of: ValueOf) -> list[_Call]:
    """Return calls that satisfy a `tool_choice` that demands one."""
    if asked.named is not None:
        calls = [call for call in calls if call.name == asked.named][:1]
    if calls:
        return calls
    tool = next(tool for tool in asked.tools if asked.named in (None, tool.name))
    return [_fitted_call(tool, {})]


def _values(chosen: Chosen, asked: Asked, index: int) -> ValueOf:
    def value_of(name: str, key: str) -> str:
        match name:
            case "header":
                return asked.headers.get(key.lower(), "")
            case "match":
                number = int(key)
                return chosen.groups[number - 1] if 0 < number <= len(chosen.groups) else ""
            case "try":
                return str(chosen.attempt)
            case "choice":
                return str(index)
            case "tools":
                return ", ".join(tool.name for tool in asked.tools)
            case "turn" | "step":
                return str(asked.turn if name == "turn" else asked.step)
            case _:
                return str(getattr(asked, name))

    return value_of
