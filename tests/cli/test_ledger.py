from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gristmill.cli.ledger import _may_live
from gristmill.ledger import AttemptKey, LockHolder, PostgresAddress, SqliteLedger, open_ledger
from gristmill.ledger.schema import SCHEMA_VERSION
from gristmill.records import Result
from tests.cli.stories import Ran, good_story, run
from tests.ledger.server import fresh_url


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
        "writers",
    }
    assert (told["attempts"], told["writer"], told["writers"]) == ({"finished": 1, "frozen": 1}, None, [])
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
    monkeypatch.setattr("gristmill.ledger.migrate_ledger", lambda _: (0, SCHEMA_VERSION))
    assert "was brought up from version 0" in run(capsys, "ledger", "migrate", ledger).out


def test_the_group_helps(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command it says which there are."""
    ran = run(capsys, "ledger")
    assert ran.code == 0
    assert all(f"\n  {name} " in ran.out for name in ("info", "migrate", "freeze", "retire", "copy"))


def test_copy(ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To another machine's file or into a database, and again where it broke off."""
    target = tmp_path / "copy.gristmill"
    ran = run(capsys, "ledger", "copy", ledger, target)
    assert (ran.code, ran.err) == (0, f"next: gristmill verify {target}\n")
    assert ran.out == (f"{target}: 2 added, 0 unchanged\nattempts: 1 finished, 1 frozen\ncalls: 3 (and 1 lost)\n")
    told = run(capsys, "ledger", "copy", ledger, target, "--json").json
    assert told == {
        "from": str(ledger),
        "to": str(target),
        "added": 0,
        "unchanged": 2,
        "calls": 3,
        "lost": 1,
        "attempts": {"finished": 1, "frozen": 1},
    }
    with SqliteLedger(target) as store:
        store.freeze(AttemptKey("q"))
    ran = run(capsys, "ledger", "copy", ledger, target, "--json")
    assert (ran.code, ran.json["error"]["code"]) == (1, "attempt_differs")
    assert ran.json["error"]["hint"].endswith("; no attempt was copied before")
    for same in (ledger, tmp_path / "." / ledger.name):
        assert run(capsys, "ledger", "copy", ledger, same, "--json").json["error"]["code"] == "usage"
    ran = run(capsys, "ledger", "copy", tmp_path / "none", tmp_path / "new", "--json")
    assert (ran.code, ran.json["error"]["code"]) == (3, "file_unreadable")
    assert not (tmp_path / "new").exists()


def test_every_command_takes_a_database(ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A ledger is where its URL says, and the URL's password is told to nobody."""
    url = fresh_url()
    secret = url.replace("postgres@", "postgres:s3cret@")

    def ran(*arguments: object) -> Ran:
        told = run(capsys, *arguments)
        assert "s3cret" not in told.out + told.err
        return told

    assert ran("ledger", "copy", ledger, secret).code == 0
    assert ran("import", good_story(tmp_path / "other", rollout_id="other"), "--into", secret).code == 0
    listed = ran("ls", secret, "--json").json["rollouts"]
    assert [one["rollout_id"] for one in listed] == ["r", "q", "other"]
    told = ran("ledger", "info", secret, "--json").json
    assert (told["ledger"], told["writer"], told["writers"]) == (url, None, [])
    assert told["bytes"] > 0
    with open_ledger(PostgresAddress(url)) as store:
        store.announce("http://one:1")
        told = ran("ledger", "info", secret, "--json").json
        assert told["writer"] == told["writers"][0]
        assert told["writer"]["address"] == "http://one:1"
        assert " at http://one:1\n" in ran("ledger", "info", secret).out
        assert ran("ledger", "migrate", secret, "--json").json["error"]["code"] == "ledger_locked"
    assert ran("ledger", "migrate", secret, "--json").json["ledger"] == url
    assert ran("verify", secret).code == 0
    assert ran("explain", secret, "--rollout", "r").code == 0
    assert ran("show", secret, "--rollout", "r").code == 0
    assert ran("select", secret, "--rollout", "r", "--json").code == 0
    assert ran("rows", secret, "--rollout", "r", "--out", tmp_path / "rows").code == 0
    assert ran("verify", secret, tmp_path / "rows", "--rollout", "r").code == 0
    assert secret not in (tmp_path / "rows" / "manifest.json").read_text()
    assert ran("export", secret, "--rollout", "r", "--to", "jsonl", "--out", tmp_path / "lines").code == 0
    assert ran("ls", secret, "--jobs", "2", "--json").json["rollouts"] == listed
    [frozen] = ran("ledger", "freeze", secret, "q", "--json").json["frozen"]
    assert ran("ledger", "retire", secret, "q", "--snapshot", frozen["snapshot_id"]).code == 0
    assert ran("ledger", "copy", secret, tmp_path / "back.gristmill").code == 0
    assert [one["rollout_id"] for one in ran("ls", tmp_path / "back.gristmill", "--json").json["rollouts"]] == [
        *("r", "other"),
    ]
    for bad in (f"{secret}&schema=No", f"{secret}&nonsense=1", f"{secret}&schema=t_none", secret.replace(":", "s:", 1)):
        for command in (["ls"], ["ledger", "info"], ["verify"], ["ledger", "freeze", "--finished"]):
            assert ran(*command, bad, "--json").code in {2, 3}
    assert ran("ls", secret.replace("/postgres?", "/nothing?")).code == 3
    assert "pip install 'gristmill[postgres]'" in _without_packages(ran, secret)


def _without_packages(ran: Callable[..., Ran], url: str) -> str:
    """Say what a command answers where the extra is not installed."""
    hidden = {name: module for name, module in sys.modules.items() if name.startswith("gristmill.ledger.postgres")}
    with pytest.MonkeyPatch.context() as patch:
        for name in hidden:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "psycopg", None)
        return ran("ls", url).err
