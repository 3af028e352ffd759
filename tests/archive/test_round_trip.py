"""What an archive gives back is what went in."""

from __future__ import annotations

from pathlib import Path

import duckdb
import msgspec
import numpy as np
import polars
import pytest

from gristmill.archive import ArchivedAttempt, ArchiveReader, PartitionWriter, place_of
from gristmill.archive.columns import TABLES
from gristmill.errors import Code, ExportError, LedgerError
from gristmill.ledger import AttemptKey, AttemptState, MemoryLedger, SqliteLedger, snapshot_id
from gristmill.records import CallRecord, Capture, Exchange, LostCall, Result, TokenDelta
from tests.archive.stored import archived, everything, flip, memory_ledger, rollouts, write_archive
from tests.ledger.attempts import chain, comparable


def _written(path: Path, attempts: list[ArchivedAttempt], part_bytes: int = 2**28, **options: bool) -> ArchiveReader:
    with PartitionWriter(place_of(path), "a", part_bytes=part_bytes, **options) as writer:
        for attempt in attempts:
            writer.add(attempt)
        writer.finish()
    return ArchiveReader(path)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_an_attempt_with_everything_comes_back_equal(tmp_path: Path, kind: str) -> None:
    """A field that is dropped is lost for good once the ledger is deleted."""
    ledger = MemoryLedger() if kind == "memory" else SqliteLedger(tmp_path / "run.gristmill")
    key = everything(ledger)
    given = archived(ledger, key)
    with _written(tmp_path / "runs", [given]) as reader:
        got = reader.whole(key)
        assert comparable(got.capture, got.result) == comparable(given.capture, given.result)
        assert got.setup == given.setup
        assert [one.record for one in got.late] == [one.record for one in given.late]
        assert got.late[0].exchange == given.late[0].exchange
        assert got.late[0].tokens is not None
        assert got.state == given.state
        assert got.snapshot_id() == given.snapshot_id() == ledger.freeze(key)
        assert reader.prove(key) == ledger.freeze(key)
        assert reader.check(key) == ()
        assert reader.summary(key) == msgspec.structs.replace(ledger.summary(key), touched_at=given.touched_at)
        assert reader.setup(key) == got.setup
        assert reader.late(key)[0].record == given.late[0].record
    if isinstance(ledger, SqliteLedger):
        ledger.close()


def test_a_field_that_is_added_to_a_result_travels(tmp_path: Path) -> None:
    """Results grow; whoever adds a field does not think of the archive."""
    for name in Result.__struct_fields__:
        values = {"value": {"a": 1}, "reward": 1.0, "group_id": "g", "metadata": {"b": 2}, "advantage": 0.5}
        result = Result(**{name: values[name]}) if name in values else Result()
        with _written(tmp_path / name, [ArchivedAttempt(capture=Capture(rollout_id="r"), result=result)]) as reader:
            assert reader.read(AttemptKey("r"))[1] == result


def test_every_field_of_a_record_travels(tmp_path: Path) -> None:
    """Whatever a gateway writes into a record."""
    ledger = memory_ledger()
    given = archived(ledger, AttemptKey("all-0", 1))
    record = msgspec.structs.replace(
        given.capture.records[0], upstream="engine-1", engine_epoch=3, changes=("set:logprobs",), session_id="s"
    )
    capture = msgspec.structs.replace(given.capture, records=(record, *given.capture.records[1:]))
    with _written(tmp_path / "runs", [msgspec.structs.replace(given, capture=capture)]) as reader:
        got = reader.whole(given.key).capture.records[0]
        assert (got.upstream, got.engine_epoch, got.changes, got.session_id) == ("engine-1", 3, ("set:logprobs",), "s")


