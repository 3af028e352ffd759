"""AReaL's trajectories: tensors [1, T] of a whole row, with the weight version of every trained token.

Invariant: `versions` is a number exactly where the mask is 1 and a version was recorded, and −1 elsewhere. A version is
the one number at the end of its name (`12`, `v12`, `step-12`); a name without one refuses its rollout.

Not here: AReaL's batches and advantages: it makes both of trajectories and their rewards.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from gristmill.errors import Code, ReconstructionError
from gristmill.export.trainers.layout import as_float32, joined, refuse_media, reward_of
from gristmill.export.trainers.losses import dropped, statements
from gristmill.export.trainers.objects import fields_of, trainer_module
from gristmill.export.trainers.projection import Kept, Projection, Sample, Source
from gristmill.reconstruction import Row, SpanRole
from gristmill.records import Int32Array

__all__ = ["AREAL", "NO_VERSION", "trajectories"]

NO_VERSION: Final = -1
"""What stands in `versions` where nothing was sampled, and where no version was recorded."""

_DROPPED: Final = ("spans", "loss_weight", "extras", "credits", "advantage")
_LOSSES: Final = statements(
    *_DROPPED,
    versions="Rows with trained tokens whose weight version was not recorded: -1, so that they have no staleness.",
)
_version: Final = re.compile(r"(?!-)[^0-9]*([0-9]{1,10})", re.ASCII)


def _samples(source: Source, losses: Counter[str]) -> Sequence[Sample]:
    made: list[Sample] = []
    for row in source.rows:
        refuse_media(row, "areal")
        versions = _versions(row)
        made.append(Sample((row.row_id,), _fields(row, versions)))
        losses.update(dropped(row, _DROPPED))
        losses["versions"] += bool(((versions == NO_VERSION) & (row.loss_mask == 1)).any())
    return made


def _fields(row: Row, versions: Int32Array) -> dict[str, Any]:
    return {
        "input_ids": row.token_ids[None],
        "loss_mask": row.loss_mask.astype(np.int32)[None],
        "logprobs": row.logprobs[None],
        "versions": versions[None],
        "attention_mask": np.ones((1, row.token_ids.size), np.bool_),
        "rewards": as_float32([reward_of(row)], row, "the reward"),
    }


def _versions(row: Row) -> Int32Array:
    """Return the version that sampled each trained token, int32[T]."""
    versions = np.full(row.token_ids.size, NO_VERSION, np.int32)
    for span in row.spans:
        if span.role is SpanRole.SAMPLED and span.weight_version is not None:
            versions[span.start : span.end] = _number(span.weight_version, row)
    return versions


def _number(version: str, row: Row) -> int:
    found = _version.fullmatch(version)
    if found is None or int(found[1]) > np.iinfo(np.int32).max:
        message = f"expected weight versions that end in a number, such as 12 or step-12, got {version!r}"
        raise ReconstructionError(Code.NOT_EXPRESSIBLE, message, where=f"row={row.row_id}")
    return int(found[1])


def _restore(fields: Mapping[str, Any]) -> Sequence[Kept]:
    [ids], [mask], [logprobs] = fields["input_ids"], fields["loss_mask"], fields["logprobs"]
    return (joined((), ids, mask, logprobs),)


AREAL: Final = Projection(
    name="areal",
    title="AReaL: one trajectory a row, as tensors [1, T] with weight versions.",
    made_for="areal 1.0.4",
    losses=_LOSSES,
    samples=_samples,
    restore=_restore,
)


def trajectories(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Make AReaL's trajectories: dictionaries of PyTorch tensors, of the types that its own workflows return.

    Args:
        rows: rollouts in a piece.

    Returns:
        per row `input_ids`, `loss_mask`, `versions` int32[1, T], `logprobs` float32[1, T], `attention_mask`
        bool[1, T] and `rewards` float32[1].

    Raises:
        ConfigError: `trainer_missing`: PyTorch, which AReaL brings, is not installed.
        ReconstructionError: `reward_missing`, `not_expressible`.
        ExportError: `row_missing`.
    """
    torch = trainer_module("torch", "pip install areal")
    return [
        {name: torch.from_numpy(np.array(array)) for name, array in fields.items()} for fields in fields_of(AREAL, rows)
    ]
