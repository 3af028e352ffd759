from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import Code, DecodeError, ExportError
from gristmill.export import ExportWriter, Manifest, open_export, read_manifest
from gristmill.export import parquet_writer as module
from gristmill.export.folder import Folder
from gristmill.export.parquet_reader import ParquetFile, read_parquet_rows
from gristmill.export.parquet_rows import SCHEMA, SCHEMA_KEY, batch_of, rows_of
from gristmill.export.parquet_writer import ParquetRows
from gristmill.pipeline import RebuiltRollout
from gristmill.reconstruction import Row, RowExtras, SpanArray
from gristmill.records import Capture, Result
from tests.export.attempts import captured, made
from tests.export.rows_strategy import key, rows
from tests.export.test_row_json import row

NAME = "rows-00000.parquet"
ROOT = Path(__file__).resolve().parents[2]


def opened(folder: Path, **fields: Any) -> ExportWriter:
    return open_export("parquet", folder, **{"policy": "returned_history", "options": {}, **fields})


def attempts() -> Iterator[tuple[Capture, Result, Any]]:
    """A good and a refused attempt."""
    for rollout_id, texts in (("a", ()), ("b", ("nobody said this",))):
        capture = captured(rollout_id=rollout_id)
        outcome, result = made(capture, *texts)
        yield capture, result, outcome


def write(folder: Path, **fields: Any) -> Manifest:
    with opened(folder, **fields) as writer:
        for attempt in attempts():
            writer.add(*attempt)
        return writer.finish()


def outcome_of(held: Sequence[Row]) -> tuple[Capture, Result, RebuiltRollout]:
    """An attempt whose rows are replaced."""
    capture = captured()
    outcome, result = made(capture)
    assert isinstance(outcome, RebuiltRollout)
    rebuilt = msgspec.structs.replace(outcome.rebuilt, rows=tuple(held))
    return capture, result, msgspec.structs.replace(outcome, rebuilt=rebuilt)


def write_rows(folder: Path, *held: Row) -> Path:
    with opened(folder) as writer:
        writer.add(*outcome_of(held))
        writer.finish()
    return folder / NAME


def read(path: Path) -> list[Row]:
    return list(read_parquet_rows(path))


@settings(deadline=None)
@given(st.lists(rows(), max_size=4))
def test_rows_read_back_equal(held: list[Row]) -> None:
    """What is trained must be what was rebuilt, to the last bit and in every field."""
    back = list(rows_of(batch_of(held), str))
    assert [key(one) for one in back if isinstance(one, Row)] == [key(one) for one in held]


@pytest.mark.parametrize(
    "values",
    [
        np.array([[True, False]]),
        np.arange(6, dtype=">i4").reshape(3, 2),
        np.array([1.5, np.nan], np.float16),
        np.zeros((0, 3), np.uint64),
        np.arange(8, dtype=np.int64)[::2],
        np.array(3.5),
    ],
)
def test_extras_of_every_kind(tmp_path: Path, values: np.ndarray) -> None:
    """Routed experts are replayed in training: shape and type must survive."""
    held = row(extras=RowExtras((SpanArray("x", "c", 0, values), SpanArray("y", "d", 1, values))))
    [back] = read(write_rows(tmp_path / "out", held))
    assert back.extras.arrays[1].values.dtype == values.dtype.newbyteorder("=")
    np.testing.assert_array_equal(back.extras.arrays[1].values, values)
    assert read_manifest(tmp_path / "out").losses[0].name == "extras_as_bytes"


def test_a_folder_of_rows(tmp_path: Path) -> None:
    """Files, digests and counts are what the manifest says; a projection carries an advantage that is null."""
    manifest = write(tmp_path / "out")
    assert manifest == read_manifest(tmp_path / "out")
    assert manifest.format == "parquet"
    assert [entry.name for entry in manifest.files] == ["rejected.jsonl", NAME]
    for entry in manifest.files:
        data = (tmp_path / "out" / entry.name).read_bytes()
        assert (entry.bytes, entry.sha256, entry.rows) == (len(data), sha256(data).hexdigest(), 1)
    [back] = read(tmp_path / "out" / NAME)
    assert manifest.rows_digest == sha256(f"{back.row_id}\n".encode()).hexdigest()
    assert (back.rollout_id, back.reward, back.group_id, back.advantage) == ("a", 1.0, "g", None)
    assert (manifest.rollouts.selected, manifest.rejected) == (1, {"match_missing": 1})


