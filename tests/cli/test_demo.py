from __future__ import annotations

from pathlib import Path

import pytest

import gristmill.cli.explain
import gristmill.cli.verify
from gristmill.demo import recordings
from gristmill.errors import Code
from gristmill.reconstruction import Finding
from tests.cli.stories import run


def test_the_demo_works_twice_in_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the first command anybody runs, and the second."""
    monkeypatch.chdir(tmp_path)
    first, second = run(capsys, "demo"), run(capsys, "demo")
    assert first.code == second.code == 0
    assert first.out == second.out
    for told in (
        "1 import",
        "2 select",
        "3 diff",
        "4 explain",
        "5 export",
        "6 verify",
        "nothing found",
        "retry_superseded",
        "Call c06 of",
    ):
        assert told in first.out
    assert "captured 24 calls 1,064 tokens → usable" in first.out
    assert "trained 19 calls 844 tokens" in first.out
    folder = tmp_path / "gristmill-demo"
    kept = {"README.md", "captures", "rows", "run.gristmill"}
    assert {entry.name for entry in folder.iterdir() if not entry.name.startswith("run.gristmill")} | {
        "run.gristmill"
    } == kept
    assert "B only                 5     220" in first.out
    assert "next: gristmill show gristmill-demo/run.gristmill mend-the-mill" in first.err
    for captures in ("captures", "run.gristmill"):
        assert run(capsys, "verify", f"gristmill-demo/{captures}", "gristmill-demo/rows").code == 0
    assert (folder / "rows" / "rows-00000.parquet").is_file()


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The documented keys."""
    ran = run(capsys, "demo", "--json", "--out", tmp_path / "d")
    assert set(ran.json) == {
        *("folder", "ledger", "imported", "selected", "diff", "explained", "manifest", "losses", "findings", "funnel")
    }
    assert ran.json["diff"]["calls"]["only_b"] == [5, 220]
    assert ran.json["manifest"]["funnel"] == ran.json["funnel"]
    assert ran.json["explained"]["code"] == "retry_superseded"
    assert ran.json["findings"] == []
    assert [one["rollout_id"] for one in ran.json["selected"]] == sorted(entry.name for entry in recordings().iterdir())


def test_foreign_files_are_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that the demo did not make is somebody's work."""
    (tmp_path / "captures").mkdir()
    (tmp_path / "README.md").write_text("# Mine\n")
    ran = run(capsys, "demo", "--out", tmp_path, "--json")
    assert (ran.code, ran.json["error"]["code"]) == (3, "output_exists")
    (tmp_path / "README.md").unlink()
    assert run(capsys, "demo", "--out", tmp_path).code == 3
    assert (tmp_path / "captures").is_dir()


def test_a_finding_fails_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken installation must not show a happy demo."""
    monkeypatch.setattr(gristmill.cli.verify, "findings", lambda *_: iter([Finding(Code.ROW_MISSING, "row=x", "gone")]))
    ran = run(capsys, "demo", "--out", tmp_path / "d")
    assert ran.code == 1
    assert "row_missing at row=x: gone" in ran.out


def test_recordings_that_are_not_the_demos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package without its recordings is a bug of ours, and says so."""
    monkeypatch.setattr(gristmill.cli.explain, "explain_one", lambda *_: None)
    ran = run(capsys, "demo", "--out", tmp_path / "d", "--json")
    assert (ran.code, ran.json["error"]["code"]) == (3, "internal")
