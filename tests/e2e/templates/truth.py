"""What has to stand behind a turn, found without anything of the gateway: in the text of the whole rendering.

Invariant: the end of the turn is the first end-of-turn text behind the last thing that the turn said and before
anything of the next message; where the template leaves the turn out, the last one before the next message. The control
tokens that end turns are known for each template (`sources`), not derived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tests.e2e.templates.stories import Story

__all__ = ["Expected", "Tokenise", "expected"]


class Tokenise(Protocol):
    """Text to ids, control tokens included and nothing added."""

    def __call__(self, text: str, /) -> Sequence[int]: ...


class Expected(NamedTuple):
    """The token that ends the turn, what stands behind it, as text and as ids."""

    end: int
    text: str
    ids: tuple[int, ...]


def expected(rendering: str, story: Story, ends: Sequence[str], tokenise: Tokenise) -> Expected | str:
    """Find what stands behind the answered turn in a rendering; else say why nothing does.

    Args:
        rendering: of the whole request, with the generation prompt.
        story: that request.
        ends: texts of the tokens that end a turn.
        tokenise: of the template's tokenizer.
    """
    said = rendering.rfind(story.turn_mark)
    news = [at for mark in story.new_marks if (at := rendering.find(mark)) >= 0]
    if any(at < said for at in news):
        return "the template puts something new in front of the turn"
    if not news:
        return "the template drops everything new"
    before = min(news)
    if said < 0:
        found = [(at, end) for end in ends if (at := rendering.rfind(end, 0, before)) >= 0]
        at, end = max(found, default=(before, ""))
    else:
        behind = said + len(story.turn_mark)
        found = [(at, end) for end in ends if (at := rendering.find(end, behind, before)) >= 0]
        at, end = min(found, default=(before, ""))
    if not end:
        return "nothing ends the turn"
    ids = tokenise(rendering[at:])
    return Expected(ids[0], rendering[at + len(end) :], tuple(ids[1:]))
