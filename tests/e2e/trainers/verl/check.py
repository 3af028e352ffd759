"""verl's own AgentLoopOutput and DataProto: its padding of the same outputs, its batches, its advantages."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden import Golden, following, rollouts  # isort: skip

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, patch

import msgspec
import numpy as np
import torch
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopMetrics,
    AgentLoopOutput,
    AgentLoopWorker,
    _agent_loop_registry,
)
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.ray_trainer import compute_advantage, compute_response_mask
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from gristmill.export.trainers.verl import METADATA, VERL, agent_loop_outputs, data_proto
from gristmill.reconstruction import Row, RowExtras, SpanArray, TokenCredit

PAD = 7
QUEUE_WORKER = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__mro__[1]
INT, FLOAT = torch.int64, torch.float32
TYPES = {
    "prompts": INT,
    "responses": INT,
    "response_mask": INT,
    "input_ids": INT,
    "attention_mask": INT,
    "position_ids": INT,
    "rollout_log_probs": FLOAT,
    "rm_scores": FLOAT,
    "advantages": FLOAT,
}


class Tokenizer:
    """Pads one sequence as the tokenizers that verl's worker calls do."""

    pad_token_id = PAD
    padding_side = "right"

    def pad(self, encoded: dict[str, list[int]], *, max_length: int, **_: Any) -> dict[str, torch.Tensor]:
        ids = torch.tensor([encoded["input_ids"]])
        missing = max_length - ids.shape[1]
        sides = (missing, 0) if self.padding_side == "left" else (0, missing)
        return {
            "input_ids": torch.nn.functional.pad(ids, sides, value=PAD),
            "attention_mask": torch.nn.functional.pad(torch.ones_like(ids), sides),
        }


def worker(prompt_length: int = 0, response_length: int = 0, kind: Any = AgentLoopWorker) -> Any:
    """verl's worker without the Ray actors around it."""
    made = object.__new__(kind)
    made.tokenizer = Tokenizer()
    made.processor = None
    made.mm_processor_kwargs = None
    made.rollout_config = SimpleNamespace(prompt_length=prompt_length, response_length=response_length)
    made.reward_loop_worker_handles = None
    made.distillation_enabled = False
    return made


def main() -> None:
    golden = Golden("verl", "verl")
    held: list[Sequence[Row]] = []
    for rows in rollouts():
        held.append(rows)
        outputs(golden, rows)
        batch(golden, rows)
        session(golden, rows)
    several = [row for rows in held[:40] for row in rows]
    whole = batch(golden, several)
    trainers_batches(golden, whole)
    advantages(golden, held)
    call_rewards(golden, held)
    experts(golden, held[0])
    page(golden)
    golden.report(
        AgentLoopOutput,
        AgentLoopMetrics,
        AgentLoopWorker,
        QUEUE_WORKER,
        DataProto,
        compute_advantage_for_multi_trajectories,
    )


def outputs(golden: Golden, rows: Sequence[Row]) -> None:
    """Each output is verl's class, and the dictionary that verl itself makes of it holds the row."""
    made = agent_loop_outputs(rows)
    fields = [output.as_dict() for output in made]
    for row, output, held in zip(rows, made, fields, strict=True):
        golden.is_type((type(output), type(output.metrics)), (AgentLoopOutput, AgentLoopMetrics), "class")
        golden.is_type(output.extra_fields[METADATA]["row_id"], row.row_id, "row id")
        golden.same(torch.cat([held["prompts"], held["responses"]]), row.token_ids, "ids")
        golden.same(held["response_mask"], row.loss_mask[row.prompt_len :], "mask")
        golden.is_type(held["rollout_log_probs"].dtype, FLOAT, "type")
        golden.same(held["rollout_log_probs"], row.logprobs[row.prompt_len :], "log-probabilities")
        golden.same(held["rm_scores"].sum(), row.reward, "reward")
    golden.is_type(list_of_dict_to_tensordict(fields).batch_size, torch.Size([len(rows)]), "queue")


