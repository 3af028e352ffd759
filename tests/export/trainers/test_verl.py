"""verl: outputs of a session, and the padded batch."""

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

from gristmill.errors import Code, ConfigError, ExportError, ReconstructionError
from gristmill.export.trainers import Source
from gristmill.export.trainers.samples import sample_lines
from gristmill.export.trainers.verl import VERL, agent_loop_outputs, data_proto
from gristmill.reconstruction import Row, RowExtras, SpanArray, TokenCredit
from gristmill.records import WeightSpan
from tests.export.trainers.fakes import module
from tests.export.trainers.rollouts import source_of
from tests.reconstruction.attempts import Call, chain

replace = msgspec.structs.replace


@pytest.fixture(autouse=True)
def verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl and PyTorch, as far as they are given something."""
    module(monkeypatch, "torch", from_numpy=lambda array: array)
    module(monkeypatch, "verl", DataProto=SimpleNamespace(from_dict=SimpleNamespace))
    module(monkeypatch, "verl.experimental.agent_loop.agent_loop", AgentLoopOutput=SimpleNamespace)


def fork(**fields: Any) -> Sequence[Row]:
    """Two rows: the second reply follows another prompt."""
    return source_of([Call("c0", [1, 2], [3, 4]), Call("c1", [1, 2, 9], [5], parent="c0")], **fields).rows


def short(**fields: Any) -> Row:
    [row] = source_of([Call("c0", [1, 2, 3], [4])], rollout_id="short", **fields).rows
    return row


def refusal(rows: Sequence[Row], **options: Any) -> Code:
    with pytest.raises(ReconstructionError) as raised:
        data_proto(rows, **{"pad_token_id": 0, **options})
    return raised.value.code


def losses(rows: Sequence[Row]) -> Counter[str]:
    counted = Counter[str]()
    VERL.samples(Source(rows), counted)
    return counted


# Outputs


def test_an_output_has_verls_fields() -> None:
    """verl reads them by name, and lists of Python numbers."""
    [row] = source_of(chain(2)).rows
    [output] = agent_loop_outputs([row])
    assert output.prompt_ids == [0, 1, 2]
    assert output.response_ids == [1000, 1001, 1002, 10, 11, 12, 1010, 1011, 1012]
    assert output.response_mask == [1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert output.response_logprobs == row.logprobs[3:].tolist()
    assert (output.reward_score, output.num_turns, output.metrics) == (1.0, 4, {})
    # verl takes it off the last output of a rollout that it did not score itself.
    assert output.extra_fields["reward_extra_info"] == {}
    assert output.extra_fields["gristmill"]["row_id"] == row.row_id
    assert output.extra_fields["gristmill"]["loss_weight"] == 1.0


@pytest.mark.parametrize(
    ("versions", "steps"),
    [
        ((WeightSpan("7", 0, 1), WeightSpan("12", 1, 2)), {"min_global_steps": 7, "max_global_steps": 12}),
        ((WeightSpan("7", 0, 1),), {}),
        ((WeightSpan("step-7", 0, 2),), {}),
        ((WeightSpan("-7", 0, 2),), {}),
        ((), {}),
    ],
)
def test_steps_are_known_or_not_there(versions: tuple[WeightSpan, ...], steps: dict[str, int]) -> None:
    """verl drops rollouts that are too old: an invented step would keep or drop the wrong ones."""
    source = source_of([Call("c0", [1], [2, 3], fields={"weight_versions": versions})])
    [output] = agent_loop_outputs(source.rows)
    fields = output.extra_fields
    assert {name: fields[name] for name in ("min_global_steps", "max_global_steps") if name in fields} == steps


def test_a_file_holds_the_same_output() -> None:
    """What a file holds is given to verl's class by somebody who has no rows."""
    rows = fork()
    lines = [orjson.loads(record.line)["sample"] for record in sample_lines(VERL, Source(rows), Counter())]
    for fields, output in zip(lines, agent_loop_outputs(rows), strict=True):
        fields["response_logprobs"] = np.float32(fields["response_logprobs"]).tolist()
        assert fields == vars(output)


