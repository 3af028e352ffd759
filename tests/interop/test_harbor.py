"""Harbor's trials: rollout details, rewards, and the trajectory beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import Code, DecodeError
from gristmill.interop import importer_of
from tests.interop.foreign_files import (
    TEXTS,
    TURNS,
    Imported,
    Json,
    detail,
    imported,
    job,
    said,
    tokens_of,
    trajectory,
    trial,
    written,
)


def read(tmp_path: Path, value: Any, beside: Any = None, **options: Any) -> Imported:
    folder = tmp_path / "trial"
    written(folder / "result.json", value)
    if beside is not None:
        written(folder / "agent" / "trajectory.json", beside)
    return imported("harbor", folder, **options)


def with_details(*details: Json, **more: Any) -> Json:
    return trial(agent_result={"rollout_details": list(details)}, **more)


def test_a_trial_is_a_rollout(tmp_path: Path) -> None:
    """Its task is what it is compared within, its reward what its calls are trained on."""
    found = read(tmp_path, trial())
    assert found.capture.rollout_id == "count-names__a1"
    result = found.one.result
    assert result is not None
    assert (result.reward, result.group_id, dict(result.metadata)) == (1.0, "count-names", {})
    assert result.value["terminal_response_id"] == "0.2"
    assert {record.model for record in found.capture.records} == {"m"}


def test_a_job_gives_its_trials(tmp_path: Path) -> None:
    """The job's own result stands beside the trials' and is none."""
    folder = job(tmp_path / "job", trial("a__1"), trial("a__2"), trial("b__1", task_name="b"))
    found = imported("harbor", folder)
    assert [rollout.capture.rollout_id for rollout in found.rollouts] == ["a__1", "a__2", "b__1"]
    assert importer_of(folder) is not None
    written(folder / "c" / "result.json", {"id": "no trial"})
    assert importer_of(folder) is None
    with pytest.raises(DecodeError, match="the result of a trial, with a trial_name"):
        imported("harbor", folder)
    assert len(imported("harbor", folder, skip_bad=True).rollouts) == 3


def test_text_comes_from_the_step_of_equal_ids(tmp_path: Path) -> None:
    """Ids and text are written to two places; only equal ids bring them together."""
    found = read(tmp_path, trial(), trajectory())
    texts = [
        [atom.text for item in record.output_items for atom in item.atoms or ()] for record in found.capture.records
    ]
    assert texts == [[text] for text in TEXTS]
    assert not found.report.losses["texts"]
    other = trajectory()
    other["steps"][1]["metrics"]["completion_token_ids"] = [10, 12]
    other["steps"][5]["metrics"] = dict(other["steps"][3]["metrics"])
    found = read(tmp_path, trial(), other)
    assert [len(record.output_items) for record in found.capture.records] == [0, 0, 0]
    assert found.report.losses["texts"] == 3


def test_a_trajectory_alone(tmp_path: Path) -> None:
    """An agent that collects no rollout details may still write ids into its trajectory."""
    found = read(tmp_path, trial(agent_result={"n_input_tokens": 3}), trajectory())
    assert list(tokens_of(found.capture).values()) == list(TURNS)
    assert found.one.result is not None
    assert (found.one.result.reward, found.one.result.group_id) == (1.0, "count-names")
    assert found.one.result.value["messages"][-1] == said(TEXTS[2])
    assert found.capture.rollout_id == "count-names__a1"


def test_nothing_of_the_calls(tmp_path: Path) -> None:
    """A trial without details and trajectory is a rollout without calls, and says no more."""
    found = read(tmp_path, trial(agent_result=None))
    assert (found.capture.records, found.one.result is not None) == ((), True)


@pytest.mark.parametrize(
    ("short", "reason"),
    [
        ("logprobs", Code.LOGPROBS_MISSING),
        ("completion_token_ids", Code.TOKEN_IDS_MISSING),
        ("prompt_token_ids", Code.PROMPT_IDS_MISSING),
    ],
)
def test_lists_that_do_not_agree(tmp_path: Path, short: str, reason: str) -> None:
    """A turn without log-probabilities leaves no gap in Harbor's lists: the others may not move up into it."""
    held = detail()
    held[short] = held[short][:2]
    found = read(tmp_path, with_details(held))
    assert set(found.reasons.values()) == {reason}
    assert len(found.reasons) == 3
    assert found.report.losses["turns_unaligned"] == 1


def test_several_histories(tmp_path: Path) -> None:
    """By convention the first history is the main agent's: the scored call is its last one."""
    found = read(tmp_path, with_details(detail((0, 1)), detail((2,))))
    assert list(found.reasons) == ["0.0", "0.1", "1.0"]
    assert [record.session_id for record in found.capture.records] == ["0", "0", "1"]
    assert found.one.result is not None
    assert found.one.result.value["terminal_response_id"] == "0.1"
    assert found.parents["1.0"] is None


def test_a_history_that_was_summarised(tmp_path: Path) -> None:
    """After a summary the next prompt is another one: the turn before is no parent of it."""
    held = detail()
    held["prompt_token_ids"][2] = [7, 7]
    found = read(tmp_path, with_details(held))
    assert [record.parent_resolution for record in found.capture.records] == ["root", "resolved", "unresolved"]


