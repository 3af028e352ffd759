"""NeMo RL's message logs and batches, NeMo Gym's items and traces: what their documented schemas demand."""

from __future__ import annotations

import json
import sys
from collections import Counter, UserDict
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from gristmill.errors import Code, ConfigError, ReconstructionError
from gristmill.export.trainers import PROJECTIONS, Source
from gristmill.export.trainers.nemo_gym import NEMO_GYM, NEMO_GYM_TRACES, responses, training_traces
from gristmill.export.trainers.nemo_rl import NEMO_RL, message_logs, train_arrays, train_batch
from gristmill.export.trainers.samples import sample_lines
from gristmill.fingerprint import output_items
from gristmill.interop import Report, importer_named
from gristmill.pipeline import RebuiltRollout, run_rollout
from gristmill.reconstruction import Row, RowMode, TokenCredit
from gristmill.selection import ReturnedHistory
from tests.export.trainers.rollouts import generated, plain, source_of
from tests.export.trainers.trainer_page import export_demo, run_page
from tests.reconstruction.attempts import Call, chain
from tests.selection.calls import function_call, said

NEMO = [NEMO_RL, NEMO_GYM, NEMO_GYM_TRACES]


def forked() -> Source:
    """A first call that two others continue: the second row holds its tokens as context."""
    return source_of(
        [
            Call("c0", [1, 2], [3, 4], logprobs=[-0.5, -0.25]),
            Call("c1", [1, 2, 3, 4, 5], [6], parent="c0", logprobs=[-1.0]),
            Call("c2", [1, 2, 3, 4, 7], [8, 9], parent="c0", logprobs=[-2.0, -3.0]),
        ]
    )


def fields(projection: Any, source: Source, losses: Counter[str] | None = None) -> list[Any]:
    return [sample.fields for sample in projection.samples(source, Counter() if losses is None else losses)]


def test_they_are_formats() -> None:
    assert {"nemo-rl", "nemo-gym", "nemo-gym-traces"} <= PROJECTIONS.keys()


# ---- nemo-rl ---------------------------------------------------------------------------------------------------------


def test_a_message_of_the_assistant_is_what_is_trained() -> None:
    """NeMo RL trains every token of an assistant's message, and nothing else."""
    first, second = fields(NEMO_RL, forked())
    told = [(message["role"], message["token_ids"].tolist()) for message in first["message_log"]]
    assert told == [("user", [1, 2]), ("assistant", [3, 4]), ("user", [5]), ("assistant", [6])]
    told = [(message["role"], message["token_ids"].tolist()) for message in second["message_log"]]
    assert told == [("user", [1, 2, 3, 4, 7]), ("assistant", [8, 9])]
    assert second["message_log"][1]["generation_logprobs"].tolist() == [-2.0, -3.0]
    assert {message["content"] for message in first["message_log"]} == {""}
    assert "generation_logprobs" not in first["message_log"][0]
    assert (first["length"], second["length"]) == (2, 5)
    assert first["gym_task_group_id"] == second["gym_task_group_id"] < 2**53
    assert first["gym_trace_id"] != second["gym_trace_id"]
    assert (first["gym_rollout_id"], first["total_reward"], first["loss_multiplier"]) == ("r1", 1.0, 1.0)
    assert first["advantages"].tolist() == [0, 0, 0.5, 0.5, 0, 0.5]


def test_an_advantage_that_nobody_gave_is_left_to_the_trainer() -> None:
    [made] = fields(NEMO_RL, source_of(chain(2), advantage=None))
    assert "advantages" not in made


def test_a_train_batch_is_padded_on_the_right() -> None:
    batch = train_arrays(forked().rows, pad_token_id=99, divisible_by=4)
    types = {name: (array.dtype.name, array.shape) for name, array in batch.items()}
    assert types == {
        "input_ids": ("int64", (2, 8)),
        "input_lengths": ("int32", (2,)),
        "generation_logprobs": ("float32", (2, 8)),
        "token_mask": ("float32", (2, 8)),
        "sample_mask": ("float32", (2,)),
        "advantages": ("float32", (2, 8)),
    }
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 99, 99], [1, 2, 3, 4, 7, 8, 9, 99]]
    assert batch["input_lengths"].tolist() == [6, 7]
    assert batch["token_mask"].tolist() == [[0, 0, 1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1, 1, 0]]
    assert batch["generation_logprobs"][1].tolist() == [0, 0, 0, 0, 0, -2.0, -3.0, 0]
    assert batch["sample_mask"].tolist() == [1.0, 1.0]


def test_a_rollout_counts_once_on_request() -> None:
    """Under a loss averaged by sequence a rollout of two rows would otherwise count twice."""
    batch = train_arrays(forked().rows, rollouts_equal=True)
    np.testing.assert_allclose(batch["sample_mask"], np.float32([0.6, 0.4]))


