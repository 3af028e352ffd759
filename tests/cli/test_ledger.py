from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest

from gristmill.cli.ledger import _may_live
from gristmill.ledger import AttemptKey, LockHolder, SqliteLedger
from gristmill.ledger.schema import SCHEMA_VERSION
from gristmill.records import Result
from tests.cli.stories import good_story, run


@pytest.fixture
def ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A frozen attempt, and one that has finished."""
    path = tmp_path / "run.gristmill"
    run(capsys, "import", good_story(tmp_path / "s"), "--into", path)
    with SqliteLedger(path) as store:
        store.admit(AttemptKey("q"), "c")
        store.finish(AttemptKey("q"), Result(value={}))
    return path


def test_info(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How large is it, what is in it, who writes to it?"""
    ran = run(capsys, "ledger", "info", ledger)
    assert ran.code == 0
    assert "attempts: 1 finished, 1 frozen" in ran.out
    assert "calls: 3 (and 1 lost), 3 usable, 5 sampled and 15 prompt tokens" in ran.out
    assert ran.err == f"next: gristmill ls {ledger}\n"
    told = run(capsys, "ledger", "info", ledger, "--json").json
    assert set(told) == {
        *("ledger", "bytes", "attempts", "calls", "lost", "usable_calls", "sampled_tokens", "prompt_tokens", "writer"),
    }
    assert (told["attempts"], told["writer"]) == ({"finished": 1, "frozen": 1}, None)
    with SqliteLedger(ledger) as store:
        store.announce("http://127.0.0.1:1")
        assert set(run(capsys, "ledger", "info", ledger, "--json").json["writer"]) == {
            *("pid", "host", "instance", "started", "address"),
        }
        assert " at http://127.0.0.1:1\n" in run(capsys, "ledger", "info", ledger).out


def test_a_writer_that_may_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed gateway leaves its name behind; it must not be taken for a living one."""
    holder = LockHolder(pid=os.getpid(), host=socket.gethostname(), instance="i", started=0.0)
    assert _may_live(holder)
    assert _may_live(msgspec.structs.replace(holder, host="elsewhere"))
    for error, alive in ((ProcessLookupError(), False), (PermissionError(), True)):

        def kill(pid: int, signal: int, error: OSError = error) -> None:
            raise error

        monkeypatch.setattr(os, "kill", kill)
        assert _may_live(holder) is alive


def test_freeze_and_retire(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was archived is deleted, and only that."""
    ran = run(capsys, "ledger", "freeze", ledger, "--finished")
    assert ran.code == 0
    assert "1 frozen" in ran.out
    assert ran.err.startswith(f"next: gristmill ledger retire {ledger} q --attempt 0 --snapshot ")
    [frozen] = run(capsys, "ledger", "freeze", ledger, "q", "--json").json["frozen"]
    assert frozen["snapshot_id"] in ran.out
    wrong = run(capsys, "ledger", "retire", ledger, "q", "--snapshot", "0" * 64, "--json")
    assert (wrong.code, wrong.json["error"]["code"]) == (1, "manifest_differs")
    gone = run(capsys, "ledger", "retire", ledger, "q", "--snapshot", frozen["snapshot_id"], "--json")
    assert gone.json == {"ledger": str(ledger), "retired": frozen}
    assert [one["rollout_id"] for one in run(capsys, "ls", ledger, "--json").json["rollouts"]] == ["r"]
    [frozen] = run(capsys, "ledger", "freeze", ledger, "r", "--attempt", "0", "--json").json["frozen"]
    ran = run(capsys, "ledger", "retire", ledger, "r", "--snapshot", frozen["snapshot_id"])
    assert ran.out == f"{ledger}: attempt 0 of r is deleted\n"
    assert run(capsys, "ledger", "freeze", ledger, "--finished").out == "0 frozen\n"


def test_names_that_are_not_there(ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is frozen or deleted by a typo, and no ledger is made by one."""
    ran = run(capsys, "ledger", "freeze", ledger, "rr", "--json")
    assert (ran.code, ran.json["error"]["hint"]) == (2, "Did you mean 'r'?")
    ran = run(capsys, "ledger", "freeze", ledger, "r", "--attempt", "4", "--json")
    assert (ran.code, ran.json["error"]["hint"]) == (2, "There is 0.")
    for command in (["info"], ["migrate"], ["freeze", "--finished"], ["retire", "r", "--snapshot", "x"]):
        ran = run(capsys, "ledger", command[0], tmp_path / "none", *command[1:], "--json")
        assert (ran.code, ran.json["error"]["code"]) == (3, "file_unreadable")
    assert not (tmp_path / "none").exists()


def test_migrate(ledger: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicit, and harmless where there is nothing to do."""
    assert run(capsys, "ledger", "migrate", ledger).out == f"{ledger}: schema {SCHEMA_VERSION}, is current\n"
    told = run(capsys, "ledger", "migrate", ledger, "--json").json
    assert told == {"ledger": str(ledger), "from": SCHEMA_VERSION, "to": SCHEMA_VERSION}
    monkeypatch.setattr("gristmill.ledger.migrate", lambda _: 0)
    assert "was brought up from version 0" in run(capsys, "ledger", "migrate", ledger).out


def test_the_group_helps(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command it says which there are."""
    ran = run(capsys, "ledger")
    assert ran.code == 0
    assert all(f"\n  {name} " in ran.out for name in ("info", "migrate", "freeze", "retire"))
