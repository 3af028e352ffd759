"""`gristmill archive`, archives as captures, and ledgers that forget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gristmill.archive import ArchiveReader
from gristmill.ledger import AttemptKey, AttemptState, SqliteLedger, SqliteReader, snapshot_id
from gristmill.records import Result
from tests.archive.stored import everything, flip, rollouts, write_archive
from tests.cli.stories import good_story, refused_story, run
from tests.ledger.attempts import comparable, fill


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """A ledger with an attempt in every state."""
    path = tmp_path / "run one.gristmill"
    with SqliteLedger(path) as made:
        everything(made, "frozen")
        fill(made, AttemptKey("open"))
        fill(made, AttemptKey("finished"))
        made.finish(AttemptKey("finished"), Result(value={}, reward=1.0))
        fill(made, AttemptKey("abandoned"))
        made.abandon(AttemptKey("abandoned"))
    return path


def snapshot_of(stored: SqliteReader, key: AttemptKey) -> str:
    """Digest an attempt as it is in a ledger."""
    capture, result = stored.read(key, exchanges=True)
    return snapshot_id(capture, result, stored.late(key), stored.setup(key))


def test_a_ledger_is_archived(ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole of it, but for what may still change."""
    ran = run(capsys, "archive", ledger, tmp_path / "runs", "--json")
    assert ran.code == 0
    assert (ran.json["partition"], ran.json["passed_over"], ran.json["counts"]["attempts"]) == ("run-one", 1, 3)
    with ArchiveReader(tmp_path / "runs") as archive, SqliteReader(ledger) as stored:
        for summary in stored.summaries():
            if summary.state is not AttemptState.OPEN:
                assert archive.summary(summary.key) == summary
                assert comparable(*archive.read(summary.key, exchanges=True)) == comparable(
                    *stored.read(summary.key, exchanges=True)
                )
                assert archive.whole(summary.key).snapshot_id() == snapshot_of(stored, summary.key)
                assert archive.check(summary.key) == ()
    told = run(capsys, "archive", ledger, tmp_path / "runs")
    assert told.code == 3
    assert "is there" in told.err
    assert run(capsys, "archive", ledger, tmp_path / "runs", "--overwrite").code == 0


def test_every_command_takes_an_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody should have to bring it back into a ledger to look at it."""
    good_story(tmp_path / "made" / "good", "good")
    refused_story(tmp_path / "made" / "refused", "refused")
    runs = tmp_path / "runs"
    assert run(capsys, "archive", tmp_path / "made", runs).code == 0
    for command in (["ls"], ["select"], ["rows"], ["drift"], ["show"]):
        both = [
            run(capsys, *command, place, "--rollout", "good", "--json") for place in (tmp_path / "made" / "good", runs)
        ]
        assert both[0].code == both[1].code == 0
        texts = [json.dumps(ran.json).replace(str(tmp_path / "made" / "good"), str(runs)) for ran in both]
        assert texts[0] == texts[1], command
    assert run(capsys, "verify", runs).code == 0
    assert run(capsys, "explain", runs, "--rollout", "refused").code in {0, 1}
    for name in ("first", "second"):
        assert run(capsys, "export", runs, "--out", tmp_path / name).code == 0
    assert run(capsys, "verify", runs, tmp_path / "first").code == 0
    back = tmp_path / "back.gristmill"
    ran = run(capsys, "import", runs, "--into", back, "--json")
    assert (ran.json["added"], ran.json["unchanged"]) == (2, 0)
    assert run(capsys, "import", tmp_path / "made", "--into", back, "--json").json["unchanged"] == 2


def test_what_is_archived_may_be_deleted(ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Frozen attempts only, and only what the archive gives back unchanged."""
    runs = tmp_path / "runs"
    ran = run(capsys, "archive", ledger, runs, "--retire", "--json")
    assert ran.json["retired"] == 2
    with SqliteReader(ledger) as stored:
        assert {key.rollout_id for key in stored.attempts()} == {"open", "finished"}
    with SqliteLedger(ledger) as stored:
        stored.freeze(AttemptKey("finished"))
    ran = run(capsys, "ledger", "retire", ledger, "finished", "--archive", runs)
    assert ran.code == 0
    with SqliteReader(ledger) as stored:
        assert {key.rollout_id for key in stored.attempts()} == {"open"}


