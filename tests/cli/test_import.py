from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest

import gristmill.cli.progress
from gristmill.cli.attempts import Captures
from gristmill.cli.importing import Counted, _attempts
from gristmill.cli.sources import size_bytes
from gristmill.ledger import AttemptKey, AttemptState, SqliteLedger, SqliteReader, StoredCall
from gristmill.records import CallRecord, Result
from tests.cli.stories import good_story, refused_story, run, story, write_story
from tests.cli.test_command_line import terminal_output
from tests.cli.test_ls import many


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "run.gristmill"


def keys(ledger: Path) -> list[str]:
    with SqliteReader(ledger) as store:
        return [key.rollout_id for key in store.attempts()]


def test_everything_once(tmp_path: Path, ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An import that can be repeated is one that can be put into a script."""
    good_story(tmp_path / "in" / "a", "a")
    many(tmp_path / "in" / "more.jsonl", 3)
    exchange = {
        "request": {"path": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hi"}]}},
        "status": 200,
        "body": {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", "content": "yo"}}]},
    }
    (tmp_path / "one.json").write_text(json.dumps(exchange))
    paths = (tmp_path / "in", tmp_path / "one.json")
    ran = run(capsys, "import", *paths, "--into", ledger)
    assert ran.code == 0
    assert ran.out == f"{ledger}: 5 added, 0 unchanged\n5 rollouts, 10 calls, 11 sampled tokens\n"
    assert ran.err == f"next: gristmill ls {ledger}\n"
    assert keys(ledger) == ["a", "r00000", "r00001", "r00002", "rollout"]
    again = run(capsys, "import", *paths, "--into", ledger, "--json")
    assert again.json == {
        "ledger": str(ledger),
        "added": 0,
        "unchanged": 5,
        "calls": 10,
        "lost": 0,
        "sampled_tokens": 11,
        "bad_lines": [],
        "losses": {},
    }


def test_what_was_imported_explains_and_verifies_alike(
    tmp_path: Path, ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ledger must answer every question as the files did."""
    good_story(tmp_path / "in" / "a", "a")
    refused_story(tmp_path / "in" / "b", "b")
    run(capsys, "import", tmp_path / "in", "--into", ledger)
    for command in ("select", "explain", "rows", "verify", "diff"):
        more = ["--against", "all_captured"] if command == "diff" else []
        filed, stored = (run(capsys, command, path, "--json", *more) for path in (tmp_path / "in", ledger))
        assert (filed.code, filed.json) == (stored.code, stored.json)
    assert run(capsys, "explain", ledger, "x1", "--rollout", "a").code == 0
    assert "--rollout a" in run(capsys, "select", ledger).err


def test_bad_lines_are_all_told_and_nothing_is_imported(
    tmp_path: Path, ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Correcting a file line by line, import by import, takes a day; half an import takes longer."""
    path = many(tmp_path / "run.jsonl", 4)
    lines = path.read_text().splitlines()
    lines[4], lines[7] = "{broken", '{"kind": "odd", "rollout_id": "r00002"}'
    path.write_text("".join(f"{line}\n" for line in lines))
    ran = run(capsys, "import", path, "--into", ledger)
    assert ran.code == 1
    assert "warning: cannot read" in ran.err
    assert {int(number) for number in re.findall(r"run\.jsonl line (\d+)", ran.err)} == {5, 8}
    assert "got 2 lines that cannot; nothing was imported" in ran.err
    assert list(tmp_path.iterdir()) == [path], "an empty ledger would be taken for an import that worked"
    error = run(capsys, "import", path, "--into", ledger, "--json").json["error"]
    assert error["code"] == "file_malformed"
    skipped = run(capsys, "import", path, "--into", ledger, "--skip-bad")
    assert skipped.code == 0
    assert "4 added, 0 unchanged, 2 bad lines skipped" in skipped.out
    assert "(and 5 lost)" in skipped.out, "a line without a place may belong to any of the four"
    again = run(capsys, "import", path, "--into", ledger, "--skip-bad", "--json").json
    assert (again["unchanged"], len(again["bad_lines"])) == (4, 2)
    lines[4] = ""
    path.write_text("".join(f"{line}\n" for line in lines))
    assert "got a line that cannot" in run(capsys, "import", path, "--into", tmp_path / "other").err


def test_an_attempt_that_differs(tmp_path: Path, ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two captures under one id: one of them is wrong, and only a person knows which."""
    run(capsys, "import", good_story(tmp_path / "a"), "--into", ledger)
    good_story(tmp_path / "in" / "fresh", "fresh")
    write_story(tmp_path / "in" / "r", story()[:1])
    ran = run(capsys, "import", tmp_path / "in", "--into", ledger, "--json")
    assert (ran.code, ran.json["error"]["code"]) == (1, "attempt_differs")
    assert keys(ledger) == ["r"]


def test_paths_that_are_not_there_make_no_ledger(
    tmp_path: Path, ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped path must leave nothing behind."""
    ran = run(capsys, "import", tmp_path / "nowhere", "--into", ledger)
    assert ran.code == 3
    assert not ledger.exists()
    good = good_story(tmp_path / "a")
    assert (
        run(capsys, "import", good, "--into", good / "capture.jsonl", "--json").json["error"]["code"]
        == "ledger_foreign"
    )


def test_a_second_writer_is_refused(tmp_path: Path, ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A gateway may be writing; readers are welcome all the same."""
    path = good_story(tmp_path / "a")
    run(capsys, "import", path, "--into", ledger)
    with SqliteLedger(ledger):
        ran = run(capsys, "import", path, "--into", ledger, "--json")
        assert (ran.code, ran.json["error"]["code"]) == (3, "ledger_locked")
        assert run(capsys, "ls", ledger).code == 0
        assert "written to by process" in run(capsys, "ledger", "info", ledger).out


def test_files_that_share_a_result(tmp_path: Path, ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One result.json beside two captures: whose is it?"""
    good_story(tmp_path / "in")
    (tmp_path / "in" / "capture.jsonl").rename(tmp_path / "in" / "one.jsonl")
    many(tmp_path / "in" / "two.jsonl", 1)
    ran = run(capsys, "import", tmp_path / "in", "--into", ledger)
    assert ran.code == 2
    assert "expected one file of capture lines beside" in ran.err
    ran = run(capsys, "select", ledger.parent / "in" / "one.jsonl", "--result", tmp_path / "in" / "result.json")
    assert ran.code == 0


def test_a_ledger_into_a_ledger(tmp_path: Path, ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of several machines are brought together, and their results need no file."""
    run(capsys, "import", many(tmp_path / "run.jsonl", 2), "--into", ledger)
    ran = run(capsys, "import", ledger, "--into", tmp_path / "all.gristmill")
    assert "2 added" in ran.out
    ran = run(capsys, "import", ledger, "--into", tmp_path / "all.gristmill", "--result", tmp_path / "r.json")
    assert ran.code == 2
    assert "a ledger, which holds the results" in ran.err
    ran = run(capsys, "ls", ledger, tmp_path / "all.gristmill")
    assert (ran.code, "is in both" in ran.err) == (2, True)


def test_sizes_of_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A progress bar must not be what an import fails of."""
    assert size_bytes(tmp_path / "none") == 0
    (tmp_path / "f").write_text("abc")
    assert size_bytes(tmp_path) == size_bytes(tmp_path / "f") == 3

    def forbidden(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", forbidden)
    assert size_bytes(tmp_path) == 0


def test_only_some(tmp_path: Path, ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One rollout of a large run, to send to somebody."""
    path = many(tmp_path / "run.jsonl", 12)
    assert "1 rollout, 2 calls" in run(capsys, "import", path, "--into", ledger, "--rollout", "r00003").out
    assert keys(ledger) == ["r00003"]
    assert "4 rollouts" in run(capsys, "import", path, "--into", tmp_path / "g", "--group", "g1").out


def test_an_interrupt_stops_the_reading(tmp_path: Path) -> None:
    """Ctrl-C must not wait for the rest of a gigabyte."""
    stop = threading.Event()
    found = _attempts(Captures((many(tmp_path / "run.jsonl", 3),)), Counted(), lambda _: None, stop)
    next(found)
    stop.set()
    with pytest.raises(KeyboardInterrupt):
        next(found)


def test_states_of_a_ledger(tmp_path: Path, ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While a run goes on, some rollouts are open, some finished, some given up."""
    with SqliteLedger(ledger) as store:
        for name in ("open", "finished", "frozen", "abandoned"):
            record = CallRecord(model_call_id="c", response_id=name, response_status="completed", finish_reason="stop")
            store.admit(AttemptKey(name), "c")
            store.commit(AttemptKey(name), StoredCall(record=record))
        for name in ("finished", "frozen"):
            store.finish(AttemptKey(name), Result(value={"output": []}, reward=0.0))
        store.freeze(AttemptKey("frozen"))
        store.abandon(AttemptKey("abandoned"))
        for state in AttemptState:
            [line] = run(capsys, "ls", ledger, "--state", str(state), "--json").json["rollouts"]
            assert (line["rollout_id"], line["state"]) == (str(state), str(state))
            assert line["has_result"] is (state in {"finished", "frozen"})
            assert (
                run(capsys, "select", ledger, "--state", str(state), "--json").json["rollouts"][0]["rollout_id"]
                == state
            )
    assert "open  open, no reward" in run(capsys, "show", ledger, "open").out


# ---- progress ----------------------------------------------------------------------------------------------


def test_progress_in_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A log wants a line now and then, not a bar."""
    with gristmill.cli.progress.progress("read", 1_000_000_000, in_bytes=True) as step:
        for _ in range(10):
            step(99_000_000)
        step(10_000_000)
    assert capsys.readouterr().err.splitlines() == [
        f"progress: {done} of 1.0 GB read" for done in ("198.0 MB", "396.0 MB", "594.0 MB", "792.0 MB", "990.0 MB")
    ]
    with gristmill.cli.progress.progress("rollouts") as step:
        for _ in range(25):
            step(1000)
    assert capsys.readouterr().err == "progress: 10,000 rollouts\nprogress: 20,000 rollouts\n"
    with gristmill.cli.progress.progress("rollouts", 300_000) as step:
        step(299_000)
    assert capsys.readouterr().err == "progress: 299,000 of 300,000 rollouts\n"
    assert [gristmill.cli.progress.bytes_text(size) for size in (12, 12_345, 2_000_000)] == [
        "12 bytes",
        "12.3 kB",
        "2.0 MB",
    ]


def test_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it counts bytes or rollouts, it is gone at the end."""
    monkeypatch.setattr(gristmill.cli.progress, "_is_terminal", lambda: True)
    for in_bytes in (True, False):
        with gristmill.cli.progress.progress("read", 10, in_bytes=in_bytes) as step:
            step(5)
    assert "progress:" not in capsys.readouterr().err


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    """People watch it; it is gone when the answer comes, and warnings stay readable."""
    path = good_story(tmp_path / "s")
    sent = terminal_output(["import", str(path), "--into", str(tmp_path / "l")], COLUMNS="120")
    assert "read" in sent
    assert "1 added, 0 unchanged" in sent
    sent = terminal_output(["export", str(path), "--out", str(tmp_path / "o")], COLUMNS="120")
    assert "rows-00000.parquet" in sent
