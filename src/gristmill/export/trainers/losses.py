"""What formats drop of rows, each said and counted in one place.

Invariant: a loss has the same name and the same count in every format that has it; a format may say in its own words
what it comes to there.

Not here: what only one format drops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import msgspec

from gristmill.reconstruction import Row

__all__ = ["dropped", "statements"]


class _Loss(msgspec.Struct, frozen=True):
    statement: str
    number: Callable[[Row], int]


_LOSSES: Final[Mapping[str, _Loss]] = {
    "spans": _Loss(
        "Rows without their spans: which call sampled which tokens, and the certificates.",
        lambda _: 1,
    ),
    "loss_weight": _Loss(
        "Rows of rollouts of several rows, without loss_weight: each may count as one rollout.",
        lambda row: row.row_count > 1,
    ),
    "extras": _Loss(
        "Extra arrays, such as routed experts, that the format has no place for.",
        lambda row: len(row.extras.arrays),
    ),
    "credits": _Loss(
        "Credits of calls and spans, which the format has no place for: the rollout's reward stands.",
        lambda row: len(row.credits),
    ),
    "credit_rewards": _Loss(
        "Rewards of calls and spans, which the format has no place for: advantages stand.",
        lambda row: sum(credit.reward is not None for credit in row.credits),
    ),
    "group": _Loss(
        "Rows of rollouts without a group: each attempt is a group of one, by a number of its own.",
        lambda row: row.group_id is None,
    ),
    "reward": _Loss(
        "Rows without the reward of their rollout: the advantages stand for it.",
        lambda row: row.reward is not None,
    ),
    "advantage": _Loss(
        "Rows without the advantage of their rollout: the trainer makes its own of the rewards.",
        lambda row: row.advantage is not None,
    ),
}


def statements(*names: str, **own: str) -> dict[str, str]:
    """Return the statements of losses that are known here, and of a format's own, or in its own words."""
    return {name: _LOSSES[name].statement for name in names} | own


def dropped(row: Row, names: Iterable[str], *, kept_extras: Collection[str] = ()) -> Counter[str]:
    """Count losses of a row.

    Args:
        row: the row.
        names: of losses that are known here.
        kept_extras: names of extra arrays that the format has a place for.
    """
    losses = Counter({name: int(_LOSSES[name].number(row)) for name in names})
    if "extras" in losses:
        losses["extras"] -= sum(array.name in kept_extras for array in row.extras.arrays)
    return losses