def test_parts_are_bounded_and_hold_whole_attempts(tmp_path: Path) -> None:
    """A part is what one process of a build reads."""
    ledger = memory_ledger(9)
    attempts = [archived(ledger, key) for key in ledger.attempts()]
    with _written(tmp_path / "runs", attempts, part_bytes=60_000) as reader:
        assert len(reader.parts) > 2
        assert list(reader.attempts()) == list(ledger.attempts())
        for one in attempts:
            assert reader.prove(one.key) == one.snapshot_id()
        sizes = [sum(entry.rows for entry in part.files) for part in reader.parts]
        assert all(sizes)
        assert reader.counts() == ledger.counts()


def test_attempts_are_found_by_key_state_and_group(tmp_path: Path) -> None:
    """`ls --group` and `show ROLLOUT` on an archive."""
    ledger = memory_ledger(3)
    open_ended = AttemptKey("all-0", 0)
    ledger.admit(open_ended, "c0")
    ledger.abandon(open_ended)
    attempts = [archived(ledger, key) for key in ledger.attempts()]
    with _written(tmp_path / "runs", attempts, part_bytes=40_000) as reader:
        assert reader.rollout("all-0") == (AttemptKey("all-0", 0), AttemptKey("all-0", 1))
        assert reader.rollout("nobody") == ()
        abandoned = [one.key for one in reader.summaries(state=AttemptState.ABANDONED)]
        assert abandoned == [open_ended]
        assert len(list(reader.summaries(group_id="g"))) == 3
        keys = list(reader.attempts())
        assert [one.key for one in reader.summaries(after=keys[1])] == keys[2:]
        with pytest.raises(LedgerError) as caught:
            reader.read(AttemptKey("all-0", 2))
        assert caught.value.code is Code.ROLLOUT_UNKNOWN


def test_without_exchanges_the_rest_is_there(tmp_path: Path) -> None:
    """Bodies are most of the bytes; the snapshot id then says that they are not there."""
    ledger = memory_ledger()
    given = archived(ledger, AttemptKey("all-0", 1))
    with _written(tmp_path / "runs", [given], exchanges=False) as reader:
        got = reader.whole(given.key)
        assert got.capture.records == given.capture.records
        assert not got.capture.exchanges
        assert got.late[0].exchange is None
        assert reader.prove(given.key) != given.snapshot_id()
        assert reader.check(given.key) == ()


def test_tokens_and_exchanges_are_read_only_where_they_are_wanted(tmp_path: Path) -> None:
    """A listing of a large archive must not read its tokens."""
    ledger = memory_ledger()
    given = archived(ledger, AttemptKey("all-0", 1))
    with _written(tmp_path / "runs", [given]) as reader:
        bare, _ = reader.read(given.key, tokens=False)
        assert (bare.tokens, bare.exchanges) == ({}, {})
        assert bare.records == given.capture.records


def test_long_histories_take_the_room_of_their_new_messages(tmp_path: Path) -> None:
    """A request repeats everything before it: stored whole, bytes grow with the square of the turns."""
    sizes: list[int] = []
    for calls in (40, 80):
        ledger = MemoryLedger()
        key = AttemptKey("r")
        for call in chain(calls, long_chars=2000):
            ledger.admit(key, call.record.model_call_id)
            ledger.commit(key, call)
        ledger.finish(key, Result())
        with _written(tmp_path / str(calls), [archived(ledger, key)]) as reader:
            sizes.append(sum(entry.bytes for entry in reader.parts[0].files))
    assert sizes[1] < 2.5 * sizes[0]


def test_an_empty_partition_and_attempts_without_calls(tmp_path: Path) -> None:
    """A run in which nothing happened is a run."""
    with _written(tmp_path / "nothing", []) as reader:
        assert list(reader.attempts()) == []
        assert reader.counts().calls == 0
    with _written(tmp_path / "empty", [ArchivedAttempt(capture=Capture(rollout_id="r"))]) as reader:
        assert reader.read(AttemptKey("r")) == (Capture(rollout_id="r"), None)


def test_equal_captures_make_equal_files(tmp_path: Path) -> None:
    """No clock, host or path."""
    for name in ("one", "other"):
        write_archive(tmp_path / name, list(rollouts(7)))
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert len(files) == 4
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "other" / path).read_bytes()


