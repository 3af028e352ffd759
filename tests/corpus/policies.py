"""Selection policies of users, as the stories name them: `tests.corpus.policies:first_call`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def first_call(records: Sequence[Any], result: Any) -> tuple[list[Any], str]:
    """Keep the first call only."""
    return [records[0]], records[0].response_id


def same_call_twice(records: Sequence[Any], result: Any) -> tuple[list[Any], str]:
    """Break the contract: the selection must be unique."""
    return [records[0], records[0]], records[0].response_id


def no_good_rollouts(records: Sequence[Any], result: Any) -> tuple[list[Any], str]:
    """Refuse in the way of somebody who knows nothing of our errors."""
    raise ValueError("this rollout is of no use to me")
