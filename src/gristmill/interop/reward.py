"""The reward of a rollout, gathered from places that may each state one.

Invariant: a reward is the one that all of those places state; where they differ there is none.

Not here: what a reward is for (credit).
"""

from __future__ import annotations

from math import isfinite

import msgspec

from gristmill.canonical import JsonValue
from gristmill.captures.fields import kind_of, number
from gristmill.captures.reply import Unexpected

__all__ = ["Rewards", "reward_at"]


def reward_at(value: JsonValue, where: str) -> float | None:
    """Return a reward, None where there is none.

    Raises:
        Unexpected: it is no finite number.
    """
    read = None if value is None else number(value)
    if read is not None and not isfinite(read):
        raise Unexpected("a finite number or null", kind_of(value), where)
    return read


class Rewards(msgspec.Struct):
    """Rewards that were stated so far."""

    stated: set[float] = msgspec.field(default_factory=set[float])

    def add(self, value: JsonValue, where: str) -> None:
        """Take what one place states; `Unexpected` as in `reward_at`."""
        read = reward_at(value, where)
        if read is not None:
            self.stated.add(read)

    @property
    def differ(self) -> bool:
        """Whether several were stated."""
        return len(self.stated) > 1

    @property
    def value(self) -> float | None:
        """The reward, None where none was stated or several were."""
        return next(iter(self.stated)) if len(self.stated) == 1 else None