def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    """Runs can be compared by their files only if nothing of the clock or the machine is in them."""
    assert write(tmp_path / "one") == write(tmp_path / "two")
    assert (tmp_path / "one" / NAME).read_bytes() == (tmp_path / "two" / NAME).read_bytes()


def test_how_the_arrays_are_written(tmp_path: Path) -> None:
    """Other encodings cost half as much again in bytes and in time."""
    held = pq.ParquetFile(write_rows(tmp_path / "out", row())).metadata.row_group(0)
    columns = {held.column(at).path_in_schema: held.column(at) for at in range(held.num_columns)}
    for name in ("token_ids", "logprobs"):
        column = columns[f"{name}.list.element"]
        assert "BYTE_STREAM_SPLIT" in column.encodings
        assert not column.has_dictionary_page
    assert {column.compression for column in columns.values()} == {"ZSTD"}


# Loaders


def test_polars_and_duckdb_read_the_files(tmp_path: Path) -> None:
    """They must see lists of the narrow types, not objects or 64-bit copies."""
    import duckdb
    import polars

    write_rows(tmp_path / "out", row(), row(group_id=None, reward=None, extras=RowExtras(), spans=()))
    frame = polars.read_parquet(tmp_path / "out" / "*.parquet")
    assert frame.schema["token_ids"] == polars.List(polars.Int32)
    assert frame.schema["loss_mask"] == polars.List(polars.UInt8)
    assert frame.schema["logprobs"] == polars.List(polars.Float32)
    assert frame["token_ids"][0].to_list() == [1, 2, 2**31 - 1, 0]
    assert frame["reward"].to_list() == [0.1, None]
    assert frame["spans"][0][0]["certificate"]["parent_ids"] == [1, 2]
    with duckdb.connect() as database:
        found = database.execute(
            "select typeof(token_ids), typeof(loss_mask), typeof(logprobs), list_sum(loss_mask),"
            " len(spans), extras.arrays[1].dtype, advantage from read_parquet(?)",
            [str(tmp_path / "out" / "*.parquet")],
        ).fetchall()
    assert found[0] == ("INTEGER[]", "UTINYINT[]", "FLOAT[]", 2, 3, "int16", None)
    assert found[1][4:] == (0, None, None)


