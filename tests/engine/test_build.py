"""Builds on one machine: the same bytes, whatever happens on the way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.archive import ArchiveReader, PartitionWriter, place_of
from gristmill.archive.columns import ATTEMPTS, CALLS
from gristmill.archive.parquet_tables import SCHEMAS, write_options
from gristmill.credit import AdvantageKind
from gristmill.engine import BuildOptions, build
from gristmill.engine.partition import PartReport
from gristmill.engine.plan import Plan
from gristmill.errors import Code, ConfigError, DecodeError, ExportError
from gristmill.export.formats import FORMATS
from gristmill.export.parquet_reader import read_parquet_rows
from gristmill.reconstruction import RowMode
from tests.archive.stored import rollouts, write_archive
from tests.cli.stories import run
from tests.engine.builds import contents, many_parts


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """An archive of two partitions of several parts; every fifth rollout is refused."""
    many_parts(tmp_path / "runs")
    return tmp_path / "runs"


def _watch() -> tuple[list[Plan], list[PartReport]]:
    return [], []


def test_a_build_makes_what_an_export_makes(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows of a whole archive are the rows of its rollouts."""
    summary = build(runs, tmp_path / "rows")
    assert run(capsys, "export", runs, "--out", tmp_path / "export", "--json").code == 0
    manifest = json.loads((tmp_path / "export" / "manifest.json").read_bytes())
    made = json.loads((tmp_path / "rows" / "summary.json").read_bytes())
    for name in ("funnel", "rollouts", "rejected", "forks", "context_tokens"):
        assert made[name] == manifest[name], name
    assert made["rollouts"]["rejected"] == 8
    assert summary.partitions > 4
    assert made["groups"]["groups"] == 10
    parts = sorted((tmp_path / "rows").rglob("rows-*.parquet"))
    rows = [row.row_id for path in parts for row in read_parquet_rows(path)]
    exported = [row.row_id for row in read_parquet_rows(tmp_path / "export" / "rows-00000.parquet")]
    assert rows == exported
    assert summary.records == len(rows)
    refused = [line for path in (tmp_path / "rows").rglob("rejected.jsonl") for line in path.read_bytes().splitlines()]
    assert len(refused) == 8
    assert run(capsys, "verify", runs, tmp_path / "rows").code == 0


