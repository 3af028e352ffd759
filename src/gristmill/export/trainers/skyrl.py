"""SkyRL's `GeneratorOutput`: a rollout's rows are the steps of one trajectory.

Invariant: the steps of a trajectory stand together, the last one is marked, and each has the reward of the rollout:
SkyRL computes the advantage of a trajectory from its last step and gives it to all of them.

Not here: SkyRL's generators and batches, and the text of prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from gristmill.export.trainers.layout import (
    ROUTED_EXPERTS,
    by_rollout,
    group_of,
    joined,
    one_reward,
    prompt_response,
    refuse_media,
    rewards_of,
    rollout_number,
    routed_experts_of,
)
from gristmill.export.trainers.losses import dropped, statements
from gristmill.export.trainers.objects import trainer_module
from gristmill.export.trainers.projection import Kept, Projection, Sample, Source
from gristmill.reconstruction import Row
from gristmill.records import Int32Array

__all__ = ["SKYRL", "generator_output"]

_DROPPED: Final = ("spans", "extras", "credits", "advantage", "loss_weight")
_LOSSES: Final = statements(
    *_DROPPED,
    credits="Credits of calls and spans: a file has one reward a step; `generator_output` keeps rewards of calls.",
    group="Rows of rollouts without a group: each is a group of one, by an instance_id of its own.",
    loss_weight="Rows of rollouts that make several: SkyRL's advantages count the rollout, its losses tokens or rows.",
    stop_reasons="Rows whose finish reason is neither stop nor length: written as stop.",
)
_INSTALL: Final = "pip install skyrl==0.4.0"
_LISTS: Final = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")


def _samples(source: Source, losses: Counter[str]) -> Sequence[Sample]:
    fields = _fields(source.rows)
    kept = (ROUTED_EXPERTS,) if fields["rollout_expert_indices"] else ()
    for row in source.rows:
        losses.update(dropped(row, _DROPPED, kept_extras=kept))
        losses["group"] += row.group_id is None
        losses["stop_reasons"] += row.finish_reason != "stop" and not row.truncated
    return (Sample(tuple(row.row_id for row in source.rows), fields),)


def _fields(rows: Sequence[Row]) -> dict[str, Any]:
    for row in rows:
        refuse_media(row, "skyrl")
    reward = one_reward(rows)
    cuts = [prompt_response(row) for row in rows]
    trajectory = {"instance_id": group_of(rows[0]), "repetition_id": rollout_number(rows[0])}
    return {
        "prompt_token_ids": [cut.prompt_ids for cut in cuts],
        "response_ids": [cut.response_ids for cut in cuts],
        "rewards": [reward] * len(rows),
        "loss_masks": [cut.response_mask for cut in cuts],
        "stop_reasons": ["length" if row.truncated else "stop" for row in rows],
        "rollout_logprobs": [cut.response_logprobs for cut in cuts],
        "trajectory_ids": [trajectory] * len(rows),
        "rollout_expert_indices": _experts(rows),
        "is_last_step": [row.row_index == row.row_count - 1 for row in rows],
    }


def _experts(rows: Sequence[Row]) -> list[Any] | None:
    """Return the experts of every token but the last, in the smaller of the types that SkyRL takes for any model."""
    held: list[Int32Array] = []
    for row in rows:
        experts = routed_experts_of(row)
        if experts is None or (held and experts.shape[1:] != held[0].shape[1:]):
            return None
        held.append(experts)
    return [experts.astype(np.int16) for experts in held]


def _restore(fields: Mapping[str, Any]) -> Sequence[Kept]:
    return [joined(*step) for step in zip(*(fields[name] for name in _LISTS), strict=True)]


SKYRL: Final = Projection(
    name="skyrl",
    title="SkyRL: one GeneratorOutput a rollout; its rows are the steps of a trajectory.",
    made_for="skyrl 0.4.0",
    losses=_LOSSES,
    samples=_samples,
    restore=_restore,
)


def generator_output(rows: Iterable[Row], *, call_rewards: bool = True) -> Any:
    """Make SkyRL's own batch, `skyrl.train.generators.base.GeneratorOutput`.

    With `generator.step_wise_trajectories=true` a rollout has as many steps as rows; without it SkyRL takes no rollout
    of several rows. Rollouts must come in the order of the prompts that SkyRL gave.

    Args:
        rows: rollouts in a piece.
        call_rewards: where calls or spans have rewards, give one reward a token: theirs on the last token of each span,
            the rollout's on the last token; SkyRL adds them up. With False, or without such rewards, one a row.

    Raises:
        ConfigError: `trainer_missing`.
        ReconstructionError: `reward_missing`, `rewards_differ`; `not_expressible`: media, or rewards of calls in a
            rollout of several rows.
        ExportError: `row_missing`.
    """
    base = trainer_module("skyrl.train.generators.base", _INSTALL)
    rollouts = list(by_rollout(rows))
    made: dict[str, Any] = dict.fromkeys(base.GeneratorOutput.__annotations__)
    parts = [_fields(rollout) for rollout in rollouts]
    for name in ("rewards", "stop_reasons", "is_last_step"):
        made[name] = [value for part in parts for value in part[name]]
    for name in _LISTS:
        made[name] = [array.tolist() for part in parts for array in part[name]]
    made["trajectory_ids"] = [base.TrajectoryID(**value) for part in parts for value in part["trajectory_ids"]]
    made["rollout_expert_indices"] = _experts([row for rollout in rollouts for row in rollout])
    credits = [credit for rollout in rollouts for row in rollout for credit in row.credits]
    if call_rewards and any(credit.reward is not None for credit in credits):
        made["rewards"] = [
            rewards[row.prompt_len :].tolist()
            for rollout in rollouts
            for row, rewards in zip(rollout, rewards_of(rollout, calls=True), strict=True)
        ]
    return made