def test_batches_without_advantages_have_none() -> None:
    batch = train_arrays(source_of(chain(2), advantage=None).rows)
    assert "advantages" not in batch
    mixed = [*source_of(chain(1), advantage=None).rows, *source_of(chain(1), rollout_id="r2").rows]
    with pytest.raises(ReconstructionError) as caught:
        train_arrays(mixed)
    assert caught.value.code is Code.ADVANTAGE_REQUIRED


def test_a_row_is_never_cut() -> None:
    with pytest.raises(ReconstructionError) as caught:
        train_arrays(forked().rows, width=6)
    assert caught.value.code is Code.ROW_TOO_LONG
    assert train_arrays(forked().rows, width=7, divisible_by=8)["input_ids"].shape == (2, 8)


def test_credits_are_advantages_or_losses() -> None:
    source = source_of(chain(1), advantage=None)
    [row] = source.rows
    start, end = (int(at) for at in np.flatnonzero(row.loss_mask)[[0, -1]])
    given = TokenCredit(call_id="c0", start=start, end=end + 1, advantage=2.0)
    [made] = fields(NEMO_RL, Source([msgspec.structs.replace(row, credits=(given,))]))
    assert made["advantages"][row.loss_mask == 1].tolist() == [2.0] * int(row.loss_mask.sum())
    losses = Counter[str]()
    rewarded = TokenCredit(call_id="c0", start=start, end=end + 1, reward=2.0)
    both = TokenCredit(call_id="c0", start=start, end=end + 1, reward=2.0, advantage=1.0)
    for credit in (given, rewarded, both):
        fields(NEMO_RL, Source([msgspec.structs.replace(row, credits=(credit,))]), losses)
    assert losses["credit_rewards"] == 2


def _attempt(rollout_id: str, attempt: int, group_id: str | None = None) -> Source:
    rows = source_of(chain(1), rollout_id=rollout_id, group_id=group_id).rows
    return Source([msgspec.structs.replace(row, attempt=attempt) for row in rows])


def test_no_two_attempts_have_one_name() -> None:
    """A second attempt is called as Gym calls it; a rollout that is called so itself is another one."""
    given = [(name, attempt) for name in ("x", "x-a1", "x-a1-a0", "x-a0") for attempt in (0, 1, 2)]
    named = [fields(NEMO_RL, _attempt(*one))[0]["gym_rollout_id"] for one in given]
    assert len(set(named)) == len(given)
    assert named[:2] == ["x", "x-a1"]
    assert [fields(NEMO_GYM, _attempt(*one))[0]["rollout_id"] for one in given] == named


def test_an_attempt_without_a_group_is_in_nobodys() -> None:
    """A group that has a rollout's name would be compared with the rollout, and its attempts with each other."""
    losses = Counter[str]()
    sources = [_attempt("x", 0), _attempt("x", 1), _attempt("y", 0, "x")]
    assert len({fields(NEMO_RL, source, losses)[0]["gym_task_group_id"] for source in sources}) == 3
    assert losses["group"] == 2


class BatchedDataDict(UserDict[str, Any]):
    """Stands for NeMo RL's class, which no package installs: a dictionary of tensors."""


