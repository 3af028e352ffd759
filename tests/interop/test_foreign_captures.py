"""Captures of other programs on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.cli import main
from gristmill.ledger import SqliteReader
from tests.cli.stories import run
from tests.interop.foreign_files import (
    FORMATS,
    Format,
    Json,
    detail,
    job,
    lines,
    pair,
    step,
    trace,
    trajectory,
    trial,
    written,
)

EVERY = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)


def attempts(ledger: Path) -> list[str]:
    with SqliteReader(ledger) as store:
        return [key.rollout_id for key in store.attempts()]


@EVERY
def test_into_a_ledger_and_out_as_rows(form: Format, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files and the ledger that they were imported into give the same rows, the second import nothing new."""
    path = form.write(tmp_path / "in" / form.file, {})
    into = tmp_path / "run.gristmill"
    named = ("--from", form.name, "--completed")
    first = run(capsys, "import", path, *named, "--into", into, "--json")
    assert first.code == 0
    assert (first.json["added"], first.json["calls"], first.json["sampled_tokens"]) == (1, 3, 6)
    assert set(first.json["losses"]) == {form.name}
    assert run(capsys, "import", path, *named, "--into", into, "--json").json["unchanged"] == 1
    policy = ("--policy", "all_captured" if form.name in {"atif", "harbor"} else "final_context")
    filed, stored = run(capsys, "rows", path, *named, *policy), run(capsys, "rows", into, *policy)
    assert filed.code == stored.code == 0
    assert filed.lines == stored.lines
    [row] = filed.lines
    assert row["token_ids"] == [1, 2, 3, 10, 11, 4, 12, 5, 13, 14, 15]
    assert row["loss_mask"] == [0, 0, 0, 1, 1, 0, 1, 0, 1, 1, 1]