@pytest.mark.slow
def test_datasets_loads_the_files(tmp_path: Path) -> None:
    """It is how most trainers load them."""
    from datasets import List, Value, load_dataset

    write_rows(tmp_path / "out", row(), row(extras=RowExtras(), spans=()))
    loaded = load_dataset(
        "parquet", data_files=str(tmp_path / "out" / "*.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded.features["token_ids"] == List(Value("int32"))
    assert loaded.features["loss_mask"] == List(Value("uint8"))
    assert loaded.features["logprobs"] == List(Value("float32"))
    assert loaded[0]["token_ids"] == [1, 2, 2**31 - 1, 0]
    assert loaded[0]["advantage"] is None
    assert len(loaded[1]["spans"]) == 0


@pytest.mark.parametrize("name", ["parquet", "messages", "jsonl"])
def test_empty_exports_are_files_too(tmp_path: Path, name: str) -> None:
    """A run in which everything was refused must not break what reads it."""
    import duckdb
    import polars

    with open_export(name, tmp_path / "out", policy="p", options={}) as writer:
        manifest = writer.finish()
    assert [entry.rows for entry in manifest.files] == [0, 0]
    if name == "parquet":
        assert read(tmp_path / "out" / NAME) == []
        assert polars.read_parquet(tmp_path / "out" / NAME).height == 0
        with duckdb.connect() as database:
            assert database.execute("from read_parquet(?)", [str(tmp_path / "out" / NAME)]).fetchall() == []


# Sizes


def test_row_groups_and_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets are 32-bit and memory is not endless: a run is cut into row groups and files, an attempt never."""
    monkeypatch.setattr(module, "ROW_GROUP_BYTES", 3000)
    monkeypatch.setattr(module, "FILE_BYTES", 1)
    folder = Folder(tmp_path / "out", overwrite=False)
    written = ParquetRows(folder)
    two = outcome_of([row(row_id="1", rollout_id="r"), row(row_id="2", rollout_id="r"), row(row_id="3")])
    for _ in range(3):
        written.add(*two)
    written.close()
    entries = folder.close()
    folder.place(b"{}")
    assert [(entry.name, entry.rows) for entry in entries] == [(f"rows-0000{at}.parquet", 3) for at in range(3)]
    held = pq.ParquetFile(tmp_path / "out" / NAME)
    assert [held.metadata.row_group(at).num_rows for at in range(held.num_row_groups)] == [2, 1]
    assert [one.row_id for one in read(tmp_path / "out" / "rows-00002.parquet")] == ["1", "2", "3"]


def test_what_no_offset_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum beyond the offsets' type would wrap and mix up rows."""
    from gristmill.export import parquet_rows

    with pytest.raises(OverflowError, match="2147483648 elements"):
        parquet_rows._offsets([2**30, 2**30], 2)
    assert parquet_rows._offsets([2**30, 2**30], 2, np.int64)[-1] == 2**31
    monkeypatch.setattr(parquet_rows, "_LARGEST_ARRAY", 15)
    with pytest.raises(ExportError, match="extra array of 16 bytes") as caught:
        batch_of([row()])
    assert caught.value.code is Code.ROW_MALFORMED


@pytest.mark.slow
def test_memory_does_not_grow_with_rollouts(tmp_path: Path) -> None:
    """20,000 rollouts must take what 2,000 take, outside Python's own memory too."""
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from tests.export.test_parquet import opened, outcome_of, row\n"
        "import numpy as np\n"
        "ids = np.random.default_rng(1).integers(0, 150_000, 2000).astype(np.int32)\n"
        "attempt = outcome_of([row(token_ids=ids, loss_mask=np.ones(2000, np.uint8), "
        "logprobs=np.zeros(2000, np.float32))])\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "with opened(Path(sys.argv[1])) as writer:\n"
        "    for _ in range(4000): writer.add(*attempt)\n"
        "    before = peak()\n"
        "    for _ in range(16000): writer.add(*attempt)\n"
        "    print(peak() - before)\n"
        "    writer.finish()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out")], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    # 16,000 rollouts are 320 MB of arrays; Linux counts in KiB, macOS in bytes.
    grown_MiB = int(done.stdout) / (2**20 if sys.platform == "darwin" else 2**10)
    assert grown_MiB < 24


# Atomicity


def test_an_unfinished_folder_is_taken_away(tmp_path: Path) -> None:
    """Half a run must not look like a whole one."""
    with suppress(RuntimeError), opened(tmp_path / "out") as writer:
        for attempt in attempts():
            writer.add(*attempt)
        raise RuntimeError
    assert not (tmp_path / "out").exists()


