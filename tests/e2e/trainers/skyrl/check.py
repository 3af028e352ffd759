"""SkyRL's own checks of a generator's output, and its trainer's way from there to tensors and advantages."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden import Golden, following, rollouts  # isort: skip

import copy
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generators.base import GeneratorOutput, TrajectoryID
from skyrl.train.generators.utils import concatenate_generator_outputs, merge_stepwise_output
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import validate_generator_output

from gristmill.export.trainers.skyrl import generator_output
from gristmill.reconstruction import Row, RowExtras, SpanArray, TokenCredit

PAD = 7


def trainer(**generator: Any) -> Any:
    """SkyRL's trainer without Ray, models and data: its configuration, a tokenizer's padding, one process."""
    made = object.__new__(RayPPOTrainer)
    made.cfg = SkyRLTrainConfig()
    made.cfg.trainer.critic.model.path = None
    made.cfg.trainer.algorithm.advantage_estimator = "grpo"
    for name, value in generator.items():
        setattr(made.cfg.generator, name, value)
    made.tokenizer = SimpleNamespace(pad_token_id=PAD)
    made.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 1)
    made.all_metrics = {}
    return made


def main() -> None:
    golden = Golden("skyrl", "skyrl")
    held = [
        [msgspec.structs.replace(row, group_id=f"g_{number // 4}") for row in rows]
        for number, rows in enumerate(rollouts())
    ]
    held = held[: len(held) - len(held) % 4]
    whole = generator_output([row for rows in held for row in rows])
    fields(golden, whole, [row for rows in held for row in rows])
    put_together(golden, whole, held)
    merged(golden, held)
    trained(golden, held, step_wise_trajectories=True, n_samples_per_prompt=4)
    singles = [[msgspec.structs.replace(rows[0], row_count=1)] for rows in held if len(rows) == 1]
    singles = [
        [msgspec.structs.replace(row, group_id=f"s{number // 4}") for row in rows]
        for number, rows in enumerate(singles[: len(singles) - len(singles) % 4])
    ]
    trained(golden, singles, step_wise_trajectories=False, n_samples_per_prompt=4)
    call_rewards(golden, singles)
    experts(golden, held)
    with following("skyrl.md") as (defined, rows):
        golden.is_type(len(defined["output"]["response_ids"]), len(rows), "page")
    golden.report(
        GeneratorOutput,
        TrajectoryID,
        validate_generator_output,
        concatenate_generator_outputs,
        merge_stepwise_output,
        RayPPOTrainer,
    )


def fields(golden: Golden, made: Any, rows: Sequence[Row]) -> None:
    """Every field that SkyRL declares is there, and its own check accepts them."""
    golden.is_type(set(made), set(GeneratorOutput.__annotations__), "names")
    validate_generator_output(len({(row.rollout_id, row.attempt) for row in rows}), made, step_wise=True)
    for index, row in enumerate(rows):
        golden.is_type(type(made["trajectory_ids"][index]), TrajectoryID, "class")
        golden.is_type(made["trajectory_ids"][index].instance_id, row.group_id, "group")
        golden.same(made["prompt_token_ids"][index] + made["response_ids"][index], row.token_ids, "ids")
        golden.same(made["loss_masks"][index], row.loss_mask[row.prompt_len :], "mask")
        golden.same(np.float32(made["rollout_logprobs"][index]), row.logprobs[row.prompt_len :], "log-probabilities")
        golden.is_type(made["rewards"][index], row.reward, "reward")
        golden.is_type({type(value) for value in made["rollout_logprobs"][index]} <= {float}, True, "types")


def put_together(golden: Golden, whole: Any, held: Sequence[Sequence[Row]]) -> None:
    """One output a rollout, put together by SkyRL, is the output of all."""
    joined = concatenate_generator_outputs([generator_output(rows) for rows in held], step_wise=True)
    for name, values in whole.items():
        if values is not None:
            golden.is_type(joined[name], values, name)


def merged(golden: Golden, held: Sequence[Sequence[Row]]) -> None:
    """SkyRL's own merging of steps trains the same tokens, each once."""
    for rows in held:
        made = generator_output(rows)
        again = merge_stepwise_output(copy.deepcopy(made))
        trained = sum(map(sum, again["loss_masks"]))
        golden.is_type(trained, sum(int(row.loss_mask.sum()) for row in rows), "trained once")
        golden.is_type(again["rewards"][-1], rows[-1].reward, "reward")


