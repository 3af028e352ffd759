"""Log-probabilities of sampled ids: pseudo-random, and the same for the same seed, position and id on every machine.

Invariant: values are exact float32 numbers made of integers, no logarithm is computed; all of them are negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Alternatives", "alternatives", "draws", "logprobs"]

Words = npt.NDArray[np.uint64]

_VALUE_SALT: Final = 0x10C9
_OTHERS_SALT: Final = 0x0A17
_SPARE: Final = 4
_SCALE: Final = np.float32(-(2.0**-21))
_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


class Alternatives(NamedTuple):
    """Tokens that might have been sampled at a position, most likely first, and their log-probabilities."""

    ids: list[int]
    values: list[float]


def draws(seed: int, ids: Words) -> Words:
    """Draw 64 random bits for each id at its position (splitmix64)."""
    positions = np.arange(1, len(ids) + 1, dtype=np.uint64)
    words = np.full(len(ids), seed & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64) + positions * _GAMMA
    words = _mixed(words) ^ (ids * _FIRST)
    return _mixed(words)


def _mixed(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def _values(words: Words) -> npt.NDArray[np.float32]:
    """Turn bits into values between -8 and 0, most of them near 0."""
    left = ((words >> np.uint64(8)) & np.uint64(0xFFF)).astype(np.float32) + np.float32(1)
    right = ((words >> np.uint64(24)) & np.uint64(0xFFF)).astype(np.float32) + np.float32(1)
    return np.multiply(left * right, _SCALE, dtype=np.float32)


@lru_cache(1024)
def logprobs(seed: int, ids: tuple[int, ...]) -> tuple[float, ...]:
    """Return the log-probabilities of sampled ids, in nats.

    Args:
        seed: which model.
        ids: shape (T,).

    Returns:
        Shape (T,): float32 values.
    """
    return tuple(_values(draws(seed ^ _VALUE_SALT, np.asarray(ids, dtype=np.uint64))).tolist())


def alternatives(seed: int, ids: Sequence[int], count: int, size: int) -> list[Alternatives]:
    """Return other tokens at each position.

    Args:
        seed: which model.
        ids: the sampled ids, shape (T,).
        count: how many at each position.
        size: number of ids of the vocabulary.
    """
    sampled = np.asarray(ids, dtype=np.uint64)
    # A few more than are wanted: some repeat each other, or the sampled one.
    columns = [draws((seed ^ _OTHERS_SALT) + number, sampled) for number in range(count + _SPARE if count else 0)]
    tokens = [(column % np.uint64(size)).tolist() for column in columns]
    values = [_values(column).tolist() for column in columns]
    made: list[Alternatives] = []
    for at, token in enumerate(ids):
        ranked: dict[int, float] = {}
        for number in range(len(columns)):
            if tokens[number][at] != token and len(ranked) < count:
                ranked.setdefault(tokens[number][at], values[number][at])
        order = sorted(ranked, key=lambda one: (-ranked[one], one))
        made.append(Alternatives(order, [ranked[one] for one in order]))
    return made
