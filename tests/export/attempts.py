"""Captured attempts for the tests of files of rows."""

from __future__ import annotations

import json
from typing import Any

from gristmill.captures import read_lines
from gristmill.pipeline import RebuiltRollout, run_rollout
from gristmill.reconstruction import RowMode
from gristmill.records import Capture, Result
from gristmill.selection import Rejected, resolve_selection_policy
from tests.cli.stories import TWO_TURNS, Json, returned, story

__all__ = ["Outcome", "captured", "made"]

Outcome = RebuiltRollout | Rejected


def captured(calls: list[Json] | None = None, rollout_id: str = "r") -> Capture:
    """Read calls as a capture file would hold them."""
    lines = [{**line, "rollout_id": rollout_id} for line in (story() if calls is None else calls)]
    [rollout] = read_lines(json.dumps(line).encode() for line in lines).rollouts.values()
    return rollout.capture


def made(
    capture: Capture, *texts: str, mode: RowMode = RowMode.MERGED, advantage: float | None = None, **fields: Any
) -> tuple[Outcome, Result]:
    """Select and rebuild an attempt whose result holds the given replies."""
    value = returned(*(texts or TWO_TURNS))
    result = Result(value=value, reward=1.0, group_id="g", **fields)
    return run_rollout(capture, result, resolve_selection_policy(), mode=mode, advantage=advantage), result