def test_duckdb_and_polars_read_the_tables(tmp_path: Path) -> None:
    """Queries are their business."""
    write_archive(tmp_path / "runs", list(rollouts(7)), "train")
    pattern = f"{tmp_path}/runs/run=*/calls-*.parquet"
    query = f"select run, sum(sampled_tokens), max(len(token_ids)) from read_parquet('{pattern}') group by run"
    assert duckdb.sql(query).fetchall() == [("train", 35, 5)]
    table = polars.read_parquet(f"{tmp_path}/runs/run=*/attempts-*.parquet")
    assert table["reward"].sum() == 3.0
    ids = polars.read_parquet(pattern)["token_ids"].explode().to_numpy()
    assert ids.dtype == np.int32


def test_every_column_is_documented_and_written() -> None:
    """A column that nobody explains is a riddle in ten years."""
    for table in TABLES:
        assert len(set(table.names)) == len(table.columns)
        assert all(column.about for column in table.columns)


@pytest.mark.parametrize(
    ("capture", "code"),
    [
        (Capture(rollout_id="\ud800"), Code.OPTION_INVALID),
        (Capture(rollout_id="r", exchanges={"x": Exchange(model_call_id="x")}), Code.CALL_UNKNOWN),
        (
            Capture(
                rollout_id="r",
                records=(CallRecord(model_call_id="c", response_id="c", cum_len=2, prompt_len=1, delta_len=2),),
                tokens={"c": TokenDelta(np.zeros(1, np.int32), np.zeros(1, np.uint8), np.zeros(1, np.float32))},
            ),
            Code.TOKEN_COUNT_MISMATCH,
        ),
        (Capture(rollout_id="r", lost=(LostCall(model_call_id="\ud800"),)), Code.OPTION_INVALID),
    ],
)
def test_what_no_ledger_stores_is_refused(tmp_path: Path, capture: Capture, code: Code) -> None:
    """Half an attempt in an archive would be found when its ledger is gone."""
    with PartitionWriter(place_of(tmp_path / "runs"), "a") as writer:
        with pytest.raises(LedgerError) as caught:
            writer.add(ArchivedAttempt(capture=capture))
        assert caught.value.code is code
        writer.add(ArchivedAttempt(capture=Capture(rollout_id="next")))
        assert writer.finish().counts.attempts == 1


def test_an_attempt_is_archived_once(tmp_path: Path) -> None:
    """Trained twice otherwise."""
    attempt = ArchivedAttempt(capture=Capture(rollout_id="r"))
    with PartitionWriter(place_of(tmp_path / "runs"), "a") as writer:
        writer.add(attempt)
        with pytest.raises(LedgerError, match="each attempt once"):
            writer.add(attempt)


def test_a_partition_that_is_there_is_not_replaced_by_accident(tmp_path: Path) -> None:
    """A second run with the same name."""
    write_archive(tmp_path / "runs", list(rollouts(2)))
    with pytest.raises(ExportError) as caught:
        write_archive(tmp_path / "runs", list(rollouts(3)))
    assert caught.value.code is Code.OUTPUT_EXISTS
    with PartitionWriter(place_of(tmp_path / "runs"), "a", overwrite=True, drop=True) as writer:
        writer.finish()
    with ArchiveReader(tmp_path / "runs") as reader:
        assert list(reader.attempts()) == []