def trained(golden: Golden, held: Sequence[Sequence[Row]], **generator: Any) -> None:
    """SkyRL's trainer makes tensors of our rows, and advantages over rollouts, not rows."""
    skyrl = trainer(**generator)
    skyrl.cfg.trainer.train_batch_size = len(held) // 4
    skyrl.cfg.trainer.policy_mini_batch_size = len(held) // 4
    rows = [row for rollout in held for row in rollout]
    made = generator_output(rows)
    step_wise = generator["step_wise_trajectories"]
    validate_generator_output(len(held), made, step_wise=step_wise)
    uids = [trajectory.instance_id for trajectory in made["trajectory_ids"]]
    made, uids = skyrl.postprocess_generator_output(made, uids)
    batch = skyrl.convert_to_training_input(made, uids)
    batch["values"] = None  # there is no critic
    skyrl.compute_advantages_and_returns(batch)
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in held:
        groups[str(rollout[0].group_id)].append(float(rollout[0].reward or 0.0))
    for index, row in enumerate(rows):
        attended = batch["attention_mask"][index].bool()
        size = row.token_ids.size - row.prompt_len
        golden.same(batch["sequences"][index][attended], row.token_ids, "ids")
        golden.same(batch["loss_mask"][index][-size:], row.loss_mask[row.prompt_len :], "mask")
        golden.is_type(batch["rollout_logprobs"].dtype, torch.float32, "type")
        golden.same(batch["rollout_logprobs"][index][-size:], row.logprobs[row.prompt_len :], "log-probabilities")
        golden.same(batch["rewards"][index].sum(), row.reward, "reward")
        scores = torch.tensor(groups[str(row.group_id)])
        expected = (row.reward - scores.mean()) / (scores.std() + 1e-6)
        got = batch["advantages"][index][-size:]
        torch.testing.assert_close(got, torch.full_like(got, float(expected)), rtol=1e-4, atol=1e-4)


def call_rewards(golden: Golden, held: Sequence[Sequence[Row]]) -> None:
    """Rewards of calls make rewards of tokens, of all rows; SkyRL's score is the sum."""
    rows = [rollout[0] for rollout in held]
    first = int(np.flatnonzero(rows[0].loss_mask)[0])
    credits = (TokenCredit("c", first, first + 1, reward=0.25),)
    made = generator_output([msgspec.structs.replace(rows[0], credits=credits), *rows[1:]])
    validate_generator_output(len(rows), made)
    golden.same(sum(made["rewards"][0]), rows[0].reward + 0.25, "score")
    golden.same([sum(rewards) for rewards in made["rewards"][1:]], [row.reward for row in rows[1:]], "others")


def experts(golden: Golden, held: Sequence[Sequence[Row]]) -> None:
    """Routed experts pass SkyRL's check of replayed routes and come out of its batch."""
    rows = []
    for row in (row for rollout in held[:8] for row in rollout):
        values = np.arange((row.token_ids.size - 1) * 6, dtype=np.int64).reshape(-1, 2, 3)
        extras = RowExtras((SpanArray("routed_experts", row.spans[0].call_id, 0, values),))
        rows.append(msgspec.structs.replace(row, extras=extras))
    made = generator_output(rows)
    validate_generator_output(8, made, step_wise=True, routes_expected=True)
    skyrl = trainer(step_wise_trajectories=True, n_samples_per_prompt=4)
    skyrl.cfg.trainer.train_batch_size = skyrl.cfg.trainer.policy_mini_batch_size = 2
    uids = [trajectory.instance_id for trajectory in made["trajectory_ids"]]
    made, uids = skyrl.postprocess_generator_output(made, uids)
    packed = skyrl.convert_to_training_input(made, uids)["rollout_expert_indices"]
    at = 0
    for row in rows:
        size = row.token_ids.size
        golden.same(packed.values[at : at + size - 1], row.extras.arrays[0].values, "experts")
        at += size


if __name__ == "__main__":
    main()
