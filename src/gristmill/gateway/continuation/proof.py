"""Two witnesses to what a template adds for new messages: a turn that stands in for the parent's, and the request.

Invariant: a suffix is returned only where both agree, and where what ends the turn is known: it is what the engine
ended the parent with, or, of a parent that was cut, what the template ends turns of text with.

Not here: what is compared (suffix), what renders (renderer), whether a request may be continued at all (conditions).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from gristmill.gateway.continuation.suffix import (
    QUESTION,
    STAND_INS,
    Shape,
    behind_turn,
    ends_with,
    reworded,
    shape_of,
    stand_in,
    text_end,
)
from gristmill.records import ContinuationReason, Int32Array

__all__ = ["ParentEnd", "Proof", "Render", "prove"]

JsonObject = dict[str, Any]

Render = Callable[[Sequence[JsonObject], bool], Awaitable[Int32Array]]
"""Renders messages with the request's own tools and settings; False: as they are, with nothing asked for after them."""

_TEXT = Shape(text=True, calls=())


class ParentEnd(NamedTuple):
    """How the parent's sequence ends: its last token, and whether the engine chose to end with it."""

    last_id: int
    ended: bool


class Proof(NamedTuple):
    """What is proved.

    Attributes:
        end_id: the token that ends the parent's turn.
        suffix_T: int32[T] what follows it.
        whole_T: int32[T] the rendering of the whole request.
    """

    end_id: int
    suffix_T: Int32Array
    whole_T: Int32Array


async def prove(
    render: Render, messages: Sequence[JsonObject], reply: int, parent: ParentEnd
) -> Proof | ContinuationReason:
    """Prove what follows the parent's sequence in a request that continues it.

    Args:
        render: renders.
        messages: of the request.
        reply: index of the parent's turn among them; something follows it.
        parent: how its sequence ends.

    Raises:
        RenderFailed: there is no rendering.
    """
    new, shape = messages[reply + 1 :], shape_of(messages[reply])
    one, other = (stand_in(shape, text) for text in STAND_INS[:2])
    # What turns of text end with is asked for turns that were cut alone, and is the same for all requests.
    turns = [] if parent.ended else [render([QUESTION, stand_in(_TEXT, text)], False) for text in STAND_INS]
    one_T, other_T, reworded_T, whole_T, *texts = await _together(
        [
            render([QUESTION, one, *new], True),
            render([QUESTION, other, *new], True),
            render([QUESTION, one, *map(reworded, new)], True),
            render(messages, True),
            *turns,
        ]
    )
    end_id = parent.last_id if parent.ended else text_end(texts)
    behind = behind_turn(one_T, other_T, reworded_T)
    if behind is None:
        return ContinuationReason.WITNESSES_DISAGREE
    suffix_T = None if end_id is None else behind.after(end_id)
    if end_id is None or suffix_T is None:
        return ContinuationReason.END_OF_TURN_UNKNOWN
    if not ends_with(whole_T, end_id, suffix_T):
        return ContinuationReason.WITNESSES_DISAGREE
    return Proof(end_id, suffix_T, whole_T)


async def _together(renderings: Sequence[Awaitable[Int32Array]]) -> list[Int32Array]:
    """Wait for renderings that run at once; the first failure ends the others."""
    running = [asyncio.ensure_future(one) for one in renderings]
    try:
        return await asyncio.gather(*running)
    finally:
        for one in running:
            one.cancel()
