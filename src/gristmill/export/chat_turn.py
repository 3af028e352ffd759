"""Chat messages as they are built up, part by part, and what one part of them loses on the way.

Invariant: a text, a tool call's id and arguments that are a text stay exactly what they were. Parts keep their order:
an assistant's message says reasoning, text and tool calls, in this order, and what would go back in it begins another
message. What a chat message has no place for is a refusal or a named loss.

Not here: where the parts of a dialect stand (exchange_turns).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from gristmill.canonical import JsonNumber, JsonValue, RepeatedKeys, json_kind
from gristmill.captures.exact import dumps
from gristmill.errors import Code, ReconstructionError

__all__ = [
    "Turn",
    "TurnBuilder",
    "joined_text",
    "json_list",
    "json_object",
    "json_text",
    "refused",
    "text_of",
    "tool_call",
]

_REASONING, _TEXT, _CALL = range(3)
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text"})


class Turn(msgspec.Struct, frozen=True):
    """One chat message, the same as JSON, and the names of what was lost on the way to it."""

    message: Mapping[str, JsonValue]
    text: bytes
    losses: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether an assistant said nothing at all."""
        return not (self.message["content"] or "reasoning_content" in self.message or "tool_calls" in self.message)


def refused(message: str, where: str) -> ReconstructionError:
    """Make the refusal of what a chat message cannot hold."""
    return ReconstructionError(Code.ITEM_TYPE_UNSUPPORTED, message, where=where)


def _malformed(expected: str, got: JsonValue, where: str) -> ReconstructionError:
    return ReconstructionError(Code.OUTPUT_MALFORMED, f"expected {expected}, got {json_kind(got)}", where=where)


def json_object(value: JsonValue, where: str) -> Mapping[str, JsonValue]:
    """Return an object whose keys are unique.

    Raises:
        ReconstructionError: `output_malformed`.
    """
    if not isinstance(value, Mapping) or isinstance(value, RepeatedKeys):
        raise _malformed("an object whose keys are unique", cast(JsonValue, value), where)
    return cast(Mapping[str, JsonValue], value)


def json_list(value: JsonValue, where: str) -> Sequence[JsonValue]:
    """Return an array; null is an empty one.

    Raises:
        ReconstructionError: `output_malformed`.
    """
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise _malformed("an array", value, where)
    return cast(Sequence[JsonValue], value)


def text_of(value: JsonValue, where: str) -> str:
    """Return a text; null is an empty one.

    Raises:
        ReconstructionError: `output_malformed`.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _malformed("a string", value, where)
    return value


def json_text(value: JsonValue) -> str:
    """Write a JSON value as Python and most chat templates do: `{"key": 1}`; numbers and repeated keys stay."""
    if isinstance(value, JsonNumber):
        return value.text
    if isinstance(value, Mapping):
        members = cast(Mapping[str, JsonValue], value)
        pairs = members.pairs if isinstance(members, RepeatedKeys) else members.items()
        return "{" + ", ".join(f"{json_text(key)}: {json_text(member)}" for key, member in pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(json_text, cast(Sequence[JsonValue], value))) + "]"
    return json.dumps(value, ensure_ascii=False)


def joined_text(content: JsonValue, where: str, losses: list[str]) -> str:
    """Return the text of content: a string, null, or parts that are texts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(json_list(content, where)):
        place = f"{where}[{index}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        held = json_object(part, place)
        kind = held.get("type")
        if kind == "refusal":
            losses.append("refusals")
            texts.append(text_of(held.get("refusal"), f"{place}.refusal"))
        elif kind in _TEXT_PARTS:
            texts.append(text_of(held.get("text"), f"{place}.text"))
        else:
            raise refused(f"expected text, got a content part of type {kind!r}", place)
    if sum(map(bool, texts)) > 1:
        losses.append("texts_joined")
    return "".join(texts)


def tool_call(call_id: JsonValue, name: JsonValue, arguments: JsonValue, where: str, losses: list[str]) -> JsonValue:
    """Make a tool call of a chat message; arguments that are a text stay it."""
    if not isinstance(arguments, str):
        # Dialects that serve arguments as a value do not tell which text was sampled.
        losses.append("arguments_rewritten")
        arguments = json_text({} if arguments is None else arguments)
    function = {"name": text_of(name, f"{where}.name"), "arguments": arguments}
    return {"id": text_of(call_id, f"{where}.id"), "type": "function", "function": function}


class TurnBuilder:
    """Collects the messages of a conversation."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._said: list[tuple[int, Any]] | None = None
        self._losses: list[str] = []

    def begin(self) -> None:
        """Begin an assistant's message, which may stay empty."""
        self.end()
        self._said = []

    def _add(self, rank: int, part: Any, losses: Iterable[str]) -> None:
        if self._said and self._said[-1][0] > rank:
            self.end()
        if self._said is None:
            self._said = []
        self._losses += losses
        self._said.append((rank, part))

    def reasoning(self, text: str) -> None:
        """Add reasoning to the assistant's message."""
        if text:
            self._add(_REASONING, text, ())

    def lost(self, name: str) -> None:
        """Note that something of the assistant's message is lost."""
        self._said = [] if self._said is None else self._said
        self._losses.append(name)

    def text(self, text: str, losses: Iterable[str] = ()) -> None:
        """Add visible text to the assistant's message."""
        if text:
            self._add(_TEXT, text, losses)

    def call(self, call: JsonValue, losses: Iterable[str]) -> None:
        """Add a tool call to the assistant's message."""
        self._add(_CALL, call, losses)

    def end(self) -> None:
        """End the assistant's message, if one was begun."""
        if self._said is None:
            return
        parts = [[part for rank, part in self._said if rank == wanted] for wanted in (_REASONING, _TEXT, _CALL)]
        reasoning, texts, calls = parts
        message: dict[str, JsonValue] = {"role": "assistant", "content": "".join(texts)}
        if reasoning:
            message["reasoning_content"] = "".join(reasoning)
        if calls:
            message["tool_calls"] = calls
        joined = ["texts_joined"] * (len(texts) > 1 or len(reasoning) > 1)
        self.turns.append(Turn(message, dumps(message), (*self._losses, *joined)))
        self._said, self._losses = None, []

    def other(self, message: Mapping[str, JsonValue], losses: Iterable[str]) -> None:
        """Add a message that the assistant did not write."""
        self.end()
        self.turns.append(Turn(message, dumps(message), tuple(losses)))
