"""What a first user runs into: what is unusable is said, and hints lead on."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.cli.stories import TWO_TURNS, Ran, call, good_story, returned, run, story, write_story
from tests.docs.pages import ROOT


def unusable(folder: Path) -> Path:
    calls = story()
    del calls[2]["prompt_token_ids"], calls[2]["generation_token_ids"], calls[2]["generation_log_probs"]
    return write_story(folder, calls, returned(*TWO_TURNS))


def next_of(ran: Ran) -> list[str]:
    [line] = [line for line in ran.err.splitlines() if line.startswith("next: gristmill ")]
    return shlex.split(line)[2:]


def test_calls_without_usable_tokens_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A selection that looks whole, and rows that refuse it, leave a user with no way to see why."""
    path = unusable(tmp_path)
    ran = run(capsys, "select", path)
    line = next(line for line in ran.out.splitlines() if " c2 " in line)
    assert "  –  $.response.output[3] · no rows: token_ids_missing" in line
    told = run(capsys, "explain", path, "c2").out
    assert "No row can be made of it: token_ids_missing" in told
    assert "No row" not in run(capsys, "explain", path, "c1").out
    verdicts = run(capsys, "select", path, "--json").json["rollouts"][0]["verdicts"]
    assert [verdict.get("unusable_reason") for verdict in verdicts] == [None, None, "token_ids_missing"]
    assert run(capsys, "explain", path, "c2", "--json").json["unusable_reason"] == "token_ids_missing"
    assert "unusable_reason" not in run(capsys, "explain", path, "c1", "--json").json


@pytest.mark.parametrize("made", ["rows", "export"])
def test_the_next_command_repeats_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str], made: str) -> None:
    """A hint that leaves out a filter or the policy checks something else than what was made."""
    calls = [{**line, "rollout_id": name, "attempt": 1} for name in ("a", "b") for line in story()]
    calls += [{"kind": "result", "rollout_id": "a", "attempt": 1, "result": returned("one", "other")}]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in calls))
    given = ("--rollout", "a", "--attempt", "1", "--skip-bad", "--policy", "all_captured", "--train-model", "m")
    ran = run(capsys, made, path, "--out", tmp_path / "out", *given)
    command = next_of(ran)
    assert command[:3] == ["verify", str(path), str(tmp_path / "out")]
    assert command[3:] == list(given)
    followed = run(capsys, *command)
    assert followed.code == 0, followed
    selected = run(capsys, "select", path, *given)
    assert run(capsys, *next_of(selected)).code == 0
    assert {"--rollout", "--attempt", "--skip-bad", "--train-model"} <= set(next_of(selected))
    assert "--skip-bad" in next_of(run(capsys, "ls", path, *given))
    assert next_of(run(capsys, "verify", path, *given))[-9:] == list(given)[-9:]


def test_attempts_with_the_same_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`explain` refuses a call id of several attempts: the hint must name one."""
    path = tmp_path / "run.jsonl"
    lines = [{**line, "attempt": number} for number in (0, 1) for line in story()]
    lines += [
        {"kind": "result", "rollout_id": "r", "attempt": number, "result": returned(*TWO_TURNS)} for number in (0, 1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = next_of(run(capsys, "select", path))
    assert command[-2:] == ["--attempt", "0"]
    assert run(capsys, *command).code == 0


def test_long_request_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sixty lines of ids hide what a reader looks for."""
    request = {
        "messages": [{"role": "user", "content": "hi"}],
        "ids": list(range(540)),
        "stop": ["a", "b"],
        "nested": {"text": "x" * 300, "mixed": [1, "a"] * 8, "names": ["n"] * 9, "biases": [0.5] * 9},
    }
    path = write_story(tmp_path, [call("c1", "one", [1], [2], request=request)], returned("one"))
    [line] = [line for line in run(capsys, "show", path, "--call", "c1").out.splitlines() if "parameters:" in line]
    assert "[540 integers]" in line
    assert re.search(r"x{200}(…|\\u2026) \(300 characters\)", line)
    assert all(told in line for told in ("[16 values]", "[9 strings]", "[9 numbers]", '"stop"'))
    assert run(capsys, "show", path, "--call", "c1", "--json").json["request"]["parameters"]["ids"] == request["ids"]


