from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.errors import Code, ConfigError, DecodeError
from gristmill.export import FolderCheck, Needs, read_manifest
from gristmill.export import parquet_writer as module
from gristmill.reconstruction import Row
from gristmill.records import Capture
from tests.export.attempts import captured, made
from tests.export.folders import Attempt, change_entry, entry_paths, findings, reseal
from tests.export.test_parquet import NAME, opened


def attempts() -> list[Attempt]:
    """A good attempt, a refused one, and a good one that forks, so that a rollout has two rows."""
    made_of: list[Attempt] = []
    for rollout_id, texts in (("a", ()), ("b", ("nobody said this",)), ("c", ())):
        capture: Capture = captured(forked() if rollout_id == "c" else None, rollout_id=rollout_id)
        outcome, result = made(capture, *texts)
        made_of.append((capture, result, outcome))
    return made_of


def forked() -> list[dict[str, Any]]:
    from tests.cli.stories import TWO_TURNS, call

    return [
        call("c1", "one", [1, 2, 3], [4, 5]),
        call("c2", TWO_TURNS[1], [1, 2, 9, 4, 5, 6], [7, 8], parent_call_id="c1"),
    ]


ATTEMPTS = attempts()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parquet") / "out"
    with opened(folder) as writer:
        for attempt in ATTEMPTS:
            writer.add(*attempt)
        writer.finish()
    return folder


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "out"))


def rewrite(folder: Path, change: Any) -> None:
    """Change the table of rows; the file has the same columns and metadata."""
    pq.write_table(change(pq.read_table(folder / NAME)), folder / NAME)


def set_value(folder: Path, name: str, index: int, value: Any) -> None:
    def change(table: Any) -> Any:
        at = table.schema.get_field_index(name)
        field = table.schema.field(at)
        values = table.column(name).to_pylist()
        values[index] = value
        return table.set_column(at, field, pa.array(values, field.type))

    rewrite(folder, change)


def value_of(folder: Path, name: str, index: int) -> Any:
    return pq.read_table(folder / NAME).column(name)[index].as_py()


def codes(folder: Path) -> set[Code]:
    return {finding.code for finding in findings(folder, ATTEMPTS)}


def test_a_good_folder_has_no_findings(folder: Path) -> None:
    """A check that finds faults in good folders is a check that nobody runs."""
    assert findings(folder, ATTEMPTS) == []
    check = FolderCheck(folder)
    assert check.needs is Needs.ROWS
    assert [list(check.check(*attempt)) for attempt in ATTEMPTS] == [[], [], []]
    assert check.rows_checked == 3


def test_the_order_of_the_captures_is_free(folder: Path) -> None:
    """Captures may come from another store, in another order."""
    assert findings(folder, ATTEMPTS[::-1]) == []


def test_part_of_the_captures(folder: Path) -> None:
    """One rollout of a run can be checked; what the others would prove is then not asked."""
    assert findings(folder, ATTEMPTS[:1], whole=False) == []
    found = {finding.code for finding in findings(folder, ATTEMPTS[:1])}
    assert found == {Code.ROW_UNEXPECTED, Code.MANIFEST_DIFFERS}


SIZES = [8, 5, 8]


@pytest.mark.parametrize("sealed", [False, True], ids=["as it is", "resealed"])
@pytest.mark.parametrize(("name", "change", "code"), [
    ("token_ids", lambda value: value + 1, Code.ROW_TOKENS_DIFFER),
    ("loss_mask", lambda value: 1 - value, Code.ROW_MASK_DIFFERS),
    ("logprobs", lambda value: float(np.nextafter(np.float32(value), np.float32(9))), Code.ROW_LOGPROBS_DIFFER),
])  # fmt: skip
def test_any_changed_token_is_found(folder: Path, name: str, change: Any, code: Code, sealed: bool) -> None:
    """Whatever was changed after the export must not be trained: any id, mask bit or log-probability."""
    for index, size in enumerate(SIZES):
        before = value_of(folder, name, index)
        assert len(before) == size
        for at in range(size):
            after = [*before]
            after[at] = change(after[at])
            set_value(folder, name, index, after)
            if sealed:
                reseal(folder)
            found = codes(folder)
            assert code in found
            assert sealed or Code.MANIFEST_DIFFERS in found
        set_value(folder, name, index, before)


SPAN_CHANGES: list[tuple[str, Any]] = [
    ("call_id", "other"),
    ("start", 1),
    ("end", 4),
    ("role", "sampled_elsewhere"),
    ("owner", "row"),
    ("weight_version", "w"),
    ("logprobs_mode", "raw"),
    ("temperature", 0.5),
    ("certificate", {"relation": "exact", "parent_call_id": "x1", "parent_ids": [], "call_ids": []}),
]


@pytest.mark.parametrize(("name", "value"), SPAN_CHANGES)
def test_any_changed_span_is_found(folder: Path, name: str, value: Any) -> None:
    """Spans say whose tokens are whose, and how they were sampled."""
    spans = value_of(folder, "spans", 0)
    set_value(folder, "spans", 0, [spans[0], {**spans[1], name: value}, *spans[2:]])
    reseal(folder)
    assert codes(folder)


@pytest.mark.parametrize(("name", "value"), [
    ("row_id", "0" * 32), ("group_id", "h"), ("group_id", None), ("reward", 0.0), ("reward", None),
    ("advantage", 1.0), ("loss_weight", 0.4), ("truncated", True), ("finish_reason", "length"), ("prompt_len", 2),
    ("row_index", 1), ("row_count", 2), ("rollout_id", "b"), ("rollout_id", "zz"), ("attempt", 1),
    ("extras", {"arrays": [], "media": [{"digest": "d", "offset": 0, "length": 1}]}),
])  # fmt: skip
def test_any_other_changed_field_is_found(folder: Path, name: str, value: Any) -> None:
    """Rewards and weights decide as much as tokens do."""
    set_value(folder, name, 0, value)
    reseal(folder)
    assert codes(folder)


