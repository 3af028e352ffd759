from __future__ import annotations

import json
from pathlib import Path

import pytest

from gristmill.export import decode_row
from tests.cli.stories import TWO_TURNS, good_story, refused_story, returned, run, story, write_story


def test_a_folder_holds_rows_refusals_and_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder is what a trainer reads, and what verify proves."""
    good_story(tmp_path / "in" / "a", "a")
    refused_story(tmp_path / "in" / "b", "b")
    out = tmp_path / "out"
    ran = run(capsys, "rows", tmp_path / "in", "--out", out)
    assert ran.code == 0
    assert "trained 2 calls 4 tokens" in ran.out
    assert "rejected: 1 match_missing" in ran.out
    assert ran.err == f"next: gristmill verify {tmp_path / 'in'} {out}\n"
    assert sorted(entry.name for entry in out.iterdir()) == ["manifest.json", "rejected.jsonl", "rows.jsonl"]
    [line] = (out / "rows.jsonl").read_bytes().splitlines()
    row = decode_row(line, "line 1")
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1, 1]
    assert json.loads((out / "rejected.jsonl").read_text())["code"] == "match_missing"


def test_json_holds_the_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Programs read the counts from here."""
    out = tmp_path / "out"
    ran = run(capsys, "rows", good_story(tmp_path / "s"), "--out", out, "--json", "--mode", "per_call")
    assert ran.json == {"folder": str(out), "manifest": json.loads((out / "manifest.json").read_text())}
    assert ran.json["manifest"]["mode"] == "per_call"
    assert ran.json["manifest"]["files"][1]["rows"] == 2


@pytest.mark.parametrize(("mode", "rows"), [("merged", 1), ("per_call", 2), ("tree", 1)])
def test_rows_go_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, rows: int) -> None:
    """`gristmill rows … | consumer` must see rows and nothing else."""
    good_story(tmp_path / "a", "a")
    refused_story(tmp_path / "b", "b")
    ran = run(capsys, "rows", tmp_path, "--mode", mode)
    assert ran.code == 0
    assert [line["rollout_id"] for line in ran.lines] == ["a"] * rows
    assert "rejected: b: match_missing at $.response.output[3]" in ran.err
    assert "rows: captured 6 calls" in ran.err
    document = run(capsys, "rows", tmp_path, "--mode", mode, "--json")
    assert set(document.json) == {"rows", "rejected", "funnel", "forks", "bad_lines"}
    assert document.json["rows"] == ran.lines
    assert document.json["rejected"][0]["code"] == "match_missing"
    assert document.err == ""


def test_nothing_but_refusals_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that trains nothing must not look like a success."""
    path = refused_story(tmp_path / "s")
    assert run(capsys, "rows", path).code == 1
    assert run(capsys, "rows", path, "--out", tmp_path / "out").code == 1
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == b""


def test_what_is_there_is_replaced_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of an earlier run must not vanish, nor mix with new ones."""
    path, out = good_story(tmp_path / "s"), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    refused = run(capsys, "rows", path, "--out", out, "--json")
    assert refused.code == 3
    assert refused.json["error"]["code"] == "output_exists"
    assert "--overwrite" in refused.json["error"]["hint"]
    assert run(capsys, "rows", path, "--out", out, "--overwrite").code == 0
    assert (out / "notes.txt").read_text() == "mine"
    before = (out / "manifest.json").read_bytes()
    assert run(capsys, "rows", path, "--out", out, "--overwrite").code == 0
    assert (out / "manifest.json").read_bytes() == before
    lonely = run(capsys, "rows", path, "--overwrite")
    assert (lonely.code, lonely.err.splitlines()[0]) == (2, "error: --overwrite needs --out")


def test_an_error_on_the_way_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half a folder of rows would be trained as a whole one."""
    good_story(tmp_path / "in" / "a", "a")
    write_story(tmp_path / "in" / "b").joinpath("capture.jsonl").write_text("{broken\n")
    ran = run(capsys, "rows", tmp_path / "in", "--out", tmp_path / "out")
    assert ran.code == 1
    assert not (tmp_path / "out").exists()
    printed = run(capsys, "rows", tmp_path / "in", "--json")
    assert set(printed.json) == {"error"}


def test_an_unwritable_place_is_an_error_of_the_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A full or read-only disk must be told apart from bad data."""
    (tmp_path / "file").write_text("")
    ran = run(capsys, "rows", good_story(tmp_path / "s"), "--out", tmp_path / "file" / "out", "--json")
    assert ran.code == 3
    assert ran.json["error"]["code"] == "file_unreadable"


def test_rows_that_are_not_ascii_stay_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed rows are escaped for the terminal, and must read back as they were."""
    name = "r\x7f\u202e\U0001f642"
    calls = [{**line, "rollout_id": name} for line in story()]
    path = write_story(tmp_path / "s", calls, returned(*TWO_TURNS))
    ran = run(capsys, "rows", path)
    assert ran.out.isascii()
    assert "\x7f" not in ran.out
    assert ran.lines[0]["rollout_id"] == name
    run(capsys, "rows", path, "--out", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "rows.jsonl").read_text()) == ran.lines[0]