@pytest.mark.parametrize("where", ["local", "memory"])
def test_what_only_the_partition_that_is_there_holds_is_not_dropped(tmp_path: Path, where: str) -> None:
    """Its ledger may have forgotten it, because it was proved to be here."""
    runs = str(tmp_path / "runs") if where == "local" else f"memory://{tmp_path.name}/runs"
    held = list(rollouts(3))
    write_archive(runs, held)
    changed = (held[0][0], Result(reward=9.0))
    for attempts, named in ((held[1:], "lacks 1 of"), ([changed, *held[1:]], "rollout-00000/0"), ([], "lacks 3 of")):
        with PartitionWriter(place_of(runs), "a", overwrite=True, part_bytes=1) as writer:
            for capture, result in attempts:
                writer.add(ArchivedAttempt(capture=capture, result=result))
            with pytest.raises(ExportError, match=named) as caught:
                writer.finish()
        assert caught.value.code is Code.OUTPUT_EXISTS
        with ArchiveReader(runs) as reader:
            assert [one.reward for one in reader.summaries()] == [result.reward for _, result in held]
            assert all(reader.prove(key) for key in reader.attempts())
    with PartitionWriter(place_of(runs), "a", overwrite=True, part_bytes=1) as writer:
        for capture, result in rollouts(4):
            writer.add(ArchivedAttempt(capture=capture, result=result))
        writer.finish()
    with ArchiveReader(runs) as reader:
        assert len(list(reader.attempts())) == len(reader.parts) == 4
        assert all(reader.prove(key) for key in reader.attempts())
    with PartitionWriter(place_of(runs), "a", overwrite=True, drop=True) as writer:
        writer.finish()
    with ArchiveReader(runs) as reader:
        assert list(reader.attempts()) == []


def test_a_partition_that_cannot_be_read_is_not_replaced(tmp_path: Path) -> None:
    """Nothing says that the new one holds as much."""
    write_archive(tmp_path / "runs", list(rollouts(1)))
    flip(tmp_path / "runs" / "run=a" / "attempts-00000.parquet", 100)
    with PartitionWriter(place_of(tmp_path / "runs"), "a", overwrite=True) as writer:
        for capture, result in rollouts(1):
            writer.add(ArchivedAttempt(capture=capture, result=result))
        with pytest.raises(ExportError, match="before it is replaced") as caught:
            writer.finish()
    assert (caught.value.code, "--drop" in (caught.value.hint or "")) == (Code.OUTPUT_EXISTS, True)


def test_a_writer_that_is_given_up_leaves_what_was_there(tmp_path: Path) -> None:
    """Also where files go one by one to the place that they will have."""
    for runs in (str(tmp_path / "runs"), f"memory://{tmp_path.name}/given-up"):
        write_archive(runs, list(rollouts(2)))
        with PartitionWriter(place_of(runs), "a", overwrite=True, part_bytes=1) as writer:
            for capture, result in rollouts(3):
                writer.add(ArchivedAttempt(capture=capture, result=result))
        with ArchiveReader(runs) as reader:
            assert len([reader.prove(key) for key in reader.attempts()]) == 2


def test_a_folder_that_cannot_be_put_in_its_place_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one goes when the new one is there."""
    write_archive(tmp_path / "runs", list(rollouts(1)))
    replace = Path.replace

    def refused(own: Path, target: Path) -> Path:
        if own.name == "work":
            raise OSError("no room")
        return replace(own, target)

    monkeypatch.setattr(Path, "replace", refused)
    writer = PartitionWriter(place_of(tmp_path / "runs"), "a", overwrite=True, drop=True)
    with writer, pytest.raises(ExportError, match="no room"):
        writer.finish()
    with ArchiveReader(tmp_path / "runs") as reader:
        assert reader.prove(AttemptKey("rollout-00000"))


def test_a_writer_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    """Half a partition must never be taken for one."""
    with PartitionWriter(place_of(tmp_path / "runs"), "a", part_bytes=1) as writer:
        for capture, result in rollouts(3):
            writer.add(ArchivedAttempt(capture=capture, result=result))
    assert list((tmp_path / "runs").iterdir()) == []


def test_snapshot_ids_do_not_depend_on_where_a_result_is(tmp_path: Path) -> None:
    """The proof that lets a ledger forget compares them."""
    [(capture, result)] = rollouts(1)
    write_archive(tmp_path / "runs", [(capture, result)])
    with ArchiveReader(tmp_path / "runs") as reader:
        assert reader.prove(AttemptKey(capture.rollout_id)) == snapshot_id(capture, result)
