"""SkyRL: a rollout as the steps of a trajectory."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from gristmill.errors import Code, ConfigError, ReconstructionError
from gristmill.export.trainers import Source
from gristmill.export.trainers.samples import sample_lines
from gristmill.export.trainers.skyrl import SKYRL, generator_output
from gristmill.reconstruction import Row, RowExtras, SpanArray, TokenCredit
from tests.export.trainers.fakes import module
from tests.export.trainers.rollouts import source_of
from tests.reconstruction.attempts import Call, chain

replace = msgspec.structs.replace

# The fields of skyrl 0.4.0's GeneratorOutput.
FIELDS = (
    "prompt_token_ids",
    "response_ids",
    "rewards",
    "loss_masks",
    "stop_reasons",
    "rollout_metrics",
    "rollout_logprobs",
    "trajectory_ids",
    "trajectory_generation_times",
    "trajectory_time_splits",
    "rollout_expert_indices",
    "rollout_sample_support",
    "is_last_step",
    "env_metrics",
    "pixel_values",
    "image_grid_thw",
)


@pytest.fixture(autouse=True)
def skyrl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that declares the fields."""
    output = SimpleNamespace(__annotations__=dict.fromkeys(FIELDS))
    module(monkeypatch, "skyrl.train.generators.base", GeneratorOutput=output, TrajectoryID=SimpleNamespace)


def fork(**fields: Any) -> Sequence[Row]:
    """Two rows: the second reply follows another prompt and was cut at its length."""
    stopped = {"finish_reason": "length"}
    return source_of(
        [Call("c0", [1, 2], [3, 4]), Call("c1", [1, 2, 9], [5], parent="c0", fields=stopped)], **fields
    ).rows


def single(**fields: Any) -> Row:
    [row] = source_of(chain(1), **fields).rows
    return row


def refusal(rows: Sequence[Row]) -> Code:
    with pytest.raises(ReconstructionError) as raised:
        generator_output(rows)
    return raised.value.code


def test_rows_are_steps_of_one_trajectory() -> None:
    """SkyRL finds the end of a trajectory by a flag, and its members by standing next to each other."""
    made = generator_output([*fork(), single(rollout_id="r2")])
    assert made["prompt_token_ids"] == [[1, 2], [1, 2, 9], [0, 1, 2]]
    assert made["response_ids"] == [[3, 4], [5], [1000, 1001, 1002]]
    assert made["loss_masks"] == [[1, 1], [1], [1, 1, 1]]
    assert made["is_last_step"] == [False, True, True]
    assert made["rewards"] == [1.0, 1.0, 1.0]
    first, second, other = made["trajectory_ids"]
    assert first == second != other
    assert {identity.instance_id for identity in (first, other)} == {"g1"}
    assert {type(identity.repetition_id) for identity in (first, other)} == {int}


def test_every_field_of_skyrl_is_there() -> None:
    """SkyRL reads some of them without asking whether they are there."""
    made = generator_output(fork())
    assert tuple(made) == FIELDS
    nothing = set(FIELDS[9:]) - {"is_last_step"} | {"rollout_metrics", "trajectory_generation_times"}
    assert {name for name, value in made.items() if value is None} == nothing


def test_only_what_was_cut_has_not_stopped() -> None:
    """SkyRL's overlong filter masks every row that did not stop: calls of tools end turns too."""
    [tools] = source_of([Call("c0", [1], [2], fields={"finish_reason": "tool_calls"})], rollout_id="r2").rows
    assert generator_output([*fork(), tools])["stop_reasons"] == ["stop", "length", "stop"]
    counted = Counter[str]()
    SKYRL.samples(Source([tools]), counted)
    assert counted["stop_reasons"] == 1


def test_attempts_and_ungrouped_rollouts_are_trajectories_of_their_own() -> None:
    """Two rollouts under one identity are one trajectory to SkyRL: one of the rewards would be lost."""
    rows = [
        single(),
        replace(single(), attempt=1),
        single(rollout_id="r2", group_id=None),
        single(rollout_id="r3", group_id=None),
    ]
    identities = generator_output(rows)["trajectory_ids"]
    assert len({(identity.instance_id, identity.repetition_id) for identity in identities}) == 4
    assert len({identity.instance_id for identity in identities}) == 3


