"""What the checks against trainers' real classes share: rollouts, comparisons, the line that a check prints.

Invariant: a comparison that does not hold ends the check with an exception; the line is printed last, or not at all.

A check imports this module first, which makes the repository's own modules importable.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
# Some packages bring a `tests` of their own, which would be found before a folder that is no package.
sys.modules["tests"] = ModuleType("tests")
sys.modules["tests"].__path__ = [str(ROOT / "tests")]

from gristmill.reconstruction import Row  # noqa: E402 - found through the lines above
from tests.export.trainers.rollouts import generated  # noqa: E402
from tests.export.trainers.trainer_page import export_demo, run_page  # noqa: E402


def rollouts(count: int = 300) -> Iterator[Sequence[Row]]:
    """Give the rows of generated rollouts with forks, several versions of the weights, and every mode of rows."""
    for source in generated(seed=11, count=count):
        yield source.rows


@contextmanager
def following(page: str, rows_at: str = "rows") -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """Follow a page of the documentation where its rows are; give what it defines, and the rows."""
    with TemporaryDirectory() as place, chdir(place):
        rows = export_demo(Path(rows_at))
        yield run_page(page), [row for rollout in rows for row in rollout]


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
