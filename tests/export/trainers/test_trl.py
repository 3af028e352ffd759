"""TRL: completions by position, samples with an advantage, labels."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from gristmill.errors import Code, ConfigError, ReconstructionError
from gristmill.export.trainers import Source
from gristmill.export.trainers.trl import TRL, TRL_SFT, given_reward, rollout_output, rollout_samples, sft_dataset
from gristmill.reconstruction import Row, TokenCredit
from gristmill.records import WeightSpan
from tests.export.trainers.fakes import module
from tests.export.trainers.rollouts import source_of
from tests.reconstruction.attempts import Call, chain

replace = msgspec.structs.replace


class Columns:
    """Takes columns as `datasets.Dataset` does."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = columns

    @classmethod
    def from_dict(cls, columns: dict[str, Any]) -> Columns:
        return cls(columns)


@pytest.fixture(autouse=True)
def trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's worker and data sets, as far as they are given something."""
    module(monkeypatch, "trl.experimental.async_grpo.async_rollout_worker", RolloutSample=SimpleNamespace)
    module(monkeypatch, "datasets", Dataset=Columns)


def fork(**fields: Any) -> Sequence[Row]:
    """Two rows: the second reply follows another prompt."""
    return source_of([Call("c0", [1, 2], [3, 4]), Call("c1", [1, 2, 9], [5], parent="c0")], **fields).rows


def single(rollout_id: str = "r1", **fields: Any) -> Row:
    [row] = source_of(chain(1), rollout_id=rollout_id, **fields).rows
    return row


def refusal(made: Any, rows: Sequence[Row], **options: Any) -> Code:
    with pytest.raises(ReconstructionError) as raised:
        made(rows, **options)
    return raised.value.code


# GRPO


def test_a_completion_is_the_row_after_its_prompt() -> None:
    """TRL puts both together again: a token too many between them trains on a context that nobody saw."""
    [row] = source_of(chain(2)).rows
    made = rollout_output([row])
    assert made["prompt_ids"] == [[0, 1, 2]]
    assert made["completion_ids"] == [[1000, 1001, 1002, 10, 11, 12, 1010, 1011, 1012]]
    assert made["env_mask"] == [[1, 1, 1, 0, 0, 0, 1, 1, 1]]
    assert made["logprobs"] == [row.logprobs[3:].tolist()]
    assert (made["reward"], made["group_id"], made["rollout_id"]) == ([1.0], ["g1"], ["r1"])


def test_the_reward_function_returns_what_was_carried() -> None:
    """TRL hands fields of the rollout over by name, beside prompts and completions."""
    made = rollout_output([single(reward=0.25), single("r2", reward=None)])
    assert given_reward(prompts=["p", "p"], completions=["", ""], **made) == [0.25, None]


def test_a_rollout_of_several_rows_is_no_completion() -> None:
    """TRL would give the second row to the next prompt, and every row after it likewise."""
    assert refusal(rollout_output, fork()) is Code.NOT_EXPRESSIBLE
    counted = Counter[str]()
    TRL.samples(Source(fork()), counted)
    assert counted["several_rows"] == 2


@pytest.mark.parametrize(
    ("groups", "code"),
    [
        (["a", "a", "b", "b"], None),
        (["a", "b", "a", "b"], Code.NOT_EXPRESSIBLE),
        (["a", "a", "b"], Code.NOT_EXPRESSIBLE),
        (["a", "a", "a", "a"], Code.NOT_EXPRESSIBLE),
        (["a", None, "b", "b"], Code.GROUP_MISSING),
    ],
)
def test_groups_are_neighbours(groups: list[str | None], code: Code | None) -> None:
    """TRL normalises rewards by position: a rollout in the wrong place is compared with another prompt's."""
    rows = [single(f"r{number}", group_id=group) for number, group in enumerate(groups)]
    if code is None:
        assert rollout_output(rows, num_generations=2)["group_id"] == groups
    else:
        assert refusal(rollout_output, rows, num_generations=2) is code
    assert rollout_output(rows)["group_id"] == groups


