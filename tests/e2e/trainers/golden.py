"""What the checks against trainers' real classes share: rollouts, comparisons, the line that a check prints.

Invariant: a comparison that does not hold ends the check with an exception; the line is printed last, or not at all.

A check imports this module first, which makes the repository's own modules importable.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from gristmill.reconstruction import Row  # noqa: E402 - found through the lines above
from tests.export.trainers.rollouts import generated  # noqa: E402


def rollouts(count: int = 300) -> Iterator[Sequence[Row]]:
    """Give the rows of generated rollouts with forks, several versions of the weights, and every mode of rows."""
    for source in generated(seed=11, count=count):
        yield source.rows


class Golden:
    """Counts the comparisons of one trainer."""

    def __init__(self, trainer: str, distribution: str) -> None:
        self._trainer = trainer
        self._version = version(distribution)
        self._checks = 0

    def same(self, got: Any, expected: Any, what: str = "") -> None:
        """Compare values, or arrays element by element."""
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected), err_msg=what, strict=False)
        self._checks += 1

    def is_type(self, got: object, expected: object, what: str = "") -> None:
        """Compare types, shapes and other facts that are equal or not."""
        if got != expected:
            raise AssertionError(f"{what}: expected {expected!r}, got {got!r}")
        self._checks += 1

    def report(self, *classes: object) -> None:
        """Print the line that says what was checked."""
        names = [f"{getattr(cls, '__module__', '')}.{getattr(cls, '__qualname__', cls)}" for cls in classes]
        line = {"trainer": self._trainer, "version": self._version, "classes": names, "checks": self._checks}
        sys.stdout.write(json.dumps(line) + "\n")