def session(golden: Golden, rows: Sequence[Row]) -> None:
    """The outputs of a rollout go through verl's own queue of samples as one session."""
    put: dict[str, Any] = {}

    async def keep(**fields: Any) -> None:
        put.update(fields)

    with patch("verl.trainer.ppo.v1.agent_loop_tq.tq.async_kv_batch_put", keep):
        made = worker(kind=QUEUE_WORKER)._agent_loop_postprocess(
            agent_loop_outputs(rows), False, uid="g", session_id=3, global_steps=1
        )
        asyncio.run(made)
    golden.is_type(put["keys"], [f"g_3_{index}" for index in range(len(rows))], "keys")
    for index, row in enumerate(rows):
        held = put["fields"][index]
        golden.same(held["input_ids"], row.token_ids, "ids in the queue")
        golden.same(held["loss_mask"], row.loss_mask[row.prompt_len :], "mask in the queue")
        golden.same(held["rollout_log_probs"], row.logprobs[row.prompt_len :], "log-probabilities in the queue")
        golden.same(held["rm_scores"].sum(), row.reward, "reward in the queue")


def batch(golden: Golden, rows: Sequence[Row]) -> DataProto:
    """The padded batch is the one that verl's worker makes of the outputs."""
    made = data_proto(rows, pad_token_id=PAD)
    made.check_consistency()
    golden.is_type({name: tensor.dtype for name, tensor in made.batch.items()}, TYPES, "types")
    verls = worker(made.batch["prompts"].shape[1], made.batch["responses"].shape[1])
    inner = [
        asyncio.run(verls._agent_loop_postprocess(output, False, raw_prompt=[])) for output in agent_loop_outputs(rows)
    ]
    expected = verls._postprocess(inner)
    golden.is_type(set(expected.batch.keys()), set(TYPES) - {"advantages"}, "names")
    for name, tensor in expected.batch.items():
        golden.is_type(made.batch[name].dtype, tensor.dtype, name)
        golden.same(made.batch[name], tensor, name)
    golden.same(made.non_tensor_batch["__num_turns__"], expected.non_tensor_batch["__num_turns__"], "turns")
    for index, row in enumerate(rows):
        attended = made.batch["attention_mask"][index].bool()
        golden.same(made.batch["input_ids"][index][attended], row.token_ids, "ids")
        response = slice(0, row.token_ids.size - row.prompt_len)
        golden.same(made.batch["advantages"][index][response], 0.5 * row.loss_mask[row.prompt_len :], "advantages")
        golden.same(made.batch["rollout_log_probs"][index][response], row.logprobs[row.prompt_len :], "log-probs")
    golden.same(made.batch["response_mask"] * compute_response_mask(made), made.batch["response_mask"], "mask")
    golden.same(made.non_tensor_batch["loss_weight"], [row.loss_weight for row in rows], "weights")
    return made


def trainers_batches(golden: Golden, made: DataProto) -> None:
    """Cut, put together and joined with what a trainer adds, a batch is the same."""
    size = len(made) - len(made) % 4
    cut = made[:size]
    again = DataProto.concat(cut.chunk(4))
    for name, tensor in cut.batch.items():
        golden.same(again.batch[name], tensor, name)
    for name, values in cut.non_tensor_batch.items():
        golden.is_type(list(again.non_tensor_batch[name]), list(values), name)
    added = DataProto.from_dict(tensors={"old_log_probs": cut.batch["rollout_log_probs"].clone()})
    joined = cut.union(added)
    golden.same(joined.batch["old_log_probs"], joined.batch["rollout_log_probs"], "union")
    balanced = joined.select_idxs(list(reversed(range(size))))
    golden.is_type(list(balanced.non_tensor_batch["row_id"]), list(cut.non_tensor_batch["row_id"])[::-1], "selected")
    copied = DataProto.from_tensordict(joined.to_tensordict())
    golden.same(copied.batch["responses"], joined.batch["responses"], "tensordict")


