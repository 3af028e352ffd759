"""The chat template of the scripted engine: ChatML, as reasoning models with tools use it.

Invariant: it does what makes real histories drift. Reasoning of assistant turns before the last real user message is
dropped; line ends around reasoning and text are stripped; a call's arguments are parsed and written anew, and what
cannot be parsed becomes `{}`; control-token text of a user is not escaped.

Not here: tokens (tokenizer). The wording of the tools block is our own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

import orjson

from gristmill.scripted.asked import EngineRefused, text_of

__all__ = ["EMPTY_THOUGHT", "TemplateOptions", "render", "think", "tool_call"]

JsonObject = dict[str, Any]

EMPTY_THOUGHT: Final = "<think>\n\n</think>\n\n"

_TOOLS_BEFORE: Final = "# Tools\n\nFunctions that can be called, one a line:\n<tools>"
_TOOLS_AFTER: Final = (
    "\n</tools>\n\nCall a function with one JSON object between call tags:\n"
    '<tool_call>\n{"name": <its name>, "arguments": <its arguments>}\n</tool_call>'
)
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal"})


class TemplateOptions(NamedTuple):
    """What a request and the script say about rendering."""

    thinking_model: bool = False
    enable_thinking: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def think(reasoning: str) -> str:
    """Return a thought as it is sampled and rendered."""
    return f"<think>\n{reasoning}\n</think>\n\n"


def tool_call(name: str, arguments: str) -> str:
    """Return a call as it is sampled and rendered."""
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n</tool_call>'


def render(messages: Sequence[JsonObject], tools: Sequence[Any], options: TemplateOptions) -> str:
    """Render a conversation.

    Raises:
        EngineRefused: 400, a part that is no text.
    """
    listed = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    opening: list[str] = []
    while listed and listed[0]["role"] == "system":
        opening.append(_text(listed.pop(0)))
    parts: list[str] = []
    if tools:
        opening.append(_described(orjson.dumps(tools)))
    if opening:
        parts.append(_turn("system", "\n\n".join(opening)))
    query = max((at for at, message in enumerate(listed) if _is_query(message)), default=len(listed) - 1)
    for at, message in enumerate(listed):
        match message["role"]:
            case "assistant":
                kept = options.thinking_model and at > query
                parts.append(_turn("assistant", _assistant(message, options, kept, at == len(listed) - 1)))
            case "tool":
                first = at == 0 or listed[at - 1]["role"] != "tool"
                last = at == len(listed) - 1 or listed[at + 1]["role"] != "tool"
                parts.append("<|im_start|>user" if first else "")
                parts.append(f"\n<tool_response>\n{_text(message)}\n</tool_response>")
                parts.append("<|im_end|>\n" if last else "")
            case role:
                parts.append(_turn(role, _text(message)))
    text = "".join(parts)
    if options.continue_final_message:
        return text.removesuffix("<|im_end|>\n")
    if options.add_generation_prompt:
        text += "<|im_start|>assistant\n"
        if options.thinking_model and not options.enable_thinking:
            text += EMPTY_THOUGHT
    return text


@lru_cache(64)
def _described(tools: bytes) -> str:
    """Describe tools, given in JSON; requests of one harness all have the same."""
    lines = (json.dumps(tool, ensure_ascii=False) for tool in json.loads(tools))
    return _TOOLS_BEFORE + "".join(f"\n{line}" for line in lines) + _TOOLS_AFTER


def _turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _text(message: JsonObject) -> str:
    content = message.get("content")
    if isinstance(content, list):
        for part in cast("list[Any]", content):
            kind = cast(JsonObject, part).get("type", "text") if isinstance(part, dict) else "text"
            if kind not in _TEXT_PARTS:
                raise EngineRefused(400, f"At most 0 {kind}(s) may be provided in one prompt.")
    return text_of(message)


def _is_query(message: JsonObject) -> bool:
    """Say whether a message is of a real user, not a tool's answer in a user's turn."""
    text = text_of(message)
    answer = text.startswith("<tool_response>") and text.endswith("</tool_response>")
    return message["role"] == "user" and not answer


def _assistant(message: JsonObject, options: TemplateOptions, kept: bool, final: bool) -> str:
    content = _text(message)
    reasoning = message.get("reasoning")
    if not isinstance(reasoning, str):
        reasoning = message.get("reasoning_content")
    if not isinstance(reasoning, str):
        reasoning = ""
        if options.thinking_model and "</think>" in content:
            thought, _, content = content.rpartition("</think>")
            reasoning = thought.rstrip("\n").rpartition("<think>")[2].lstrip("\n")
            content = content.lstrip("\n")
    text = content
    if kept and (final or reasoning):
        text = think(reasoning.strip("\n")) + content.lstrip("\n")
    for number, call in enumerate(cast("list[Any]", message.get("tool_calls") or [])):
        function: Any = cast(JsonObject, call).get("function", call) if isinstance(call, dict) else {}
        if number or content:
            text += "\n"
        text += tool_call(str(function.get("name", "")), _rewritten(function.get("arguments")))
    return text


def _rewritten(arguments: Any) -> str:
    """Write a call's arguments anew, as every template that takes them as an object does."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    return json.dumps(arguments if isinstance(arguments, Mapping) else {}, ensure_ascii=False)
