"""Rows to a trainer's own objects, without files: a projection's fields, and the trainer's classes.

Invariant: an object is made of exactly the fields that a file would hold; a trainer is imported when its objects are
asked for and never before.

Not here: which objects (a module per trainer), and files (samples).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from gristmill.errors import Code, ConfigError
from gristmill.export.trainers.layout import by_rollout
from gristmill.export.trainers.projection import Projection, Source
from gristmill.reconstruction import Row

__all__ = ["fields_of", "trainer_module"]


def fields_of(projection: Projection, rows: Iterable[Row]) -> Iterator[Any]:
    """Project rows: give the fields of one record after the other.

    Args:
        projection: a format that needs no exchanges.
        rows: rollouts in a piece, as `by_rollout` wants them.

    Raises:
        ReconstructionError: the format cannot express a rollout.
        ExportError: `row_missing`.
    """
    for rollout in by_rollout(rows):
        for sample in projection.samples(Source(rollout), Counter()):
            yield sample.fields


def trainer_module(name: str, install: str) -> Any:
    """Import a module of a trainer.

    Args:
        name: of the module.
        install: what installs it, for the hint.

    Raises:
        ConfigError: `trainer_missing`.
    """
    try:
        return import_module(name)
    except ImportError as error:
        message = f"expected {name} to be importable: {error}"
        raise ConfigError(message, code=Code.TRAINER_MISSING, where=name, hint=install) from error
