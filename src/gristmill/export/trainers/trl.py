"""TRL: what a `rollout_func` of GRPOTrainer returns, samples of AsyncGRPOTrainer, and token sequences for SFTTrainer.

Invariant: `env_mask`, `completion_mask` and `labels` train exactly what the row trains. GRPOTrainer takes one
completion a prompt: a rollout of several rows is none, and is refused where completions are handed over.

Not here: prompts, conversations and chat templates (the format `messages` has text), and TRL's batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from gristmill.errors import Code, ReconstructionError
from gristmill.export.trainers.layout import (
    advantage_of,
    by_rollout,
    group_of,
    joined,
    number_of,
    prompt_response,
    refuse_media,
    versions_of,
)
from gristmill.export.trainers.losses import dropped, statements
from gristmill.export.trainers.objects import fields_of, trainer_module
from gristmill.export.trainers.projection import Kept, Projection, Sample, Source
from gristmill.reconstruction import Row

__all__ = ["IGNORED", "TRL", "TRL_SFT", "given_reward", "rollout_output", "rollout_samples", "sft_dataset"]

IGNORED: Final = -100
"""The label of a token that is not trained."""

_DROPPED: Final = ("spans", "extras", "credits", "advantage")
_LOSSES: Final = statements(
    *_DROPPED,
    reward="Rows of rollouts without a reward: TRL takes them for unscorable and gives them the advantage 0.",
    several_rows="Rows of rollouts that make several: GRPOTrainer takes one completion a prompt, AsyncGRPO all.",
)
_SFT_DROPPED: Final = ("spans", "extras", "credits", "advantage", "reward", "loss_weight")
_SFT_LOSSES: Final = statements(
    *_SFT_DROPPED,
    logprobs="Rows without their log-probabilities: supervised training reads none.",
    reward="Rows without the reward of their rollout: every row is trained alike.",
    advantage="Rows without the advantage of their rollout: every row is trained alike.",
    credits="Credits of calls and spans: every token of a row is trained alike.",
    loss_weight="Rows of rollouts that make several, without loss_weight: the loss is a mean over tokens.",
)
_MADE_FOR: Final = "trl 1.16.0"
_INSTALL: Final = "pip install trl==1.16.0"
_LISTS: Final = ("prompt_ids", "completion_ids", "logprobs", "env_mask")


def _samples(source: Source, losses: Counter[str]) -> Sequence[Sample]:
    made: list[Sample] = []
    for row in source.rows:
        refuse_media(row, "trl")
        cut = prompt_response(row)
        fields = {
            "prompt_ids": cut.prompt_ids,
            "completion_ids": cut.response_ids,
            "logprobs": cut.response_logprobs,
            "env_mask": cut.response_mask,
            "reward": row.reward,
            "group_id": row.group_id,
            "rollout_id": row.rollout_id,
        }
        losses.update(dropped(row, _DROPPED))
        losses["reward"] += row.reward is None
        losses["several_rows"] += row.row_count > 1
        made.append(Sample((row.row_id,), fields))
    return made


def _restore(fields: Mapping[str, Any]) -> Sequence[Kept]:
    names = ("prompt_ids", "completion_ids", "env_mask", "logprobs")
    return (joined(*(fields[name] for name in names)),)


TRL: Final = Projection(
    name="trl",
    title="TRL: one completion a row, as a rollout_func of GRPOTrainer returns them.",
    made_for=_MADE_FOR,
    losses=_LOSSES,
    samples=_samples,
    restore=_restore,
)


def _sft_samples(source: Source, losses: Counter[str]) -> Sequence[Sample]:
    made: list[Sample] = []
    for row in source.rows:
        refuse_media(row, "trl-sft")
        labels = np.where(row.loss_mask == 1, row.token_ids, np.int32(IGNORED))
        losses.update(dropped(row, _SFT_DROPPED))
        losses["logprobs"] += 1
        made.append(Sample((row.row_id,), {"input_ids": row.token_ids, "labels": labels}))
    return made


def _sft_restore(fields: Mapping[str, Any]) -> Sequence[Kept]:
    labels = np.asarray(fields["labels"], np.int32)
    return (Kept(np.asarray(fields["input_ids"], np.int32), (labels != IGNORED).astype(np.uint8), None),)


TRL_SFT: Final = Projection(
    name="trl-sft",
    title="TRL: token ids and labels of each row, as SFTTrainer takes a data set that is prepared.",
    made_for=_MADE_FOR,
    losses=_SFT_LOSSES,
    samples=_sft_samples,
    restore=_sft_restore,
)


def rollout_output(rows: Iterable[Row], *, num_generations: int | None = None) -> dict[str, list[Any]]:
    """Make what a `rollout_func` of TRL's GRPOTrainer returns.

    TRL hands the function each prompt `num_generations` times in a row, expects one completion for each in their order,
    and compares neighbours as a group.

    Args:
        rows: one of every rollout, in the order of the prompts.
        num_generations: check that each group stands together and is whole. A process of several may hold part of a
            group; leave it out there.

    Returns:
        `prompt_ids`, `completion_ids`, `logprobs` (nats, 0.0 where `env_mask` is 0), `env_mask` (1 = sampled by the
        model), and `reward`, `group_id`, `rollout_id`, which TRL hands to reward functions (`given_reward`).

    Raises:
        ReconstructionError: `not_expressible`: media, a rollout of several rows, or groups that are not whole and
            together; `group_missing`: groups are to be checked, and a rollout has none.
        ExportError: `row_missing`.
    """
    held = [row for rollout in by_rollout(rows) for row in rollout]
    for row in held:
        if row.row_count > 1:
            message = f"expected one row of rollout {row.rollout_id!r}, got {row.row_count}: TRL takes one a prompt"
            raise ReconstructionError(Code.NOT_EXPRESSIBLE, message, where=f"row={row.row_id}")
    if num_generations is not None:
        _check_groups(held, num_generations)
    made: dict[str, list[Any]] = {name: [] for name in (*_LISTS, "reward", "group_id", "rollout_id")}
    for fields in fields_of(TRL, held):
        for name, values in made.items():
            values.append(fields[name].tolist() if name in _LISTS else fields[name])
    return made


def _check_groups(rows: Sequence[Row], size: int) -> None:
    """Refuse groups that TRL would take for others by their places."""
    seen = set[str]()
    for start in range(0, len(rows), size):
        block = rows[start : start + size]
        for row in block:
            if row.group_id is None:
                message = f"expected rollout {row.rollout_id!r} to name its group, it does not"
                raise ReconstructionError(Code.GROUP_MISSING, message, where=f"row={row.row_id}")
        names = {group_of(row) for row in block}
        if len(block) < size or len(names) > 1 or names & seen:
            message = f"expected {size} rollouts of one group from place {start}, got {len(block)} of {sorted(names)}"
            raise ReconstructionError(Code.NOT_EXPRESSIBLE, message, where=f"row={block[0].row_id}")
        seen |= names


def given_reward(*, reward: Sequence[float | None], **_: object) -> list[float | None]:
    """Be a reward function for GRPOTrainer (`reward_funcs`): the rewards that `rollout_output` carries.

    Args:
        reward: of each rollout; None where there is none, which TRL takes for unscorable.
    """
    return list(reward)


def rollout_samples(rows: Iterable[Row], *, model_version: int | None = None) -> list[Any]:
    """Make samples of AsyncGRPO, `trl.experimental.async_grpo.async_rollout_worker.RolloutSample`.

    TRL divides by trained tokens, so that the rows of a rollout add up to the rollout however it forks. Conversations,
    which TRL only logs, stay empty.

    Args:
        rows: rollouts in a piece.
        model_version: of the weights, for rows whose calls have none that is a plain number. The oldest version of a
            row stands for it, by which TRL drops stale samples.

    Raises:
        ConfigError: `trainer_missing`.
        ReconstructionError: `advantage_required`; `not_expressible`: media, advantages of calls, or no version.
        ExportError: `row_missing`.
    """
    worker = trainer_module("trl.experimental.async_grpo.async_rollout_worker", _INSTALL)
    made: list[Any] = []
    for row in (row for rollout in by_rollout(rows) for row in rollout):
        refuse_media(row, "trl")
        advantage = advantage_of(row)
        if any(credit.advantage is not None for credit in row.credits):
            message = f"expected one advantage for row {row.row_id}, calls of it have their own"
            raise ReconstructionError(Code.NOT_EXPRESSIBLE, message, where=f"row={row.row_id}")
        versions = versions_of(row)
        version = model_version if versions is None else versions.oldest
        if version is None:
            message = f"expected a number as version of the weights of row {row.row_id}: give model_version"
            raise ReconstructionError(Code.NOT_EXPRESSIBLE, message, where=f"row={row.row_id}")
        made.append(
            worker.RolloutSample(
                prompt=[],
                completion=[],
                input_ids=row.token_ids.astype(np.int64),
                completion_mask=row.loss_mask.astype(np.int64),
                old_log_probs=row.logprobs,
                advantage=advantage,
                model_version=version,
                group_id=number_of(group_of(row)),
                metrics={} if row.reward is None else {"reward": row.reward},
            )
        )
    return made


def sft_dataset(rows: Iterable[Row]) -> Any:
    """Make a `datasets.Dataset` of `input_ids` and `labels`, which SFTTrainer takes as prepared.

    SFTTrainer cuts sequences to `max_length`, 1,024 tokens unless it is told otherwise: give it `max_length=None`.

    Args:
        rows: rollouts in a piece.

    Raises:
        ConfigError: `trainer_missing`.
        ReconstructionError: `not_expressible`.
        ExportError: `row_missing`.
    """
    datasets = trainer_module("datasets", _INSTALL)
    made = list(fields_of(TRL_SFT, rows))
    return datasets.Dataset.from_dict({name: [fields[name] for fields in made] for name in ("input_ids", "labels")})
