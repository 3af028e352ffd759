"""Archives and rows on local disks and elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from gristmill.archive import ArchivedAttempt, ArchiveReader, PartitionWriter, as_url, is_archive, place_of
from gristmill.archive.local import sweep_work
from gristmill.archive.work import PREFIX, work_folder
from gristmill.cli import main
from gristmill.errors import Code, ConfigError, DecodeError, ExportError
from gristmill.ledger import AttemptKey
from tests.archive.stored import archived, memory_ledger, rollouts, write_archive


@pytest.fixture
def memory() -> Iterator[str]:
    """A location of fsspec that lives in this process."""
    files = fsspec.filesystem("memory")
    yield "memory://bucket/runs"
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("runs", None),
        ("/data/runs", None),
        ("a:b", None),
        ("s3://bucket/runs", "s3://bucket/runs"),
        ("s3:/bucket/runs", "s3://bucket/runs"),
        (Path("s3://bucket/runs"), "s3://bucket/runs"),
        (Path("file:///data/runs"), "file:///data/runs"),
        (Path("local:///data/runs"), "local:///data/runs"),
    ],
)
def test_urls_are_told_from_paths(given: str | Path, url: str | None) -> None:
    """A path type takes one of the slashes away."""
    assert as_url(given) == url


def test_a_path_that_is_there_is_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may call a folder so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "runs").mkdir(parents=True)
    assert as_url("s3:/runs") is None


def test_an_archive_elsewhere_is_what_it_is_here(memory: str, tmp_path: Path) -> None:
    """The same bytes under the same names."""
    ledger = memory_ledger(4)
    for place in (memory, str(tmp_path / "runs")):
        with PartitionWriter(place_of(place), "a", part_bytes=60_000) as writer:
            for key in ledger.attempts():
                writer.add(archived(ledger, key))
            writer.finish()
    files = fsspec.filesystem("memory")
    names = sorted(path.name for path in (tmp_path / "runs" / "run=a").iterdir())
    assert sorted(os.path.basename(path) for path in files.ls("/bucket/runs/run=a", detail=False)) == names
    for name in names:
        assert files.cat_file(f"/bucket/runs/run=a/{name}") == (tmp_path / "runs" / "run=a" / name).read_bytes()
    with ArchiveReader(memory) as reader:
        for key in ledger.attempts():
            assert reader.prove(key) == archived(ledger, key).snapshot_id()
    assert is_archive(memory)
    assert is_archive(Path(memory))
    assert is_archive(f"{memory}/run=a")
    with ArchiveReader(f"{memory}/run=a") as reader:
        assert len(list(reader.attempts())) == 4


def test_the_manifest_goes_last(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is stopped on the way leaves nothing that is read."""
    files = fsspec.filesystem("memory")
    put: list[str] = []
    real = files.put_file

    def watched(source: str, target: str, **options: Any) -> None:
        put.append(os.path.basename(target))
        real(source, target, **options)

    monkeypatch.setattr(type(files), "put_file", staticmethod(watched))
    with PartitionWriter(place_of(memory), "a", part_bytes=1) as writer:
        for capture, result in rollouts(3):
            writer.add(ArchivedAttempt(capture=capture, result=result))
        writer.finish()
    assert put[-1] == "manifest.json"
    assert len(put) == 10
    assert put[0] == "attempts-00000.parquet"


def test_a_writer_that_is_given_up_leaves_no_manifest_elsewhere(memory: str) -> None:
    """Parts that were shipped stay, and are replaced by the next writer."""
    with PartitionWriter(place_of(memory), "a", part_bytes=1) as writer:
        for capture, result in rollouts(3):
            writer.add(ArchivedAttempt(capture=capture, result=result))
    with pytest.raises(DecodeError, match="only unfinished ones"):
        ArchiveReader(memory)
    write_archive(memory, list(rollouts(1)))
    with ArchiveReader(memory) as reader:
        assert len(list(reader.attempts())) == 1
        names = fsspec.filesystem("memory").ls("/bucket/runs/run=a", detail=False)
        assert len(names) == 4
    with pytest.raises(ExportError) as caught:
        write_archive(memory, list(rollouts(1)))
    assert caught.value.code is Code.OUTPUT_EXISTS