# AsyncGRPO


def test_a_sample_is_the_whole_row() -> None:
    """TRL takes the loss over exactly the tokens of the mask."""
    rows = fork()
    made = rollout_samples(rows, model_version=4)
    for row, sample in zip(rows, made, strict=True):
        np.testing.assert_array_equal(sample.input_ids, row.token_ids)
        np.testing.assert_array_equal(sample.completion_mask, row.loss_mask)
        np.testing.assert_array_equal(sample.old_log_probs, row.logprobs)
        arrays = (sample.input_ids, sample.completion_mask, sample.old_log_probs)
        assert [array.dtype.name for array in arrays] == ["int64", "int64", "float32"]
        assert (sample.advantage, sample.model_version, sample.metrics) == (0.5, 4, {"reward": 1.0})
    assert made[0].group_id == made[1].group_id
    [other] = rollout_samples([single(group_id="g2", reward=None)], model_version=4)
    assert other.group_id != made[0].group_id
    assert other.metrics == {}


@pytest.mark.parametrize(
    ("versions", "stated", "version"),
    [
        ((WeightSpan("7", 0, 1), WeightSpan("9", 1, 2)), 3, 7),
        ((WeightSpan("7", 0, 2),), None, 7),
        ((WeightSpan("7", 0, 1),), 3, 3),
        ((WeightSpan("abc", 0, 2),), 3, 3),
        ((), None, None),
    ],
)
def test_the_oldest_version_counts(versions: tuple[WeightSpan, ...], stated: int | None, version: int | None) -> None:
    """TRL drops what is too far behind: an invented version keeps what should go."""
    rows = source_of([Call("c0", [1], [2, 3], fields={"weight_versions": versions})]).rows
    if version is None:
        assert refusal(rollout_samples, rows) is Code.NOT_EXPRESSIBLE
    else:
        assert [sample.model_version for sample in rollout_samples(rows, model_version=stated)] == [version]


def test_a_sample_has_one_advantage() -> None:
    """It is needed, and one of a call has no place beside it."""
    assert refusal(rollout_samples, [single(advantage=None)], model_version=1) is Code.ADVANTAGE_REQUIRED
    row = single()
    advised = replace(row, credits=(TokenCredit("c0", 3, 6, advantage=1.0),))
    assert refusal(rollout_samples, [advised], model_version=1) is Code.NOT_EXPRESSIBLE
    paid = replace(row, credits=(TokenCredit("c0", 3, 6, reward=1.0),))
    assert len(rollout_samples([paid], model_version=1)) == 1


# Supervised


def test_labels_are_the_trained_tokens() -> None:
    """A label too many teaches the model to write its prompts."""
    [row] = source_of(chain(2)).rows
    columns = sft_dataset([row]).columns
    assert columns["input_ids"][0].tolist() == row.token_ids.tolist()
    assert columns["labels"][0].tolist() == [-100] * 3 + [1000, 1001, 1002] + [-100] * 3 + [1010, 1011, 1012]


def test_what_supervised_training_does_not_read_is_counted() -> None:
    """Rewards do not count there, which surprises who brings them."""
    counted = Counter[str]()
    TRL_SFT.samples(Source(fork()), counted)
    assert {name: count for name, count in counted.items() if count} == dict.fromkeys(
        ("spans", "logprobs", "reward", "advantage", "loss_weight"), 2
    )


@pytest.mark.parametrize(
    ("name", "made"),
    [("trl.experimental.async_grpo.async_rollout_worker", rollout_samples), ("datasets", sft_dataset)],
)
def test_without_trl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, name: str, made: Any) -> None:
    """The first thing a user meets is a package that is not there."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as raised:
        made([single()])
    assert (raised.value.code, raised.value.hint) == (Code.TRAINER_MISSING, "pip install trl==1.16.0")
