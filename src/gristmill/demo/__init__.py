"""Rollouts recorded from a real engine, shipped with the package: what `gristmill demo` runs on.

One folder a rollout, `capture.jsonl` and `result.json` in it; tests/e2e/record_rollouts.py says what happens in
each and how they were recorded. Not here: the command (cli.demo).
"""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable

__all__ = ["recordings"]


def recordings() -> Traversable:
    """Return the folder of recorded rollouts; it may lie in an archive."""
    return files(__name__).joinpath("data")