def test_a_crash_between_files_leaves_no_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old manifest beside new rows would be believed."""
    write(tmp_path / "out")
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
        write(tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_overwriting_takes_every_older_file_away(tmp_path: Path) -> None:
    """Rows of an older, longer export would be loaded with the new ones; what is not ours stays."""
    out = tmp_path / "out"
    write(out)
    for name in ("rows-00001.parquet", "rows.jsonl", "messages.jsonl", "notes.txt", "rows-1.parquet"):
        (out / name).write_bytes(b"old")
    with pytest.raises(ExportError, match="holds files") as caught:
        write(out)
    assert caught.value.code is Code.OUTPUT_EXISTS
    write(out, overwrite=True)
    kept = {"manifest.json", "notes.txt", "rejected.jsonl", NAME, "rows-1.parquet"}
    assert {entry.name for entry in out.iterdir()} == kept


def test_a_full_disk_is_an_export_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must name the folder, and leave nothing that looks like an export."""
    from gristmill.export.folder import Part

    def full(self: Part, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Part, "write", full)
    with pytest.raises(ExportError, match="No space left on device") as caught:
        write(tmp_path / "out")
    assert caught.value.code is Code.FILE_UNREADABLE
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_opened_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure before the first row must leave no part behind."""

    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module.pq, "ParquetWriter", failing)
    with pytest.raises(ExportError, match="Input/output error"):
        opened(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# What cannot be written


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"finish_reason": "\ud800"}, "surrogates not allowed"),
        ({"rollout_id": "\ud800"}, "surrogates not allowed"),
        ({"attempt": 2**63}, "large to convert"),
        ({"logprobs": np.array([0, 0, np.nan, 0], np.float32)}, "finite"),
        ({"token_ids": np.array([1, 2, 3, 4], np.int64)}, r"expected int32\[T\], got int64"),
        ({"loss_mask": np.zeros((2, 2), np.uint8)}, r"got uint8 of shape \(2, 2\)"),
        ({"reward": "much"}, "cannot write row bad"),
    ],
)
def test_rows_that_no_parquet_holds_are_refused(fields: dict[str, Any], message: str) -> None:
    """A value that would be changed on its way gives a code and the row, not a Python error and not another value."""
    with pytest.raises(ExportError, match=message) as caught:
        batch_of([row(), row(row_id="bad", **fields), row()])
    assert (caught.value.code, caught.value.where) == (Code.ROW_MALFORMED, "row=bad")


def test_rows_that_only_together_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that no single row explains must still come out."""
    from gristmill.export import parquet_rows

    real = parquet_rows._batch

    def failing(held: Sequence[Row]) -> Any:
        if len(held) > 1:
            raise OverflowError("together")
        return real(held)

    monkeypatch.setattr(parquet_rows, "_batch", failing)
    with pytest.raises(ExportError, match="together") as caught:
        batch_of([row(), row()])
    assert caught.value.code is Code.ROW_MALFORMED


def test_ids_of_any_script_are_kept(tmp_path: Path) -> None:
    """Ids come from anywhere; captures write lone surrogates as escapes, and all the rest stays as it is."""
    held = row(rollout_id="ü-\x00-\U0001f600-\\ud800", row_id="行")
    [back] = read(write_rows(tmp_path / "out", held))
    assert key(back) == key(held)


def test_a_selection_is_no_row(tmp_path: Path) -> None:
    """Rows need tokens: a caller that hands over a bare selection is told so."""
    capture, result, outcome = outcome_of([row()])
    with pytest.raises(ExportError, match="selection only") as caught, opened(tmp_path / "out") as writer:
        writer.add(capture, result, outcome.selection)
    assert caught.value.code is Code.OPTION_INVALID


# Reading


def rewritten(path: Path, table: Any) -> None:
    pq.write_table(table, path)


def test_files_that_are_none(tmp_path: Path) -> None:
    """Any bytes give a code and a place."""
    path = tmp_path / "x.parquet"
    for data in (b"", b"PAR1", b"PAR1" + b"\0" * 50 + b"PAR1"):
        path.write_bytes(data)
        with pytest.raises(DecodeError) as caught:
            read(path)
        assert (caught.value.code, caught.value.where) == (Code.FILE_MALFORMED, str(path))
    with pytest.raises(DecodeError) as caught:
        read(tmp_path / "absent.parquet")
    assert caught.value.code is Code.FILE_UNREADABLE


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (
            lambda table: table.replace_schema_metadata({}),
            Code.ROW_MALFORMED,
            "row schema 2 or older in the metadata, got ''",
        ),
        (lambda table: table.replace_schema_metadata({SCHEMA_KEY: b"x"}), Code.ROW_MALFORMED, "got 'x'"),
        (lambda table: table.replace_schema_metadata({SCHEMA_KEY: b"3"}), Code.SCHEMA_UNSUPPORTED, "got 3"),
        (lambda table: table.drop_columns(["spans"]), Code.ROW_MALFORMED, "expected the columns row_id"),
        (lambda table: table.append_column("more", pa.array([1])), Code.ROW_MALFORMED, "no such column"),
        (
            lambda table: table.set_column(2, pa.field("attempt", pa.int32(), nullable=False), pa.array([1], "int32")),
            Code.ROW_MALFORMED,
            "got column pyarrow.Field<attempt: int32",
        ),
    ],
)
def test_other_columns_are_refused(tmp_path: Path, change: Any, code: Code, message: str) -> None:
    """A file of somebody else must not be read by guessing."""
    path = write_rows(tmp_path / "out", row())
    rewritten(path, change(pq.read_table(path)))
    with pytest.raises(DecodeError, match=message) as caught:
        read(path)
    assert caught.value.code is code


