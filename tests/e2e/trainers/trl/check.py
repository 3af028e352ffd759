"""TRL's own trainers on the CPU: a step of GRPOTrainer and of SFTTrainer, AsyncGRPO's queue, batches and loss terms."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden import Golden, following, rollouts  # isort: skip

import math
import os
import queue
from collections import defaultdict
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.experimental.async_grpo.async_grpo_trainer import (
    DataCollatorForRollout,
    FixedCountBatcher,
    RolloutQueueDataset,
)
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from gristmill.export.trainers.trl import IGNORED, given_reward, rollout_output, rollout_samples, sft_dataset
from gristmill.reconstruction import Row

VOCABULARY, PAD = 32, 31
GENERATIONS, GROUPS = 4, 6


def main() -> None:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    golden = Golden("trl", "trl")
    held = list(rollouts())
    singles = [rows[0] for rows in held if len(rows) == 1][: GROUPS * GENERATIONS]
    groups = [
        msgspec.structs.replace(row, group_id=f"g{number // GENERATIONS}", reward=float(number % 3))
        for number, row in enumerate(singles)
    ]
    grpo(golden, groups)
    asynchronous(golden, [row for rows in held for row in rows])
    supervised(golden, [row for rows in held for row in rows])
    page(golden)
    golden.report(
        GRPOTrainer,
        RolloutSample,
        RolloutQueueDataset,
        FixedCountBatcher,
        DataCollatorForRollout,
        SFTTrainer,
        DataCollatorForLanguageModeling,
    )


def model() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=PAD,
        eos_token_id=PAD - 1,
    )
    return Qwen2ForCausalLM(config)


def tokenizer() -> Any:
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"w{PAD}", eos_token=f"w{PAD - 1}")


def grpo(golden: Golden, rows: Sequence[Row]) -> None:
    """What GRPOTrainer makes of our dictionary, and what its loss then reads, is rows of whole groups."""
    waiting: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        waiting[f"w{row.group_id[1:]}"].append(row)
    asked: list[Row] = []

    def rollout(prompts: list[str], _: object) -> dict[str, Any]:
        given = [waiting[prompt].pop(0) for prompt in prompts]
        asked.extend(given)
        return rollout_output(given, num_generations=GENERATIONS)

    made: dict[str, Any] = {}

    class Kept(GRPOTrainer):
        """Keeps what the loss is computed of."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            scored = super()._generate_and_score_completions(inputs)
            made.update({name: value.clone() for name, value in scored.items() if hasattr(value, "clone")})
            return scored

    with TemporaryDirectory() as place:
        config = GRPOConfig(
            output_dir=place,
            per_device_train_batch_size=len(rows),
            num_generations=GENERATIONS,
            max_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            bf16=False,
        )
        trainer = Kept(
            model=model(),
            reward_funcs=given_reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [f"w{number}" for number in range(GROUPS)]}),
            processing_class=tokenizer(),
            rollout_func=rollout,
        )
        loss = trainer.train().training_loss
    golden.is_type(math.isfinite(loss), True, "loss")
    golden.is_type(len(asked), len(rows), "completions")
    rewards = torch.tensor([row.reward for row in asked]).view(-1, GENERATIONS)
    deviations = rewards.std(dim=1, keepdim=True)
    expected = ((rewards - rewards.mean(dim=1, keepdim=True)) / (deviations + 1e-4)).flatten()
    torch.testing.assert_close(made["advantages"].flatten().cpu(), expected, rtol=1e-4, atol=1e-4)
    for index, row in enumerate(asked):
        prompt = made["prompt_ids"][index][made["prompt_mask"][index].bool()]
        completed = made["completion_mask"][index].bool()
        golden.same(torch.cat([prompt, made["completion_ids"][index][completed]]), row.token_ids, "ids")
        mask = (made["completion_mask"] * made["tool_mask"])[index][completed]
        golden.same(mask, row.loss_mask[row.prompt_len :], "mask")
        logprobs = made["sampling_per_token_logps"][index][completed]
        golden.is_type(logprobs.dtype, torch.float32, "type")
        golden.same(logprobs, row.logprobs[row.prompt_len :], "log-probabilities")
    golden.is_type(int(made["num_items_in_batch"]), sum(int(row.loss_mask.sum()) for row in rows), "trained tokens")


