from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gristmill.conformance
from tests.cli.stories import Json, returned, run, said


def case(name: str = "k", **changes: Any) -> Json:
    """A case of two calls, both returned."""
    records = [
        {"model_call_id": one, "response_id": f"r{one}", "output_items": [said(one)], "response_status": "completed"}
        for one in ("a", "b")
    ]
    given = {"kind": "select", "policy": "returned_history", "records": records, "result": returned("a", "b")}
    expected = {"outcome": "select", "calls": ["a", "b"], "terminal": "rb"}
    return {"id": name, "input": {**given, **changes}, "expected": expected}


def write(path: Path, *cases: Any) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in cases))
    return path


def test_one_line_a_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other implementations are compared by these lines."""
    path = write(tmp_path / "c.jsonl", case("one"), "", case("two", kind="gateway"), case("three", kind="new"))
    ran = run(capsys, "cases", path)
    assert ran.code == 0
    assert [(line["id"], line["outcome"]) for line in ran.lines] == [
        ("one", "select"),
        ("two", "unsupported"),
        ("three", "unsupported"),
    ]
    assert "ok" not in ran.lines[0]
    assert ran.err == "3 cases, 2 unsupported\n"


def test_differences_are_told_and_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong selection that passes the check is what the check exists to prevent."""
    right = write(tmp_path / "right.jsonl", case("one"), case("two", kind="gateway"))
    assert run(capsys, "cases", right, "--check").code == 0
    wrong = case("wrong")
    wrong["expected"]["calls"] = ["b"]
    ran = run(capsys, "cases", right, write(tmp_path / "wrong.jsonl", wrong), "--check")
    assert ran.code == 1
    assert [line["ok"] for line in ran.lines] == [True, True, False]
    assert ran.lines[2]["problems"] == ["expected calls ['b'], got ['a', 'b']"]
    assert ran.err == "3 cases, 2 as expected, 1 not, 1 unsupported\n"


def test_cases_that_cannot_be_run_do_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One broken line must not hide two thousand answers."""
    path = write(tmp_path / "c.jsonl", "{broken", case("p", policy="nobody"), case("one"))
    ran = run(capsys, "cases", path, "--check")
    assert ran.code == 1
    assert [line["outcome"] for line in ran.lines] == ["error", "error", "select"]
    assert ran.lines[0]["id"] == f"{path} line 1"
    assert ran.lines[1]["code"] == "policy_unknown"
    assert "2 could not be run" in ran.err

    def broken(_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(gristmill.conformance, "run_case", broken)
    ran = run(capsys, "cases", path)
    assert ran.code == 1
    assert ran.lines[2] == {"id": "one", "outcome": "error", "code": "internal", "message": "RuntimeError: a bug"}


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong path must not count as no differences."""
    ran = run(capsys, "cases", tmp_path / "none.jsonl", "--json")
    assert ran.code == 3
    assert ran.json["error"]["code"] == "file_unreadable"
    assert ran.json["error"]["where"] == str(tmp_path / "none.jsonl")
