"""AReaL's own check of trajectories, its padding, and its own tensors of the same calls."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden import Golden, following, rollouts  # isort: skip

import torch
from areal.api import ModelResponse
from areal.experimental.openai.types import InteractionWithTokenLogpReward
from areal.infra.workflow_executor import check_trajectory_format
from areal.utils.data import concat_padded_tensors

from gristmill.export.trainers.areal import trajectories
from gristmill.records import WeightSpan
from tests.export.trainers.rollouts import source_of
from tests.reconstruction.attempts import Call, logprobs_of

TYPES = {
    "input_ids": torch.int32,
    "loss_mask": torch.int32,
    "logprobs": torch.float32,
    "versions": torch.int32,
    "attention_mask": torch.bool,
    "rewards": torch.float32,
}


def main() -> None:
    golden = Golden("areal", "areal")
    for rows in rollouts():
        made = trajectories(rows)
        for row, trajectory in zip(rows, made, strict=True):
            check_trajectory_format(trajectory, batch_size=1, expected_keys=set(TYPES))
            golden.is_type({name: tensor.dtype for name, tensor in trajectory.items()}, TYPES, "types")
            golden.same(trajectory["input_ids"][0], row.token_ids, "ids")
            golden.same(trajectory["loss_mask"][0], row.loss_mask, "mask")
            golden.same(trajectory["logprobs"][0], row.logprobs, "log-probabilities")
            golden.same(trajectory["rewards"], [row.reward], "reward")
            golden.is_type(bool((trajectory["versions"][0][row.loss_mask == 0] == -1).all()), True, "versions")
        batch = concat_padded_tensors(made)
        check_trajectory_format(batch, batch_size=len(rows), expected_keys=set(TYPES))
        for row, ids, attended in zip(rows, batch["input_ids"], batch["attention_mask"], strict=True):
            golden.same(ids[attended], row.token_ids, "padded")
    as_areal_makes_them(golden)
    with following("areal.md") as (page, read):
        shape = (len(read), max(row.token_ids.size for row in read))
        golden.is_type(tuple(page["batch"]["input_ids"].shape), shape, "page")
    golden.report(check_trajectory_format, concat_padded_tensors, ModelResponse, InteractionWithTokenLogpReward)


def as_areal_makes_them(golden: Golden) -> None:
    """AReaL's tensors of a conversation that extends itself are those of the one row that it is here."""
    calls = [
        Call("c0", [1, 2], [3, 4], fields={"weight_versions": (WeightSpan("5", 0, 2),)}),
        Call(
            "c1",
            [1, 2, 3, 4, 9],
            [6, 7, 8],
            parent="c0",
            fields={"weight_versions": (WeightSpan("5", 0, 1), WeightSpan("v6", 1, 3))},
        ),
    ]
    [trajectory] = trajectories(source_of(calls).rows)
    parent = None
    for call, versions in zip(calls, ([5, 5], [5, 6, 6]), strict=True):
        reply = ModelResponse(list(call.prompt), list(call.generation), logprobs_of(call), versions)
        parent = InteractionWithTokenLogpReward(reply, 1.0, parent, chat_template_type="concat")
    expected = parent.to_tensor_dict()
    golden.is_type(set(trajectory), set(expected), "names")
    for name, tensor in expected.items():
        golden.is_type(trajectory[name].shape, tensor.shape, name)
        golden.same(trajectory[name].to(tensor.dtype), tensor, name)


if __name__ == "__main__":
    main()
