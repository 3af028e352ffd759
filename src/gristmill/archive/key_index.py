"""Where each attempt of a data set stands: sixteen bytes and three numbers an attempt.

Invariant: a key is found if it is there; what the index gives is compared with the row itself by whoever asks.

Not here: reading rows (parquet_part).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from gristmill.ledger import AttemptKey

__all__ = ["KeyIndex", "Location"]


class Location(NamedTuple):
    """A place of an attempt: number of the part over all partitions, number of the attempt in it."""

    part: int
    number: int


class KeyIndex:
    """An index of keys.

    Args:
        keys: all keys of each part, part by part, in their order.
    """

    def __init__(self, keys: Iterable[Iterable[AttemptKey]]) -> None:
        hashes, attempts, parts, numbers = (list[np.ndarray[tuple[int], np.dtype[np.int64]]]() for _ in range(4))
        for part, held in enumerate(keys):
            pairs = [(_hash(key.rollout_id), key.attempt) for key in held]
            made = np.array(pairs, np.int64).reshape(-1, 2)
            hashes.append(made[:, 0])
            attempts.append(made[:, 1])
            parts.append(np.full(len(made), part, np.int64))
            numbers.append(np.arange(len(made), dtype=np.int64))
        columns = (hashes, attempts, parts, numbers)
        joined = [np.concatenate(held) if held else np.empty(0, np.int64) for held in columns]
        order = np.lexsort((joined[3], joined[2], joined[1], joined[0]))
        self._hashes, self._attempts, self._parts, self._numbers = (column[order] for column in joined)

    def __len__(self) -> int:
        """Return the number of attempts."""
        return len(self._hashes)

    def of_rollout(self, rollout_id: str) -> Iterator[Location]:
        """Give the places of attempts that may be of a rollout, by attempt number."""
        first, last = np.searchsorted(self._hashes, _hash(rollout_id), "left"), self._end(rollout_id)
        for at in range(int(first), last):
            yield Location(int(self._parts[at]), int(self._numbers[at]))

    def _end(self, rollout_id: str) -> int:
        return int(np.searchsorted(self._hashes, _hash(rollout_id), "right"))

    def repeated(self) -> Iterator[tuple[Location, Location]]:
        """Give pairs of places whose keys may be the same."""
        same = (self._hashes[1:] == self._hashes[:-1]) & (self._attempts[1:] == self._attempts[:-1])
        for at in np.flatnonzero(same):
            first, second = (Location(int(self._parts[place]), int(self._numbers[place])) for place in (at, at + 1))
            yield first, second


def _hash(rollout_id: str) -> int:
    digest = blake2b(rollout_id.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