@pytest.mark.parametrize("change", [
    lambda table: table.slice(1),
    lambda table: pa.concat_tables([table, table.slice(0, 1)]),
    lambda table: table.take([1, 0, 2]),
    lambda table: table.take([2, 1, 0]),
    lambda table: table.slice(0, 0),
])  # fmt: skip
def test_rows_gone_repeated_or_moved(folder: Path, change: Any) -> None:
    """A row that is missing is not trained, one that is there twice is trained twice."""
    rewrite(folder, change)
    rows = pq.read_metadata(folder / NAME).num_rows
    manifest = read_manifest(folder)
    files = tuple(
        type(entry)(entry.name, entry.bytes, entry.sha256, rows if entry.name == NAME else entry.rows)
        for entry in manifest.files
    )
    (folder / "manifest.json").write_bytes(type(manifest)(
        **{**{name: getattr(manifest, name) for name in manifest.__struct_fields__}, "files": files}
    ).encode())  # fmt: skip
    reseal(folder)
    assert codes(folder)


def test_every_manifest_entry_is_checked(exported: Path, tmp_path: Path) -> None:
    """Counts, digests and settings in a manifest are believed by whoever trains on the rows."""
    document = json.loads((exported / "manifest.json").read_bytes())
    places = entry_paths(document)
    assert {place[0] for place in places} == set(document)
    for place in places:
        folder = Path(shutil.copytree(exported, tmp_path / ".".join(map(str, place))))
        change_entry(folder, place)
        found = findings(folder, ATTEMPTS)
        assert Code.MANIFEST_DIFFERS in {finding.code for finding in found}, place


def test_files_gone_added_and_torn(folder: Path) -> None:
    """Whoever loads `*.parquet` loads what is there, whatever the manifest says."""
    shutil.copy(folder / NAME, folder / "rows-00001.parquet")
    assert codes(folder) >= {Code.MANIFEST_DIFFERS, Code.ROW_METADATA_DIFFERS}
    (folder / "rows-00001.parquet").unlink()
    data = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(data[:-9])
    assert codes(folder) >= {Code.FILE_MALFORMED, Code.ROW_MISSING, Code.MANIFEST_DIFFERS}
    (folder / NAME).unlink()
    found = findings(folder, ATTEMPTS)
    assert any("it is not there" in finding.message for finding in found)
    assert Code.ROW_MISSING in {finding.code for finding in found}
    (folder / "rejected.jsonl").unlink()
    assert "expected rejected.jsonl, it is not there" in {finding.message for finding in findings(folder, ATTEMPTS)}


def test_files_of_another_format(folder: Path) -> None:
    """What the files are decides, and a manifest that says otherwise is a finding."""
    reseal(folder, format="jsonl")
    assert [finding.where for finding in findings(folder, ATTEMPTS)] == [f"{folder / 'manifest.json'} $.format"]
    reseal(folder, format="gold")
    assert [finding.where for finding in findings(folder, ATTEMPTS)] == [f"{folder / 'manifest.json'} $.format"]


def test_damage_inside_a_row_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that cannot be read are findings, each; the check goes on."""
    set_value(folder, "spans", 0, [{"call_id": "c", "start": 0, "end": 1, "role": "guest"}])
    reseal(folder)
    assert codes(folder) >= {Code.ROW_MALFORMED, Code.ROW_MISSING}
    from gristmill.export.parquet_reader import ParquetFile

    def failing(self: ParquetFile, group: int) -> list[Row | DecodeError]:
        raise DecodeError("torn", where="here")

    monkeypatch.setattr(ParquetFile, "rows", failing)
    assert codes(folder) >= {Code.FILE_MALFORMED, Code.ROW_MISSING}


def test_a_file_that_cannot_be_opened(folder: Path) -> None:
    """It ends the check with its name: there is nothing to compare."""
    (folder / NAME).unlink()
    (folder / NAME).mkdir()
    with pytest.raises(DecodeError) as caught:
        FolderCheck(folder)
    assert caught.value.code is Code.FILE_UNREADABLE


def test_rows_of_a_refused_rollout(folder: Path) -> None:
    """A rollout that was rejected has no rows."""
    set_value(folder, "rollout_id", 0, "b")
    assert Code.ROW_UNEXPECTED in codes(folder)


def test_rows_are_checked_against_rows(folder: Path) -> None:
    """A caller that hands over a bare selection would have nothing checked."""
    capture, result, outcome = ATTEMPTS[0]
    check = FolderCheck(folder)
    with pytest.raises(ConfigError, match="got a selection"):
        list(check.check(capture, result, outcome.selection))


def test_several_files_are_one_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large run has many files; the rows are numbered through."""
    monkeypatch.setattr(module, "ROW_GROUP_BYTES", 1)
    monkeypatch.setattr(module, "FILE_BYTES", 1)
    folder = tmp_path / "out"
    more = [*ATTEMPTS]
    for rollout_id in "defg":
        capture = captured(forked(), rollout_id=rollout_id)
        outcome, result = made(capture)
        more.append((capture, result, outcome))
    with opened(folder) as writer:
        for attempt in more:
            writer.add(*attempt)
        manifest = writer.finish()
    assert [entry.rows for entry in manifest.files] == [1, 3, 2, 2, 2, 2]
    assert findings(folder, more) == []
    assert findings(folder, more[::-1]) == []
