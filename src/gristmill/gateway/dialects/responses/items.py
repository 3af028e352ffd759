"""The items of a reply as they are served, and the ids that tell which reply an item came from.

Invariant: an id is made from the call's token and the item's place, so a stream and its final object agree, no two
items share one, and items that come back show which of them were one reply.

Not here: when an item begins and ends (encoder), how it is streamed (events).
"""

from __future__ import annotations

import re
from typing import Any, Final

from gristmill.gateway.front import JsonObject

__all__ = [
    "COMPLETED",
    "INCOMPLETE",
    "IN_PROGRESS",
    "action_item",
    "custom_item",
    "emptied",
    "function_item",
    "item_id",
    "reasoning_item",
    "refusal_item",
    "reply_token",
    "response_id",
    "text_item",
]

IN_PROGRESS: Final = "in_progress"
COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"

_minted = re.compile(r"[a-z]+_([A-Za-z0-9]+)_[0-9]+")


def response_id(token: str) -> str:
    """Name a response."""
    return f"resp_{token}"


def item_id(prefix: str, token: str, output_index: int) -> str:
    """Name the item that stands at a place of a reply's output."""
    return f"{prefix}_{token}_{output_index}"


def reply_token(given: object) -> str | None:
    """Return the token of the reply that an item's id was made for, None for an id that is not ours."""
    match = _minted.fullmatch(given) if isinstance(given, str) else None
    return match[1] if match else None


def reasoning_item(made_id: str, text: str, status: str) -> JsonObject:
    """What the model thought; never encrypted, never summed up."""
    return {
        "id": made_id,
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": None,
    }


def text_item(made_id: str, text: str, status: str, logprobs: list[Any]) -> JsonObject:
    """What the model said."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return _message(made_id, part, status)


def refusal_item(made_id: str, text: str, status: str) -> JsonObject:
    """What the model said instead of an answer."""
    return _message(made_id, {"type": "refusal", "refusal": text}, status)


def _message(made_id: str, part: JsonObject, status: str) -> JsonObject:
    return {"id": made_id, "type": "message", "status": status, "role": "assistant", "content": [part]}


def function_item(
    made_id: str, call_id: str, name: str, namespace: str | None, arguments: str, status: str
) -> JsonObject:
    """A call of a function, its arguments as the model wrote them."""
    item: JsonObject = {
        "id": made_id,
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }
    return item if namespace is None else {**item, "namespace": namespace}


def custom_item(made_id: str, call_id: str, name: str, namespace: str | None, given: str, status: str) -> JsonObject:
    """A call of a custom tool with its free text."""
    item: JsonObject = {
        "id": made_id,
        "type": "custom_tool_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "input": given,
    }
    return item if namespace is None else {**item, "namespace": namespace}


def action_item(made_id: str, kind: str, call_id: str, field: str, given: JsonObject, status: str) -> JsonObject:
    """A call of a tool that has an item type of its own."""
    return {"id": made_id, "type": kind, "status": status, "call_id": call_id, field: given}


def emptied(item: JsonObject) -> JsonObject:
    """Return an item as it is when it begins: of what grows, nothing is there yet."""
    begun = {**item, "status": IN_PROGRESS}
    if item["type"] == "function_call":
        begun["arguments"] = ""
    elif item["type"] == "custom_tool_call":
        begun["input"] = ""
    elif "content" in item:
        [part] = item["content"]
        if part["type"] == "refusal":
            begun["content"] = [{**part, "refusal": ""}]
        elif part["type"] == "output_text":
            begun["content"] = [{**part, "text": "", "logprobs": []}]
        else:
            begun["content"] = [{**part, "text": ""}]
    return begun
