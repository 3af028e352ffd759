from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import Code, ExportError
from gristmill.export import MANIFEST_NAME, REJECTED_NAME, ROWS_NAME, ExportWriter, open_export, read_manifest
from gristmill.reconstruction import RowMode
from gristmill.records import Result
from tests.export.attempts import captured, made


def writer(folder: Path, **fields: Any) -> ExportWriter:
    settings = {"policy": "returned_history", "options": {}, "mode": RowMode.MERGED, **fields}
    return open_export("jsonl", folder, **settings)


def write(folder: Path, **fields: Any) -> None:
    """Write a good and a refused attempt."""
    with writer(folder, **fields) as rows:
        for rollout_id, texts in (("a", ()), ("b", ("nobody said this",))):
            capture = captured(rollout_id=rollout_id)
            rows.add(capture, Result(), made(capture, *texts)[0])
        rows.finish()


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    """A consumer checks the files by it before it trains."""
    out = tmp_path / "deep" / "out"
    write(out, options={"whitespace": "trim"}, train_model="m")
    manifest = read_manifest(out)
    for entry in manifest.files:
        data = (out / entry.name).read_bytes()
        assert (entry.bytes, entry.sha256, entry.rows) == (len(data), sha256(data).hexdigest(), 1)
    assert [entry.name for entry in manifest.files] == [REJECTED_NAME, ROWS_NAME]
    row_id = json.loads((out / ROWS_NAME).read_bytes())["row_id"]
    assert manifest.rows_digest == sha256(f"{row_id}\n".encode()).hexdigest()
    assert manifest.options == {"whitespace": "trim"}
    assert manifest.train_model == "m"
    assert (manifest.rollouts.selected, manifest.rollouts.rejected) == (1, 1)
    assert manifest.rejected == {"match_missing": 1}
    assert manifest.funnel.captured_calls == 6
    assert manifest.funnel.trained_tokens == 4
    assert manifest.manifest_digest == manifest.digest()


def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    """Runs can be compared by their files only if nothing of the clock or the machine is in them."""
    write(tmp_path / "one")
    write(tmp_path / "two")
    for name in (ROWS_NAME, REJECTED_NAME, MANIFEST_NAME):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_refusals_keep_their_evidence(tmp_path: Path) -> None:
    """A rejected rollout is only settled by whoever sees why."""
    write(tmp_path / "out")
    line = json.loads((tmp_path / "out" / REJECTED_NAME).read_bytes())
    assert line["evidence"]["nearest"]["difference"] == "not_captured"
    assert [verdict["code"] for verdict in line["verdicts"]] == ["rollout_rejected"] * 3


def test_an_unfinished_folder_is_taken_away(tmp_path: Path) -> None:
    """Half a run must not look like a whole one."""
    outcome, _ = made(capture := captured())
    with suppress(RuntimeError), writer(tmp_path / "out") as rows:
        rows.add(capture, Result(), outcome)
        raise RuntimeError
    assert not (tmp_path / "out").exists()
    with suppress(RuntimeError), writer(tmp_path / "mine"):
        (tmp_path / "mine" / "notes").write_text("")
        raise RuntimeError
    assert [entry.name for entry in (tmp_path / "mine").iterdir()] == ["notes"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(RuntimeError), writer(tmp_path / "empty"):
        raise RuntimeError
    assert list((tmp_path / "empty").iterdir()) == []


def test_old_rows_stay_until_new_ones_are_whole(tmp_path: Path) -> None:
    """An overwrite that fails must leave the folder as it was."""
    out = tmp_path / "out"
    write(out)
    before = {entry.name: entry.read_bytes() for entry in out.iterdir()}
    with pytest.raises(RuntimeError), writer(out, overwrite=True):
        raise RuntimeError
    assert {entry.name: entry.read_bytes() for entry in out.iterdir()} == before
    with pytest.raises(ExportError, match="holds files") as caught:
        writer(out)
    assert caught.value.code is Code.OUTPUT_EXISTS


def test_a_crash_between_renames_leaves_no_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old manifest beside new rows would be believed."""
    out = tmp_path / "out"
    write(out)
    renamed = Path.replace
    count = 0

    def failing(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count == 2:
            raise OSError(errno.EIO, "Input/output error")
        return renamed(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(ExportError, match="Input/output error"):
        write(out, overwrite=True)
    assert sorted(entry.name for entry in out.iterdir()) == [REJECTED_NAME, ROWS_NAME]


def test_everything_is_synced_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is there after a power cut must have its content."""
    events: list[str] = []
    sync, renamed = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        events.append("sync")
        sync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        events.append(target.name)
        return renamed(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write(tmp_path / "out")
    assert events == ["sync"] * 3 + [ROWS_NAME, "sync", REJECTED_NAME, "sync", MANIFEST_NAME, "sync"]


def test_a_full_disk_is_an_export_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must name the folder, and not hide behind a second error while it cleans up."""
    capture = captured()
    rows = writer(tmp_path / "out")

    class Full:
        def write(self, _: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    for part in rows.folder.parts:
        part._file.close()
        monkeypatch.setattr(part, "_file", Full())
    with pytest.raises(ExportError, match="No space left on device") as caught, rows:
        rows.add(capture, Result(), made(capture)[0])
    assert caught.value.code is Code.FILE_UNREADABLE
    assert not (tmp_path / "out").exists()


def test_memory_does_not_grow_with_rollouts(tmp_path: Path) -> None:
    """A run of a hundred thousand rollouts must fit."""
    import tracemalloc

    capture = captured()
    outcome, _ = made(capture)
    with writer(tmp_path / "out") as rows:
        rows.add(capture, Result(), outcome)
        tracemalloc.start()
        for _ in range(300):
            rows.add(capture, Result(), outcome)
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        rows.finish()
    assert grown < 50_000
