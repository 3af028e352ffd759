"""A reply as it is about to be served: its choices, the prompt's ids, and everything the wire modules need to say it.

Invariant: an answer is complete before its first byte is sent; only an abort from outside makes another one of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from gristmill.scripted.asked import Asked
from gristmill.scripted.generation import Choice
from gristmill.scripted.logprobs import draws
from gristmill.scripted.script import Behaviour, Settings, Wrong

__all__ = ["Answer", "Chunk", "VersionSpan", "chunk_sizes", "chunks_of"]

_CHUNK_SALT: Final = 0xC4C4
_LARGEST: Final = 9


class VersionSpan(NamedTuple):
    """Ids `start` to `end` of a choice were sampled under this weight version."""

    version: str
    start: int
    end: int


class Answer(NamedTuple):
    """One reply.

    Attributes:
        asked: the request.
        settings: the script's.
        behaviour: of this reply.
        prompts: token ids of each prompt.
        choices: in the order of their indices.
        response_id: id of the reply.
        created_s: unix time.
        model: the name the reply carries.
        weights: the version at the start.
        end_id: id of the end of turn.
    """

    asked: Asked
    settings: Settings
    behaviour: Behaviour
    prompts: Sequence[Sequence[int]]
    choices: tuple[Choice, ...]
    response_id: str
    created_s: int
    model: str
    weights: str
    end_id: int

    @property
    def wrong(self) -> Wrong:
        return self.behaviour.wrong or Wrong()

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def versions(self, count: int) -> list[VersionSpan]:
        """Return the weight versions of a choice of so many ids."""
        change = self.behaviour.weights
        if change is None or change.after >= count:
            return [VersionSpan(self.weights, 0, count)]
        spans = [VersionSpan(self.weights, 0, change.after), VersionSpan(change.to, change.after, count)]
        return [span for span in spans if span.end > span.start]


class Chunk(NamedTuple):
    """The ids `start` to `end` of a choice, sent together; the last chunk of a choice carries its finish reason."""

    start: int
    end: int
    last: bool


@lru_cache(4096)
def chunk_sizes(count: int, how: str | int, seed: int) -> tuple[Chunk, ...]:
    """Divide the ids of a choice into chunks.

    Args:
        count: how many ids.
        how: `one` id in each chunk, a number, or `uneven`: one to nine, most often one, now and then a chunk without.
        seed: of the uneven sizes.
    """
    if how == "uneven":
        drawn = draws(seed ^ _CHUNK_SALT, np.zeros(2 * count + 1, dtype=np.uint64)).tolist()
        sizes = [(value >> 8) % _LARGEST + 1 if value % 4 == 0 else value % 7 > 0 for value in drawn]
    else:
        size = 1 if isinstance(how, str) else how
        sizes = [size] * -(-count // size)
    chunks: list[Chunk] = []
    start = 0
    for size in sizes:
        end = min(count, start + int(size))
        chunks.append(Chunk(start, end, False))
        start = end
        if start == count and chunks:
            break
    chunks = chunks or [Chunk(0, 0, False)]
    return (*chunks[:-1], chunks[-1]._replace(last=True))


def chunks_of(answer: Answer, choice: Choice) -> tuple[Chunk, ...]:
    """Return the chunks of a choice."""
    how = answer.behaviour.chunks or "one"
    interval = answer.asked.body.get("stream_interval")
    if how == "one" and type(interval) is int and interval > 1:
        how = interval
    chunks = chunk_sizes(len(choice.generation.sampled.ids), how, choice.generation.seed)
    if choice.generation.stream_finish == "abort" and chunks[-1].end > chunks[-1].start:
        # An engine learns of an abort after it has sent what was sampled.
        count = chunks[-1].end
        chunks = (*chunks[:-1], chunks[-1]._replace(last=False), Chunk(count, count, True))
    return chunks