def test_places_that_cannot_be_read_or_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of a file system of somebody else come as ours."""
    with pytest.raises(ConfigError, match="fsspec serves"):
        place_of("unheard://bucket/runs")
    place = place_of("memory://nowhere")
    assert place.folders() == []
    assert place.files() == []
    assert place.size("x") is None
    with pytest.raises(DecodeError) as caught:
        place.read("x", 10)
    assert caught.value.code is Code.FILE_UNREADABLE
    local = place_of(tmp_path)
    local.write("x", b"0123456789ab")
    with pytest.raises(DecodeError, match="at most 10 bytes"):
        local.read("x", 10)
    assert local.read("x", 12) == b"0123456789ab"
    local.remove("x")
    local.remove("x")
    assert local.size("x") is None
    files = fsspec.filesystem("memory")

    def broken(*args: Any, **options: Any) -> None:
        raise KeyError("a fault of its own")

    monkeypatch.setattr(type(files), "pipe_file", broken)
    with pytest.raises(ExportError, match="KeyError"):
        place_of("memory://bucket").write("x", b"")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigError) as refused:
        place_of("s3://bucket/runs")
    assert "gristmill[archive]" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("memory://user:S3CR3T@bucket/runs", "memory://user@bucket/runs"),
        ("memory:/user:S3CR3T@bucket/runs", "memory://user@bucket/runs"),
        ("memory://KEY:S3CR3T/a+b@bucket/runs", "memory://KEY@bucket/runs"),
        ("memory://u:S3@CR3T@bucket/a@b", "memory://u@bucket/a@b"),
        ("memory://bucket:2121/of:me@home/x", "memory://bucket:2121/of:me@home/x"),
        ("memory://bucket/of@home", "memory://bucket/of@home"),
    ],
)
def test_a_password_is_in_no_name_and_no_message(
    given: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages go to logs and into issues; what is opened still has the password."""
    place = place_of(given).inside("run=a")
    assert (place.name, place.address) == (f"{shown}/run=a", f"{as_url(given)}/run=a")
    with pytest.raises(DecodeError) as caught:
        ArchiveReader(given)
    assert (caught.value.where, "S3CR3T" in str(caught.value)) == (shown, False)

    def broken(*args: Any, **options: Any) -> None:
        raise KeyError(f"no such place: {as_url(given)}")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "ls", broken)
    with pytest.raises(DecodeError) as refused:
        place.files()
    assert shown in str(refused.value)
    assert "S3CR3T" not in str(refused.value)
    for arguments in (["ls", given], ["build", given, "rows"], ["build", "runs", given.replace("memory", "unheard")]):
        for more in ([], ["--json"]):
            assert main([*arguments, *more]) != 0
            assert "S3CR3T" not in "".join(capsys.readouterr())


def test_object_stores_go_through_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to find out which package serves their store."""
    pytest.importorskip("obstore", reason="obstore is part of the extra `archive`")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert place_of("s3://bucket/runs").path_of("x") == "s3://bucket/runs/x"


def test_work_of_writers_that_were_killed_is_swept(tmp_path: Path) -> None:
    """Otherwise every kill leaves its files for ever, beside rows that look complete."""
    with work_folder(tmp_path) as folder:
        (folder / "x").write_bytes(b"1")
        sweep_work(place_of(tmp_path))
        assert (folder / "x").exists()
        dead = tmp_path / f"{PREFIX}dead"
        (dead / "work").mkdir(parents=True)
        sweep_work(place_of(tmp_path))
        assert not dead.exists()
        assert place_of(tmp_path).folders() == []
    assert list(tmp_path.iterdir()) == []


def test_a_local_url_is_a_local_path(tmp_path: Path) -> None:
    """`file://` needs no fsspec."""
    write_archive(f"file://{tmp_path}/runs", list(rollouts(1)))
    with ArchiveReader(tmp_path / "runs") as reader:
        assert list(reader.attempts()) == [AttemptKey("rollout-00000")]
