"""Trajectories in the Agent Trajectory Interchange Format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import Code, DecodeError
from gristmill.records import PurposeLabel
from tests.interop.foreign_files import (
    ASKED,
    TEXTS,
    Imported,
    Json,
    imported,
    lines,
    said,
    step,
    trajectory,
    written,
)


def read(tmp_path: Path, value: Any, **options: Any) -> Imported:
    return imported("atif", written(tmp_path / "trajectory.json", value), **options)


def user(number: int, text: str = "Go on.", **more: Any) -> Json:
    return {"step_id": number, "source": "user", "message": text, **more}


def referring(number: int, **reference: Any) -> Json:
    """A step of the system that observed what a sub-agent did."""
    results = [{"subagent_trajectory_ref": [reference]}]
    return {"step_id": number, "source": "system", "message": "", "observation": {"results": results}}


def test_a_trajectory_is_an_attempt_with_its_transcript(tmp_path: Path) -> None:
    """What the harness kept is its result, and it names the calls, so that every policy can read it."""
    found = read(tmp_path, trajectory(trajectory_id="count-1"))
    assert (found.capture.rollout_id, found.capture.attempt) == ("count-1", 0)
    result = found.one.result
    assert result is not None
    history = [entry for turn in range(3) for entry in ({"role": "user", "content": ASKED[turn]}, said(TEXTS[turn]))]
    assert result.value["messages"] == history
    assert result.value["terminal_response_id"] == "step-6"
    named = [turn["model_calls"][0]["model_call_id"] for turn in result.value["trajectory"]["turns"]]
    assert named == ["step-2", "step-4", "step-6"]
    assert result.reward is None
    assert {record.session_id for record in found.capture.records} == {"run-1"}
    assert {record.model for record in found.capture.records} == {"m"}


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"trajectory_id": "t", "session_id": "s"}, "t"),
        ({"session_id": "s"}, "s"),
        ({"session_id": None}, "trajectory"),
    ],
)
def test_what_a_rollout_is_called(tmp_path: Path, more: Json, name: str) -> None:
    """The format has two ids, neither of which it requires."""
    assert read(tmp_path, {**trajectory(), **more}).capture.rollout_id == name


def test_nothing_says_whether_a_call_finished(tmp_path: Path) -> None:
    """The format has no finish reason; only whoever imports can state it, and it is not inferred."""
    assert {record.response_status for record in read(tmp_path, trajectory()).capture.records} == {None}
    stated = read(tmp_path, trajectory(), completed=True).capture.records
    assert {record.response_status for record in stated} == {"completed"}


def test_text_reasoning_and_tool_calls(tmp_path: Path) -> None:
    """What the model authored is compared with what a harness returns, part by part."""
    call = {"tool_call_id": "c1", "function_name": "list_names", "arguments": {"sorted": True, "limit": 3}}
    result = {"source_call_id": "c1", "content": "Ada, Bo, Cy"}
    acting = step(2, 0, reasoning_content="A list first.", tool_calls=[call], observation={"results": [result]})
    found = read(tmp_path, trajectory([user(1), acting]))
    [record] = found.capture.records
    atoms = [(atom.kind, atom.name, atom.call_id) for item in record.output_items for atom in item.atoms or ()]
    assert atoms == [("reasoning", "", ""), ("text", "", ""), ("tool_call", "list_names", "c1")]
    assert found.one.result is not None
    assert found.one.result.value["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "Ada, Bo, Cy"}


def test_parents_only_where_tokens_prove_them(tmp_path: Path) -> None:
    """A harness that summarises goes on in the same trajectory with another context."""
    other = step(3, 1)
    other["metrics"] |= {"prompt_token_ids": [9, 9, 9], "prompt_tokens": 3}
    bare = step(4, 2, metrics=None)
    found = read(tmp_path, trajectory([user(1), step(2, 0), other, bare]))
    assert found.parents == {"step-2": None, "step-3": None, "step-4": None}
    assert [record.parent_resolution for record in found.capture.records] == ["root", "unresolved", "unresolved"]


def test_steps_that_are_no_calls(tmp_path: Path) -> None:
    """A copied step was sampled elsewhere, a dispatched one by nobody; training either would be wrong."""
    steps = [
        step(1, 0, is_copied_context=True),
        {"step_id": 2, "source": "agent", "message": "Listing.", "llm_call_count": 0},
        step(3, 1, llm_call_count=1),
    ]
    found = read(tmp_path, trajectory(steps))
    assert list(found.reasons) == ["step-3"]
    assert (found.report.losses["copied_steps"], found.report.losses["dispatched_steps"]) == (1, 1)
    assert found.one.result is not None
    assert found.one.result.value["messages"] == [said(TEXTS[1])]


def test_a_step_of_several_inferences(tmp_path: Path) -> None:
    """Tokens of several calls together are tokens of none."""
    found = read(tmp_path, trajectory([step(1, 0, llm_call_count=2)]))
    assert found.reasons == {"step-1": Code.TOKEN_IDS_MISSING}
    assert found.capture.records[0].unusable_detail == "the step stands for 2 inferences together"


def test_counts_that_differ(tmp_path: Path) -> None:
    """The stated count is held against the ids."""
    value = step(1, 0)
    value["metrics"]["completion_tokens"] = 7
    assert read(tmp_path, trajectory([value])).reasons == {"step-1": Code.TOKEN_COUNT_MISMATCH}
    longer = step(1, 0)
    longer["metrics"]["prompt_tokens"] += 96
    found = read(tmp_path, trajectory([longer]))
    assert found.reasons == {"step-1": Code.TOKEN_COUNT_MISMATCH}
    count = len(longer["metrics"]["prompt_token_ids"])
    detail = f"{count} prompt_token_ids, {count + 96} prompt_tokens reported"
    assert found.capture.records[0].unusable_detail == detail


def test_media_before_a_call(tmp_path: Path) -> None:
    """A prompt with a picture is not the text that its ids would be without it."""
    picture = {"type": "image", "source": {"media_type": "image/png", "path": "images/1.png"}}
    seen = [{"type": "text", "text": "Look:"}, picture]
    found = read(tmp_path, trajectory([step(1, 0), user(2, seen), step(3, 1)]))  # pyright: ignore
    assert [len(record.request_media) for record in found.capture.records] == [0, 1]


def sub(name: str, turn: int) -> Json:
    return trajectory([user(1, "Count."), step(2, turn)], trajectory_id=name, session_id="run-1")


def test_embedded_sub_agents(tmp_path: Path) -> None:
    """A sub-agent's calls are of the same rollout, and no part of the main conversation."""
    value = trajectory(
        [user(1), step(2, 0), referring(3, trajectory_id="helper"), step(4, 1)],
        subagent_trajectories=[sub("helper", 0), sub("idle", 2)],
    )
    found = read(tmp_path, value)
    assert list(found.reasons) == ["step-2", "helper/step-2", "step-4", "idle/step-2"]
    by_id = {record.model_call_id: record for record in found.capture.records}
    helper = by_id["helper/step-2"]
    assert (helper.session_id, helper.parent_session_id) == ("helper", "run-1")
    assert helper.purpose.label is PurposeLabel.SUBAGENT
    assert by_id["step-4"].parent_call_id == "step-2"
    assert found.one.result is not None
    assert len(found.one.result.value["trajectory"]["turns"]) == 2
    assert [note.where for note in found.report.notes] == ["run-1 idle"]


