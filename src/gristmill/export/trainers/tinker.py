"""Tinker's `Datum`: a row shifted by one, with an advantage for every token.

Invariant: position t of `model_input` predicts token t + 1 of the row, so all tensors have T − 1 entries; the advantage
is 0.0 wherever the mask is 0, so that Tinker's losses, which are sums over tokens, train the row's own tokens alone.

Not here: loss functions, and provenance (Tinker's spans name sequences that Tinker sampled).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from gristmill.export.trainers.layout import (
    advantages_of,
    as_float32,
    by_rollout,
    joined,
    refuse_media,
    refuse_without_prompt,
)
from gristmill.export.trainers.losses import dropped, statements
from gristmill.export.trainers.objects import trainer_module
from gristmill.export.trainers.projection import Kept, Projection, Sample, Source
from gristmill.reconstruction import Row

__all__ = ["TINKER", "datums"]

_DROPPED: Final = ("spans", "extras", "reward", "credit_rewards")


def _samples(source: Source, losses: Counter[str]) -> Sequence[Sample]:
    made: list[Sample] = []
    for row in source.rows:
        made.append(Sample((row.row_id,), _fields(row)))
        losses.update(dropped(row, _DROPPED))
    return made


def _fields(row: Row) -> dict[str, Any]:
    refuse_media(row, "tinker")
    refuse_without_prompt(row, "tinker")
    return {
        "model_input": row.token_ids[:-1],
        "loss_fn_inputs": {
            "target_tokens": row.token_ids[1:],
            "logprobs": row.logprobs[1:],
            "advantages": advantages_of(row)[1:],
            "mask": row.loss_mask[1:].astype(np.float32),
        },
    }


def _restore(fields: Mapping[str, Any]) -> Sequence[Kept]:
    inputs = fields["loss_fn_inputs"]
    return (joined(fields["model_input"][:1], inputs["target_tokens"], inputs["mask"], inputs["logprobs"]),)


TINKER: Final = Projection(
    name="tinker",
    title="Tinker: one Datum a row, shifted by one, with an advantage for every token.",
    made_for="tinker 0.38.0",
    losses=statements(*_DROPPED),
    samples=_samples,
    restore=_restore,
)


def datums(rows: Iterable[Row], *, mask: bool = True, rollouts_equal: bool = False) -> list[Any]:
    """Make Tinker's own data, `tinker.Datum`.

    Tinker adds the losses of tokens up, so the rows of a rollout add up to the rollout however it forks, and a rollout
    counts by its trained tokens.

    Args:
        rows: rollouts in a piece.
        mask: give the mask too, as the cookbook's own data has it; no built-in loss reads it, or takes it.
        rollouts_equal: divide the advantages of each rollout by its trained tokens (which is what `loss_weight` says),
            so that every rollout counts once, however long it is.

    Raises:
        ConfigError: `trainer_missing`.
        ReconstructionError: `advantage_required`, `not_expressible`.
        ExportError: `row_missing`.
    """
    tinker = trainer_module("tinker", "pip install tinker")
    made: list[Any] = []
    for row in (row for rollout in by_rollout(rows) for row in rollout):
        fields = _fields(row)
        inputs = fields["loss_fn_inputs"]
        inputs["target_tokens"] = inputs["target_tokens"].astype(np.int64)
        if rollouts_equal:
            weight = as_float32(row.loss_weight / row.loss_mask.sum(), row, "the weight")
            inputs["advantages"] = inputs["advantages"] * weight
        if not mask:
            del inputs["mask"]
        model_input = tinker.ModelInput.from_ints(fields["model_input"].tolist())
        made.append(tinker.Datum(model_input=model_input, loss_fn_inputs=inputs))
    return made