def test_a_file_of_before_credits_is_read(tmp_path: Path) -> None:
    """What was exported by an older version is still what it was."""
    held = row()
    path = write_rows(tmp_path / "out", held)
    table = pq.read_table(path).drop_columns(["credits"])
    rewritten(path, table.replace_schema_metadata({SCHEMA_KEY: b"1"}))
    assert [key(one) for one in read(path)] == [key(held)]
    rewritten(path, table)
    with pytest.raises(DecodeError, match="expected the columns row_id"):
        read(path)


def changed(path: Path, name: str, value: Any) -> None:
    """Replace one column's only value."""
    table = pq.read_table(path)
    at = table.schema.get_field_index(name)
    field = table.schema.field(at)
    rewritten(path, table.set_column(at, field, pa.array([value], field.type)))


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("spans", [{"call_id": "c", "start": 0, "end": 1, "role": "guest"}], "row 0 $.spans[0].role"),
        (
            "extras",
            {"media": [], "arrays": [{"name": "x", "call_id": "c", "start": 0, "dtype": "object", "shape": [1],
                                      "data": b"x"}]},
            "row 0 $.extras.arrays[0].dtype",
        ),
        (
            "extras",
            {"media": [], "arrays": [{"name": "x", "call_id": "c", "start": 0, "dtype": "int8", "shape": [-1],
                                      "data": b"x"}]},
            "row 0 $.extras.arrays[0]",
        ),
    ],
)  # fmt: skip
def test_values_that_no_row_has(tmp_path: Path, name: str, value: Any, where: str) -> None:
    """Columns of the right type can still hold no row."""
    path = write_rows(tmp_path / "out", row())
    changed(path, name, value)
    with pytest.raises(DecodeError) as caught:
        read(path)
    assert caught.value.code is Code.ROW_MALFORMED
    assert caught.value.where == f"{path} {where}"


def test_a_torn_page_is_found(tmp_path: Path) -> None:
    """A file whose footer is whole may still be damaged inside."""
    path = write_rows(tmp_path / "out", *[row(row_id=str(at)) for at in range(50)])
    data = bytearray(path.read_bytes())
    data[4:200] = b"\xff" * 196
    path.write_bytes(data)
    with pytest.raises(DecodeError) as caught:
        read(path)
    assert caught.value.code is Code.FILE_MALFORMED


def test_only_some_row_groups_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a long file must not gather all of it in memory."""
    monkeypatch.setattr(module, "ROW_GROUP_BYTES", 1)
    file = ParquetFile(write_rows(tmp_path / "out", *[row(row_id=str(at)) for at in range(9)]))
    for _ in range(2):
        for group in file.groups:
            [held] = file.rows(group)
            assert isinstance(held, Row)
            assert held.row_id == str(group)
    assert len(file._kept) == 4
    file.close()


def test_the_schema_is_the_row() -> None:
    """A field that is added to the row must be added to the file."""
    assert tuple(SCHEMA.names) == Row.__struct_fields__


def test_a_writer_is_a_file_to_pyarrow(tmp_path: Path) -> None:
    """pyarrow flushes and closes what it writes to; only the folder may end a part."""
    part = Folder(tmp_path / "out", overwrite=False).part("x")
    sink = module._Sink(part)
    assert sink.write(b"ab") == 2
    sink.flush()
    sink.close()
    assert sink.closed
    assert part.close() is part.close()


@pytest.mark.parametrize("name", ["gristmill.cli", "gristmill.export"])
def test_pyarrow_is_loaded_only_when_it_is_needed(name: str) -> None:
    """`gristmill --help` must not wait for it."""
    script = f"import sys, {name}; sys.exit(any(loaded.split('.')[0] == 'pyarrow' for loaded in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