@pytest.fixture
def their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, batched = ModuleType("torch"), ModuleType("nemo_rl.distributed.batched_data_dict")
    monkeypatch.setattr(torch, "from_numpy", lambda array: ("tensor", array), raising=False)
    monkeypatch.setattr(batched, "BatchedDataDict", BatchedDataDict, raising=False)
    for name in ("nemo_rl", "nemo_rl.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "nemo_rl.distributed.batched_data_dict", batched)


@pytest.mark.usefixtures("their_packages")
def test_objects_are_made_of_their_classes() -> None:
    batch = train_batch(forked().rows, pad_token_id=9)
    assert isinstance(batch, BatchedDataDict)
    arrays = train_arrays(forked().rows, pad_token_id=9)
    assert batch.keys() == arrays.keys()
    for name, (kind, array) in batch.items():
        assert kind == "tensor"
        np.testing.assert_array_equal(array, arrays[name])
    [first, _] = message_logs(forked().rows)
    kind, ids = first["message_log"][1]["token_ids"]
    assert (kind, ids.dtype.name, ids.tolist()) == ("tensor", "int64", [3, 4])
    kind, logprobs = first["message_log"][1]["generation_logprobs"]
    assert (kind, logprobs.dtype.name, logprobs.tolist()) == ("tensor", "float32", [-0.5, -0.25])


@pytest.mark.parametrize("make", [train_batch, message_logs, responses])
def test_a_missing_trainer_is_named(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "nemo_gym"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as caught:
        make(forked().rows)
    assert caught.value.code is Code.TRAINER_MISSING


# ---- nemo-gym --------------------------------------------------------------------------------------------------------


def contiguous(output: list[Any]) -> None:
    """What Gym demands of items with tokens: each prompt begins with all tokens so far."""
    seen: list[int] = []
    for item in output:
        if "generation_token_ids" in item:
            prompt = item["prompt_token_ids"].tolist()
            assert prompt[: len(seen)] == seen
            seen = [*prompt, *item["generation_token_ids"].tolist()]
            assert len(item["generation_token_ids"]) == len(item["generation_log_probs"])


def test_items_of_generated_rollouts_are_contiguous() -> None:
    for source in generated(seed=3, count=200):
        for record in fields(NEMO_GYM, source):
            contiguous(record["response"]["output"])


def test_what_a_call_served_stands_in_its_items() -> None:
    source = source_of([Call("c0", [1], [2, 3], fields={"model": "m"})])
    assert source.capture is not None
    served = [
        {"role": "assistant", "reasoning_content": "hm", "content": "Let me see."},
        function_call("t1", '{"b": 1, "a": 2}'),
        {"type": "custom_tool_call", "call_id": "t2", "name": "sh", "input": "ls"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    [record] = source.capture.records
    record = msgspec.structs.replace(record, output_items=output_items(served))
    losses = Counter[str]()
    capture = msgspec.structs.replace(source.capture, records=(record,))
    [made] = fields(NEMO_GYM, msgspec.structs.replace(source, capture=capture), losses)
    output = made["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "message"]
    assert output[0]["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert output[1]["content"] == [{"type": "output_text", "text": "Let me see.", "annotations": []}]
    assert (output[2]["call_id"], output[2]["name"], json.loads(output[2]["arguments"])) == (
        "t1",
        "f",
        {"a": 2, "b": 1},
    )
    assert output[3]["content"] == [{"type": "refusal", "refusal": "No."}]
    assert [item for item in output if "generation_token_ids" in item] == [output[3]]
    assert (losses["parts"], losses["text"]) == (1, 0)
    assert made["response"]["model"] == "m"


def test_rows_alone_have_no_text() -> None:
    losses = Counter[str]()
    [first, second] = fields(NEMO_GYM, plain(forked()), losses)
    assert losses["text"] == 3
    assert losses["loss_weight"] == 2
    assert (first["rollout_id"], second["rollout_id"]) == ("r1.0", "r1.1")
    assert first["response"]["output"][0]["content"][0]["text"] == ""
    [whole] = fields(NEMO_GYM, plain(source_of(chain(2))))
    assert whole["rollout_id"] == "r1"


def test_a_row_that_was_cut_is_incomplete() -> None:
    [row] = source_of(chain(1)).rows
    [made] = fields(NEMO_GYM, Source([msgspec.structs.replace(row, truncated=True)]))
    response = made["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_what_is_written_for_gym_is_read_as_a_capture(tmp_path: Path) -> None:
    """Rows that went out to Gym's format and came back as captures are the same rows."""
    line = sample_lines(NEMO_GYM, source_of(chain(3)), Counter())[0].line
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(orjson.dumps(orjson.loads(line)["sample"]) + b"\n")
    [rollout] = importer_named("nemo-gym").read(path, Report(completed=True))
    assert rollout.result is not None
    outcome = run_rollout(rollout.capture, rollout.result, ReturnedHistory())
    assert isinstance(outcome, RebuiltRollout), outcome
    [row], [expected] = outcome.rows, source_of(chain(3)).rows
    np.testing.assert_array_equal(row.token_ids, expected.token_ids)
    np.testing.assert_array_equal(row.loss_mask, expected.loss_mask)
    np.testing.assert_array_equal(row.logprobs, expected.logprobs)
    assert row.reward == expected.reward


# ---- nemo-gym-traces -------------------------------------------------------------------------------------------------


def checked(envelope: Any) -> None:
    """What NeMo RL demands of training traces before it trains them."""
    assert envelope.keys() == {"schema_version", "rollout_id", "builder", "traces"}
    assert envelope["schema_version"] == 1
    assert envelope["builder"] in {"per_request", "prefix_merging"}
    owners: list[str] = []
    for trace in envelope["traces"]:
        ids, mask, logprobs = trace["token_ids"], trace["loss_mask"], trace["generation_logprobs"]
        assert len(ids) == len(mask) == len(logprobs) > 0
        assert mask[0] == 0
        assert set(mask) == {0, 1}
        assert len(set(trace["model_call_ids"])) == len(trace["model_call_ids"])
        covered = [0] * len(ids)
        for span in trace["sampled_spans"]:
            assert span["model_call_id"] in trace["model_call_ids"]
            assert 0 < span["start"] < span["end"] <= len(ids)
            assert not any(covered[span["start"] : span["end"]])
            covered[span["start"] : span["end"]] = [1] * (span["end"] - span["start"])
            owners.append(span["model_call_id"])
        assert covered == list(mask)
    assert len(owners) == len(set(owners))
    assert set(owners) == {call for trace in envelope["traces"] for call in trace["model_call_ids"]}
    assert len({trace["trace_id"] for trace in envelope["traces"]}) == len(envelope["traces"])


def test_traces_of_generated_rollouts_keep_their_contract() -> None:
    """NeMo RL masks a rollout whose traces break it, or ends the run."""
    builders = set[str]()
    for source in generated(seed=5, count=300):
        [envelope] = training_traces(source.rows)
        checked(envelope)
        builders.add(envelope["builder"])
    assert builders == {"per_request", "prefix_merging"}


def test_a_call_is_owned_by_one_trace() -> None:
    [envelope] = training_traces(forked().rows)
    first, second = envelope["traces"]
    assert (first["model_call_ids"], second["model_call_ids"]) == (["c0", "c1"], ["c0", "c2"])
    assert second["loss_mask"] == [0, 0, 0, 0, 0, 1, 1]
    assert second["sampled_spans"] == [{"model_call_id": "c2", "start": 5, "end": 7}]
    assert json.dumps(envelope)


def test_one_record_a_rollout_with_its_reward() -> None:
    [record] = fields(NEMO_GYM_TRACES, forked())
    assert (record["rollout_id"], record["reward"], record["group_id"]) == ("r1", 1.0, "g1")
    second = [msgspec.structs.replace(row, attempt=2) for row in forked().rows]
    [again] = fields(NEMO_GYM_TRACES, Source(second))
    assert again["training_traces"]["rollout_id"] == "r1-a2"


def test_per_call_rows_are_one_request_each() -> None:
    [envelope] = training_traces(source_of(chain(3), mode=RowMode.PER_CALL).rows)
    assert envelope["builder"] == "per_request"
    checked(envelope)


# ---- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projection", NEMO, ids=lambda projection: projection.name)
def test_what_none_of_them_can_express(projection: Any) -> None:
    with pytest.raises(ReconstructionError) as caught:
        fields(projection, source_of(chain(2), reward=None))
    assert caught.value.code is Code.REWARD_MISSING
    [row] = source_of(chain(1)).rows
    promptless = msgspec.structs.replace(row, loss_mask=np.ones_like(row.loss_mask))
    with pytest.raises(ReconstructionError) as caught:
        fields(projection, Source([promptless]))
    assert caught.value.code is Code.NOT_EXPRESSIBLE
    assert caught.value.where == f"row={row.row_id}"


def test_items_have_no_place_behind_the_last_generation() -> None:
    [row] = source_of([Call("c0", [1, 2], [3])]).rows
    longer: Row = msgspec.structs.replace(
        row, **{name: np.append(getattr(row, name), 0) for name in ("token_ids", "loss_mask", "logprobs")}
    )
    with pytest.raises(ReconstructionError) as caught:
        fields(NEMO_GYM, Source([longer]))
    assert caught.value.code is Code.NOT_EXPRESSIBLE


def test_traces_of_one_rollout_have_one_reward() -> None:
    first, second = forked().rows
    with pytest.raises(ReconstructionError) as caught:
        fields(NEMO_GYM_TRACES, Source([first, msgspec.structs.replace(second, reward=0.0)]))
    assert caught.value.code is Code.REWARDS_DIFFER


def test_a_message_needs_text_to_be_compared() -> None:
    """The text of items is what the client was served, so a history made of it selects the same calls."""
    source = source_of([Call("c0", [1], [2])])
    assert source.capture is not None
    [record] = source.capture.records
    told = msgspec.structs.replace(record, output_items=output_items([said("a")]))
    capture = msgspec.structs.replace(source.capture, records=(told,))
    [made] = fields(NEMO_GYM, msgspec.structs.replace(source, capture=capture))
    selected, _ = ReturnedHistory()([told], {"response": {"output": made["response"]["output"]}})
    assert selected == [told]


@pytest.mark.usefixtures("their_packages")
def test_what_a_user_pastes_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = [row for rows in export_demo(tmp_path / "rows") for row in rows]
    monkeypatch.chdir(tmp_path)
    defined = run_page("nemo-rl.md")
    _, ids = defined["batch"]["input_ids"]
    assert ids.shape[0] == len(exported)
    assert ids.shape[1] % 64 == 0
    assert defined["lenient"].keywords == {"reasoning": "optional"}