def advantages(golden: Golden, held: Sequence[Sequence[Row]]) -> None:
    """verl counts rollouts, not rows, by our keys: GRPO over groups of four equals the one computed by hand."""
    groups = [held[start : start + 4] for start in range(0, 80, 4)]
    rows = [
        msgspec.structs.replace(row, group_id=f"g_{number}")
        for number, group in enumerate(groups)
        for rollout in group
        for row in rollout
    ]
    made = data_proto(rows, pad_token_id=PAD)
    made.batch["token_level_rewards"] = made.batch["rm_scores"]
    keys = list(made.non_tensor_batch["batch_key"])
    got = compute_advantage_for_multi_trajectories(made, keys, AdvantageEstimator.GRPO).batch["advantages"]
    at = 0
    for group in groups:
        rewards = torch.tensor([rollout[0].reward for rollout in group])
        scores = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for rollout, score in zip(group, scores, strict=True):
            for row in rollout:
                trained = got[at][made.batch["response_mask"][at].bool()]
                torch.testing.assert_close(trained, torch.full_like(trained, float(score)))
                golden.is_type(trained.numel(), int(row.loss_mask.sum()), "trained tokens")
                at += 1
    alone = data_proto([msgspec.structs.replace(row, group_id=None) for row in held[0]], pad_token_id=PAD)
    golden.is_type(len(set(alone.non_tensor_batch["uid"])), 1, "ungrouped")
    alone.batch["token_level_rewards"] = alone.batch["rm_scores"]
    got = compute_advantage(alone, AdvantageEstimator.GRPO).batch["advantages"]
    expected = held[0][0].reward * alone.batch["response_mask"]
    if len(held[0]) == 1:
        torch.testing.assert_close(got, expected.to(FLOAT))


def call_rewards(golden: Golden, held: Sequence[Sequence[Row]]) -> None:
    """Rewards of calls stand on the last tokens of their spans, and verl's score is the sum."""
    singles = [rows[0] for rows in held if len(rows) == 1 and rows[0].loss_mask.sum() > 1][:20]
    for row in singles:
        first = int(np.flatnonzero(row.loss_mask)[0])
        credited = msgspec.structs.replace(row, credits=(TokenCredit("c", first, first + 1, reward=0.25),))
        made = data_proto([credited], pad_token_id=PAD)
        scores = made.batch["rm_scores"][0]
        golden.same(scores.sum(), row.reward + 0.25, "score")
        golden.same(scores[first - row.prompt_len], 0.25, "place")
        plain = data_proto([credited], pad_token_id=PAD, call_rewards=False)
        golden.same(plain.batch["rm_scores"].sum(), row.reward, "without")


def experts(golden: Golden, rows: Sequence[Row]) -> None:
    """Routed experts stand where verl's worker puts them."""
    row = msgspec.structs.replace(rows[0], row_index=0, row_count=1)
    values = np.arange((row.token_ids.size - 1) * 6, dtype=np.int32).reshape(-1, 2, 3)
    extras = RowExtras((SpanArray("routed_experts", row.spans[0].call_id, 0, values),))
    row = msgspec.structs.replace(row, extras=extras)
    prompts, responses = row.prompt_len + 3, row.token_ids.size - row.prompt_len + 2
    made = data_proto([row], pad_token_id=PAD, prompt_length=prompts, response_length=responses)
    [output] = agent_loop_outputs([row])
    verls = worker(prompts, responses)
    inner = asyncio.run(verls._agent_loop_postprocess(output, False, raw_prompt=[]))
    golden.is_type(made.batch["routed_experts"].dtype, inner.routed_experts.dtype, "experts")
    golden.same(made.batch["routed_experts"], inner.routed_experts, "experts")
    golden.is_type(VERL.made_for, "verl 0.9.1", "version")


def page(golden: Golden) -> None:
    """What a user pastes runs: the batch holds all rows, and verl knows the loop by its name."""
    with following("verl.md") as (defined, rows):
        golden.is_type(list(defined["batch"].non_tensor_batch["row_id"]), [row.row_id for row in rows], "page")
        golden.is_type("gristmill" in _agent_loop_registry, True, "registered")
        defined["rows_of_one_rollout"] = AsyncMock(return_value=rows[: rows[0].row_count])
        loop = object.__new__(defined["GristmillLoop"])
        returned = asyncio.run(loop.run({}))
        golden.is_type(len(returned), rows[0].row_count, "outputs of the loop")
        golden.is_type(returned[0].extra_fields[METADATA]["row_id"], rows[0].row_id, "loop")


if __name__ == "__main__":
    main()
