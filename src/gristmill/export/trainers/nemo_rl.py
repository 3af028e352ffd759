"""NeMo RL's message logs and train batches: a row cut into messages where training begins and ends.

Invariant: a message of the assistant is exactly the tokens of a generation that the row trains, with its
log-probabilities; everything else, generations that other rows train among it, is a message of the user. NeMo RL trains
by role, so masks come out equal.

Not here: NeMo Gym's records (nemo_gym), advantages that NeMo RL makes of the rewards, and text: `content` stays empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from gristmill.export.trainers.layout import (
    advantages_of,
    as_float32,
    by_rollout,
    group_of,
    gym_rollout_id,
    number_of,
    padded,
    refuse_media,
    refuse_without_prompt,
    reward_of,
    turns_of,
)
from gristmill.export.trainers.losses import dropped, statements
from gristmill.export.trainers.objects import fields_of, trainer_module
from gristmill.export.trainers.projection import Kept, Projection, Sample, Source
from gristmill.reconstruction import Row
from gristmill.records import Float32Array

__all__ = ["NEMO_RL", "message_logs", "train_arrays", "train_batch"]

_DROPPED: Final = ("spans", "loss_weight", "extras", "credit_rewards", "group")
_LOSSES: Final = statements(*_DROPPED, text="Messages without their text: only tokens are trained.")
_INSTALL: Final = "NeMo RL is installed from its repository, NVIDIA-NeMo/RL: what PyPI has under its name is empty"


def _samples(source: Source, losses: Counter[str]) -> Sequence[Sample]:
    made: list[Sample] = []
    for row in source.rows:
        made.append(Sample((row.row_id,), _fields(row)))
        losses.update(dropped(row, _DROPPED))
        losses["text"] += 1
    return made


def _fields(row: Row) -> dict[str, Any]:
    refuse_media(row, "nemo-rl")
    refuse_without_prompt(row, "nemo-rl")
    log = _message_log(row)
    fields: dict[str, Any] = {
        "message_log": log,
        "length": int(log[0]["token_ids"].size),
        "loss_multiplier": 1.0,
        "total_reward": reward_of(row),
        "truncated": row.truncated,
        "gym_rollout_id": gym_rollout_id(row),
        "gym_trace_id": row.row_id,
        "gym_task_group_id": number_of(group_of(row)),
    }
    advantages = _advantages(row)
    return fields if advantages is None else {**fields, "advantages": advantages}


def _message_log(row: Row) -> list[dict[str, Any]]:
    log: list[dict[str, Any]] = []
    for turn in turns_of(row):
        place = slice(turn.start, turn.end)
        message: dict[str, Any] = {"role": "user", "content": "", "token_ids": row.token_ids[place]}
        if turn.trained:
            message |= {"role": "assistant", "generation_logprobs": row.logprobs[place]}
        log.append(message)
    return log


def _advantages(row: Row) -> Float32Array | None:
    given = row.advantage is not None or any(credit.advantage is not None for credit in row.credits)
    return advantages_of(row) if given else None


def _restore(fields: Mapping[str, Any]) -> Sequence[Kept]:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for message in cast("list[Mapping[str, Any]]", fields["message_log"]):
        tokens = message["token_ids"]
        ids += tokens
        mask += [int(message["role"] == "assistant")] * len(tokens)
        logprobs += message.get("generation_logprobs", [0.0] * len(tokens))
    kept = np.asarray(logprobs, np.float64).astype(np.float32)
    return (Kept(np.asarray(ids, np.int32), np.asarray(mask, np.uint8), kept),)


NEMO_RL: Final = Projection(
    name="nemo-rl",
    title="NeMo RL: one message log a row, with its reward.",
    made_for="nemo-rl, documented schema of 2026-11",
    losses=_LOSSES,
    samples=_samples,
    restore=_restore,
)


def message_logs(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Make NeMo RL's samples: dictionaries with a message log of PyTorch tensors.

    Args:
        rows: rollouts in a piece.

    Returns:
        per row `message_log` (`token_ids` int64, `generation_logprobs` float32), `length`, `loss_multiplier`,
        `total_reward`, `truncated`, and ids of rollout, row and group under the names that NeMo RL has for Gym's.

    Raises:
        ConfigError: `trainer_missing`: PyTorch, which NeMo RL brings, is not installed.
        ReconstructionError: `reward_missing`, `not_expressible`.
        ExportError: `row_missing`.
    """
    torch = trainer_module("torch", _INSTALL)

    def tensors(message: Mapping[str, Any]) -> dict[str, Any]:
        made = dict(message)
        made["token_ids"] = torch.from_numpy(message["token_ids"].astype(np.int64))
        if "generation_logprobs" in message:
            made["generation_logprobs"] = torch.from_numpy(np.array(message["generation_logprobs"]))
        return made

    return [
        {**fields, "message_log": [tensors(message) for message in fields["message_log"]]}
        for fields in fields_of(NEMO_RL, rows)
    ]


