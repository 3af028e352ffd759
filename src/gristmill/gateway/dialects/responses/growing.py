"""One item while it is being said: its pieces so far, and the item that they make.

Invariant: an item says exactly what its pieces say. A call of a custom tool, or of one with an item type of its own,
becomes that item only if the item holds all that the model wrote; else it is served as the function call it was.

Not here: what is written to the client (events), which piece belongs to which item (encoder).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

from gristmill.gateway.dialects.responses.actions import action_of, plain_object
from gristmill.gateway.dialects.responses.items import (
    INCOMPLETE,
    action_item,
    custom_item,
    function_item,
    item_id,
    reasoning_item,
    refusal_item,
    text_item,
)
from gristmill.gateway.dialects.responses.logprobs import TextLogprobs
from gristmill.gateway.dialects.responses.tools import CUSTOM_FIELD, Tool, ToolKind
from gristmill.gateway.front import JsonObject

__all__ = ["Call", "Said", "Speech"]


class Speech(StrEnum):
    """What kind of text is said."""

    REASONING = "reasoning"
    TEXT = "text"
    REFUSAL = "refusal"


_PREFIXES: Final = {Speech.REASONING: "rs", Speech.TEXT: "msg", Speech.REFUSAL: "msg"}


def _joined(pieces: list[str]) -> str:
    """Join text as every client does: the halves of a character that the engine split come together."""
    text = "".join(pieces)
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return text


class Said:
    """A thought, a text or a refusal.

    Attributes:
        pieces: its text so far.
        head: what the writer needs for its next piece.
    """

    __slots__ = ("_id", "_logprobs", "head", "output_index", "pieces", "speech")

    def __init__(self, speech: Speech, token: str, output_index: int, logprobs: TextLogprobs | None) -> None:
        self.speech = speech
        self.output_index = output_index
        self.pieces: list[str] = []
        self.head: tuple[bytes, bytes] | None = None
        self._id = item_id(_PREFIXES[speech], token, output_index)
        self._logprobs = logprobs

    def begun(self) -> JsonObject:
        """Return the item before its first piece."""
        return self._item("", "", [])

    def item(self, status: str) -> JsonObject:
        """Return the item when all of it was said, once."""
        text = _joined(self.pieces)
        return self._item(text, status, [] if self._logprobs is None else self._logprobs.take(text))

    def unfinished(self) -> JsonObject:
        """Return the item as far as it was said, without log-probabilities."""
        return self._item(_joined(self.pieces), INCOMPLETE, [])

    def _item(self, text: str, status: str, logprobs: list[Any]) -> JsonObject:
        if self.speech is Speech.TEXT:
            return text_item(self._id, text, status, logprobs)
        make = reasoning_item if self.speech is Speech.REASONING else refusal_item
        return make(self._id, text, status)


class Call:
    """A call of a tool.

    Attributes:
        pieces: its arguments so far.
        head: what the writer needs for its next piece; None before the client was told that the call began, which it is
            at once for a function, and at the end for any other tool.
        index: which of the reply's calls it is.
        name: what the engine calls the tool.
    """

    __slots__ = ("_call_id", "_token", "head", "index", "name", "output_index", "pieces")

    def __init__(self, index: int, name: str, call_id: str, token: str, output_index: int) -> None:
        self.index = index
        self.name = name
        self.output_index = output_index
        self.pieces: list[str] = []
        self.head: tuple[bytes, bytes] | None = None
        self._call_id = call_id
        self._token = token

    def item(self, tool: Tool | None, status: str) -> JsonObject:
        """Return the item as it is now; `tool` is the client's, None for one that it did not offer."""
        arguments = _joined(self.pieces)
        call_id = self._call_id
        known = tool or Tool(ToolKind.FUNCTION, self.name)
        if known.kind is ToolKind.CUSTOM:
            given = plain_object(arguments)
            text = given.get(CUSTOM_FIELD) if given is not None and len(given) == 1 else None
            if isinstance(text, str):
                return custom_item(self._named("ctc"), call_id, known.name, known.namespace, text, status)
        if known.action is not None:
            action = known.action
            done = action_of(action, arguments)
            if done is not None:
                return action_item(self._named(action.prefix), action.item, call_id, action.fields[0], done, status)
        return function_item(self._named("fc"), call_id, known.name, known.namespace, arguments, status)

    def _named(self, prefix: str) -> str:
        return item_id(prefix, self._token, self.output_index)
