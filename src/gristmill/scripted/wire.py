"""How a reply is written: one body, or the events of a stream; what all profiles and routes have in common.

Invariant: an event is its head, which differs from call to call, and a tail, which is encoded once for equal
generations; joined they are one JSON object.

Not here: the fields of a profile (chat_wire, sglang_wire, completions_wire), and when bytes are sent (delivery).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import orjson

from gristmill.scripted.answer import Answer, Chunk, chunks_of
from gristmill.scripted.generation import Choice
from gristmill.scripted.sampling import seed_of

__all__ = [
    "DONE",
    "Event",
    "Sent",
    "Wire",
    "dumps",
    "ending",
    "events",
    "fingerprint",
    "logprob_salt",
    "metrics",
    "usage",
]

JsonObject = dict[str, Any]

DONE: Final = b"data: [DONE]\n\n"
dumps = orjson.dumps


class Sent(NamedTuple):
    """How many ids of each choice have been sent, by index."""

    ids: Sequence[int]

    def reasoning(self, answer: Answer) -> int:
        """Return how many of them are reasoning."""
        pairs = zip(answer.choices, self.ids, strict=True)
        return sum(choice.generation.thought[count - 1] for choice, count in pairs if count)


class Event(NamedTuple):
    """One event of a stream.

    Attributes:
        data: its bytes.
        sent: what has been sent once it is.
        counts: it is one of a choice's chunks.
    """

    data: bytes
    sent: Sent
    counts: bool = False


class Wire(Protocol):
    """The fields of one route in one profile."""

    @property
    def chunk_object(self) -> str:
        """What `object` says in a stream."""
        ...

    def opening(self, answer: Answer) -> list[bytes]:
        """Return the tails of the events before the first id."""
        ...

    def tails(self, answer: Answer, choice: Choice) -> Sequence[bytes | None]:
        """Return one tail for each chunk of a choice; None where the engine sends nothing for it."""
        ...

    def aborted(self, answer: Answer, choice: Choice) -> bytes:
        """Return the tail of the event that ends a choice which was aborted."""
        ...

    def closing(self, answer: Answer, sent: Sent) -> list[bytes]:
        """Return the tails of the events after the last choice has ended."""
        ...

    def body(self, answer: Answer) -> JsonObject:
        """Return the reply as one body."""
        ...


def usage(answer: Answer, sent: Sent | None = None) -> JsonObject:
    """Return the token counts, of the whole reply or of what has been sent of a stream."""
    stream = sent is not None
    if sent is None:
        sent = Sent([len(choice.generation.sampled.ids) for choice in answer.choices])
    completion = sum(sent.ids) + answer.wrong.usage
    said: JsonObject = {
        "prompt_tokens": answer.prompt_tokens,
        "total_tokens": answer.prompt_tokens + completion,
        "completion_tokens": completion,
    }
    details: JsonObject = {"cached_tokens": 0, "created_cache_tokens": 0}
    if answer.asked.route == "completions":
        details = {"cached_tokens": 0} if stream else {"cached_tokens": 0, "created_cache_tokens": None}
    said["prompt_tokens_details"] = details if stream else {**details, "multimodal_tokens": None}
    if answer.settings.thinking and answer.asked.route == "chat":
        said["completion_tokens_details"] = {"reasoning_tokens": sent.reasoning(answer)}
    elif not stream:
        said["completion_tokens_details"] = None
    return said


def metrics(answer: Answer, *, speculative: bool = False) -> JsonObject | None:
    """Return the times that vLLM reports of a reply with one choice, as the script makes them.

    Args:
        answer: the reply.
        speculative: a body says of speculative decoding that there was none.
    """
    if len(answer.choices) != 1:
        return None
    count = len(answer.choices[0].generation.sampled.ids)
    first_ms = (answer.behaviour.delay_s or 0) * 1000.0
    rest_ms = (answer.behaviour.gap_s or 0) * 1000.0 * max(0, count - 1)
    said: JsonObject = {
        "time_to_first_token_ms": first_ms,
        "generation_time_ms": rest_ms,
        "queue_time_ms": 0.0,
        "mean_itl_ms": rest_ms / (count - 1) if count > 1 else None,
        "tokens_per_second": count * 1000 / (first_ms + rest_ms) if first_ms + rest_ms else None,
    }
    return {**said, "speculative_decoding": None} if speculative else said


def fingerprint(answer: Answer) -> str:
    """Return what the engine calls its own configuration."""
    return f"vllm-{answer.settings.version}-scripted"


def logprob_salt(answer: Answer) -> int:
    """Tell sampling settings apart where the script says that log-probabilities depend on them."""
    if answer.settings.logprobs_mode == "raw":
        return 0
    names = ("temperature", "top_p", "top_k", "min_p")
    return seed_of(*(answer.asked.body.get(name) for name in names))


def events(wire: Wire, answer: Answer) -> Iterator[Event]:
    """Yield the events of a reply, `[DONE]` included; the choices of one take turns."""
    head = _head(wire, answer)
    sent = [0] * len(answer.choices)
    options = answer.asked.stream_options
    continuous = bool(options.get("include_usage") and options.get("continuous_usage_stats"))

    def event(tail: bytes, *, counts: bool = False) -> Event:
        now = Sent(tuple(sent))
        if continuous and b'"usage"' not in tail:
            tail = tail[:-1] + b',"usage":' + dumps(_continuous(answer, now)) + b"}"
        return Event(head + tail + b"\n\n", now, counts)

    for tail in wire.opening(answer):
        yield event(tail)
    for position, chunk, tail in _turns(wire, answer):
        sent[position] = chunk.end
        if tail is not None:
            yield event(tail, counts=True)
    yield from ending(wire, answer, Sent(tuple(sent)))


def ending(wire: Wire, answer: Answer, sent: Sent, *, aborted: bool = False) -> Iterator[Event]:
    """Yield the last events of a reply, where it was aborted those that say so first."""
    head = _head(wire, answer)
    tails = [wire.aborted(answer, choice) for choice in answer.choices] if aborted else []
    for tail in (*tails, *wire.closing(answer, sent)):
        yield Event(head + tail + b"\n\n", sent)
    if answer.wrong.done:
        yield Event(DONE, sent)


def _head(wire: Wire, answer: Answer) -> bytes:
    named = {"id": answer.response_id, "object": wire.chunk_object, "created": answer.created_s, "model": answer.model}
    return b"data: " + dumps(named)[:-1] + b","


def _turns(wire: Wire, answer: Answer) -> Iterator[tuple[int, Chunk, bytes | None]]:
    waiting = [
        (position, iter(zip(chunks_of(answer, choice), wire.tails(answer, choice), strict=True)))
        for position, choice in enumerate(answer.choices)
    ]
    while waiting:
        for position, rest in list(waiting):
            following = next(rest, None)
            if following is None:
                waiting.remove((position, rest))
            else:
                yield position, *following


def _continuous(answer: Answer, sent: Sent) -> JsonObject:
    said = usage(answer, sent)
    del said["prompt_tokens_details"]
    return said