def test_rewards_of_calls_make_rewards_of_tokens() -> None:
    """SkyRL takes rewards a row or a token, for all alike."""
    row = single()
    credited = replace(row, credits=(TokenCredit("c0", 3, 5, reward=0.25),))
    other = single(rollout_id="r2", reward=0.0)
    assert generator_output([credited, other])["rewards"] == [[0.0, 0.25, 1.0], [0.0, 0.0, 0.0]]
    assert generator_output([credited, other], call_rewards=False)["rewards"] == [1.0, 0.0]
    advised = replace(row, credits=(TokenCredit("c0", 3, 5, advantage=0.25),))
    assert generator_output([advised, other])["rewards"] == [1.0, 0.0]


def test_rewards_of_calls_need_rollouts_of_one_row() -> None:
    """SkyRL reads the last step alone: rewards of earlier steps would be dropped without a word."""
    first, second = fork()
    first = replace(first, credits=(TokenCredit("c0", 2, 3, reward=1.0),))
    assert refusal([first, second]) is Code.NOT_EXPRESSIBLE
    assert generator_output([first, second], call_rewards=False)["rewards"] == [1.0, 1.0]


def test_a_rollout_has_one_reward() -> None:
    """SkyRL would take that of the last row for all."""
    first, second = fork()
    assert refusal([first, replace(second, reward=0.0)]) is Code.REWARDS_DIFFER
    assert refusal(fork(reward=None)) is Code.REWARD_MISSING


def test_experts_are_there_for_all_rows_or_for_none() -> None:
    """SkyRL asserts on routes that are missing, after the rollouts were made."""
    row = single()
    values = np.arange(10, dtype=np.int64).reshape(5, 1, 2)
    held = replace(row, extras=RowExtras((SpanArray("routed_experts", "c0", 0, values),)))
    [experts] = generator_output([held])["rollout_expert_indices"]
    assert (experts.dtype, experts.tolist()) == (np.int16, values.tolist())
    assert generator_output([held, single(rollout_id="r2")])["rollout_expert_indices"] is None
    other = replace(held, rollout_id="r2", extras=RowExtras((SpanArray("routed_experts", "c0", 0, values[:, :, :1]),)))
    assert generator_output([held, other])["rollout_expert_indices"] is None
    for rows, lost in (([held], 0), ([row], 0), ([replace(held, extras=other.extras)], 0)):
        counted = Counter[str]()
        SKYRL.samples(Source(rows), counted)
        assert counted["extras"] == lost
    unknown = replace(row, extras=RowExtras((SpanArray("routed_experts", "c0", 1, values),)))
    counted = Counter[str]()
    SKYRL.samples(Source([unknown]), counted)
    assert counted["extras"] == 1


def test_a_file_holds_a_trajectory_a_record() -> None:
    """Records of a file, put together, are the batch; what is None there is left out."""
    rows = fork()
    [record] = sample_lines(SKYRL, Source(rows), Counter())
    fields = orjson.loads(record.line)["sample"]
    made = generator_output(rows)
    fields["rollout_logprobs"] = [np.float32(values).tolist() for values in fields["rollout_logprobs"]]
    fields["trajectory_ids"] = [SimpleNamespace(**identity) for identity in fields["trajectory_ids"]]
    assert fields == {name: made[name] for name in fields}
    assert {name for name in made if made[name] is not None} <= set(fields)


def test_without_skyrl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thing a user meets is a package that is not there."""
    monkeypatch.setitem(sys.modules, "skyrl.train.generators.base", None)
    with pytest.raises(ConfigError) as raised:
        generator_output([single()])
    assert (raised.value.code, raised.value.hint) == (Code.TRAINER_MISSING, "pip install skyrl==0.4.0")