def test_processes_do_not_change_a_byte(runs: Path, tmp_path: Path) -> None:
    """Who trains again next year gets the same rows."""
    build(runs, tmp_path / "one", jobs=1)
    build(runs, tmp_path / "two", jobs=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert len(contents(tmp_path / "one")) > 20


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "parquet"])
def test_every_format_can_be_built_and_proved(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A trainer's format is one like any other."""
    ran = run(capsys, "build", runs, tmp_path / "rows", "--to", name, "--jobs", "1", "--advantage", "group_mean")
    if name == "messages":
        assert (ran.code, "no advantages" in ran.err) == (2, True)
        ran = run(capsys, "build", runs, tmp_path / "rows", "--to", name, "--jobs", "1")
    assert ran.code in {0, 1}, ran.err
    ran = run(capsys, "verify", runs, tmp_path / "rows", "--json")
    assert (ran.code, ran.json["findings"]) == (0, [])


def test_a_second_run_makes_nothing(runs: Path, tmp_path: Path) -> None:
    """Finished partitions are passed over."""
    rows = tmp_path / "rows"
    build(runs, rows)
    before = {path: path.stat().st_mtime_ns for path in rows.rglob("*.parquet")}
    plans, made = _watch()
    build(runs, rows, on_plan=plans.append, on_part=made.append)
    assert (len(plans[0].todo), made) == (0, [])
    assert {path: path.stat().st_mtime_ns for path in rows.rglob("*.parquet")} == before


def test_what_is_missing_is_made_again(runs: Path, tmp_path: Path) -> None:
    """A partition without a manifest, one that is not there, a summary."""
    rows = tmp_path / "rows"
    build(runs, rows)
    whole = contents(rows)
    (rows / "run=a" / "part=00001" / "manifest.json").unlink()
    (rows / "run=a" / "part=00001" / "rows-00000.parquet").write_bytes(b"half")
    shutil.rmtree(rows / "run=b" / "part=00000")
    (rows / "summary.json").unlink()
    plans, made = _watch()
    build(runs, rows, on_plan=plans.append, on_part=made.append)
    assert sorted(report.name for report in made) == ["run=a/part=00001", "run=b/part=00000"]
    assert contents(rows) == whole


def test_partitions_that_are_added_are_built_beside_the_others(runs: Path, tmp_path: Path) -> None:
    """The next run of the agent is the next partition."""
    rows = tmp_path / "rows"
    build(runs, rows)
    write_archive(runs, list(rollouts(3, 100)), "c")
    plans, made = _watch()
    build(runs, rows, on_plan=plans.append, on_part=made.append)
    assert [report.name for report in made] == ["run=c/part=00000"]


OTHERWISE: dict[str, BuildOptions] = {
    "mode": BuildOptions(mode=RowMode.PER_CALL),
    "policy": BuildOptions(policy="all_captured"),
    "options": BuildOptions(options={"reasoning": "optional"}),
    "train_model": BuildOptions(train_model="m"),
    "format": BuildOptions(format="jsonl"),
    "advantage": BuildOptions(advantage=AdvantageKind.GROUP_MEAN),
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_rows_that_were_made_otherwise_are_refused(runs: Path, tmp_path: Path, what: str) -> None:
    """Two kinds of rows in one folder would be trained as one."""
    rows = tmp_path / "rows"
    build(runs, rows)
    before = contents(rows)
    with pytest.raises(ExportError) as caught:
        build(runs, rows, OTHERWISE[what])
    assert caught.value.code is Code.OUTPUT_EXISTS
    assert what in caught.value.message
    assert contents(rows) == before
    build(runs, rows, OTHERWISE[what], overwrite=True)
    build(runs, tmp_path / "fresh", OTHERWISE[what])
    assert contents(rows) == contents(tmp_path / "fresh")


def test_rows_of_other_captures_are_refused(runs: Path, tmp_path: Path) -> None:
    """The same names, other rollouts."""
    rows = tmp_path / "rows"
    build(runs, rows)
    other = tmp_path / "other"
    many_parts(other, 20, partitions=("a",))
    with pytest.raises(ExportError) as caught:
        build(other, rows)
    assert caught.value.code is Code.OUTPUT_EXISTS
    build(other, rows, overwrite=True)
    assert {name.split("/")[0] for name in contents(rows)} == {"run=a", "summary.json"}
    with PartitionWriter(place_of(other), "a", overwrite=True, drop=True) as writer:
        writer.finish()
    with pytest.raises(ExportError, match=r"none of this archive|other inputs"):
        build(other, rows)


def test_more_rewards_in_a_group_are_other_inputs(runs: Path, tmp_path: Path) -> None:
    """An advantage over a group depends on rollouts of other partitions."""
    options = BuildOptions(advantage=AdvantageKind.GROUP_NORM)
    rows = tmp_path / "rows"
    build(runs, rows, options)
    write_archive(runs, list(rollouts(3, 100)), "c")
    with pytest.raises(ExportError, match="rewards in its groups"):
        build(runs, rows, options)


def test_a_finished_partition_that_was_touched_is_refused(runs: Path, tmp_path: Path) -> None:
    """Passing over it would pass it on."""
    rows = tmp_path / "rows"
    build(runs, rows)
    whole = contents(rows)
    path = rows / "run=a" / "part=00000" / "rejected.jsonl"
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ExportError) as caught:
        build(runs, rows)
    assert caught.value.code is Code.MANIFEST_DIFFERS
    (rows / "run=a" / "part=00000" / "build.json").write_bytes(b"{")
    with pytest.raises(DecodeError):
        build(runs, rows)
    build(runs, rows, overwrite=True)
    assert contents(rows) == whole


def _damage(runs: Path, change: Callable[[list[dict[str, object]]], object]) -> None:
    """Write other calls into an archive, as somebody would who has our writer."""
    path = next((runs / "run=a").glob("calls-*.parquet"))
    rows = pq.read_table(path).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMAS["calls"]), path, **write_options(CALLS))
    with ArchiveReader(runs) as reader:
        manifest = reader.partitions["a"]
    from hashlib import sha256

    from gristmill.archive.manifest import sealed

    entries = [
        msgspec.structs.replace(entry, bytes=path.stat().st_size, sha256=sha256(path.read_bytes()).hexdigest())
        if entry.name == path.name
        else entry
        for entry in manifest.files
    ]
    changed = sealed(msgspec.structs.replace(manifest, files=tuple(entries)))
    (runs / "run=a" / "manifest.json").write_bytes(changed.encode())