def test_a_ledger_is_archived_day_after_day(ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What finished yesterday is in the data set already; twice in it, it would make all of it unreadable."""
    runs = tmp_path / "runs"
    assert run(capsys, "archive", ledger, runs, "--partition", "day1", "--retire").code == 0
    with SqliteLedger(ledger) as stored:
        stored.freeze(AttemptKey("finished"))
        fill(stored, AttemptKey("new"))
        stored.finish(AttemptKey("new"), Result(value={}, reward=0.5))
    told = run(capsys, "archive", ledger, runs, "--partition", "day2", "--retire", "--json").json
    assert (told["counts"]["attempts"], told["already"], told["retired"]) == (1, 1, 1)
    with ArchiveReader(runs) as archive:
        assert sorted(key.rollout_id for key in archive.attempts()) == ["abandoned", "finished", "frozen", "new"]
    with SqliteReader(ledger) as stored:
        assert {key.rollout_id for key in stored.attempts()} == {"open", "new"}
    assert (
        "1 rollout in another partition as they are" in run(capsys, "archive", ledger, runs, "--partition", "day3").err
    )


def test_other_content_of_an_archived_attempt_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody could say which of the two is right."""
    runs = tmp_path / "runs"
    for number, reward in enumerate((1.0, 0.0)):
        with SqliteLedger(tmp_path / f"{number}.gristmill") as made:
            fill(made, AttemptKey("same"))
            made.finish(AttemptKey("same"), Result(value={}, reward=reward))
    assert run(capsys, "archive", tmp_path / "0.gristmill", runs).code == 0
    ran = run(capsys, "archive", tmp_path / "1.gristmill", runs, "--json")
    assert (ran.code, ran.json["error"]["code"]) == (3, "output_exists")
    assert "same/0 is in run=0" in ran.json["error"]["message"]
    assert not (runs / "run=1").exists()
    assert run(capsys, "ls", runs).code == 0


def test_what_is_not_proved_is_kept(ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another archive, a changed file, a missing option: nothing is deleted."""
    runs, other = tmp_path / "runs", tmp_path / "other"
    assert run(capsys, "archive", ledger, runs).code == 0
    write_archive(other, list(rollouts(1)))
    assert run(capsys, "ledger", "retire", ledger, "frozen", "--attempt", "1").code == 2
    ran = run(capsys, "ledger", "retire", ledger, "frozen", "--attempt", "1", "--archive", other, "--json")
    assert ran.json["error"]["code"] == "rollout_unknown"
    told = ["ledger", "retire", ledger, "frozen", "--attempt", "1", "--archive", runs, "--json"]
    ran = run(capsys, *told, "--snapshot", "0" * 64)
    assert ran.json["error"]["code"] == "manifest_differs"
    path = runs / "run=run-one" / "calls-00000.parquet"
    data = path.read_bytes()
    path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    assert run(capsys, *told).json["error"]["code"] == "manifest_differs"
    path.write_bytes(data)
    bare = tmp_path / "bare"
    assert run(capsys, "archive", ledger, bare, "--no-exchanges").code == 0
    ran = run(capsys, "ledger", "retire", ledger, "frozen", "--attempt", "1", "--archive", bare, "--json")
    assert ran.json["error"]["code"] == "manifest_differs"
    with SqliteReader(ledger) as stored:
        assert len(list(stored.attempts())) == 4
    assert run(capsys, *told).code == 0


def test_names_of_partitions(ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name becomes a folder, everywhere."""
    ran = run(capsys, "archive", ledger, tmp_path / "runs", "--partition", "../up")
    assert (ran.code, "expected letters, digits" in ran.err) == (2, True)
    good_story(tmp_path / "good", "good")
    ran = run(capsys, "archive", ledger, tmp_path / "good", tmp_path / "runs")
    assert (ran.code, "expected --partition" in ran.err) == (2, True)
    ran = run(capsys, "archive", tmp_path / "runs")
    assert (ran.code, "expected captures and a data set" in ran.err) == (2, True)
    assert not (tmp_path / "runs").exists()


def test_what_a_ledger_has_forgotten_stays_in_its_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who archives the same ledger every night has one name for all of it."""
    for name in "abc":
        good_story(tmp_path / "made" / name, name)
    ledger, runs = tmp_path / "two.gristmill", tmp_path / "runs"
    assert run(capsys, "import", tmp_path / "made", "--into", ledger).code == 0
    assert run(capsys, "ledger", "freeze", ledger, "a").code == 0
    assert run(capsys, "archive", ledger, runs).code == 0
    assert run(capsys, "ledger", "retire", ledger, "a", "--archive", runs).code == 0
    ran = run(capsys, "archive", ledger, runs, "--overwrite", "--json")
    assert (ran.code, ran.json["error"]["code"]) == (3, "output_exists")
    assert "a/0" in ran.json["error"]["message"]
    with ArchiveReader(runs) as archive:
        assert {key.rollout_id for key in archive.attempts()} == {"a", "b", "c"}
    assert run(capsys, "archive", ledger, runs, "--drop").code == 2
    assert run(capsys, "archive", ledger, runs, "--partition", "more").code == 0
    assert run(capsys, "archive", ledger, tmp_path / "again").code == 0
    assert run(capsys, "archive", ledger, runs, "--overwrite", "--drop").code == 0


@pytest.mark.parametrize("command", ["export", "rows", "select", "groups", "ls", "explain", "show", "archive"])
def test_no_command_takes_what_is_not_as_it_was_archived(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """One flipped bit gave another reward, group or id, and exit code 0."""
    runs = tmp_path / "runs"
    good_story(tmp_path / "made")
    assert run(capsys, "archive", tmp_path / "made", runs).code == 0
    more = {"export": ["--out", tmp_path / "rows"], "archive": [tmp_path / "other"]}.get(command, [])
    for name in ("attempts", "calls"):
        path = runs / "run=made" / f"{name}-00000.parquet"
        whole = path.read_bytes()
        flip(path, len(whole) // 3)
        ran = run(capsys, command, runs, *more)
        assert (ran.code, "as its manifest says" in ran.err) == (1, True), ran
        path.write_bytes(whole)


@pytest.mark.parametrize("name", ["attempts", "calls", "bodies"])
def test_damage_is_a_finding_and_takes_no_other_partition_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Of a run of one attempt, nothing may be left that can be read."""
    runs = tmp_path / "runs"
    write_archive(runs, list(rollouts(1)), "a")
    write_archive(runs, list(rollouts(2, 1)), "b")
    path = runs / "run=a" / f"{name}-00000.parquet"
    flip(path, len(path.read_bytes()) // 2)
    ran = run(capsys, "verify", runs, "--json")
    assert ran.code == 1
    assert {one["code"] for one in ran.json["findings"]} == {"ledger_damaged"}
    assert ran.json["checked"]["rollouts"] >= 2
    for more in ([], ["--rollout", "rollout-00000"]):
        ran = run(capsys, "verify", runs / "run=a", *more)
        assert (ran.code, "ledger_damaged" in ran.out) == (1, True), ran