def train_arrays(
    rows: Iterable[Row],
    *,
    pad_token_id: int = 0,
    divisible_by: int = 1,
    width: int | None = None,
    rollouts_equal: bool = False,
) -> dict[str, npt.NDArray[Any]]:
    """Make the arrays of a train batch of B rows, padded on the right to S tokens.

    Args:
        rows: rollouts in a piece; at least one.
        pad_token_id: stands behind a row's tokens.
        divisible_by: S is made divisible by it, as NeMo RL's `make_sequence_length_divisible_by` does.
        width: S; by default that of the longest row.
        rollouts_equal: give `loss_weight` as `sample_mask`, so that under a loss that is averaged by sequence a rollout
            counts once however many rows it makes; by default each row has 1.0, which is right for a loss that is
            averaged by token.

    Returns:
        `input_ids` int64[B, S], `input_lengths` int32[B], `generation_logprobs` float32[B, S] nats (0.0 where nothing
        is trained), `token_mask` float32[B, S], `sample_mask` float32[B]; `advantages` float32[B, S] where rows have
        them.

    Raises:
        ReconstructionError: `row_too_long`, `not_expressible`; `advantage_required`: some rows have an advantage.
        ExportError: `row_missing`.
    """
    held = [row for rollout in by_rollout(rows) for row in rollout]
    for row in held:
        refuse_media(row, "nemo-rl")
        refuse_without_prompt(row, "nemo-rl")
    longest = width if width is not None else max((row.token_ids.size for row in held), default=0)
    size = -(-longest // divisible_by) * divisible_by
    weights = [as_float32(row.loss_weight if rollouts_equal else 1.0, row, "the weight") for row in held]
    arrays = {
        "input_ids": padded([row.token_ids for row in held], size, pad_token_id),
        "input_lengths": np.array([row.token_ids.size for row in held], np.int32),
        "generation_logprobs": padded([row.logprobs for row in held], size, 0.0, dtype=np.float32),
        "token_mask": padded([row.loss_mask for row in held], size, 0.0, dtype=np.float32),
        "sample_mask": np.array(weights, np.float32),
    }
    if any(_advantages(row) is not None for row in held):
        arrays["advantages"] = padded([advantages_of(row) for row in held], size, 0.0, dtype=np.float32)
    return arrays


def train_batch(rows: Iterable[Row], **settings: Any) -> Any:
    """Make NeMo RL's own train batch, a `BatchedDataDict` of PyTorch tensors; arguments and fields of `train_arrays`.

    Raises:
        ConfigError: `trainer_missing`.
        ReconstructionError: as `train_arrays`.
        ExportError: `row_missing`.
    """
    torch = trainer_module("torch", _INSTALL)
    batched = trainer_module("nemo_rl.distributed.batched_data_dict", _INSTALL)
    arrays = train_arrays(rows, **settings)
    return batched.BatchedDataDict({name: torch.from_numpy(array) for name, array in arrays.items()})
