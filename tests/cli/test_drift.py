from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.demo import recordings
from tests.cli.stories import Json, call, refused_story, returned, run, write_story


def forked() -> list[Json]:
    """Three turns: the second extends the first, the third does not begin with the second's tokens."""
    return [
        call("c1", "one", [1, 2, 3], [4, 5]),
        call("c2", "two", [1, 2, 3, 4, 5, 6], [7], parent_call_id="c1"),
        call("c3", "three", [1, 2, 9, 9, 9], [8], parent_call_id="c2", system_digest="s"),
        call("t1", "title", [1, 5], [8], parent_call_id="c1"),
        call("n1", "no ids", [1], [1], generation_token_ids=None),
        call("n2", "child", [1, 1], [1], parent_call_id="n1"),
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_story(tmp_path / "a", forked(), returned("one", "two", "three"))


def test_turns_by_cause_and_cost(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Forks cost rows and context; which, why and how much decides what to repair in a harness."""
    ran = run(capsys, "drift", path)
    assert ran.code == 0
    lines = [line.split() for line in ran.out.splitlines()]
    assert lines[1] == ["r", "0", "c3", "c2", "5", "forked:", "unknown", "at", "2"]
    assert "2 selected turns in 1 rollout: 1 exact, 1 forked, 0 unknown" in ran.out
    assert ["unknown", "1", "1", "0", "5"] in lines
    assert "2 rows: 4 trained tokens, 9 tokens of context, 5 of them repeated" in ran.out
    assert ran.err == f"next: gristmill show {path} r --call c3\n"


def test_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The documented keys."""
    told = run(capsys, "drift", path, "--json", "--all").json
    assert set(told) == {"rollouts", "turns", "causes", "rows", "continuation", "of", "bad_lines"}
    assert told["turns"] == {"exact": 1, "forked": 1, "unknown": 0}
    assert told["causes"] == {"unknown": {"turns": 1, "in_prompt": 1, "in_reply": 0, "paid_again_tokens": 5}}
    assert told["rows"] == {"rows": 2, "context_tokens": 9, "repeated_tokens": 5, "trained_tokens": 4}
    [rollout] = told["rollouts"]
    assert set(rollout) == {
        *("rollout_id", "attempt", "outcome", "exact", "forked", "unknown", "causes", "paid_again_tokens", "turns"),
    }
    assert [turn["model_call_id"] for turn in rollout["turns"]] == ["c2", "c3"]
    assert rollout["turns"][1] == {
        "model_call_id": "c3",
        "parent_call_id": "c2",
        "relation": "forked",
        "cause": "unknown",
        "position": 2,
        "paid_again_tokens": 5,
    }
    assert len(run(capsys, "drift", path, "--json").json["rollouts"][0]["turns"]) == 1


def test_everything_captured(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How an engine and a harness drift does not depend on what is trained, rejected rollouts included."""
    told = run(capsys, "drift", path, "--captured", "--json").json
    assert (told["of"], told["rows"], told["rollouts"][0]["outcome"]) == ("captured", None, None)
    assert told["turns"] == {"exact": 1, "forked": 2, "unknown": 1}
    assert "tokens of its parent unknown" in run(capsys, "drift", path, "--captured").out
    bad = refused_story(tmp_path / "b")
    ran = run(capsys, "drift", bad)
    assert "0 selected turns in 1 rollout:" in ran.out
    assert "1 rejected rollout has no selected turns" in ran.out
    assert ran.err == ""
    assert run(capsys, "drift", bad, "--json").json["rollouts"][0]["outcome"] == "rejected"
    assert run(capsys, "drift", bad, "--captured", "--json").json["turns"]["exact"] == 2


def test_a_restarted_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The next command must name the attempt that it means."""
    calls = [{**line, "attempt": 2} for line in forked()]
    assert "r --attempt 2 --call" in run(capsys, "drift", write_story(tmp_path, calls), "--captured").err


def test_the_forks_of_the_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two commands that count forks differently would make both doubtful."""
    captures = str(recordings())
    run(capsys, "rows", captures, "--out", tmp_path / "rows")
    manifest = json.loads((tmp_path / "rows" / "manifest.json").read_text())
    told = run(capsys, "drift", captures, "--json").json
    assert {cause: counted["turns"] for cause, counted in told["causes"].items()} == manifest["forks"]
    assert told["rows"]["context_tokens"] == manifest["context_tokens"]
    listed = run(capsys, "ls", captures, "--json").json
    assert (listed["forks"], listed["context_tokens"]) == (manifest["forks"], manifest["context_tokens"])
    assert told["rows"]["trained_tokens"] == manifest["funnel"]["trained_tokens"]


def test_context_that_rows_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two replies to one history are two rows of the same context, though no prompt forks."""
    calls = [
        call("c1", "one", [1, 2, 3], [4, 5]),
        call("c2", "two", [1, 2, 3, 4, 5, 6], [7], parent_call_id="c1"),
        call("c3", "three", [1, 2, 3, 4, 5, 9], [8], parent_call_id="c1"),
    ]
    items = returned("one", "two", "three")
    told = run(capsys, "drift", write_story(tmp_path / "a", calls, items), "--json").json
    assert told["turns"] == {"exact": 2, "forked": 0, "unknown": 0}
    assert told["rows"] == {"rows": 2, "context_tokens": 10, "repeated_tokens": 5, "trained_tokens": 4}
    assert told["causes"] == {}


def test_where_prompts_fork(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fork in a reply is the harness's or the template's; one in the prompt changed the history."""
    calls = [
        call("c1", "one", [1, 2, 3], [4, 5]),
        call("c2", "two", [1, 2, 3, 9, 6], [7], parent_call_id="c1"),
        call("c3", "three", [1, 9, 3], [8], parent_call_id="c2"),
    ]
    path = write_story(tmp_path / "a", calls, returned("one", "two", "three"))
    told = run(capsys, "drift", path, "--json").json
    assert told["causes"] == {"unknown": {"turns": 2, "in_prompt": 1, "in_reply": 1, "paid_again_tokens": 8}}
    assert told["rows"]["repeated_tokens"] == 8


def continued(**told: Any) -> Json:
    """What a call says of its continuation."""
    return {"continuation": {"state": "continued", "parent_call_id": "c1", "suffix_len": 1, **told}}


def linked(parent: str = "c1") -> Json:
    """What a call through a gateway has where nothing but the conversation went on."""
    return {"parent_call_id": parent, "parent_resolution": "resolved", "dialect": "chat"}


def test_what_continuation_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether it pays is what a run has to say: calls, reasons, and the context that was not repeated."""
    calls = [
        call("c1", "one", [1, 2, 3], [4, 5], continuation={"state": "refused", "reason": "no_parent"}),
        call("c2", "two", [1, 2, 3, 4, 5, 6], [7], **linked(), **continued(fork=4)),
        call("c3", "three", [1, 2, 3, 4, 5, 6, 7, 8, 9], [9], **linked("c2"), **continued(closed=True, suffix_len=2)),
        call(
            *("c4", "four", [1, 2, 9], [8]),
            **linked("c3"),
            continuation={"state": "refused", "reason": "witnesses_disagree"},
        ),
    ]
    path = write_story(tmp_path / "a", calls, returned("one", "two", "three", "four"))
    ran = run(capsys, "drift", path)
    assert "2 calls continued by tokens, 1 of them behind a turn that was cut" in ran.out
    lines = [line.split() for line in ran.out.splitlines()]
    assert ["no_parent", "1", "0"] in lines
    assert ["witnesses_disagree", "1", "3"] in lines
    assert "continuation saved 1 row and 5 tokens of context" in ran.out
    assert "would save" not in ran.out
    assert run(capsys, "drift", path, "--json").json["continuation"] == {
        "continued": 2,
        "closed": 1,
        "suffix_tokens": 3,
        "refused": {
            "no_parent": {"calls": 1, "paid_again_tokens": 0},
            "witnesses_disagree": {"calls": 1, "paid_again_tokens": 3},
        },
        "saved": {"turns": 1, "context_tokens": 5},
        "could_save": {"turns": 0, "context_tokens": 0},
    }


@pytest.mark.parametrize(
    ("changed", "turns"),
    [
        ({}, 1),
        ({"continuation": {"state": "refused", "reason": "engine_unable"}}, 1),
        ({"continuation": {"state": "refused", "reason": "end_of_turn_unknown"}}, 0),
        ({"system_digest": "s"}, 0),
        ({"tools_digest": "t"}, 0),
        ({"model": "other"}, 0),
        ({"parent_resolution": "ambiguous"}, 0),
        ({"dialect": "completions"}, 0),
        ({"request_media": ["m"]}, 0),
    ],
)
def test_what_continuation_would_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: Json, turns: int
) -> None:
    """Forks that it could not have prevented must not speak for switching it on."""
    calls = [
        call("c1", "one", [1, 2, 3], [4, 5]),
        call("c2", "two", [1, 2, 3, 9, 6], [7], **{**linked(), **changed}),
    ]
    path = write_story(tmp_path / "a", calls, returned("one", "two"))
    could = run(capsys, "drift", path, "--json").json["continuation"]["could_save"]
    assert could == {"turns": turns, "context_tokens": 5 * turns}
    told = "continuation would save up to 1 row and 5 tokens of context"
    assert (told in run(capsys, "drift", path).out) is bool(turns)


def test_forks_of_rejected_rollouts_say_nothing_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their calls cost no rows."""
    bad = refused_story(tmp_path / "b")
    told = run(capsys, "drift", bad, "--json").json["continuation"]
    assert told["could_save"] == {"turns": 0, "context_tokens": 0}
