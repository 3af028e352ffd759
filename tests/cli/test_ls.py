from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import gristmill.cli.listing
import gristmill.cli.work
from tests.cli.stories import Json, call, good_story, refused_story, returned, run, story, write_story

KEYS = {
    *("rollout_id", "attempt", "state", "outcome", "code", "where", "reward", "group_id", "has_result", "calls"),
    *("lost", "usable_calls", "selected_calls", "sampled_tokens", "prompt_tokens", "trained_tokens", "rows", "models"),
    *("first_at", "last_at", "touched_at", "source"),
}


@pytest.fixture
def captures(tmp_path: Path) -> Path:
    """A good rollout, a refused one, and one that nobody rewarded."""
    good_story(tmp_path / "in" / "a", "a")
    refused_story(tmp_path / "in" / "b", "b")
    calls = [{**line, "rollout_id": "c", "admitted_at": 1.7e9, "completed_at": 1.7e9 + 1} for line in story()]
    calls.append({"kind": "lost", "rollout_id": "c", "model_call_id": "gone", "maybe_received": False})
    write_story(tmp_path / "in" / "c", calls, returned("one", "two, at some length", reward=None, group_id=None))
    return tmp_path / "in"


def many(path: Path, count: int) -> Path:
    """A file of many rollouts, two calls each; every tenth is refused."""
    with path.open("w") as file:
        for number in range(count):
            name = f"r{number:05}"
            lines: list[Json] = [
                {**call("c1", "one", [1, 2], [3]), "rollout_id": name},
                {**call("c2", "two", [1, 2, 3, 4], [5], parent_call_id="c1"), "rollout_id": name},
            ]
            told = "two" if number % 10 else "three"
            result: Any = {**returned("one", told), "group_id": f"g{number % 3}", "reward": number % 2}
            lines.append({"kind": "result", "rollout_id": name, "result": result})
            file.write("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_one_line_a_rollout(captures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What there is, what is wrong with it and what it is worth, at a glance; a missing reward is not 0."""
    ran = run(capsys, "ls", captures)
    assert ran.code == 0
    lines = [line.split() for line in ran.out.splitlines()]
    assert lines[0] == [
        "rollout",
        "attempt",
        "state",
        "verdict",
        "reward",
        "group",
        "calls",
        "lost",
        "tokens",
        "rows",
        "models",
        "time",
    ]
    assert lines[1] == ["a", "0", "frozen", "selected", "1", "g", "2/3", "0", "5", "1", "m", "-"]
    assert lines[2] == ["b", "0", "frozen", "match_missing", "1", "g", "0/3", "0", "5", "0", "m", "-"]
    assert lines[3] == ["c", "0", "frozen", "selected", "-", "-", "2/3", "1", "5", "1", "m", "2023-11-14", "22:13:20"]
    assert "3 rollouts: 2 selected, 1 rejected (1 match_missing)" in ran.out
    assert "trained 4 calls 8 tokens" in ran.out
    assert ran.err == f"next: gristmill show {captures} a\n"
    assert not any(line != line.rstrip() for line in ran.out.splitlines())


def test_json(captures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Programs read these keys."""
    ran = run(capsys, "ls", captures, "--json")
    assert set(ran.json) == {"rollouts", "totals", "tally", "funnel", "forks", "context_tokens", "bad_lines"}
    assert [set(line) for line in ran.json["rollouts"]] == [KEYS] * 3
    good, bad, lost = ran.json["rollouts"]
    assert (good["outcome"], good["code"], good["rows"], good["trained_tokens"]) == ("selected", None, 1, 4)
    assert (bad["outcome"], bad["code"], bad["where"]) == ("rejected", "match_missing", "$.response.output[3]")
    assert (lost["reward"], lost["lost"], lost["has_result"]) == (None, 1, True)
    assert (lost["first_at"], lost["last_at"], lost["touched_at"]) == (1.7e9, 1.7e9 + 1, None)
    assert ran.json["totals"] == {
        "rollouts": 3,
        "calls": 9,
        "lost": 1,
        "usable_calls": 9,
        "sampled_tokens": 15,
        "prompt_tokens": 45,
    }
    assert ran.json["tally"] == {"selected": 2, "rejected": 1, "codes": {"match_missing": 1}}


def test_a_ledger_lists_as_the_files_do(captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An import must change nothing that is shown, selected or counted."""
    ledger = tmp_path / "run.gristmill"
    assert run(capsys, "import", captures, "--into", ledger).code == 0
    for more in ((), ("--no-verdicts",), ("--selected",), ("--code", "retry_superseded")):
        filed, stored = (run(capsys, "ls", path, "--json", *more).json for path in (captures, ledger))
        for document in (filed, stored):
            for line in document["rollouts"]:
                line["source"] = line["touched_at"] = None
        assert filed == stored
    assert run(capsys, "ls", ledger, "--json").json["rollouts"][0]["touched_at"] > 1.7e9
    text = run(capsys, "ls", ledger).out.splitlines()
    assert text[1].split()[:10] == ["a", "0", "frozen", "selected", "1", "g", "2/3", "0", "5", "1"]
    assert text[1].split()[-2].startswith("20"), "a ledger knows when it was written to"


def test_the_same_funnel_everywhere(captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three commands that count differently would make every count doubtful."""
    ledger = tmp_path / "run.gristmill"
    run(capsys, "import", captures, "--into", ledger)
    run(capsys, "export", ledger, "--out", tmp_path / "rows")
    manifest = json.loads((tmp_path / "rows" / "manifest.json").read_text())
    listed = run(capsys, "ls", ledger, "--json").json
    assert listed["funnel"] == manifest["funnel"] == run(capsys, "verify", ledger, "--json").json["funnel"]
    assert (listed["forks"], listed["context_tokens"]) == (manifest["forks"], manifest["context_tokens"])
    assert listed["tally"]["codes"] == manifest["rejected"]


def test_without_verdicts(captures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A look at a large ledger must not wait for a selection."""
    ran = run(capsys, "ls", captures, "--no-verdicts")
    assert ran.out.splitlines()[1].split() == ["a", "0", "frozen", "-", "1", "g", "3", "0", "5", "-", "m", "-"]
    assert "3 rollouts: 9 calls (and 1 lost), 15 tokens" in ran.out
    told = run(capsys, "ls", captures, "--no-verdicts", "--json").json
    assert (told["tally"], told["funnel"], told["forks"], told["context_tokens"]) == (None, None, None, None)
    assert {told["rollouts"][0][key] for key in ("outcome", "rows", "selected_calls", "trained_tokens")} == {None}
    good_story(captures / "a", "a")
    assert "1 rollout: 3 calls, 5 tokens" in run(capsys, "ls", captures / "a", "--no-verdicts").out


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--selected"], ["a", "c"]),
        (["--rejected"], ["b"]),
        (["--code", "match_missing"], ["b"]),
        (["--code", "retry_superseded"], ["a", "c"]),
        (["--code", "lost"], ["c"]),
        (["--group", "g"], ["a", "b"]),
        (["--rollout", "b"], ["b"]),
        (["--rollout", "a", "--group", "g"], ["a"]),
        (["--state", "frozen"], ["a", "b", "c"]),
        (["--selected", "--code", "model_calls_mixed"], None),
        (["--code", "models_mixed"], []),
    ],
)
def test_filters(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], shown: list[str] | None
) -> None:
    """On a run of thousands people look for the few that went wrong; files and ledgers must agree."""
    ledger = tmp_path / "run.gristmill"
    run(capsys, "import", captures, "--into", ledger)
    for path in (captures, ledger):
        ran = run(capsys, "ls", path, "--json", *options)
        if shown is None:
            assert ran.code == 2
            continue
        assert [line["rollout_id"] for line in ran.json["rollouts"]] == shown
        assert ran.json["totals"]["rollouts"] == len(shown)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (["--rollout", "aa"], "no rollout 'aa'", "Did you mean 'a'?"),
        (["--rollout", "a", "--attempt", "3"], "no attempt 3", "There is 0."),
        (["--group", "h"], "no rollout of group 'h'", None),
        (["--state", "open"], "no rollout of state 'open'", None),
        (["--rollout", "a", "--group", "h", "--state", "frozen"], "no rollout of group 'h' and state 'frozen'", None),
        (["--rollout", "a", "--group", "h"], "no rollout of group 'h'", None),
    ],
)
def test_filters_that_find_nothing(
    captures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
    hint: str | None,
) -> None:
    """A typo must not look like an empty run."""
    ledger = tmp_path / "run.gristmill"
    run(capsys, "import", captures, "--into", ledger)
    for path in (captures, ledger):
        for command in ("ls", "select"):
            error = run(capsys, command, path, "--json", *options).json["error"]
            assert error["code"] == "rollout_unknown"
            assert message in error["message"]
            assert error["hint"] == hint


