"""The tool calls of a Chat reply, put together from the pieces of a stream or taken from a body.

Invariant: arguments are joined in the order they came; an id and a name are said once; calls come in order.

Not here: how a call is served (encoder, arguments).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.captures.fields import count_at, name_at, object_at, text_at
from gristmill.captures.reply import Unexpected

__all__ = ["ToolCall", "ToolCalls"]


class ToolCall:
    """One call, as far as it has come; `id` and `name` are empty until they were said."""

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.pieces: list[str] = []

    @property
    def arguments(self) -> str:
        """What the model wrote as arguments so far."""
        return "".join(self.pieces)


class ToolCalls(list[ToolCall]):
    """The calls of one reply in order."""

    def add(self, pieces: list[Any], where: str) -> None:
        """Add the `tool_calls` of a delta, or of a whole message.

        Raises:
            Unexpected: they are not what the Chat dialect says.
        """
        for position, raw in enumerate(pieces):
            place = f"{where}[{position}]"
            piece = object_at(raw, place)
            call = self._call_of(piece, place)
            kind = piece.get("type")
            if kind not in (None, "", "function"):
                raise Unexpected("a function call", repr(kind)[:40], f"{place}.type")
            call.id = _said_once(call.id, piece, "id", place)
            if piece.get("function") is not None:
                function = object_at(piece["function"], f"{place}.function")
                call.name = _said_once(call.name, function, "name", f"{place}.function")
                arguments = text_at(function, "arguments", f"{place}.function")
                if arguments:
                    call.pieces.append(arguments)

    def _call_of(self, piece: Mapping[str, Any], where: str) -> ToolCall:
        index = count_at(piece, "index", where)
        if index is None:  # some servers leave it out and send each call whole
            index = len(self) if piece.get("id") is not None or not self else len(self) - 1
        if index > len(self):
            raise Unexpected("tool calls in order", "a gap", f"{where}.index")
        if index == len(self):
            self.append(ToolCall())
        return self[index]


def _said_once(before: str, piece: Mapping[str, Any], key: str, where: str) -> str:
    value = name_at(piece, key, where)
    if before and value not in (None, "", before):
        raise Unexpected("one value", "a second, different one", f"{where}.{key}")
    return before or value or ""
