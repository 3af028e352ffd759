"""The projections by name.

Invariant: a projection stands here once, under the name that `--to` takes; importing it needs no trainer.

Not here: what they do (a module each).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gristmill.export.trainers.areal import AREAL
from gristmill.export.trainers.atif import ATIF
from gristmill.export.trainers.miles import MILES
from gristmill.export.trainers.nemo_gym import NEMO_GYM, NEMO_GYM_TRACES
from gristmill.export.trainers.nemo_rl import NEMO_RL
from gristmill.export.trainers.prime_rl import PRIME_RL
from gristmill.export.trainers.projection import Projection
from gristmill.export.trainers.skyrl import SKYRL
from gristmill.export.trainers.slime import SLIME
from gristmill.export.trainers.tinker import TINKER
from gristmill.export.trainers.trl import TRL, TRL_SFT
from gristmill.export.trainers.verl import VERL

__all__ = ["PROJECTIONS"]

PROJECTIONS: Final[Mapping[str, Projection]] = {
    projection.name: projection
    for projection in (
        VERL,
        TRL,
        TRL_SFT,
        SKYRL,
        TINKER,
        SLIME,
        MILES,
        PRIME_RL,
        AREAL,
        NEMO_RL,
        NEMO_GYM,
        NEMO_GYM_TRACES,
        ATIF,
    )
}
