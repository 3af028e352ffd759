"""Trajectories in the Agent Trajectory Interchange Format, and back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given

from gristmill.captures import CapturedRollout, read_lines
from gristmill.errors import Code, ConfigError
from gristmill.export.trainers import Source, read_samples
from gristmill.export.trainers.atif import ATIF, trajectories
from gristmill.export.trainers.samples import sample_lines
from gristmill.interop import Report, importer_named
from gristmill.reconstruction import Rollout, Row, RowMode, rebuild
from gristmill.records import ParentResolution, PurposeLabel, Result
from tests.cli.stories import run
from tests.export.trainers.rollouts import generated, plain, source_of
from tests.export.trainers.spoken import RETURNED, rebuilt, story
from tests.reconstruction.attempts import Call, call_forests, chain

Json = dict[str, Any]


def document(source: Source, losses: Counter[str] | None = None) -> Json:
    """The trajectory of a source as it comes out of a file."""
    [record] = sample_lines(ATIF, source, Counter() if losses is None else losses)
    return orjson.loads(record.line)["sample"]


def imported(value: Json, folder: Path) -> tuple[CapturedRollout, Report]:
    path = folder / "trajectory.json"
    path.write_text(json.dumps(value))
    report = Report()
    [rollout] = importer_named("atif").read(path, report)
    return rollout, report


def rows_again(rollout: CapturedRollout, mode: RowMode) -> tuple[Row, ...]:
    """Rebuild every call of an imported rollout."""
    capture, result = rollout
    assert result is not None
    kept = Rollout(
        rollout_id=capture.rollout_id,
        attempt=capture.attempt,
        group_id=result.group_id,
        reward=result.reward,
        advantage=result.advantage,
    )
    calls = [record.model_call_id for record in capture.records]
    return rebuild(capture.records, capture.tokens, calls, kept, mode=mode).rows


def keyed(rows: Any) -> list[tuple[Any, ...]]:
    arrays = [(row.token_ids.tolist(), row.loss_mask.tolist(), row.logprobs.tolist()) for row in rows]
    return sorted((*made, row.reward, row.advantage, row.loss_weight) for made, row in zip(arrays, rows, strict=True))


def test_rows_to_a_trajectory_to_captures_to_rows(tmp_path: Path) -> None:
    """Whoever hands a trajectory on hands on what can be trained, to the last bit."""
    for number, source in enumerate(generated(seed=3, count=150)):
        for held in (source, plain(source)):
            rollout, report = imported(document(held), tmp_path)
            made = rows_again(rollout, RowMode.MERGED)
            first = source_rows(source)
            assert keyed(made) == keyed(first), number
            assert rollout.capture.rollout_id == source.rows[0].rollout_id
            assert not report.bad
            assert set(report.losses) <= {"fields"}


def source_rows(source: Source) -> tuple[Row, ...]:
    """The rows of a source in the default mode: how calls share rows is not of the trajectory."""
    assert source.capture is not None
    first = source.rows[0]
    rollout = Rollout(
        rollout_id=first.rollout_id, group_id=first.group_id, reward=first.reward, advantage=first.advantage
    )
    calls = {span.call_id for row in source.rows for span in row.spans if span.role == "sampled"}
    order = [record.model_call_id for record in source.capture.records if record.model_call_id in calls]
    return rebuild(source.capture.records, source.capture.tokens, order, rollout, mode=RowMode.MERGED).rows


@given(calls=call_forests())
def test_every_call_is_a_step_with_its_own_prompt(calls: list[Call]) -> None:
    """A reader of the format trains each step on what the model saw before it."""
    if not any(call.generation for call in calls if call.fields.get("model", "m") == "m"):
        return
    value = document(source_of(calls))
    by_id = {call.call_id: call for call in calls}
    steps = [step for step in value["steps"] if step["source"] == "agent"]
    assert [step["step_id"] for step in value["steps"]] == list(range(1, len(value["steps"]) + 1))
    for step in steps:
        call = by_id[step["extra"]["gristmill"]["model_call_id"]]
        metrics = step["metrics"]
        assert metrics["prompt_token_ids"] == list(call.prompt)
        assert metrics["completion_token_ids"] == list(call.generation)
        if call.logprobs is not None:
            logprobs = np.asarray(metrics["logprobs"], np.float32)
            np.testing.assert_array_equal(logprobs, np.asarray(call.logprobs, np.float32))
        assert metrics["extra"]["loss_mask"] == [1] * len(call.generation)


def test_text_is_told_in_turn_order(tmp_path: Path) -> None:
    """People and programs read trajectories; a message that stands twice or out of its place misleads both."""
    capture = story()
    outcome = rebuilt(capture, RETURNED)
    losses = Counter[str]()
    value = document(Source(outcome.rows, capture, RETURNED), losses)
    told = [(step["source"], step["message"]) for step in value["steps"]]
    assert told == [
        ("system", "Be short."),
        ("user", "Which names?"),
        ("agent", ""),
        ("system", ""),
        ("agent", "Ada and Bo."),
        ("user", "In other words?"),
        ("agent", "Ada and Bo."),
    ]
    acting = value["steps"][2]
    assert acting["reasoning_content"] == "A list first."
    assert acting["observation"]["results"] == [
        {"source_call_id": "c1", "content": "Ada, Bo"},
        {"source_call_id": "c2", "content": "-"},
    ]
    assert acting["tool_calls"][0] == {
        "tool_call_id": "c1",
        "function_name": "list_names",
        "arguments": {"sorted": True},
    }
    assert acting["tool_calls"][1]["arguments"] == {}
    assert acting["tool_calls"][1]["extra"] == {"gristmill": {"arguments": '{"limit": 3, "limit": 4}'}}
    assert value["agent"]["tool_definitions"][0]["function"]["name"] == "list_names"
    [helper] = value["subagent_trajectories"]
    assert [step["message"] for step in helper["steps"]] == ["Help.", "Here."]
    reference = value["steps"][3]["observation"]["results"][0]["subagent_trajectory_ref"]
    assert reference == [{"trajectory_id": helper["trajectory_id"]}]
    assert not losses["texts"]


def test_what_is_known_of_calls_comes_back(tmp_path: Path) -> None:
    """A trajectory of ours gives the records back, as far as the format and its extras go."""
    capture = story()
    outcome = rebuilt(capture, RETURNED)
    rollout, _ = imported(document(Source(outcome.rows, capture, RETURNED)), tmp_path)
    again = {record.model_call_id: record for record in rollout.capture.records}
    assert list(again) == ["a", "h", "b", "c"]
    for record in capture.records:
        made = again[record.model_call_id]
        for name in ("response_id", "finish_reason", "response_status", "model", "dialect", "sampling", "session_id"):
            assert getattr(made, name) == getattr(record, name) or name == "session_id", name
        assert (made.parent_call_id, made.parent_resolution) == (record.parent_call_id, record.parent_resolution)
        assert [item.fingerprint for item in made.output_items] == [item.fingerprint for item in record.output_items]
    assert again["h"].purpose.label is PurposeLabel.SUBAGENT
    result = rollout.result
    assert result is not None
    assert (result.reward, result.group_id, result.advantage) == (0.75, "names", 0.25)
    assert result.value["terminal_response_id"] == "resp-c"
    assert keyed(rebuilt(rollout.capture, result).rows) == keyed(outcome.rows)


def test_a_prompt_that_its_trajectory_did_not_say(tmp_path: Path) -> None:
    """Messages of an assistant that nobody exported are context, and a result without its call stands alone."""
    asked = [
        {"role": "developer", "content": "Be kind."},
        {"role": "assistant", "content": "Earlier words."},
        {"role": "tool", "tool_call_id": "gone", "content": "left over"},
        {"role": "user", "content": "And?"},
    ]
    reply = {"role": "assistant", "content": "Well."}
    line = {
        "model_call_id": "a",
        "finish_reason": "stop",
        "dialect": "chat",
        "output_items": [reply],
        "prompt_token_ids": [1],
        "generation_token_ids": [2],
        "generation_log_probs": [-1.0],
        "request": {"messages": asked},
        "reply": {"choices": [{"index": 0, "message": reply, "finish_reason": "stop"}]},
    }
    [rollout] = read_lines([json.dumps(line).encode()]).rollouts.values()
    result = Result(value={"terminal_response_id": "a", "messages": []})
    value = document(Source(rebuilt(rollout.capture, result).rows, rollout.capture))
    steps = value["steps"]
    assert [step["source"] for step in steps] == ["system", "agent", "system", "user", "agent"]
    assert steps[1]["is_copied_context"] is True
    assert "metrics" not in steps[1]
    assert steps[2]["observation"] == {"results": [{"source_call_id": "gone", "content": "left over"}]}
    again, _ = imported(value, tmp_path)
    assert [record.model_call_id for record in again.capture.records] == ["a"]


def test_losses() -> None:
    """Rows alone have no text, and certificates have no field."""
    losses = Counter[str]()
    document(plain(source_of(chain(3))), losses)
    # The first call continues nothing, so it has no certificate.
    assert losses == {"texts": 3, "certificates": 2}


def test_a_parent_that_is_not_exported(tmp_path: Path) -> None:
    """A link to a call that is not there would be a broken lineage."""
    source = source_of(
        [
            Call("x", [1], [2], logprobs=[-1.0], fields={"model": "other"}),
            Call("y", [1, 2, 3], [4], logprobs=[-1.0], parent="x", fields={"model": "m"}),
        ]
    )
    value = document(source)
    assert "parent_call_id" not in value["steps"][0]["extra"]["gristmill"]
    rollout, _ = imported(value, tmp_path)
    [record] = rollout.capture.records
    assert (record.parent_call_id, record.parent_resolution) == (None, ParentResolution.ROOT)


def test_its_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is the format's own, and Gristmill does without it."""
    monkeypatch.setitem(__import__("sys").modules, "atif", None)
    with pytest.raises(ConfigError) as refused:
        trajectories(source_of(chain(1)).rows)
    assert (refused.value.code, refused.value.hint) == (Code.TRAINER_MISSING, "pip install atif")