def test_a_long_run_in_several_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of processes must not change a byte of the answer, nor the order."""
    monkeypatch.setattr(gristmill.cli.work, "_BATCH", 40)
    ledger = tmp_path / "run.gristmill"
    assert run(capsys, "import", many(tmp_path / "run.jsonl", 700), "--into", ledger).code == 0
    for command in (("ls", "--json"), ("select", "--json"), ("ls",), ("ls", "--no-verdicts")):
        one = run(
            capsys, command[0], ledger, *command[1:], *(["--jobs", "1"] if "--no-verdicts" not in command else [])
        )
        two = run(capsys, command[0], ledger, *command[1:], "--jobs", "2")
        assert (one.code, one.out, one.err) == (two.code, two.out, two.err)
    told = run(capsys, "ls", ledger, "--json", "--jobs", "2").json
    assert told["tally"] == {"selected": 630, "rejected": 70, "codes": {"match_missing": 70}}
    assert [line["rollout_id"] for line in told["rollouts"]] == [f"r{number:05}" for number in range(700)]
    assert len(run(capsys, "ls", ledger, "--rejected", "--jobs", "2").out.splitlines()) == 70 + 4


def test_on_a_terminal(captures: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines end at the edge, and verdicts have a colour."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    lines = run(capsys, "ls", captures).out.splitlines()
    assert "\x1b[32mselected" in lines[1]
    assert "\x1b[31mmatch_missing" in lines[2]
    assert not any("…" in line for line in lines)
    assert "├── " in run(capsys, "show", captures, "a").out


def test_work_of_another_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other processes do is the same as what this one does; an interrupt is not theirs to handle."""
    handled: list[tuple[int, object]] = []
    monkeypatch.setattr(signal, "signal", lambda *given: handled.append(given))
    gristmill.cli.work._ignore_interrupts()
    assert handled == [(signal.SIGINT, signal.SIG_IGN)]
    monkeypatch.undo()
    from gristmill.cli.attempts import Captures
    from gristmill.cli.choice import Choice
    from gristmill.cli.ls import ListJob
    from gristmill.cli.store import reading
    from gristmill.cli.wanted import Wanted

    ledger = tmp_path / "run.gristmill"
    run(capsys, "import", many(tmp_path / "run.jsonl", 3), "--into", ledger)
    captures = Captures((ledger,), summaries=True)
    with reading(ledger) as store:
        keys = list(captures.stored_keys(store))
    for _ in range(2):
        lines = gristmill.cli.work._work(ledger, captures, ListJob(Choice(), Wanted(selected=True)), keys)
        assert [None if line is None else line.summary.key.rollout_id for line in lines] == [None, "r00001", "r00002"]
    gristmill.cli.work._open.pop(ledger).close()