def test_trajectories_in_files_beside(tmp_path: Path) -> None:
    """A folder holds one rollout in many files: each call once, none of them a rollout of its own."""
    folder = tmp_path / "run"
    main = trajectory(
        [user(1), step(2, 0), referring(3, trajectory_path="sub.json")], continued_trajectory_ref="next.json"
    )
    written(folder / "a.json", main)
    written(folder / "sub.json", sub("helper", 2))
    written(folder / "next.json", trajectory([step(1, 0, is_copied_context=True), step(2, 1)]))
    for path in (folder, folder / "a.json"):
        found = imported("atif", path)
        assert list(found.reasons) == ["step-2", "sub/step-2", "next/step-2"]
        assert found.one.result is not None
        assert found.one.result.value["terminal_response_id"] == "next/step-2"
        assert not found.capture.lost


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"continued_trajectory_ref": "none.json"}, "none"),
        ({"steps": [step(1, 0), referring(2, trajectory_path="https://host/x.json")]}, "x"),
        ({"steps": [step(1, 0), referring(2, trajectory_id="gone")]}, "gone"),
    ],
)
def test_references_that_lead_nowhere(tmp_path: Path, more: Json, name: str) -> None:
    """Calls were made that are not here: the rollout must not look complete."""
    found = read(tmp_path, {**trajectory(), **more})
    assert [call.model_call_id for call in found.capture.lost] == [name]
    assert found.report.losses["references"] == 1


