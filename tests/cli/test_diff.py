from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.stories import TWO_TURNS, good_story, refused_story, returned, run, story, write_story


@pytest.fixture
def captures(tmp_path: Path) -> Path:
    good_story(tmp_path / "a", "a")
    refused_story(tmp_path / "b", "b")
    return tmp_path


def test_calls_that_flip_are_shown(captures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a policy is changed, people want to see what they would train in addition."""
    ran = run(capsys, "diff", captures, "--against", "all_captured")
    assert ran.code == 0
    lines = [line.split() for line in ran.out.splitlines()]
    assert ["a", "selected", "|", "terminal_unattributed"] in lines or ["a", "selected", "|", "selected"] in lines
    assert "○  ●  x1    retry_superseded → captured        1" in ran.out or "x1" in ran.out
    assert "A: returned_history\nB: all_captured\n" in ran.out
    assert "of 2 rollouts differ" in ran.out
    assert ran.err.startswith("next: gristmill explain ")


def test_json(captures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The documented keys; every call is counted once."""
    told = run(capsys, "diff", captures, "--against", "all_captured", "--json").json
    assert set(told) == {"a", "b", "rollouts", "table", "calls", "flips", "compared", "bad_lines"}
    assert told["a"] == {"policy": "returned_history", "options": {}}
    assert told["compared"] == 2
    assert sum(calls for calls, _ in told["calls"].values()) == 6
    assert sum(tokens for _, tokens in told["calls"].values()) == 10
    assert sum(row["rollouts"] for row in told["table"]) == 2
    for rollout in told["rollouts"]:
        assert set(rollout) == {"rollout_id", "attempt", "outcomes", "codes", "terminals", "flips"}
        for flip in rollout["flips"]:
            assert set(flip) == {"model_call_id", "included", "codes", "tokens"}
            assert flip["included"][0] is not flip["included"][1]
    flipped = sum(len(rollout["flips"]) for rollout in told["rollouts"])
    assert flipped == sum(row["calls"] for row in told["flips"])
    assert flipped == told["calls"]["only_a"][0] + told["calls"]["only_b"][0]


def test_settings_against_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One option is the usual difference between two runs."""
    path = write_story(tmp_path, None, returned(" one", TWO_TURNS[1] + "\n"))
    ran = run(capsys, "diff", path, "--set-against", "whitespace=trim")
    assert "r  match_missing | selected  scored nobody | c2" in ran.out
    assert "B: returned_history whitespace=trim" in ran.out
    assert "1 of 1 rollout differ" in ran.out
    told = run(capsys, "diff", path, "--set-against", "whitespace=trim", "--json").json
    assert told["rollouts"][0]["codes"] == ["match_missing", None]
    assert told["rollouts"][0]["outcomes"] == ["rejected", "selected"]
    assert told["rollouts"][0]["terminals"] == [None, "c2"]


def test_no_difference(captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal policies have nothing to show but the counts, unless all is asked for."""
    arguments = ("--set-against", "reasoning=required")
    ran = run(capsys, "diff", captures, *arguments)
    assert ran.out.startswith("A: returned_history\n")
    assert "0 of 2 rollouts differ" in ran.out
    assert ran.err == ""
    assert "a  selected | selected\n" in run(capsys, "diff", captures, *arguments, "--all").out
    assert len(run(capsys, "diff", captures, *arguments, "--all", "--json").json["rollouts"]) == 2
    assert run(capsys, "diff", captures, *arguments, "--json").json["rollouts"] == []


def test_attempts_and_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A restarted rollout is named with its attempt, and so is the next command."""
    calls = [{**line, "attempt": 1} for line in story()]
    path = write_story(
        tmp_path, [*calls, {"kind": "result", "rollout_id": "r", "attempt": 1, "result": returned("one")}]
    )
    ran = run(capsys, "diff", path, "--against", "all_captured", "--train-model", "m", "--attempt", "1")
    assert "r attempt 1  " in ran.out
    if ran.err:
        assert "--rollout r --attempt 1" in ran.err
