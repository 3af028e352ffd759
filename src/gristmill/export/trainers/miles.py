"""miles' `Sample`: slime's fields, in a class that is on PyPI and knows no rollouts of several samples yet.

Invariant: as slime's. `rollout_id` goes along as an attribute of the sample, which versions after this one read.

Not here: the fields (slime).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from gristmill.export.trainers.losses import statements
from gristmill.export.trainers.objects import trainer_module
from gristmill.export.trainers.projection import Projection
from gristmill.export.trainers.slime import DROPPED, LOSSES, made_of, restore_sample, sample_rows
from gristmill.reconstruction import Row

__all__ = ["MILES", "samples"]

MILES: Final = Projection(
    name="miles",
    title="miles: one Sample a row.",
    made_for="miles-rl 0.0.2",
    losses=LOSSES | statements("loss_weight"),
    samples=partial(sample_rows, "miles", (*DROPPED, "loss_weight")),
    restore=restore_sample,
)


def samples(rows: Iterable[Row]) -> list[Any]:
    """Make miles' own samples, `miles.utils.types.Sample`, each checked by its `validate`.

    Args:
        rows: rollouts in a piece.

    Raises:
        ConfigError: `trainer_missing`.
        ReconstructionError: `reward_missing`, `rewards_differ`, `not_expressible`.
        ExportError: `row_missing`.
    """
    made = made_of(trainer_module("miles.utils.types", "pip install miles-rl").Sample, MILES, rows)
    for sample in made:
        sample.validate()
    return made
