"""What models say: small replies out of a tiny alphabet, and the wire forms of each dialect.

The alphabet is tiny on purpose: equal texts, and replies that concatenate from others, are then the rule.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.strategies.draws import Draws

__all__ = ["Piece", "Reply", "environment", "reply", "wire_items"]

TEXTS = ("a", "b", "c", "ab")
ARGUMENTS = ("{}", '{"n":1}', "ls", '{"n":2,"s":"x"}')
SPELLINGS = {
    "{}": ("{}", "", "null", " { } "),
    '{"n":1}': ('{"n":1}', '{"n": 1.0}', ' {"n":10e-1}'),
    '{"n":2,"s":"x"}': ('{"n":2,"s":"x"}', '{"s":"\\u0078", "n":2}'),
    "ls": ("ls",),
}
"""Arguments that mean the same."""


@dataclass(frozen=True)
class Piece:
    """One thing said: `kind` is `text`, `reasoning`, `tool` or `empty`."""

    kind: str
    text: str = ""
    name: str = ""
    call_id: str = ""
    item_id: str | None = None


Reply = tuple[Piece, ...]


def reply(draws: Draws, dialect: str) -> Reply:
    """Make a reply; a Chat or Anthropic one holds its pieces in the order in which one message has them."""
    pieces: list[Piece] = []
    if draws.chance(15):
        pieces.append(Piece("reasoning", draws.pick(("r", "s"))))
    texts = draws.pick((1, 1, 1, 0, 2)) if dialect == "responses" else draws.pick((1, 1, 0))
    pieces.extend(Piece("text", draws.pick(TEXTS)) for _ in range(texts))
    if draws.chance(30):
        for _ in range(draws.pick((1, 1, 2))):
            pieces.append(Piece("tool", draws.pick(ARGUMENTS), draws.pick(("f", "g"))))
    if dialect == "responses" and draws.chance(8):
        pieces.insert(draws.count(0, len(pieces)), Piece("empty"))
    return tuple(pieces) or (Piece("empty"),)


def wire_items(pieces: Sequence[Piece], dialect: str, draws: Draws) -> list[dict[str, Any]]:
    """Write a reply as the items or messages of a dialect, in one of the spellings that mean the same."""
    if dialect == "responses":
        return [_responses_item(piece, draws) for piece in pieces]
    make = _chat_message if dialect == "chat" else _anthropic_message
    message = make(pieces, draws)
    ids = [piece.item_id for piece in pieces if piece.item_id]
    return [{**message, "id": ids[0]} if ids else message]


def with_ids(pieces: Sequence[Piece], ids: Sequence[str | None]) -> Reply:
    """Give the pieces item ids."""
    return tuple(replace(piece, item_id=item_id) for piece, item_id in zip(pieces, ids, strict=True))


def _responses_item(piece: Piece, draws: Draws) -> dict[str, Any]:
    item: dict[str, Any] = {"type": "message", "role": "assistant"}
    if piece.kind == "reasoning":
        part = [{"type": draws.pick(("summary_text", "reasoning_text")), "text": piece.text}]
        item = {"type": "reasoning", draws.pick(("summary", "content")): part}
    elif piece.kind == "tool":
        arguments = draws.pick(SPELLINGS[piece.text])
        item = {"type": "function_call", "call_id": piece.call_id, "name": piece.name, "arguments": arguments}
    elif piece.kind == "empty":
        item["content"] = draws.pick(([], None, "", [{"type": "output_text", "text": ""}]))
    else:
        item["content"] = _text_content(piece.text, "output_text", draws)
    return {**item, "id": piece.item_id} if piece.item_id else item


def _text_content(text: str, part_type: str, draws: Draws) -> Any:
    form = draws.pick(("parts", "string", "split"))
    if form == "string":
        return text
    cut = draws.count(0, len(text)) if form == "split" else len(text)
    return [{"type": part_type, "text": part} for part in (text[:cut], text[cut:])[: 1 + (form == "split")]]


def _chat_message(pieces: Sequence[Piece], draws: Draws) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": draws.pick((None, "", []))}
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.kind == "reasoning":
            message[draws.pick(("reasoning_content", "reasoning"))] = piece.text
        elif piece.kind == "text":
            message["content"] = _text_content(piece.text, "text", draws)
        elif piece.kind == "tool":
            function = {"name": piece.name, "arguments": draws.pick(SPELLINGS[piece.text])}
            calls.append({"id": piece.call_id, "type": "function", "function": function})
    return {**message, "tool_calls": calls} if calls else message


def _anthropic_message(pieces: Sequence[Piece], draws: Draws) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.kind == "reasoning":
            content.append({"type": "thinking", "thinking": piece.text, "signature": draws.pick(("", "sig"))})
        elif piece.kind == "text":
            content.append({"type": "text", "text": piece.text})
        elif piece.kind == "tool":
            given = piece.text if piece.text == "ls" else json.loads(piece.text)
            content.append({"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": given})
    return {"role": "assistant", "content": content}


def environment(kind: str, dialect: str, call_id: str = "") -> dict[str, Any]:
    """Write an environment item: `user` and `compaction` are bounds, `tool` (a tool result) is none."""
    if kind == "user":
        return {"role": "user", "content": "go on"}
    if kind == "compaction":
        return {"type": "compaction", "encrypted_content": "x"} if dialect == "responses" else environment("user", "")
    if dialect == "responses":
        return {"type": "function_call_output", "call_id": call_id, "output": "ok"}
    if dialect == "chat":
        return {"role": "tool", "tool_call_id": call_id, "content": "ok"}
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "ok"}]}
