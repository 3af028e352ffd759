from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.errors import Code
from tests.cli.stories import TWO_TURNS, call, good_story, refused_story, returned, run, story, write_story


def test_a_table_shows_every_call_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a row for the retry, its exclusion would go unseen."""
    ran = run(capsys, "select", good_story(tmp_path))
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == "r  returned_history  2 of 3 calls"
    assert lines[2].split() == ["●", "c1", "content", "2", "$.response.output[1]"]
    assert lines[3].split()[:4] == ["○", "x1", "c1", "retry_superseded"]
    assert lines[4].startswith("★  c2  ")
    assert "1 rollout: 1 selected, 0 rejected" in lines
    assert "captured 3 calls 5 tokens → usable 3 calls 5 tokens → selected 2 calls 4 tokens" in lines
    assert ran.err.startswith("next: gristmill explain ")
    assert not any(line != line.rstrip() for line in lines)


def test_json_holds_the_documented_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Programs read these keys: a missing one breaks them."""
    ran = run(capsys, "select", good_story(tmp_path), "--json")
    assert ran.code == 0
    assert ran.err == ""
    [rollout] = ran.json["rollouts"]
    assert rollout["outcome"] == "selected"
    assert rollout["calls"] == ["c1", "c2"]
    assert rollout["terminal_call_id"] == "c2"
    assert rollout["terminal_response_id"] == "resp-c2"
    assert set(rollout) == {
        *("rollout_id", "attempt", "outcome", "policy", "options", "calls", "terminal_call_id"),
        *("terminal_response_id", "truncated", "lost", "notes", "verdicts"),
    }
    assert [set(verdict) for verdict in rollout["verdicts"]] == [{"model_call_id", "included", "code", "evidence"}] * 3
    assert ran.json["funnel"]["excluded"] == {"retry_superseded": [1, 1]}
    assert ran.json["tally"] == {"selected": 1, "rejected": 0, "codes": {}}


def test_a_refusal_names_code_place_and_what_would_settle_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A refused rollout without a way forward leaves its owner stuck; exit code 1 stops a pipeline."""
    path = refused_story(tmp_path)
    ran = run(capsys, "select", path)
    assert ran.code == 1
    assert "match_missing at $.response.output[3]" in ran.out
    assert "Return the text as it was served." in ran.out
    assert "0 selected, 1 rejected (1 match_missing)" in ran.out
    [rollout] = run(capsys, "select", path, "--json").json["rollouts"]
    assert rollout["outcome"] == "rejected"
    assert rollout["code"] == "match_missing"
    assert rollout["would_settle"] == ["Return the text as it was served."]
    assert {verdict["code"] for verdict in rollout["verdicts"]} == {"rollout_rejected"}


def test_one_refused_rollout_does_not_fail_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One bad rollout in a run must cost that rollout only."""
    good_story(tmp_path / "a", "a")
    refused_story(tmp_path / "b", "b")
    ran = run(capsys, "select", tmp_path, "--json")
    assert ran.code == 0
    assert [rollout["outcome"] for rollout in ran.json["rollouts"]] == ["selected", "rejected"]
    assert ran.json["tally"]["codes"] == {"match_missing": 1}


def test_options_reach_the_policy_and_the_next_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An option that is dropped on the way would change what is trained."""
    path = write_story(tmp_path, None, returned(" one", TWO_TURNS[1] + "\n"))
    assert run(capsys, "select", path).code == 1
    ran = run(
        *(capsys, "select", path, "--policy", "returned_history"),
        *("--set", "whitespace=trim", "--set", "reasoning=optional", "--train-model", "m"),
    )
    assert ran.code == 0
    assert "r  returned_history reasoning=optional whitespace=trim" in ran.out
    assert "note: option whitespace=trim was in force" in ran.out
    assert "--policy returned_history --set whitespace=trim --set reasoning=optional --train-model m" in ran.err


def test_calls_of_another_model_become_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training a judge model's tokens as the policy's own would poison the run."""
    calls = [*story()[:2], {**story()[2], "model": "other"}]
    path = write_story(tmp_path, calls, returned(*TWO_TURNS))
    ran = run(capsys, "select", path, "--train-model", "m")
    assert ran.code == 0
    assert "foreign_model" in ran.out
    assert "model other" in ran.out


def test_facts_about_the_rollout_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cut reply and a lost call change what a reward means."""
    calls = [
        *story()[:2],
        {**story()[2], "finish_reason": "length", "response_status": "incomplete"},
        {"kind": "lost", "rollout_id": "r", "model_call_id": "gone", "maybe_received": False},
    ]
    ran = run(capsys, "select", write_story(tmp_path, calls, returned(*TWO_TURNS)))
    assert "truncated: a selected call was cut at its length" in ran.out
    assert "lost and of no concern to the selection: gone" in ran.out
    assert "(and 1 lost)" in ran.out


def test_attempts_are_told_apart_and_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A restarted rollout has two attempts; rows of the wrong one would be trained."""
    calls = [{**line, "attempt": number} for number in (0, 1) for line in story()]
    calls += [
        {"kind": "result", "rollout_id": "r", "attempt": 1, "result": returned(*TWO_TURNS)},
    ]
    path = write_story(tmp_path, calls)
    both = run(capsys, "select", path, "--json").json["rollouts"]
    assert [(one["attempt"], one["outcome"]) for one in both] == [(0, "rejected"), (1, "selected")]
    [one] = run(capsys, "select", path, "--attempt", 1, "--rollout", "r", "--json").json["rollouts"]
    assert one["attempt"] == 1
    assert "r attempt 1  returned_history" in run(capsys, "select", path, "--attempt", 1).out
    missing = run(capsys, "select", path, "--attempt", 7, "--json")
    assert missing.code == 2
    assert missing.json["error"]["code"] == "rollout_unknown"
    assert missing.json["error"]["hint"] == "There is 0, 1."


