"""Rows read back for training: the right ones, in their order, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest
from msgspec.structs import replace

from gristmill.errors import Code, DecodeError, ExportError
from gristmill.export import FileEntry, decode_row, encode_row, open_export, read_manifest, read_rows
from gristmill.pipeline import RebuiltRollout
from gristmill.records import Result
from tests.export.attempts import captured, made

FORMATS = pytest.mark.parametrize("name", ["parquet", "jsonl"])


def write(name: str, folder: Path, rollouts: Sequence[str] = ("b", "refused", "a")) -> list[bytes]:
    """Write rollouts; give their rows as lines."""
    lines: list[bytes] = []
    with open_export(name, folder, policy="returned_history", options={}) as writer:
        for rollout_id in rollouts:
            capture = captured(rollout_id=rollout_id)
            outcome, result = made(capture, *(("nobody said this",) if rollout_id == "refused" else ()))
            writer.add(capture, result, outcome)
            lines += [encode_row(row) for row in outcome.rows] if isinstance(outcome, RebuiltRollout) else []
        writer.finish()
    return lines


@FORMATS
def test_rows_come_back_in_order(name: str, tmp_path: Path) -> None:
    """Whoever trains takes the rows that were proved, all of them, rollouts in a piece."""
    lines = write(name, tmp_path / "out")
    assert [encode_row(row) for row in read_rows(tmp_path / "out")] == lines
    assert [encode_row(row) for row in read_rows(str(tmp_path / "out"))] == lines
    assert len(lines) == 2


def test_many_files_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """The hundred thousandth file stands before the last of five digits if names are compared as texts."""
    out = tmp_path / "out"
    lines = write("parquet", out)
    later = write("parquet", tmp_path / "more", rollouts=("z",))
    (out / "rows-00000.parquet").rename(out / "rows-99999.parquet")
    (tmp_path / "more" / "rows-00000.parquet").rename(out / "rows-100000.parquet")
    manifest = read_manifest(out)
    files = tuple(FileEntry(f"rows-{number}.parquet", 0, "", 1) for number in (100_000, 99_999))
    ids = "".join(f"{decode_row(line, '').row_id}\n" for line in lines + later)
    digest = sha256(ids.encode()).hexdigest()
    (out / "manifest.json").write_bytes(replace(manifest, files=files, rows_digest=digest).encode())
    assert [encode_row(row) for row in read_rows(out)] == lines + later


def test_rows_are_read_while_they_are_taken(tmp_path: Path) -> None:
    """Memory does not grow with the file, and a broken line stops nobody before it."""
    [first, second] = write("jsonl", tmp_path / "out")
    (tmp_path / "out" / "rows.jsonl").write_bytes(first + b"\n" + second[:-9] + b"\n")
    rows = read_rows(tmp_path / "out")
    assert encode_row(next(rows)) == first
    with pytest.raises(DecodeError) as raised:
        next(rows)
    assert str(raised.value.where).endswith("rows.jsonl line 2")


@pytest.mark.parametrize("order", [[0], [1, 0], [0, 1, 1], []])
def test_other_rows_than_the_manifest_names_are_found(order: list[int], tmp_path: Path) -> None:
    """A file that was cut at a line end reads without an error, and a part of the run is not trained."""
    lines = write("jsonl", tmp_path / "out")
    (tmp_path / "out" / "rows.jsonl").write_bytes(b"".join(lines[at] + b"\n" for at in order))
    rows = read_rows(tmp_path / "out")
    for at in order:
        assert next(rows).row_id == decode_row(lines[at], "").row_id
    with pytest.raises(DecodeError) as raised:
        next(rows)
    assert raised.value.code is Code.MANIFEST_DIFFERS


@FORMATS
def test_a_file_that_is_not_there(name: str, tmp_path: Path) -> None:
    """It is said with its name."""
    write(name, tmp_path / "out")
    [path] = (tmp_path / "out").glob("rows*")
    path.unlink()
    with pytest.raises(DecodeError) as raised:
        list(read_rows(tmp_path / "out"))
    assert (raised.value.code, raised.value.where) == (Code.FILE_UNREADABLE, str(path))


def test_a_folder_without_a_manifest_is_refused_at_once(tmp_path: Path) -> None:
    """It is not finished, or it is no export."""
    with pytest.raises(DecodeError) as raised:
        read_rows(tmp_path)
    assert raised.value.code is Code.FILE_UNREADABLE


def test_records_that_are_no_rows_are_refused_at_once(tmp_path: Path) -> None:
    """Chat messages and samples of trainers have no rows in them."""
    with open_export("slime", tmp_path / "out", policy="returned_history", options={}) as writer:
        capture = captured()
        outcome, _ = made(capture)
        writer.add(capture, Result(reward=1.0), outcome)
        writer.finish()
    with pytest.raises(ExportError) as raised:
        read_rows(tmp_path / "out")
    assert raised.value.code is Code.OPTION_INVALID