def test_columns_at_80(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out is chosen; the verdict and what forks cost are never cut."""
    good_story(tmp_path / "a", "a-rollout-with-a-long-id")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    ran = run(capsys, "ls", tmp_path)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", ran.out).splitlines()
    assert plain[0].split() == ["rollout", "state", "verdict", "reward", "calls", "lost", "tokens", "rows"]
    assert "…" not in plain[1]
    assert "too narrow for attempt, group, models, time" in ran.err
    drift = re.sub(r"\x1b\[[0-9;]*m", "", run(capsys, "drift", tmp_path, "--all").out).splitlines()
    assert "paid again" in drift[0]


def test_commands_are_not_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command with a line end in it cannot be pasted."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    ran = run(capsys, "rows", good_story(tmp_path / ("long" * 30)), "--out", tmp_path / "out")
    err = re.sub(r"\x1b\[[0-9;]*m", "", ran.err)
    assert f"next: gristmill verify {tmp_path / ('long' * 30)} {tmp_path / 'out'}\n" in err
    assert f"{tmp_path / 'out' / 'rows.jsonl'}  1 line  " in ran.out


def test_rows_given_as_captures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The arguments of verify are easily given the wrong way round."""
    path, rows = good_story(tmp_path / "a"), tmp_path / "rows"
    run(capsys, "rows", path, "--out", rows)
    for given in (("verify", rows, path), ("verify", rows), ("select", rows)):
        ran = run(capsys, *given)
        assert ran.code == 1
        assert "hint: this is an export folder; name the captures first" in ran.err


def test_a_lock_file_and_a_ledger_into_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both stand beside what was meant."""
    ledger = tmp_path / "run.gristmill"
    run(capsys, "import", good_story(tmp_path / "a"), "--into", ledger)
    lock = tmp_path / "run.gristmill.lock"
    lock.touch()
    assert f"hint: name the ledger: {ledger}" in run(capsys, "ls", lock).err
    ran = run(capsys, "import", ledger, "--into", ledger)
    assert (ran.code, "which is what is imported" in ran.err) == (2, True)
    lines = tmp_path / "a" / "capture.jsonl"
    assert run(capsys, "import", lines, "--into", lines).code == 2


@pytest.mark.parametrize("made", ["rows", "export"])
def test_a_file_where_a_folder_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str], made: str) -> None:
    """`--overwrite` is about folders."""
    (tmp_path / "out").write_text("mine")
    ran = run(capsys, made, good_story(tmp_path / "a"), "--out", tmp_path / "out", "--overwrite")
    assert ran.code == 3
    assert "out is a file" in ran.err
    assert (tmp_path / "out").read_text() == "mine"


def test_lines_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The way past a bad line is an option that has to be known."""
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(story()[0]) + "\n{broken\n")
    assert "hint: --skip-bad passes over bad lines" in run(capsys, "select", path).err
    path.write_text(json.dumps(story()[0]) + '\n{"kind": "result", "rollout_id": "r"}\n')
    ran = run(capsys, "select", path)
    assert "a line of kind result without it" in ran.err
    assert "hint: what the harness handed back goes under it" in ran.err


def test_a_refused_import_keeps_what_was_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only a ledger that the refused command made itself is removed."""
    ledger, path = tmp_path / "run.gristmill", tmp_path / "bad.jsonl"
    path.write_text("{broken\n")
    assert run(capsys, "import", path, "--into", ledger).code == 1
    assert list(tmp_path.iterdir()) == [path]
    run(capsys, "import", good_story(tmp_path / "a"), "--into", ledger)
    assert run(capsys, "import", path, "--into", ledger).code == 1
    assert run(capsys, "ls", ledger, "--json").json["totals"]["calls"] == 3


def policy(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(folder))
    (folder / f"{name}.py").write_text(text)
    return name


def test_policies_with_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes a policy needs the place of the mistake."""
    path = good_story(tmp_path / "a")
    text = (
        "def keep_all(records, result):\n    return list(records)\n"
        "def broken(records, result):\n    return helper(result)\n"
        "def helper(result):\n    return result['nothing']\n"
        "def options(records, result, *, reasoning='strict'):\n    return records, None\n"
    )
    name = policy(tmp_path, "hinted_policy", text, monkeypatch)
    missing = run(capsys, "select", path, "--policy", f"{name}:keep_al")
    assert "hinted_policy was imported, it has no keep_al; did you mean 'keep_all'?" in missing.err
    bare = run(capsys, "select", path, "--policy", f"{name}:keep_all")
    assert "it returned list, expected a pair (records, response id)" in bare.out
    raised = run(capsys, "select", path, "--policy", f"{name}:broken")
    assert f"{tmp_path / 'hinted_policy.py'}:6; GRISTMILL_DEBUG=1 shows the traceback" in raised.err
    assert "Traceback" not in raised.err
    monkeypatch.setenv("GRISTMILL_DEBUG", "1")
    assert "in helper" in run(capsys, "select", path, "--policy", f"{name}:broken").err
    monkeypatch.delenv("GRISTMILL_DEBUG")
    for chosen in ("returned_history", f"{name}:options"):
        option = run(capsys, "select", path, "--policy", chosen, "--set", "reasonin=optional")
        assert option.code == 2
        assert "hint: did you mean reasoning?" in option.err
        assert "__init__" not in option.err
    late = policy(tmp_path, "hinted_late", "x = 1\nraise KeyError('late')\n", monkeypatch)
    assert f"{tmp_path / 'hinted_late.py'}:2)" in run(capsys, "select", path, "--policy", f"{late}:x").err


def test_the_sample_of_the_format_selects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is what a reader pastes first."""
    page = (ROOT / "docs/reference/capture-format.md").read_text()
    path = tmp_path / "mine.jsonl"
    path.write_text(page.partition("```json\n")[2].partition("```")[0])
    told = run(capsys, "rows", path, "--json").json
    assert (len(told["rows"]), told["rejected"]) == (1, [])
    assert "1 rollout: 1 selected" in run(capsys, "select", path).out
    assert "captured 1 call 2 tokens" in run(capsys, "select", path).out


def test_the_demo_can_be_followed_where_it_is_not_on_the_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make demo` starts it from an environment that is not active."""
    started = tmp_path / ".venv" / "bin" / "gristmill"
    started.parent.mkdir(parents=True)
    started.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(started)])
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "next: .venv/bin/gristmill show gristmill-demo/run.gristmill" in run(capsys, "demo").err
    monkeypatch.setattr("sys.argv", ["/elsewhere/pytest"])
    assert "next: gristmill show " in run(capsys, "demo").err
