from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.cli.app import COMMANDS, COMPLETION_VARIABLE
from gristmill.demo import recordings
from gristmill.export.formats import FORMATS
from tests.cli.stories import good_story, refused_story, run
from tests.cli.test_command_line import PROGRAM


@pytest.fixture
def captures(tmp_path: Path) -> Path:
    good_story(tmp_path / "in" / "a", "a")
    shutil.copytree(str(recordings() / "cut-short"), tmp_path / "in" / "c")
    refused_story(tmp_path / "in" / "b", "b")
    return tmp_path / "in"


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format(captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """What is lost on the way is told, and what was written can be verified."""
    out = tmp_path / "out"
    # Some trainers take nothing without an advantage; conversations have no place for one.
    asked = ("--to", name, "--out", out, *(() if name == "messages" else ("--advantage", "group_mean")))
    ran = run(capsys, "export", captures, *asked)
    assert ran.code == 0
    assert str(out) in ran.out
    assert f"loss report: {name}: " in ran.out
    assert "1 match_missing" in ran.out
    assert ran.err == f"next: gristmill verify {captures} {out}\n"
    assert run(capsys, "verify", captures, out).code == 0
    again = run(capsys, "export", captures, *asked, "--json")
    assert (again.code, again.json["error"]["code"]) == (3, "output_exists")
    told = run(capsys, "export", captures, *asked, "--overwrite", "--json").json
    assert set(told) == {"folder", "format", "manifest", "losses", "bad_lines"}
    assert told["manifest"] == json.loads((out / "manifest.json").read_text())
    assert (told["format"], bool(told["losses"])) == (name, True)


def test_nothing_selected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipeline must stop at an export that trains nothing."""
    assert run(capsys, "export", refused_story(tmp_path / "in"), "--out", tmp_path / "out").code == 1


# ---- completion --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    """The script asks this program by the variable that this program looks at."""
    ran = run(capsys, "completion", shell)
    assert ran.code == 0
    assert f"{COMPLETION_VARIABLE}={shell}_complete" in ran.out
    assert "gristmill" in ran.out


def complete(words: str, at: int) -> list[str]:
    """Ask as bash does."""
    environment = {"COMP_WORDS": words, "COMP_CWORD": str(at), COMPLETION_VARIABLE: "bash_complete"}
    done = subprocess.run(
        PROGRAM, capture_output=True, text=True, check=True, env={**environment, "PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_a_shell_asks() -> None:
    """Commands, sub-commands, codes and formats are what nobody remembers."""
    assert complete("gristmill ", 1) == list(COMMANDS)
    assert complete("gristmill dr", 1) == ["drift"]
    assert complete("gristmill ledger m", 2) == ["migrate"]
    assert complete("gristmill ls --code retr", 3) == ["retry_superseded"]
    assert complete("gristmill export --to pa", 3) == ["parquet"]
    assert "--no-verdicts" in complete("gristmill ls --no", 2)


def test_completion_in_this_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown question is no answer, and no traceback."""
    for words, at, told in (
        ("gristmill ex", "1", "plain,explain\nplain,export\n"),
        ("gristmill ls --code lo", "3", None),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", at)
        monkeypatch.setenv(COMPLETION_VARIABLE, "bash_complete")
        ran = run(capsys)
        assert ran.code == 0
        assert told is None or ran.out == told
    monkeypatch.setenv("COMP_WORDS", "gristmill export --to j")
    assert run(capsys).out == "plain,jsonl\n"
    monkeypatch.setenv(COMPLETION_VARIABLE, "nonsense")
    assert run(capsys).code == 1