def test_objects_of_a_package_with_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are made of the fields that a file would hold."""

    class Trajectory:
        def __init__(self, fields: Mapping[str, Any]) -> None:
            self.fields = fields

        @classmethod
        def model_validate(cls, fields: Mapping[str, Any]) -> Trajectory:
            return cls(fields)

    module = type("Module", (), {"Trajectory": Trajectory})
    monkeypatch.setitem(__import__("sys").modules, "atif", module)
    source = source_of(chain(2))
    [made] = trajectories(source.rows)
    assert made.fields == document(plain(source))
    assert source.capture is not None
    [made] = trajectories(source.rows, {("r1", 0): source.capture})
    assert made.fields == document(source)


def test_an_export_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two commands: out as trajectories, in again, the same rows."""
    stories = Path("src/gristmill/demo/data")
    assert run(capsys, "export", stories, "--to", "atif", "--out", tmp_path / "out").code == 0
    samples = tmp_path / "out" / "samples.jsonl"
    assert len(list(read_samples(tmp_path / "out"))) > 1
    into = tmp_path / "again.gristmill"
    assert run(capsys, "import", samples, "--into", into).code == 0
    first = {row["rollout_id"]: row for row in run(capsys, "rows", stories).lines}
    again = {row["rollout_id"]: row for row in run(capsys, "rows", into).lines}
    assert again.keys() == first.keys()
    for rollout_id, row in again.items():
        for key in ("token_ids", "loss_mask", "logprobs", "reward", "group_id"):
            assert row[key] == first[rollout_id][key], (rollout_id, key)