def test_one_attempt_that_cannot_be_read_takes_no_other_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A million rollouts, and one with a record of nonsense."""
    runs = tmp_path / "runs"
    write_archive(runs, list(rollouts(4)))
    _damage(runs, lambda rows: rows[1].update(record=b"\x00"))
    summary = build(runs, tmp_path / "rows")
    assert summary.rejected == {"file_malformed": 1}
    assert summary.rollouts.selected == 3
    line = json.loads((tmp_path / "rows" / "run=a" / "part=00000" / "rejected.jsonl").read_bytes())
    assert (line["rollout_id"], line["code"]) == ("rollout-00000", "file_malformed")
    assert run(capsys, "verify", runs, tmp_path / "rows").code == 0


def test_an_archive_whose_files_are_not_as_its_manifest_says(runs: Path, tmp_path: Path) -> None:
    """What was proved when it was archived is what is built, or nothing is."""
    path = next((runs / "run=b").glob("calls-*.parquet"))
    data = path.read_bytes()
    path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    for jobs in (1, 2):
        with pytest.raises((DecodeError, ExportError)) as caught:
            build(runs, tmp_path / f"rows-{jobs}", jobs=jobs)
        assert caught.value.code is Code.MANIFEST_DIFFERS
    assert (tmp_path / "rows-1" / "run=a" / "part=00000" / "manifest.json").exists()
    assert not (tmp_path / "rows-1" / "summary.json").exists()


def _flipped(runs: Path) -> Path:
    """Change a result of the last partition, so that it still is one."""
    path = max((runs / "run=b").glob("attempts-*.parquet"))
    rows = pq.read_table(path).to_pylist()
    result = msgspec.msgpack.decode(rows[0]["result"])
    rows[0]["result"] = msgspec.msgpack.encode({**result, "reward": 0.5})
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMAS["attempts"]), path, **write_options(ATTEMPTS))
    return path


@pytest.mark.parametrize("advantage", [None, AdvantageKind.GROUP_MEAN])
def test_a_reward_that_is_not_as_it_was_archived_reaches_no_partition(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], advantage: AdvantageKind | None
) -> None:
    """It would be in the advantages of others, which are whole and look proved."""
    options = BuildOptions(advantage=advantage)
    build(runs, tmp_path / "good", options)
    path = _flipped(runs)
    with pytest.raises(DecodeError) as caught:
        build(runs, tmp_path / "rows", options)
    assert (caught.value.code, caught.value.where) == (Code.MANIFEST_DIFFERS, str(path))
    assert not list((tmp_path / "rows").rglob("manifest.json"))
    ran = run(capsys, "verify", runs, tmp_path / "good", "--json")
    found = [(one["code"], one["where"]) for one in ran.json["findings"]]
    assert (ran.code, found) == (1, [("manifest_differs", str(path))])


POLICY = """
from gristmill.selection import select_captured_calls

def mine(records, result):
    print("a policy that prints")
    if records[0].rollout_id == "rollout-00003":
        raise KeyError("not a refusal")
    if records[0].rollout_id == "rollout-00005":
        raise ValueError("a refusal")
    return select_captured_calls(records, result)
