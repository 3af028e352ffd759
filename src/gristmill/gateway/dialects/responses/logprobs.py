"""Log-probabilities of the text that a client reads, out of those of everything that was sampled.

Invariant: an entry is given only where its bytes stand in the text; where the text cannot be found in the sampled bytes
(a parser changed it), there are none. What is given does not depend on how the engine split its stream.

Not here: log-probabilities for training (captures).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, cast

from gristmill.captures.fields import list_at, object_at, text_at
from gristmill.gateway.front import JsonObject

__all__ = ["TextLogprobs"]


class TextLogprobs:
    """Collects the entries of one reply and finds those of its texts, in the order they were said.

    Args:
        alternatives: how many of the likeliest tokens the client wants beside each.
    """

    def __init__(self, alternatives: int) -> None:
        self._alternatives = alternatives
        self._entries: list[JsonObject] = []
        self._ends: list[int] = []
        self._sampled = bytearray()
        self._from = 0

    def add(self, logprobs: Any, where: str) -> None:
        """Add the entries that a choice, or a piece of one, carries.

        Raises:
            Unexpected: they are none of Chat's.
        """
        if logprobs is None:
            return
        holder = object_at(logprobs, where)
        for index, raw in enumerate(list_at(holder, "content", where) or ()):
            entry = object_at(raw, f"{where}.content[{index}]")
            self._sampled += _bytes_of(entry, f"{where}.content[{index}]")
            self._entries.append(entry)
            self._ends.append(len(self._sampled))

    def take(self, text: str) -> list[Any]:
        """Return the entries of a text that was said after the last one that was taken."""
        said = text.encode("utf-8", "surrogatepass")
        start = self._sampled.find(said, self._from)
        if start < 0 or not said:
            return []
        self._from = start + len(said)
        first, last = bisect_right(self._ends, start), bisect_left(self._ends, self._from)
        return [self._shown(entry) for entry in self._entries[first : last + 1]]

    def _shown(self, entry: JsonObject) -> JsonObject:
        likeliest = cast("list[Any]", entry.get("top_logprobs") or [])[: self._alternatives]
        return {**_plain(entry), "top_logprobs": [_plain(each) for each in likeliest]}


def _plain(entry: JsonObject) -> JsonObject:
    return {key: entry.get(key) for key in ("token", "bytes", "logprob")}


def _bytes_of(entry: JsonObject, where: str) -> bytes:
    given = list_at(entry, "bytes", where)
    if given is not None and all(type(each) is int and 0 <= each < 256 for each in given):
        return bytes(cast("list[int]", given))
    return (text_at(entry, "token", where) or "").encode("utf-8", "surrogatepass")