@EVERY
def test_a_bad_file_imports_nothing(form: Format, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half an import is worse than none: the ledger is not even made."""
    path = form.write(tmp_path / form.file, {})
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 30])
    into = tmp_path / "run.gristmill"
    ran = run(capsys, "import", path, "--from", form.name, "--into", into)
    assert ran.code == 1
    assert f"cannot read {path}" in ran.err
    assert not into.exists()


def test_all_bad_lines_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Correcting a log line by line, import by import, takes a day."""
    path = lines(tmp_path / "log.jsonl", [pair(0), {**pair(1), "reward": "x"}, pair(1)])
    path.write_text(path.read_text() + "{\n")
    into = tmp_path / "run.gristmill"
    told = ("import", path, "--from", "request-response", "--into", into)
    ran = run(capsys, *told)
    assert (ran.code, into.exists()) == (1, False)
    assert f"cannot read {path} line 2 $.reward" in ran.err
    assert f"cannot read {path} line 4" in ran.err
    ran = run(capsys, *told, "--skip-bad", "--json")
    assert [line["where"].split(" line ")[1] for line in ran.json["bad_lines"]] == ["4", "2 $.reward"]
    assert (ran.json["calls"], ran.json["lost"]) == (2, 2)


def test_what_a_file_is_needs_no_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that says what it is is read as that, beside captures of ours."""
    written(tmp_path / "atif" / "t.json", trajectory(trajectory_id="counted"))
    lines(tmp_path / "rllm" / "traces.jsonl", [trace(0)])
    lines(tmp_path / "log.jsonl", [pair(0)])
    folder = job(tmp_path / "job", trial())
    own = Path("tests/corpus")
    story = sorted(path.parent for path in own.glob("*/capture.jsonl"))[0]
    into = tmp_path / "run.gristmill"
    paths = (tmp_path / "atif" / "t.json", tmp_path / "rllm", tmp_path / "log.jsonl", folder, story)
    ran = run(capsys, "import", *paths, "--into", into)
    assert ran.code == 0
    assert {"counted", "task-7:0", "s", "count-names__a1"} < set(attempts(into))


def test_calls_that_nobody_says_the_end_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a finish reason a cut reply looks like a whole one: only a person may say otherwise."""
    path = written(tmp_path / "t.json", trajectory())
    ran = run(capsys, "rows", path)
    assert (ran.code, "completion_unknown" in ran.err) == (1, True)
    assert run(capsys, "rows", path, "--completed").code == 0


def test_policies_on_a_trajectory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The transcript is what was handed back: it holds the main agent's calls and not its helper's."""
    helper = trajectory([step(1, 2)], trajectory_id="helper")
    reference = {"subagent_trajectory_ref": [{"trajectory_id": "helper"}]}
    observed = {"step_id": 2, "source": "system", "message": "", "observation": {"results": [reference]}}
    value = trajectory([step(1, 0), observed, step(3, 1)], subagent_trajectories=[helper])
    path = written(tmp_path / "t.json", value)

    def selected(policy: str) -> list[str]:
        ran = run(capsys, "select", path, "--completed", "--policy", policy, "--json")
        return [call["model_call_id"] for call in ran.json["rollouts"][0]["verdicts"] if call["included"]]

    assert selected("returned_history") == ["step-1", "step-3"]
    assert selected("final_context") == ["step-1", "step-3"]
    assert selected("all_captured") == ["step-1", "helper/step-1", "step-3"]


def test_policies_on_a_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The main history is what was handed back; summaries and helpers stand beside it."""
    value = trial(agent_result={"rollout_details": [detail((0, 1)), detail((2,))]})
    written(tmp_path / "result.json", value)

    def selected(policy: str) -> list[str]:
        ran = run(capsys, "select", tmp_path, "--completed", "--policy", policy, "--json")
        return [call["model_call_id"] for call in ran.json["rollouts"][0]["verdicts"] if call["included"]]

    assert selected("returned_history") == ["0.0", "0.1"]
    assert selected("all_captured") == ["0.0", "0.1", "1.0"]


def test_a_prompt_with_a_picture_makes_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its ids alone are another prompt than the one that the model saw."""
    picture = {"type": "image", "source": {"media_type": "image/png", "path": "1.png"}}
    asking: Json = {"step_id": 1, "source": "user", "message": [picture]}
    path = written(tmp_path / "t.json", trajectory([asking, step(2, 0)]))
    ran = run(capsys, "rows", path, "--completed")
    assert (ran.code, "media_missing" in ran.err) == (1, True)


def test_filters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands narrow down foreign captures as they do ours, and say what is not there."""
    folder = job(tmp_path / "job", trial("a"), trial("b", task_name="other"))
    for options in (("--rollout", "b"), ("--group", "other")):
        found = run(capsys, "ls", folder, *options, "--json").json["rollouts"]
        assert [line["rollout_id"] for line in found] == ["b"]
    ran = run(capsys, "ls", folder, "--rollout", "aa")
    assert (ran.code, "no rollout 'aa'" in ran.err) == (2, True)
    ran = run(capsys, "select", folder, "--rollout", "b", "--completed", "--from", "harbor", "--skip-bad")
    assert "--from harbor --completed --skip-bad" in ran.err


def test_one_attempt_in_two_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing says which of them is the right one."""
    folder = tmp_path / "sessions"
    lines(folder / "a.jsonl", [trace(0)])
    lines(folder / "b.jsonl", [trace(1)])
    ran = run(capsys, "ls", folder, "--from", "rllm")
    assert ran.code == 2
    assert "expected each attempt in one place" in ran.err


def test_a_result_beside_a_foreign_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its format says where results stand; a second one could contradict it."""
    path = lines(tmp_path / "log.jsonl", [pair(0)])
    ran = run(capsys, "select", path, "--result", written(tmp_path / "r.json", {}))
    assert (ran.code, "a capture of another program" in ran.err) == (2, True)


def test_a_format_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped name is answered with the right one."""
    ran = run(capsys, "import", tmp_path, "--from", "harbour", "--into", tmp_path / "x.gristmill")
    assert (ran.code, "no format 'harbour'. Did you mean 'harbor'?" in ran.err) == (2, True)


def test_a_shell_completes_formats(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody remembers the names."""
    for name, value in {"COMP_WORDS": "gristmill import --from r", "COMP_CWORD": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_GRISTMILL_COMPLETE", "bash_complete")
    with pytest.raises(SystemExit):
        raise SystemExit(main([]))
    assert [line.partition(",")[2] for line in capsys.readouterr().out.splitlines()] == ["request-response", "rllm"]