def test_what_verl_has_no_place_for_is_counted() -> None:
    """A loss that nobody counts is found in the training curve."""
    [row] = source_of(chain(1), reward=None, group_id=None).rows
    credited = replace(row, credits=(TokenCredit("c0", 3, 6, reward=1.0),))
    counted = losses([credited])
    assert {name for name, count in counted.items() if count} == {"spans", "turns", "credits", "reward", "group"}
    assert losses(fork())["loss_weight"] == 2


# Batches


def test_prompts_end_and_responses_begin_at_one_column() -> None:
    """verl cuts prompt and response at a column: a row that is moved by one trains its neighbour."""
    long = source_of(chain(2)).rows[0]
    made = data_proto([long, short()], pad_token_id=7)
    tensors = made.tensors
    assert tensors["prompts"].tolist() == [[0, 1, 2], [1, 2, 3]]
    assert tensors["responses"][1].tolist() == [4] + [7] * 8
    assert tensors["response_mask"][1].tolist() == [1] + [0] * 8
    assert tensors["attention_mask"].sum(axis=1).tolist() == [12, 4]
    assert tensors["position_ids"][0].tolist() == list(range(12))
    assert {name: array.dtype.name for name, array in tensors.items()} == {
        **dict.fromkeys(("prompts", "responses", "response_mask"), "int64"),
        **dict.fromkeys(("input_ids", "attention_mask", "position_ids"), "int64"),
        **dict.fromkeys(("rollout_log_probs", "rm_scores", "advantages"), "float32"),
    }


def test_padding_on_the_left_is_not_attended() -> None:
    """A token that looks like padding is still a token: the mask comes from lengths."""
    row = short()
    made = data_proto([row, *fork()], pad_token_id=1).tensors
    assert made["prompts"].tolist() == [[1, 2, 3], [1, 1, 2], [1, 2, 9]]
    assert made["attention_mask"][:, :3].tolist() == [[1, 1, 1], [0, 1, 1], [1, 1, 1]]
    assert made["position_ids"][1].tolist() == [0, 0, 1, 2, 3]


def test_given_lengths_are_kept_and_nothing_is_cut() -> None:
    """A row that is cut trains a reply that the model never gave."""
    row = short()
    made = data_proto([row], pad_token_id=0, prompt_length=5, response_length=3).tensors
    assert (made["prompts"].shape, made["responses"].shape) == ((1, 5), (1, 3))
    assert refusal([row], prompt_length=2) is Code.ROW_TOO_LONG
    assert refusal(fork(), response_length=1) is Code.ROW_TOO_LONG


def test_the_reward_stands_on_the_last_token() -> None:
    """verl reads a score there, of every row."""
    made = data_proto(fork(reward=0.5), pad_token_id=0).tensors
    assert made["rm_scores"].tolist() == [[0.0, 0.5], [0.5, 0.0]]


def test_rewards_are_there_for_all_or_for_none() -> None:
    """Without any, verl scores; with some, the others would count as 0."""
    assert "rm_scores" not in data_proto([short(reward=None)], pad_token_id=0).tensors
    assert refusal([short(reward=None), *fork()]) is Code.REWARD_MISSING


def test_a_rollout_has_one_reward() -> None:
    """verl takes that of the last output for all, so that others would be lost."""
    first, second = fork()
    rows = [first, replace(second, reward=0.0)]
    assert refusal(rows) is Code.REWARDS_DIFFER
    with pytest.raises(ReconstructionError) as raised:
        agent_loop_outputs(rows)
    assert raised.value.code is Code.REWARDS_DIFFER


def test_rewards_of_calls_are_added_where_a_row_is_the_rollout() -> None:
    """verl takes the sum of a row for its score, and of a session the last row alone."""
    [row] = source_of(chain(2)).rows
    credits = (TokenCredit("c0", 3, 5, reward=0.25), TokenCredit("c1", 9, 12, reward=-1.0))
    row = replace(row, credits=credits)
    made = data_proto([row], pad_token_id=0).tensors
    assert made["rm_scores"][0].tolist() == [0, 0.25, 0, 0, 0, 0, 0, 0, 0.0]
    made = data_proto([row], pad_token_id=0, call_rewards=False).tensors
    assert made["rm_scores"][0].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1.0]
    first, second = fork()
    first = replace(first, credits=(TokenCredit("c0", 2, 3, reward=1.0),))
    assert refusal([first, second]) is Code.NOT_EXPRESSIBLE
    assert "rm_scores" in data_proto([first, second], pad_token_id=0, call_rewards=False).tensors


