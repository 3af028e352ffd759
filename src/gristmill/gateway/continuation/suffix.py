"""What a chat template adds behind a turn, proved from renderings of turns that stand for it.

Three small conversations are rendered. Two differ in nothing but the text of one turn: what they have in common at the
end begins right behind that text. The third has other texts in the new messages: what it has in common with the first
ends in front of the first new text. What lies between is the template's own, whatever anybody said; the token that ends
the turn has to be there, once. What follows it is the suffix, as tokens that no earlier text can have reached into.

Invariant: pure; an answer is what the renderings prove, and None where they do not prove it. Control tokens in what a
harness sends prove nothing: they never lie between.

Not here: rendering (proof), and what is made of a suffix (plan).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Final, NamedTuple, cast

import numpy as np

from gristmill.records import Int32Array
from gristmill.tokens.prefix_tree import common_prefix

__all__ = [
    "QUESTION",
    "STAND_INS",
    "Behind",
    "Shape",
    "behind_turn",
    "ends_with",
    "reworded",
    "says_text",
    "shape_of",
    "stand_in",
    "text_end",
]

JsonObject = dict[str, Any]

QUESTION: Final[JsonObject] = {"role": "user", "content": "Which way does the wheel turn?"}
"""Stands before a turn that stands in for another."""

STAND_INS: Final = ("It goes by the stream", "It turned at half past 7", "It stands still (the pond is frozen)")
"""Texts of turns: one ends with a letter, one with a digit, one with a sign, so that a token that holds both the last
character and what comes after it shows in at least one of them."""

_OTHERWISE: Final = "Nothing of this was said."


class Shape(NamedTuple):
    """What a turn consists of, apart from what it says.

    Attributes:
        text: it has text.
        calls: its tool calls.
    """

    text: bool
    calls: tuple[JsonObject, ...]


class Behind(NamedTuple):
    """What a template adds behind a turn.

    Attributes:
        tokens_T: int32[T] behind the turn's text, to the end of the prompt.
        own_len: tokens of it that are the template's own; the next one may be of a new message.
    """

    tokens_T: Int32Array
    own_len: int

    def after(self, end_id: int) -> Int32Array | None:
        """Return int32[T] what follows the token that ends the turn; None where the template has it not, or twice."""
        found = np.flatnonzero(self.tokens_T[: self.own_len] == end_id)
        return self.tokens_T[int(found[0]) + 1 :] if found.size == 1 else None


def shape_of(message: Mapping[str, Any]) -> Shape:
    """Return the shape of an assistant message of a Chat body."""
    given = message.get("tool_calls")
    calls: list[JsonObject] = []
    for value in cast("list[Any]", given) if isinstance(given, list) else ():
        call = cast(JsonObject, value) if isinstance(value, dict) else {}
        function: Any = call.get("function")
        named: Any = cast(JsonObject, function).get("name") if isinstance(function, dict) else None
        calls.append({"id": call.get("id"), "type": "function", "function": {"name": named}})
    return Shape(says_text(message.get("content")), tuple(calls))


def says_text(content: Any) -> bool:
    """Say whether a message's content has anything but white space."""
    parts = cast("list[Any]", content) if isinstance(content, list) else [content]
    texts = (cast(JsonObject, part).get("text") if isinstance(part, dict) else part for part in parts)
    return any(isinstance(text, str) and text.strip() for text in texts)


def stand_in(shape: Shape, text: str) -> JsonObject:
    """Return an assistant message of a shape, whose texts and arguments say this; one that is empty has text, too."""
    message: JsonObject = {"role": "assistant", "content": text if shape.text or not shape.calls else None}
    if shape.calls:
        arguments = json.dumps({"said": text})
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments}} for call in shape.calls
        ]
    return message


def reworded(message: JsonObject) -> JsonObject:
    """Return a new message that says something else."""
    if isinstance(message.get("content"), list):
        return {**message, "content": [{"type": "text", "text": _OTHERWISE}]}
    return {**message, "content": _OTHERWISE}


def behind_turn(one_T: Int32Array, other_T: Int32Array, reworded_T: Int32Array) -> Behind | None:
    """Return what a template adds behind a turn.

    Args:
        one_T, other_T: int32[T] renderings of a turn that stands in and the new messages, which differ in that turn.
        reworded_T: int32[T] the first with other texts in the new messages.

    Returns:
        None where the turn's text is not rendered, or something of the new messages stands before its end: a template,
        or an engine, may gather what systems and developers say at the start, where no suffix brings it.
    """
    common_T = _common_end(one_T, other_T)
    if common_T is None:
        return None
    own_len = common_prefix(one_T, reworded_T) - (one_T.size - common_T.size)
    return Behind(common_T, min(own_len, common_T.size)) if own_len > 0 else None


def text_end(renderings: Sequence[Int32Array]) -> int | None:
    """Return the token that ends a turn of text.

    Args:
        renderings: int32[T] of conversations that end with such a turn, one for each of `STAND_INS`.

    Returns:
        None where the endings differ by the character before them, which then is in one token with them.
    """
    ends = [_common_end(one, other) for one, other in combinations(renderings, 2)]
    first = ends[0]
    if first is None or not all(end is not None and np.array_equal(end, first) for end in ends):
        return None
    return int(first[0])


def _common_end(one_T: Int32Array, other_T: Int32Array) -> Int32Array | None:
    """Return the longest common end of two renderings, None where one of them is all of it, or there is none."""
    size = common_prefix(one_T[::-1], other_T[::-1])
    return one_T[one_T.size - size :] if 0 < size < min(one_T.size, other_T.size) else None


def ends_with(whole_T: Int32Array, end_id: int, suffix_T: Int32Array) -> bool:
    """Say whether a rendering ends with a token and what follows it, and begins with something else."""
    at = whole_T.size - suffix_T.size - 1
    return at > 0 and whole_T[at] == end_id and np.array_equal(whole_T[at + 1 :], suffix_T)
