"""The conversation of a Messages request as the messages of a Chat request, the way the engines' own converters say it.

Invariant: every block stands in the result, is noted as left out, or refuses the request with its path. The echo of a
served message becomes the assistant message that the engine had answered with: thinking joined into `reasoning`, text
joined into `content`, calls in order.

A user message with tool results becomes one `tool` message a result, then one `user` message with the images of the
results (Chat has no place for them in a result that every template renders), then the rest of the content in order.
`is_error` has no place in Chat either and is noted; the text of the result says what went wrong. Several texts of a
result are joined with a line feed. A `system` message keeps its place among the messages.

Not here: blocks of any role (blocks), tools (tools), the rest of the request (request).
"""

from __future__ import annotations

from typing import Any, cast

from gristmill.captures.fields import object_at, text_at
from gristmill.captures.headers import billing_text
from gristmill.captures.reply import Unexpected
from gristmill.gateway.dialects.messages.arguments import arguments_of
from gristmill.gateway.dialects.messages.blocks import (
    block_objects,
    content_parts,
    note_left_out,
    refused,
    refused_block,
    required_text,
)
from gristmill.gateway.dialects.messages.notes import Notes
from gristmill.gateway.front import JsonObject

__all__ = ["chat_messages", "continues_last"]


def chat_messages(body: JsonObject, notes: Notes) -> list[JsonObject]:
    """Turn `system` and `messages` into Chat messages.

    Raises:
        RequestRefused: `parameter_refused` for what cannot be carried over.
        Unexpected: something is not what the dialect says.
    """
    made: list[JsonObject] = []
    system = body.get("system")
    text = "" if system is None else _system_text(system, "$.system", notes)
    if text:
        made.append({"role": "system", "content": text})
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Unexpected("an array of messages, not empty", "something else", "$.messages")
    for index, raw in enumerate(cast("list[Any]", messages)):
        where = f"$.messages[{index}]"
        message = object_at(raw, where)
        note_left_out(message, frozenset({"role", "content"}), "message", notes)
        role, content, place = message.get("role"), message.get("content"), f"{where}.content"
        if role == "user":
            made.extend(_user(content, place, notes))
        elif role == "assistant":
            made.append(_assistant(content, place, notes))
        elif role == "system":
            text = _system_text(content, place, notes)
            if text:
                made.append({"role": "system", "content": text})
        else:
            raise Unexpected("user, assistant or system", repr(role)[:40], f"{where}.role")
    return made


def _system_text(value: Any, where: str, notes: Notes) -> str:
    """Join the text of a system prompt; blocks follow each other without anything between them."""
    if isinstance(value, str):
        return value
    pieces: list[str] = []
    for block, kind, place in block_objects(value, where):
        if kind != "text":
            raise refused(f"expected text in a system prompt, got a block of type {kind!r}", place)
        note_left_out(block, frozenset({"text"}), "text", notes)
        text = required_text(block, "text", place)
        if billing_text(block) is not None:
            notes.removed("system.billing_header")
        else:
            pieces.append(text)
    return "".join(pieces)


# User messages


def _user(content: Any, where: str, notes: Notes) -> list[JsonObject]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results: list[JsonObject] = []
    images: list[JsonObject] = []
    parts: list[JsonObject] = []
    for block, kind, place in block_objects(content, where):
        if kind == "tool_result":
            results.append(_tool_result(block, place, images, notes))
        else:
            parts.extend(content_parts(block, kind, place, notes))
    made = results
    if images:
        made.append({"role": "user", "content": images})
    if len(parts) == 1 and parts[0]["type"] == "text":
        made.append({"role": "user", "content": parts[0]["text"]})
    elif parts or not made:
        made.append({"role": "user", "content": parts or ""})
    return made


def _tool_result(block: JsonObject, where: str, images: list[JsonObject], notes: Notes) -> JsonObject:
    """Turn a tool result into a `tool` message and collect its images."""
    note_left_out(block, frozenset({"tool_use_id", "content"}), "tool_result", notes)
    content = block.get("content")
    text = content if isinstance(content, str) else ""
    if content is not None and not isinstance(content, str):
        texts: list[str] = []
        for inner, kind, place in block_objects(content, f"{where}.content"):
            if kind == "tool_reference":
                notes.replaced("tool_reference")
                texts.append(required_text(inner, "tool_name", place))
                continue
            for part in content_parts(inner, kind, place, notes):
                if part["type"] == "text":
                    texts.append(cast(str, part["text"]))
                else:
                    images.append(part)
        text = "\n".join(texts)
    return {"role": "tool", "tool_call_id": required_text(block, "tool_use_id", where), "content": text}


# Assistant messages


def _assistant(content: Any, where: str, notes: Notes) -> JsonObject:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[JsonObject] = []
    for block, kind, place in block_objects(content, where):
        if kind == "text":
            note_left_out(block, frozenset({"text"}), "text", notes)
            texts.append(required_text(block, "text", place))
        elif kind == "thinking":
            note_left_out(block, frozenset({"thinking", "signature"}), "thinking", notes)
            thoughts.append(text_at(block, "thinking", place) or "")
        elif kind == "redacted_thinking":
            notes.removed("redacted_thinking")
        elif kind == "tool_use":
            note_left_out(block, frozenset({"id", "name", "input"}), "tool_use", notes)
            calls.append(_tool_call(block, place))
        else:
            raise refused_block(kind, place)
    text, reasoning = "".join(texts), "".join(thoughts)
    message: JsonObject = {"role": "assistant", "content": text if text or not calls else None}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(block: JsonObject, where: str) -> JsonObject:
    given = object_at({} if block.get("input") is None else block["input"], f"{where}.input")
    function = {"name": required_text(block, "name", where), "arguments": arguments_of(given)}
    return {"id": required_text(block, "id", where), "type": "function", "function": function}


def continues_last(messages: list[JsonObject], where: str, notes: Notes) -> bool:
    """Tell whether the request ends with the beginning of the reply, and drop an ending that says nothing.

    Args:
        messages: what `chat_messages` made.
        where: JSON path of the request's last message.
        notes: takes the note of what was dropped.

    Raises:
        RequestRefused: `parameter_refused` for an ending that a model cannot go on from.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        return False
    if last.get("tool_calls"):
        raise refused("expected the results of the last message's tool calls, got no further message", where)
    text = cast(str, last["content"])
    if not text:
        if last.get("reasoning"):
            raise refused("expected text at the end of a message to continue, got thinking", where)
        messages.pop()
        notes.removed("empty_last_message")
        return False
    if text != text.rstrip():
        raise refused("expected a message to continue that does not end in white space", where)
    return True