def test_advantages_are_there_for_all_or_for_none() -> None:
    """Those of calls stand before those of rollouts."""
    assert "advantages" not in data_proto([short(advantage=None)], pad_token_id=0).tensors
    assert refusal([short(advantage=None), *fork()]) is Code.ADVANTAGE_REQUIRED
    [row] = source_of(chain(1), advantage=None).rows
    credited = replace(row, credits=(TokenCredit("c0", 3, 6, advantage=2.0),))
    assert data_proto([credited], pad_token_id=0).tensors["advantages"].tolist() == [[2.0, 2.0, 2.0]]


def test_rows_of_a_rollout_are_one_session() -> None:
    """By its keys verl computes an advantage a rollout; a row that is a session of its own counts as a rollout."""
    rows = [*fork(), short(), *fork(rollout_id="other", group_id=None)]
    arrays = data_proto(rows, pad_token_id=0).non_tensors
    keys = [key.rsplit("_", 2) for key in arrays["batch_key"]]
    assert [key[0] for key in keys] == list(arrays["uid"])
    assert [key[2] for key in keys] == ["0", "1", "0", "0", "1"]
    assert [len({key[1] for key in part}) for part in (keys[:2], keys[2:3], keys[3:], keys)] == [1, 1, 1, 3]
    assert list(arrays["uid"][:3]) == ["g1"] * 3
    assert len(set(arrays["uid"][3:])) == 1
    assert arrays["loss_weight"].tolist() == [row.loss_weight for row in rows]
    assert all(array.shape == (5,) for array in arrays.values())


def test_a_rollout_without_a_group_joins_no_group() -> None:
    """Two of them, or one and the group that has its name, would be compared with each other."""
    rows = [short(group_id=None), *fork(group_id=None), *fork(rollout_id="r2", group_id="short")]
    uids = data_proto(rows, pad_token_id=0).non_tensors["uid"]
    assert len({uids[0], uids[1], uids[3]}) == 3


def test_experts_stand_at_their_tokens() -> None:
    """verl replays routing by position."""
    row = short()
    values = np.arange(6, dtype=np.int64).reshape(3, 1, 2)
    held = replace(row, extras=RowExtras((SpanArray("routed_experts", "c0", 0, values),)))
    made = data_proto([held], pad_token_id=0, prompt_length=4).tensors["routed_experts"]
    assert (made.dtype, made.shape) == (np.int16, (1, 5, 1, 2))
    assert made[0, :, 0].tolist() == [[0, 0], [0, 1], [2, 3], [4, 5], [0, 0]]
    assert "routed_experts" not in data_proto([held, *fork()], pad_token_id=0).tensors
    other = replace(held, rollout_id="r2", extras=RowExtras((SpanArray("routed_experts", "c0", 0, values[:, :, :1]),)))
    assert "routed_experts" not in data_proto([held, other], pad_token_id=0).tensors


def test_no_rows_are_no_batch() -> None:
    """An empty batch would stop a trainer somewhere else."""
    assert refusal([]) is Code.NOTHING_TO_TRAIN


def test_half_a_rollout_is_refused() -> None:
    """The rows that are left out would be missing from the session."""
    with pytest.raises(ExportError) as raised:
        data_proto(fork()[:1], pad_token_id=0)
    assert raised.value.code is Code.ROW_MISSING


@pytest.mark.parametrize("made", [agent_loop_outputs, lambda rows: data_proto(rows, pad_token_id=0)])
def test_without_verl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
    """The first thing a user meets is a package that is not there."""
    for name in ("verl", "verl.experimental.agent_loop.agent_loop"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as raised:
        made([short()])
    assert (raised.value.code, raised.value.hint) == (Code.TRAINER_MISSING, "pip install verl==0.9.1")