def test_a_circle_of_continuations_ends(tmp_path: Path) -> None:
    """A file that refers to itself is read once."""
    written(tmp_path / "b.json", trajectory([step(1, 1)], continued_trajectory_ref="b.json"))
    found = read(tmp_path, trajectory([step(1, 0)], continued_trajectory_ref="b.json"))
    assert list(found.reasons) == ["step-1", "b/step-1"]


def test_a_part_that_cannot_be_read(tmp_path: Path) -> None:
    """A damaged sub-agent is a hole in the rollout, where its reader asked for that."""
    (tmp_path / "b.json").write_text("{")
    value = trajectory([step(1, 0)], continued_trajectory_ref="b.json")
    with pytest.raises(DecodeError, match=r"expected JSON"):
        read(tmp_path, value)
    found = read(tmp_path, value, skip_bad=True)
    assert [call.model_call_id for call in found.capture.lost] == ["b"]
    assert len(found.report.bad) == 1


def test_lines_of_trajectories(tmp_path: Path) -> None:
    """Data sets keep a trajectory a line."""
    values = [trajectory(trajectory_id="a"), trajectory(trajectory_id="b"), trajectory(trajectory_id="a")]
    path = lines(tmp_path / "all.jsonl", values)
    with pytest.raises(DecodeError, match="each trajectory once, got a second one of 'a'"):
        imported("atif", path)
    found = imported("atif", path, skip_bad=True)
    assert [rollout.capture.rollout_id for rollout in found.rollouts] == ["a", "b"]
    nameless = lines(tmp_path / "nameless.jsonl", [trajectory(session_id=None), trajectory(session_id=None)])
    assert [made.capture.rollout_id for made in imported("atif", nameless).rollouts] == ["line-1", "line-2"]


def test_bad_lines_of_trajectories(tmp_path: Path) -> None:
    """A line of another version, one that is no trajectory and one with a mistake do not cost the others."""
    values = [
        {**trajectory(trajectory_id="a"), "schema_version": "ATIF-v9.0"},
        {"trajectory_id": "b"},
        trajectory(trajectory_id="c", agent=None),
        trajectory(trajectory_id="d"),
    ]
    path = lines(tmp_path / "all.jsonl", values)
    found = imported("atif", path, skip_bad=True)
    assert [rollout.capture.rollout_id for rollout in found.rollouts] == ["d"]
    told = [(error.code, (error.where or "").removeprefix(f"{path} ")) for error in found.report.bad]
    assert told == [
        (Code.SCHEMA_UNSUPPORTED, "line 1 $.schema_version"),
        (Code.FILE_MALFORMED, "line 2 $.schema_version"),
        (Code.FILE_MALFORMED, "line 3 $.agent"),
    ]


@pytest.mark.parametrize("version", ["ATIF-v1.0", "ATIF-v1.4", "ATIF-v1.8", "ATIF-v1.8.1"])
def test_known_versions(tmp_path: Path, version: str) -> None:
    """Older documents are read as they were written."""
    assert len(read(tmp_path, {**trajectory(), "schema_version": version}).reasons) == 3


@pytest.mark.parametrize("version", ["ATIF-v1.9", "ATIF-v2.0", "1.8", "ATIF-v1.8-draft"])
def test_unknown_versions(tmp_path: Path, version: str) -> None:
    """What a newer version means is not guessed."""
    with pytest.raises(DecodeError) as refused:
        read(tmp_path, {**trajectory(), "schema_version": version})
    assert refused.value.code is Code.SCHEMA_UNSUPPORTED


