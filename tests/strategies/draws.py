"""Where generated histories get their choices from: hypothesis, or a plain random generator.

One generator serves both: hypothesis shrinks and explores, the long run draws ten times faster. The first option and
the lowest number are the simple ones, so that a shrunk case is a plain one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from hypothesis import strategies as st

__all__ = ["Draws", "HypothesisDraws", "RandomDraws"]

T = TypeVar("T")


class Draws(Protocol):
    """A source of choices."""

    def pick(self, options: Sequence[T]) -> T:
        """Choose one of the options, which are sorted from plain to odd."""
        ...

    def count(self, low: int, high: int) -> int:
        """Choose a number, both ends included."""
        ...

    def chance(self, percent: int) -> bool:
        """Say yes so often; no is the plain answer."""
        ...


class HypothesisDraws:
    """Choices that hypothesis makes, remembers and shrinks."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def pick(self, options: Sequence[T]) -> T:
        return options[self._draw(st.integers(0, len(options) - 1))]

    def count(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def chance(self, percent: int) -> bool:
        return self._draw(st.integers(0, 99)) >= 100 - percent


class RandomDraws:
    """Choices of a seeded generator."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._generator.random() * len(options))]

    def count(self, low: int, high: int) -> int:
        return low + int(self._generator.random() * (high - low + 1))

    def chance(self, percent: int) -> bool:
        return self._generator.random() * 100 < percent