"""


def test_a_policy_of_ones_own(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is imported by every process, and where it breaks only that rollout is lost."""
    (tmp_path / "own_policy_of_a_build.py").write_text(POLICY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    ran = run(capfd, "build", runs, "rows", "--policy", "own_policy_of_a_build:mine", "--jobs", "2", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["summary"]["rejected"] == {"match_missing": 8, "policy_broke_contract": 1, "policy_refused": 1}
    told = run(capfd, "verify", runs, "rows")
    assert (told.code, "which is not built in" in told.err) == (2, True)
    assert run(capfd, "verify", runs, "rows", "--policy", "own_policy_of_a_build:mine").code == 0


def test_what_a_build_refuses_before_it_begins(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written where it must not be."""
    assert "is an archive" in run(capsys, "build", runs, runs).err
    ran = run(capsys, "build", tmp_path / "nothing", tmp_path / "rows", "--json")
    assert ran.json["error"]["code"] == "file_malformed"
    with pytest.raises(ConfigError):
        build(runs, tmp_path / "rows", BuildOptions(options={"nope": "1"}))
    write_archive(tmp_path / "other", list(rollouts(2)), "again")
    (tmp_path / "other" / "run=again").rename(runs / "run=again")
    ran = run(capsys, "build", runs, tmp_path / "rows", "--json")
    assert (ran.json["error"]["code"], (tmp_path / "rows").exists()) == ("file_malformed", False)


def test_every_rollout_refused_is_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script has to notice."""
    write_archive(tmp_path / "runs", [pair for pair in rollouts(5) if pair[0].rollout_id.endswith("4")])
    assert run(capsys, "build", tmp_path / "runs", tmp_path / "rows").code == 1


TAMPERED: dict[str, Callable[[Path], object]] = {
    "a row": lambda rows: _append(next(rows.rglob("rejected.jsonl")), b"{}\n"),
    "a partition that is missing": lambda rows: shutil.rmtree(rows / "run=b" / "part=00000"),
    "a partition that is too many": lambda rows: shutil.copytree(
        rows / "run=b" / "part=00000", rows / "run=c" / "part=00000"
    ),
    "a file that is missing": lambda rows: next(rows.rglob("rows-*.parquet")).unlink(),
    "a file that no manifest names": lambda rows: (rows / "run=a" / "part=00000" / "more.parquet").write_bytes(b""),
    "a manifest that is missing": lambda rows: next(rows.rglob("manifest.json")).unlink(),
    "a stamp": lambda rows: _replace(rows / "run=a" / "part=00000" / "build.json", b'"merged"', b'"tree"'),
    "a stamp that is none": lambda rows: (rows / "run=a" / "part=00000" / "build.json").write_bytes(b"[]"),
    "a summary": lambda rows: _replace(rows / "summary.json", b'"selected": 32', b'"selected": 40'),
}


def _append(path: Path, data: bytes) -> None:
    path.write_bytes(path.read_bytes() + data)


def _replace(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


@pytest.mark.parametrize("change", TAMPERED)
def test_verify_proves_a_built_folder(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    """Whatever was changed after the build is a finding."""
    rows = tmp_path / "rows"
    build(runs, rows)
    TAMPERED[change](rows)
    ran = run(capsys, "verify", runs, rows, "--json")
    assert ran.code == 1
    assert ran.json["findings"]


def test_verify_wants_the_archive(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And says so, where it is given something else; rows are no captures either."""
    rows = tmp_path / "rows"
    build(runs, rows)
    (tmp_path / "c.jsonl").write_text("{}\n", encoding="utf-8")
    assert "expected the archive" in run(capsys, "verify", tmp_path / "c.jsonl", rows).err
    assert "holds rows that were built" in run(capsys, "ls", rows).err


def test_rows_elsewhere_than_on_a_disk(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Archive and rows through fsspec, from several processes: the same bytes, and the same proof."""
    away = f"local://{tmp_path}/away"
    for name in ("run=a", "run=b"):
        shutil.copytree(runs / name, tmp_path / "moved" / name)
    there = f"local://{tmp_path}/moved"
    build(there, away, jobs=2)
    build(runs, tmp_path / "rows")
    assert contents(tmp_path / "away") == contents(tmp_path / "rows")
    plans, made = _watch()
    build(there, away, on_plan=plans.append, on_part=made.append)
    assert made == []
    (tmp_path / "away" / "run=a" / "part=00000" / "manifest.json").unlink()
    build(there, away)
    assert contents(tmp_path / "away") == contents(tmp_path / "rows")
    assert run(capsys, "verify", there, away).code == 0
    (tmp_path / "away" / "run=a" / "part=00000" / "more.jsonl").write_bytes(b"")
    assert run(capsys, "verify", there, away).code == 1