def with_step(held: Json) -> Json:
    return {"agent_result": {"rollout_details": [held]}}


def test_a_trial_of_several_steps(tmp_path: Path) -> None:
    """Its calls are those of all steps; the steps' rewards are not the trial's."""
    steps = [
        {
            "step_name": "one",
            "agent_result": {"rollout_details": [detail((0,))]},
            "verifier_result": {"rewards": {"r": 0}},
        },
        {"step_name": "two", "agent_result": {"rollout_details": [detail((2,))]}, "verifier_result": None},
        {"step_name": "three", "agent_result": None},
    ]
    found = read(tmp_path, trial(agent_result=None, step_results=steps))
    assert list(found.reasons) == ["one/0.0", "two/0.0"]
    assert found.one.result is not None
    assert found.one.result.reward == 1.0
    assert found.one.result.metadata == {"rewards_of_steps": {"one": {"r": 0}}}
    assert found.one.result.value["terminal_response_id"] == "two/0.0"
    assert found.report.losses["rewards_of_steps"] == 1


@pytest.mark.parametrize(
    ("more", "reward", "metadata"),
    [
        ({"verifier_result": {"rewards": {"accuracy": 0.5}}}, 0.5, {}),
        ({"verifier_result": {"rewards": {"a": 1, "reward": 0.25}}}, 0.25, {"rewards": {"a": 1, "reward": 0.25}}),
        ({"verifier_result": {"rewards": {"a": 1, "b": 0}}}, None, {"rewards": {"a": 1, "b": 0}}),
        ({"verifier_result": {"rewards": None}}, None, {}),
        ({"verifier_result": None}, None, {}),
        (
            {"reward_valid": False, "exception_info": {"exception_type": "AgentTimeoutError"}},
            None,
            {"rewards": {"reward": 1.0}, "exception_type": "AgentTimeoutError"},
        ),
    ],
)
def test_rewards(tmp_path: Path, more: Json, reward: float | None, metadata: Json) -> None:
    """Of several rewards none is picked, and one that Harbor calls invalid trains nothing."""
    result = read(tmp_path, trial(**more)).one.result
    assert result is not None
    assert (result.reward, dict(result.metadata)) == (reward, metadata)


def test_losses_are_counted(tmp_path: Path) -> None:
    """Experts that a provider returned per turn have no stated type, so they cannot be carried."""
    found = read(tmp_path, with_details(detail(extra={"routed_experts": [[1], [2], [3]]}, mood=["x"])))
    assert (found.report.losses["turn_extras"], found.report.losses["fields"]) == (1, 1)
    # id, trial_uri, task_id, task_checksum, config
    assert found.report.losses["trial_fields"] == 5


BAD: list[tuple[Json, str]] = [
    ({"trial_name": None}, "$.trial_name"),
    ({"trial_name": 3}, "$.trial_name"),
    ({"agent_result": []}, "$.agent_result"),
    ({"agent_result": {"rollout_details": {}}}, "rollout_details"),
    ({"agent_result": {"rollout_details": ["x"]}}, "rollout_details[0]"),
    ({"agent_result": {"rollout_details": [{"prompt_token_ids": 5}]}}, "rollout_details[0].prompt_token_ids"),
    ({"agent_result": {"rollout_details": [{"completion_token_ids": [5]}]}}, "turn 0"),
    ({"agent_result": {"rollout_details": [detail(extra=[])]}}, "extra"),
    ({"verifier_result": {"rewards": [1]}}, "$.verifier_result.rewards"),
    ({"verifier_result": {"rewards": {"reward": "x"}}}, "$.verifier_result.rewards.reward"),
    ({"verifier_result": {"rewards": {"reward": float("nan")}}}, "$.verifier_result.rewards.reward"),
    ({"verifier_result": {"rewards": {"reward": 10**400}}}, "$.verifier_result.rewards.reward"),
    ({"task_name": 5}, "$.task_name"),
    ({"agent_info": {"model_info": 5}}, "$.agent_info.model_info"),
]


@pytest.mark.parametrize(("more", "place"), BAD)
def test_malformed_results(tmp_path: Path, more: Json, place: str) -> None:
    """A trial that cannot be read is named; passed over, none of its calls are there."""
    with pytest.raises(DecodeError) as refused:
        read(tmp_path, trial(**more))
    assert refused.value.code is Code.FILE_MALFORMED
    where = refused.value.where or ""
    assert where.startswith(str(tmp_path / "trial" / "result.json"))
    assert place in where
    found = read(tmp_path, trial(**more), skip_bad=True)
    assert (found.rollouts, len(found.report.bad)) == ([], 1)


def test_a_trajectory_that_cannot_be_read(tmp_path: Path) -> None:
    """Text of a damaged trajectory is not there; where it holds the calls too, the trial is refused."""
    damaged = trajectory(agent=5)
    found = read(tmp_path, trial(), damaged)
    assert [note.message for note in found.report.notes] == ["not used: expected an object, got number at $.agent"]
    with pytest.raises(DecodeError):
        read(tmp_path, trial(agent_result=None), damaged)
    found = read(tmp_path, trial(agent_result=None), damaged, skip_bad=True)
    assert [call.model_call_id for call in found.capture.lost] == ["trajectory"]
