"""One choice as it was generated: what was sampled, and what the engine's parsers make of it, whole and id by id.

Invariant: equal inputs give the same object, so that everything encoded from it can be kept beside it.

Not here: how fields are called and where they stand (the wire modules).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from gristmill.scripted.parsing import Delta, Message, StreamParser, parse_message
from gristmill.scripted.sampling import Limits, Sampled, sample
from gristmill.scripted.tokenizer import the_tokenizer

__all__ = ["Choice", "Generation", "Parsers", "Text", "generate"]

_CACHED: Final = 1024


class Text(NamedTuple):
    """A composed text and how it is sampled; see `sampling.sample`."""

    text: str
    eos: bool
    seed: int
    split: float


class Parsers(NamedTuple):
    """Which parsers the engine runs on a choice.

    Attributes:
        thinking: the reasoning parser.
        tools: the tool parser.
        forced: a call was demanded: of one tool (`named`), of any (`required`), or of none.
    """

    thinking: bool = False
    tools: bool = False
    forced: str | None = None


class Generation:
    """What one choice was made of; compared by identity.

    Attributes:
        sampled: ids, the text of each, and why it ended.
        message: the whole message.
        deltas: what each id adds to the message, one for each id; empty for Completions.
        finish: finish reason of the whole message.
        stream_finish: finish reason of the stream.
        thought: how many ids belong to the reasoning, up to and with each id.
        seed: of the log-probabilities.
    """

    __slots__ = ("_parsers", "deltas", "finish", "message", "sampled", "seed", "stream_finish", "thought")

    def __init__(self, sampled: Sampled, parsers: Parsers, finish: str | None, seed: int) -> None:
        self.sampled = sampled
        self.seed = seed
        self._parsers = parsers
        self.message: Message = parse_message(sampled.text, thinking=parsers.thinking, tools=parsers.tools)
        self.deltas, called = _deltas(sampled, parsers)
        self.finish = finish or _finish(sampled.finish, bool(self.message.calls), parsers.forced)
        self.stream_finish = finish or _finish(sampled.finish, called, parsers.forced)
        self.thought = _thought(sampled.ids) if parsers.thinking else (0,) * len(sampled.ids)

    def cut(self, count: int) -> Generation:
        """Return this generation aborted after so many ids."""
        kept = Sampled(self.sampled.ids[:count], self.sampled.pieces[:count], "abort", None)
        return Generation(kept, self._parsers, "abort", self.seed)


def _finish(finish: str, called: bool, forced: str | None) -> str:
    return "tool_calls" if called and finish == "stop" and forced != "named" else finish


def _deltas(sampled: Sampled, parsers: Parsers) -> tuple[tuple[Delta, ...], bool]:
    parser = StreamParser(thinking=parsers.thinking, tools=parsers.tools)
    last = len(sampled.pieces) - 1
    deltas = [parser.feed(piece, final=at == last) for at, piece in enumerate(sampled.pieces)]
    return tuple(deltas), parser.called


def _thought(ids: tuple[int, ...]) -> tuple[int, ...]:
    tokenizer = the_tokenizer()
    begin, end = tokenizer.control("<think>"), tokenizer.control("</think>")
    counts: list[int] = []
    count, inside = 0, True
    for token in ids:
        inside = inside and token != end
        count += inside and token != begin
        counts.append(count)
    return tuple(counts)


@lru_cache(_CACHED)
def generate(text: Text, limits: Limits, parsers: Parsers, finish: str | None, seed: int) -> Generation:
    """Generate a choice.

    Args:
        text: what is sampled.
        limits: what ends it early.
        parsers: what the engine parses.
        finish: the script's own finish reason.
        seed: of the log-probabilities.
    """
    sampled = sample(text.text, eos=text.eos, seed=text.seed, split=text.split, limits=limits)
    return Generation(sampled, parsers, finish, seed)


class Choice(NamedTuple):
    """A generation in its place in a reply; the prompt it belongs to is one of several in Completions only."""

    number: int
    generation: Generation
    prompt: int = 0
