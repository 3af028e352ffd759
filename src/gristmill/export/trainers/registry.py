"""The projections by name.

Invariant: a projection stands here once, under the name that `--to` takes; importing it needs no trainer.

Not here: what they do (a module each).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gristmill.export.trainers import slime
from gristmill.export.trainers.projection import Projection

__all__ = ["PROJECTIONS"]

PROJECTIONS: Final[Mapping[str, Projection]] = {
    projection.name: projection for projection in (slime.SLIME, slime.MILES)
}