def asynchronous(golden: Golden, rows: Sequence[Row]) -> None:
    """Loss terms of AsyncGRPO's batches are the trained tokens, each with its log-probability and advantage."""
    samples = rollout_samples(rows, model_version=5)
    waiting: queue.Queue[RolloutSample] = queue.Queue()
    for sample in samples:
        golden.is_type(type(sample), RolloutSample, "class")
        waiting.put(sample)
    metrics: Any = defaultdict(list)
    stream = RolloutQueueDataset(waiting, lambda: 6, lambda _: None, 1.0, metrics)
    batches = iter(FixedCountBatcher(stream, num_processes=1, microbatch_size=8))
    collate = DataCollatorForRollout(pad_token_id=PAD)
    left = {id(sample): (row, sample) for row, sample in zip(rows, samples, strict=True)}
    by_arrays = {id(sample.input_ids): id(sample) for sample in samples}
    for _ in range(len(samples) // 8):
        packed = next(batches)
        batch = collate([packed])
        at = 0
        for example in (example for row in packed for example in row.samples):
            row, _ = left.pop(by_arrays[id(example["input_ids"])])
            size = int(row.loss_mask.sum())
            terms = slice(at, at + size)
            index = batch["token_index"][0][terms]
            trained = row.loss_mask == 1
            golden.same(batch["shift_labels"][0][index], row.token_ids[trained], "targets")
            golden.same(batch["input_ids"][0][index], row.token_ids[np.flatnonzero(trained) - 1], "predictors")
            golden.same(batch["old_log_probs"][0][terms], row.logprobs[trained], "log-probabilities")
            golden.same(batch["advantages"][0][terms], np.full(size, 0.5, np.float32), "advantages")
            at += size
        golden.is_type(float(batch["global_n_tokens"][0]), float(at), "tokens")
    golden.is_type(len(left), len(samples) % 8, "all were taken")
    golden.is_type(metrics["sample/dropped_stale_total"], [], "stale")


def supervised(golden: Golden, rows: Sequence[Row]) -> None:
    """SFTTrainer takes the data set as prepared, and its collator's labels are the trained tokens."""
    made = sft_dataset(rows)
    golden.is_type((type(made), made.column_names), (Dataset, ["input_ids", "labels"]), "columns")
    with TemporaryDirectory() as place:
        config = SFTConfig(
            output_dir=place,
            per_device_train_batch_size=8,
            max_steps=2,
            max_length=None,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            bf16=False,
        )
        trainer = SFTTrainer(model=model(), args=config, train_dataset=made, processing_class=tokenizer())
        golden.is_type(len(trainer.train_dataset), len(rows), "kept")
        for start in range(0, len(rows), 8):
            block = rows[start : start + 8]
            batch = trainer.data_collator([trainer.train_dataset[start + index] for index in range(len(block))])
            for index, row in enumerate(block):
                size = row.token_ids.size
                golden.same(batch["input_ids"][index][:size], row.token_ids, "ids")
                expected = np.where(row.loss_mask == 1, row.token_ids, IGNORED)
                golden.same(batch["labels"][index][:size], expected, "labels")
                golden.is_type(set(batch["labels"][index][size:].tolist()) <= {IGNORED}, True, "padding")
        golden.is_type(math.isfinite(trainer.train().training_loss), True, "loss")


def page(golden: Golden) -> None:
    """What a user pastes runs, and gives all rows."""
    with following("trl.md") as (defined, rows):
        golden.is_type(len(defined["dataset"]), len(rows), "data set")
        golden.is_type(len(defined["samples"]), len(rows), "samples")
        singles = [row for row in rows if row.row_count == 1]
        defined["run_agents"] = lambda prompts: singles[: len(prompts)]
        returned = defined["rollout"](["w0"] * len(singles), SimpleNamespace(num_generations=None))
        golden.is_type(returned["rollout_id"], [row.rollout_id for row in singles], "rollout function")


if __name__ == "__main__":
    main()