def test_a_rollout_that_is_not_there_is_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo must not select nothing in silence."""
    ran = run(capsys, "select", good_story(tmp_path, "rollout-17"), "--rollout", "rollout-71")
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err == (
        "error: no rollout 'rollout-71' in the capture (at --rollout)\nhint: Did you mean 'rollout-17'?\n"
    )


def test_a_result_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Captures and results are often kept apart."""
    path = good_story(tmp_path / "s")
    result = (path / "result.json").rename(tmp_path / "other.json")
    alone = run(capsys, "select", path, "--json")
    assert alone.code == 1
    assert alone.json["rollouts"][0]["code"] == "output_missing"
    assert "--result FILE" in alone.json["rollouts"][0]["would_settle"][0]
    assert run(capsys, "select", path, "--result", result).code == 0
    assert run(capsys, "select", path / "capture.jsonl", "--result", result).code == 0
    good_story(tmp_path / "t", "t")
    several = run(capsys, "select", path, tmp_path / "t", "--result", result)
    assert several.code == 2
    assert "expected one capture" in several.err


def test_the_same_attempt_in_two_places_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Selecting one of two captures of an attempt would be a guess."""
    one, two = good_story(tmp_path / "one"), good_story(tmp_path / "two")
    ran = run(capsys, "select", one, two)
    assert ran.code == 2
    assert f"is in both {one} and {two}" in ran.err
    assert "twice" in run(capsys, "select", one, one).err


def test_bad_lines_are_reported_and_only_skipped_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hole in a capture must never be passed over in silence."""
    path = good_story(tmp_path)
    with (path / "capture.jsonl").open("a") as file:
        file.write("{broken\n")
    refused = run(capsys, "select", path, "--json")
    assert refused.code == 1
    assert refused.json["error"]["code"] == "file_malformed"
    assert "line 4" in refused.json["error"]["where"]
    skipped = run(capsys, "select", path, "--skip-bad", "--json")
    assert "line 4" in skipped.json["bad_lines"][0]["where"]
    assert "warning: skipped" in skipped.err
    assert skipped.json["rollouts"][0]["code"] == "capture_incomplete"


def test_many_remarks_are_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand equal remarks would hide the answer."""
    calls = [{**line, "mystery": 1} for line in story()] + [
        call(f"y{number}", f"aside {number}", [9], [9], mystery=1) for number in range(12)
    ]
    ran = run(capsys, "select", write_story(tmp_path, calls, returned(*TWO_TURNS)))
    assert ran.err.count("mystery") == 1
    assert "note: unknown key 'mystery' on 15 lines, first at " in ran.err
    strange = [{**line, **{f"mystery-{number}": 1 for number in range(12)}} for line in story()]
    ran = run(capsys, "select", write_story(tmp_path, strange, returned(*TWO_TURNS)))
    assert ran.err.count("note: unknown key ") == 10
    assert "note: 2 more unknown keys\n" in ran.err


def test_a_misspelt_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reply under a misspelt key is lost: the note must lead to it."""
    calls = [{**line, "output_itmes": []} for line in story()]
    ran = run(capsys, "select", write_story(tmp_path, calls, returned(*TWO_TURNS)))
    [note] = [line for line in ran.err.splitlines() if line.startswith("note: ")]
    assert (
        note == f"note: unknown key 'output_itmes' on 3 lines, first at {tmp_path} line 1; did you mean output_items?"
    )


@pytest.mark.parametrize("kind", ["missing", "empty", "folder", "exchange", "array"])
def test_bad_paths_have_a_code(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """A wrong path must say so, not end in a traceback."""
    path = tmp_path / "p"
    if kind == "folder":
        path.mkdir()
    elif kind == "exchange":
        path = tmp_path / "p.json"
        path.write_text('{"request": {"path": "/v1/models", "method": "GET"}, "status": 200, "body": {}}')
    elif kind != "missing":
        path.write_text("[1]\n" if kind == "array" else "")
    ran = run(capsys, "select", path, "--json")
    expected = {"missing": (3, Code.FILE_UNREADABLE)}.get(kind, (1, Code.FILE_MALFORMED))
    assert (ran.code, ran.json["error"]["code"]) == expected
    assert set(ran.json["error"]) == {"code", "message", "where", "hint"}


def test_files_beside_the_stories_are_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A capture that is not read must not look as if it were."""
    good_story(tmp_path / "a")
    (tmp_path / "more.json").write_text("{}\n")
    ran = run(capsys, "select", tmp_path)
    assert ran.code == 0
    assert f"{tmp_path}: 1 file(s) beside the captures are not read" in ran.err


def test_a_folder_that_may_not_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions are an error of the environment, not of the data."""

    def forbidden(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", forbidden)
    ran = run(capsys, "select", tmp_path, "--json")
    assert (ran.code, ran.json["error"]["code"]) == (3, "file_unreadable")
    assert "Permission denied" in ran.json["error"]["message"]
