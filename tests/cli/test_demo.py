from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import gristmill.cli.explain
import gristmill.cli.verify
from gristmill.demo import recordings
from gristmill.errors import Code
from gristmill.ledger import AttemptKey, SqliteReader
from gristmill.reconstruction import Finding
from gristmill.records import Delivery
from tests.cli.stories import run

_ids = re.compile(r"\b[0-9a-f]{20}\b")


def test_the_demo_works_twice_in_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the first command anybody runs, and the second."""
    monkeypatch.chdir(tmp_path)
    first, second = run(capsys, "demo"), run(capsys, "demo")
    assert first.code == second.code == 0
    # The gateway makes new ids for its calls every time; all else is the same.
    assert _ids.sub("ID", first.out) == _ids.sub("ID", second.out)
    for told in (
        "1 capture",
        "2 import",
        "3 select",
        "4 diff",
        "5 explain",
        "6 export",
        "7 verify",
        "nothing found",
        "retry_superseded",
        "live-mill  11 calls, 437 sampled tokens, reward 1",
        "has no usable tokens (stream_truncated)",
    ):
        assert told in first.out
    assert "captured 35 calls 1,501 tokens → usable 34 calls" in first.out
    assert "trained 26 calls 1,186" in first.out
    folder = tmp_path / "gristmill-demo"
    kept = {"README.md", "captures", "mill", "rows", "run.gristmill"}
    assert {entry.name for entry in folder.iterdir() if not entry.name.startswith("run.gristmill")} | {
        "run.gristmill"
    } == kept
    assert "B only                 8     307" in first.out
    assert "next: gristmill show gristmill-demo/run.gristmill live-mill" in first.err
    assert run(capsys, "verify", "gristmill-demo/run.gristmill", "gristmill-demo/rows").code == 0
    assert (folder / "rows" / "rows-00000.parquet").is_file()


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The documented keys."""
    ran = run(capsys, "demo", "--json", "--out", tmp_path / "d")
    assert set(ran.json) == {
        *(
            "folder",
            "ledger",
            "captured",
            "imported",
            "selected",
            "diff",
            "explained",
            "manifest",
            "losses",
            "findings",
            "funnel",
        )
    }
    assert ran.json["captured"] == {"rollout_id": "live-mill", "calls": 11, "sampled_tokens": 437, "reward": 1.0}
    assert ran.json["diff"]["calls"]["only_b"] == [8, 307]
    assert ran.json["manifest"]["funnel"] == ran.json["funnel"]
    assert ran.json["explained"]["code"] == "retry_superseded"
    assert ran.json["findings"] == []
    recorded = {entry.name for entry in recordings().iterdir()}
    assert {one["rollout_id"] for one in ran.json["selected"]} == {"live-mill", *recorded}


def test_the_agent_is_captured_like_any_harness(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A retry, a helper, a summary and a title call are what real harnesses bring; each must be told apart."""
    assert run(capsys, "demo", "--out", tmp_path / "d").code == 0
    with SqliteReader(tmp_path / "d" / "run.gristmill") as ledger:
        capture, result = ledger.read(AttemptKey("live-mill"))
    assert result is not None
    assert result.reward == 1.0
    assert (tmp_path / "d" / "mill" / "mill" / "stones.py").read_text() == "GAP = 2\n"
    labels = Counter(str(record.purpose.label) for record in capture.records)
    assert labels == {"agent": 7, "subagent": 2, "auxiliary": 1, "compaction": 1}
    [broken] = [record for record in capture.records if not record.usable]
    [again] = [record for record in capture.records if record.retry_of is not None]
    assert (broken.unusable_reason, again.retry_of) == (Code.STREAM_TRUNCATED, broken.model_call_id)
    assert all(record.delivery is Delivery.DELIVERED for record in capture.records if record is not broken)


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