def test_losses_are_counted(tmp_path: Path) -> None:
    """A field that is left out without a word is lost for good."""
    acting = step(2, 0, timestamp="2026-01-02T03:04:05Z", reasoning_effort="high", extra={"note": 1}, mood="fine")
    acting["metrics"].update(cached_tokens=2, extra={"a": 1})
    value = trajectory([user(1), acting], notes="By hand.", final_metrics={"total_steps": 2})
    found = read(tmp_path, value)
    # reasoning_effort, extra, mood; cached_tokens, extra; notes, final_metrics; the agent's name and version
    assert found.report.losses == {"fields": 9, "timestamps": 1, "finish_reasons": 1, "requests": 1}


BAD: list[tuple[Json, str]] = [
    ({"agent": None}, "$.agent"),
    ({"steps": {}}, "$.steps"),
    ({"steps": ["x"]}, "$.steps[0]"),
    ({"steps": [{"step_id": 1, "source": "robot", "message": ""}]}, "$.steps[0].source"),
    ({"steps": [{"step_id": "1", "source": "agent", "message": ""}]}, "$.steps[0].step_id"),
    ({"steps": [step(1, 0, metrics=[])]}, "$.steps[0].metrics"),
    ({"steps": [step(1, 0, metrics={"prompt_token_ids": "1"})]}, "$.steps[0].metrics.prompt_token_ids"),
    ({"steps": [step(1, 0, metrics={"completion_tokens": -1})]}, "$.steps[0].metrics.completion_tokens"),
    ({"steps": [step(1, 0, message=5)]}, "$.steps[0].message"),
    ({"steps": [step(1, 0, message=[{"type": "video"}])]}, "$.steps[0].message[0].type"),
    ({"steps": [step(1, 0, tool_calls=[{"tool_call_id": "c", "arguments": {}}])]}, "$.steps[0].tool_calls[0]"),
    ({"steps": [step(1, 0, tool_calls=[{"function_name": "f", "arguments": "x"}])]}, "arguments"),
    ({"steps": [step(1, 0, tool_calls=[{"function_name": "f", "arguments": {"x": float("nan")}}])]}, "x"),
    ({"steps": [step(1, 0, is_copied_context="yes")]}, "$.steps[0].is_copied_context"),
    ({"steps": [step(1, 0, llm_call_count=1.5)]}, "$.steps[0].llm_call_count"),
    ({"steps": [referring(1)]}, "subagent_trajectory_ref[0]"),
    ({"subagent_trajectories": [trajectory()]}, "$.subagent_trajectories[0]"),
    ({"subagent_trajectories": [sub("a", 0), sub("a", 1)]}, "$.subagent_trajectories[1]"),
    ({"trajectory_id": 5}, "$.trajectory_id"),
    ({"schema_version": None}, "$.schema_version"),
    ({"extra": {"gristmill": {"reward": "high"}}}, "reward"),
]


@pytest.mark.parametrize(("more", "place"), BAD)
def test_malformed_documents(tmp_path: Path, more: Json, place: str) -> None:
    """A document with a mistake is refused with the place of it, and the others of its folder are read."""
    written(tmp_path / "good.json", trajectory(session_id="good"))
    path = written(tmp_path / "bad.json", {**trajectory(), **more})
    with pytest.raises(DecodeError) as refused:
        imported("atif", path)
    assert refused.value.code is Code.FILE_MALFORMED
    where = refused.value.where or ""
    assert where.startswith(str(path))
    assert place in where
    found = imported("atif", tmp_path, skip_bad=True)
    assert [rollout.capture.rollout_id for rollout in found.rollouts] == ["good"]
    assert len(found.report.bad) == 1


def test_repeated_keys(tmp_path: Path) -> None:
    """Which of two lists of ids was sampled nobody can say."""
    path = written(tmp_path / "t.json", trajectory())
    path.write_text(path.read_text().replace('"completion_token_ids": [12]', '"logprobs": [0], "logprobs": [-1.0]'))
    with pytest.raises(DecodeError, match="each key once, got one repeated") as refused:
        imported("atif", path)
    assert "$.steps[3].metrics" in (refused.value.where or "")


def test_two_steps_of_one_id(tmp_path: Path) -> None:
    """Both calls are kept, and selection refuses what it cannot tell apart."""
    found = read(tmp_path, trajectory([step(1, 0), step(1, 1)]))
    assert [record.model_call_id for record in found.capture.records] == ["step-1", "step-1"]
    assert [note.message for note in found.report.notes] == ["this call id occurs more than once"]
