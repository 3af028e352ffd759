"""What a reply says, read from any dialect's body or events: reasoning, text and tool calls.

Invariant: nothing of this is gristmill's own reading of replies; a part that is not known is an error.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.client import Answer
from tests.e2e.witness import Seen

__all__ = ["Spoken", "engine_spoke", "spoken"]

Json = dict[str, Any]


@dataclass
class Spoken:
    """One choice's reply. Tool calls are pairs of name and arguments, the latter decoded where they are JSON."""

    reasoning: str = ""
    text: str = ""
    tools: list[tuple[str, Any]] = field(default_factory=list)
    end: str | None = None

    def add_tool(self, name: str, arguments: Any) -> None:
        if isinstance(arguments, dict) and arguments.keys() == {"INVALID_JSON"}:
            arguments = arguments["INVALID_JSON"]  # how the Messages dialect holds what is no object
        if isinstance(arguments, str):
            with suppress(ValueError):
                arguments = json.loads(arguments or "{}")
        self.tools.append((name, arguments))


def engine_spoke(seen: Seen) -> list[Spoken]:
    """Read a Chat or Completions reply of the engine."""
    text = seen.raw.decode()
    if not seen.stream:
        return _openai([json.loads(text)])
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ") and line[6:].strip() != "[DONE]"]
    return _openai([json.loads(line) for line in lines])


def spoken(dialect: str, answer: Answer) -> list[Spoken]:
    """Read what a client was told."""
    if dialect in {"chat", "completions"}:
        return _openai(answer.events or [answer.body])
    if dialect == "messages":
        return [_messages_stream(answer.events) if answer.events else _message(answer.body)]
    whole = answer.events[-1]["response"] if answer.events else answer.body
    told = _response(whole)
    if answer.events:
        _check_deltas(answer.events, told)
    return [told]


def _openai(parts: list[Json]) -> list[Spoken]:
    choices: dict[int, Spoken] = {}
    calls: dict[tuple[int, int], list[str]] = {}
    for part in parts:
        for choice in part.get("choices", []):
            index = choice["index"]
            into = choices.setdefault(index, Spoken())
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            into.text += said.get("content") or ""
            into.reasoning += said.get("reasoning") or said.get("reasoning_content") or ""
            into.end = choice.get("finish_reason") or into.end
            for position, call in enumerate(said.get("tool_calls") or []):
                held = calls.setdefault((index, call.get("index", position)), ["", ""])
                function = call.get("function") or {}
                held[0] += function.get("name") or ""
                held[1] += function.get("arguments") or ""
    for (index, _), (name, arguments) in sorted(calls.items()):
        choices[index].add_tool(name, arguments)
    return [choices[index] for index in sorted(choices)]


def _message(body: Json) -> Spoken:
    told = Spoken(end=body["stop_reason"])
    for block in body["content"]:
        _block(
            told, block["type"], block.get("text") or block.get("thinking") or "", block.get("name"), block.get("input")
        )
    return told


def _messages_stream(events: list[Json]) -> Spoken:
    told = Spoken()
    blocks: dict[int, list[Any]] = {}
    for event in events:
        kind = event["type"]
        if kind == "content_block_start":
            block = event["content_block"]
            blocks[event["index"]] = [block["type"], "", block.get("name")]
        elif kind == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]][1] += delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
        elif kind == "message_delta":
            told.end = event["delta"]["stop_reason"]
    for _, (kind, text, name) in sorted(blocks.items()):
        _block(told, kind, text, name, json.loads(text or "{}") if kind == "tool_use" else None)
    return told


def _block(told: Spoken, kind: str, text: str, name: str | None, arguments: Any) -> None:
    if kind == "thinking":
        told.reasoning += text
    elif kind == "text":
        told.text += text
    elif kind == "tool_use":
        told.add_tool(name or "", arguments)
    else:
        raise ValueError(f"a block of type {kind}")


def _response(body: Json) -> Spoken:
    told = Spoken(end=body["status"])
    for item in body["output"]:
        if item["type"] == "reasoning":
            told.reasoning += "".join(part["text"] for part in item.get("content") or [])
        elif item["type"] == "message":
            told.text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "function_call":
            told.add_tool(item["name"], item["arguments"])
        else:
            raise ValueError(f"an item of type {item['type']}")
    return told


def _check_deltas(events: list[Json], told: Spoken) -> None:
    """The deltas of a Responses stream add up to its last object."""
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    reasoning = "".join(event["delta"] for event in events if event["type"] == "response.reasoning_text.delta")
    if text != told.text or reasoning != told.reasoning:
        raise ValueError(f"deltas {reasoning!r} {text!r}, whole {told.reasoning!r} {told.text!r}")