def test_a_list_that_is_wider_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines are written while rollouts still come, so later ones may be wider than the first."""
    monkeypatch.setattr(gristmill.cli.listing, "_BATCH", 3)
    for name in ("a", "b", "c", "much-longer", "木"):
        good_story(tmp_path / name, name)
    lines = run(capsys, "ls", tmp_path).out.splitlines()
    assert lines[1].index("frozen") == lines[2].index("frozen")
    assert lines[4].startswith("much-longer        0  frozen")
    assert lines[5].index("0  frozen") == lines[1].index("0  frozen") - 1, "a wide character takes two columns"


def test_times_that_are_no_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Recorded times are whatever somebody recorded."""
    calls = [{**line, "admitted_at": 1e300} for line in story()]
    assert "1e+300" in run(capsys, "ls", write_story(tmp_path, calls, returned("one"))).out


def test_nothing_to_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty ledger, a foreign database and a damaged one each say what they are."""
    import sqlite3

    from gristmill.ledger import SqliteLedger

    SqliteLedger(tmp_path / "empty.gristmill").close()
    ran = run(capsys, "ls", tmp_path / "empty.gristmill", "--json")
    assert (ran.code, ran.json["error"]["message"]) == (1, "expected a captured call, got none")
    foreign = sqlite3.connect(tmp_path / "foreign.db")
    foreign.execute("CREATE TABLE t (a)")
    foreign.commit()
    foreign.close()
    ran = run(capsys, "ls", tmp_path / "foreign.db", "--json")
    assert (ran.code, ran.json["error"]["code"]) == (3, "ledger_foreign")


def test_nothing_that_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty list has no next command to name."""
    ran = run(capsys, "ls", good_story(tmp_path), "--rejected")
    assert (ran.code, ran.err) == (0, "")
    assert "0 rollouts: 0 selected, 0 rejected" in ran.out
    ran = run(capsys, "select", tmp_path, "--rejected")
    assert (ran.code, ran.err) == (1, "")
    assert run(capsys, "explain", tmp_path, "--rejected").out == ""
    assert run(capsys, "explain", tmp_path, "--rejected", "--json").json["rollouts"] == []
