"""Files that nobody of ours wrote: refused with a code, and never given the memory that they claim."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.archive import (
    ArchivedAttempt,
    ArchiveReader,
    PartitionWriter,
    parquet_guard,
    place_of,
    texts,
)
from gristmill.archive.columns import ATTEMPTS, BODIES, CALLS, Table
from gristmill.archive.manifest import ArchiveFile, ArchiveManifest, sealed
from gristmill.archive.parquet_tables import SCHEMAS, write_options
from gristmill.archive.texts import check_texts
from gristmill.errors import Code, DecodeError, LedgerError
from gristmill.ledger import AttemptKey
from tests.archive.stored import archived, flip, memory_ledger, reseal, rollouts, write_archive
from tests.archive.thrift import Fields, edit_footer, edit_page_header

KEY = AttemptKey("all-0", 1)
FILES = ("attempts-00000.parquet", "calls-00000.parquet", "bodies-00000.parquet")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """An archive of one attempt that has everything."""
    ledger = memory_ledger()
    with PartitionWriter(place_of(tmp_path / "runs"), "a") as writer:
        writer.add(archived(ledger, KEY))
        writer.finish()
    return tmp_path / "runs"


def _read(runs: Path) -> ArchivedAttempt:
    with ArchiveReader(runs) as reader:
        return reader.whole(KEY)


def _refused(runs: Path) -> DecodeError:
    """Read files that their manifest agrees with, whoever wrote them."""
    if all((runs / "run=a" / name).exists() for name in FILES):
        reseal(runs / "run=a")
    with pytest.raises(DecodeError) as caught:
        _read(runs)
    assert caught.value.code in {Code.FILE_MALFORMED, Code.FILE_UNREADABLE}
    assert caught.value.where
    return caught.value


def _group(fields: Fields) -> Fields:
    return fields[4][1][1][0]


def _column(fields: Fields, number: int = 0) -> Fields:
    return _group(fields)[1][1][1][number][3][1]


CLAIMS: dict[str, Callable[[Fields], object]] = {
    "rows of the file": lambda fields: fields[3].__setitem__(1, 2**40),
    "rows of a row group": lambda fields: _group(fields)[3].__setitem__(1, 2**40),
    "negative rows": lambda fields: _group(fields)[3].__setitem__(1, -1),
    "values of a column": lambda fields: _column(fields)[5].__setitem__(1, 2**40),
    "bytes of a column": lambda fields: _column(fields)[7].__setitem__(1, 2**40),
    "no bytes": lambda fields: _column(fields)[7].__setitem__(1, 0),
    "negative bytes": lambda fields: _column(fields)[7].__setitem__(1, -8),
    "bytes after decompression": lambda fields: _column(fields)[6].__setitem__(1, 2**40),
    "place of a column": lambda fields: _column(fields)[9].__setitem__(1, 2**40),
    "place before the file": lambda fields: _column(fields)[9].__setitem__(1, -4),
    "a dictionary": lambda fields: _column(fields).__setitem__(11, [6, 4]),
    "another file": lambda fields: _group(fields)[1][1][1][0].__setitem__(1, [8, b"../other.parquet"]),
    "another codec": lambda fields: _column(fields)[4].__setitem__(1, 2),
    "columns that share bytes": lambda fields: _column(fields, 1)[9].__setitem__(1, _column(fields)[9][1]),
}


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("name", FILES)
def test_claims_of_a_footer(runs: Path, name: str, claim: str) -> None:
    """Each would be allocated, or read, by whoever believes it."""
    edit_footer(runs / "run=a" / name, CLAIMS[claim])
    assert name in (_refused(runs).where or "")


PAGES: dict[str, Callable[[Fields], object]] = {
    "bytes after decompression": lambda header: header[2].__setitem__(1, header[2][1] + 1),
    "negative size": lambda header: header[2].__setitem__(1, -header[2][1]),
    "compressed bytes": lambda header: header[3].__setitem__(1, header[3][1] + 1),
    "values": lambda header: header[5][1][1].__setitem__(1, header[5][1][1][1] + 1),
    "delta encoding": lambda header: header[5][1][2].__setitem__(1, 7),
    "a dictionary": lambda header: header[1].__setitem__(1, 2),
}


@pytest.mark.parametrize("claim", PAGES)
def test_claims_of_a_page(runs: Path, claim: str) -> None:
    """A page of a few bytes can claim to hold gigabytes."""
    path = runs / "run=a" / "calls-00000.parquet"
    edit_page_header(path, CALLS.names.index("rollout_id"), PAGES[claim])
    _refused(runs)


def test_a_page_that_its_bytes_cannot_hold(runs: Path) -> None:
    """No compression makes so much of so little."""
    from gristmill.archive.compact import BadBytes
    from gristmill.archive.page_headers import check_chunk

    header = bytes([0x15, 0x00, 0x15]) + b"\x80\x80\x80\x80\x08" + bytes([0x15, 0x02])
    header += bytes([0x2C, 0x15, 0x02, 0x15, 0x00, 0x15, 0x06, 0x15, 0x06, 0x00, 0x00])
    with pytest.raises(BadBytes, match="of a size that its bytes can hold"):
        check_chunk(memoryview(header + b"x"), 1, 2**40)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x15",
        b"\x15\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x1c" * 50,
        b"\x19\x00\x00",
        b"\x18\xff\xff\x03",
        b"\x00",
        b"\x17" + bytes(4),
    ],
)
def test_bytes_that_are_no_page_header(data: bytes) -> None:
    """A parser of foreign bytes ends, whatever they are."""
    from gristmill.archive.compact import BadBytes
    from gristmill.archive.page_headers import check_chunk

    with pytest.raises(BadBytes):
        check_chunk(memoryview(data), 1, 100)


@pytest.mark.parametrize("name", FILES)
def test_files_that_end_too_soon(runs: Path, name: str) -> None:
    """A copy that was interrupted."""
    path = runs / "run=a" / name
    whole = path.read_bytes()
    for size in (0, 3, 11, len(whole) // 3, len(whole) - 9, len(whole) - 1):
        path.write_bytes(whole[:size])
        _refused(runs)
    path.write_bytes(whole[:-8] + (2**32 - 1).to_bytes(4, "little") + b"PAR1")
    assert "footer" in _refused(runs).message
    path.unlink()
    assert _refused(runs).code is Code.FILE_UNREADABLE


def test_bytes_that_were_changed(runs: Path) -> None:
    """One flipped bit, anywhere: nothing is handed out, and `verify` finds it.

    Under a manifest that agrees it is another attempt at most, and never another error.
    """
    rng = random.Random(20)
    given = _read(runs)
    manifest = runs / "run=a" / "manifest.json"
    proof = manifest.read_bytes()
    kinds: set[str] = set()
    for name in FILES:
        path = runs / "run=a" / name
        whole = path.read_bytes()
        for _ in range(150):
            at = rng.randrange(len(whole))
            flip(path, at, rng.randrange(8))
            with ArchiveReader(runs) as reader, pytest.raises(DecodeError) as caught:
                reader.whole(KEY)
            assert (caught.value.code, caught.value.where) == (Code.MANIFEST_DIFFERS, str(path)), at
            found: list[object] = []
            with ArchiveReader(runs, on_damage=found.append) as reader:
                for key in reader.attempts():
                    found += reader.check(key)
            assert found, f"{name} byte {at}"
            reseal(runs / "run=a")
            try:
                with ArchiveReader(runs) as reader:
                    reader.whole(next(reader.attempts()))
                kinds.add("read")
            except (DecodeError, LedgerError) as error:
                kinds.add(str(error.code))
            path.write_bytes(whole)
            manifest.write_bytes(proof)
    assert "file_malformed" in kinds
    assert _read(runs).capture.records == given.capture.records


def _rewrite(runs: Path, table: Table, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Write a table again with other rows, as somebody would who has our writer."""
    path = runs / "run=a" / f"{table.name}-00000.parquet"
    rows = pq.read_table(path).to_pylist()
    change(rows)
    made = pa.Table.from_pylist(rows, schema=SCHEMAS[table.name])
    pq.write_table(made, path, **write_options(table))
    reseal(runs / "run=a")


ROWS: dict[str, tuple[Table, Callable[[list[dict[str, Any]]], object]]] = {
    "calls beyond the table": (ATTEMPTS, lambda rows: rows[0].update(first_call=2**40)),
    "more calls than there are": (ATTEMPTS, lambda rows: rows[0].update(call_rows=2**40)),
    "calls before the table": (ATTEMPTS, lambda rows: rows[0].update(first_call=-1)),
    "bodies beyond the table": (ATTEMPTS, lambda rows: rows[0].update(first_body=2**62, body_rows=2**62)),
    "no state": (ATTEMPTS, lambda rows: rows[0].update(state="melted")),
    "a result that is none": (ATTEMPTS, lambda rows: rows[0].update(result=b"\xc1")),
    "a history that is no JSON": (ATTEMPTS, lambda rows: rows[0].update(result_value=b"{")),
    "a history that is missing": (ATTEMPTS, lambda rows: rows[0].update(result_value=None)),
    "metadata that is a list": (ATTEMPTS, lambda rows: rows[0].update(result_metadata=b"[]")),
    "metadata that is nested deep": (ATTEMPTS, lambda rows: rows[0].update(result_metadata=b'{"a":' + b"[" * 300)),
    "a setup that is none": (ATTEMPTS, lambda rows: rows[0].update(setup=b"\x93")),
    "a record that is none": (CALLS, lambda rows: rows[0].update(record=b"\x00")),
    "calls of another rollout": (CALLS, lambda rows: rows[0].update(rollout_id="other")),
    "another kind": (CALLS, lambda rows: rows[0].update(kind="imagined")),
    "fewer ids": (CALLS, lambda rows: rows[0]["token_ids"].pop()),
    "more log-probabilities": (CALLS, lambda rows: rows[0]["logprobs"].append(0.5)),
    "no log-probabilities": (CALLS, lambda rows: rows[0].update(logprobs=None)),
    "half an exchange": (CALLS, lambda rows: rows[0].update(reply=None)),
    "extras of objects": (CALLS, lambda rows: rows[0].update(extras=_extra("|O", (1,), b"12345678"))),
    "extras of no type": (CALLS, lambda rows: rows[0].update(extras=_extra("spam", (1,), b"1"))),
    "extras of a shape that is none": (CALLS, lambda rows: rows[0].update(extras=_extra("<i4", (-3,), b"1234"))),
    "extras of another shape": (CALLS, lambda rows: rows[0].update(extras=_extra("<i4", (2**40,), b"1234"))),
    "extras that are none": (CALLS, lambda rows: rows[0].update(extras=b"\x01")),
    "references forward": (BODIES, lambda rows: rows[0].update(text=b"\x015\x01")),
    "references to themselves": (BODIES, lambda rows: rows[0].update(text=b"\x010\x01")),
    "a mark without a number": (BODIES, lambda rows: rows[0].update(text=b"\x01\x01")),
    "bodies of another rollout": (BODIES, lambda rows: rows[0].update(attempt=9)),
}


def _extra(dtype: str, shape: tuple[int, ...], data: bytes) -> bytes:
    return msgspec.msgpack.encode({"experts": (dtype, shape, data)})


@pytest.mark.parametrize("change", ROWS)
def test_rows_that_contradict_each_other(runs: Path, change: str) -> None:
    """A file can be good Parquet and no archive."""
    table, edit = ROWS[change]
    _rewrite(runs, table, edit)
    assert _refused(runs).code is Code.FILE_MALFORMED


def test_a_record_of_a_newer_version_is_told_as_such(runs: Path) -> None:
    """ "Damaged" would send people looking for a broken disk."""
    newer = msgspec.msgpack.encode({"model_call_id": "c0", "response_id": "r", "hologram": 1, "schema": 99})
    _rewrite(runs, CALLS, lambda rows: rows[0].update(record=newer))
    with pytest.raises(DecodeError) as caught:
        _read(runs)
    assert caught.value.code is Code.SCHEMA_UNSUPPORTED


def test_texts_that_stand_for_more_than_any_memory_holds() -> None:
    """Nine lines of references are 10^9 copies."""
    pieces = {0: b"x" * 1000}
    for number in range(1, 30):
        pieces[number] = b"".join(b"\x01%d\x01" % (number - 1) for _ in range(10))
    with pytest.raises(DecodeError, match="bytes"):
        check_texts(pieces, [], "here")


def test_many_texts_that_are_large_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each within its limit."""
    monkeypatch.setattr(texts, "MOST_ATTEMPT_BYTES", 10_000)
    with pytest.raises(DecodeError, match="in an attempt"):
        check_texts(dict.fromkeys(range(11), b"x" * 1000), [], "here")


def test_what_a_reader_would_refuse_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive that cannot be read back is found when the ledger is gone."""
    ledger = memory_ledger()
    monkeypatch.setattr(texts, "MOST_TEXT_BYTES", 1000)
    with PartitionWriter(place_of(tmp_path / "runs"), "a") as writer:
        with pytest.raises(LedgerError) as caught:
            writer.add(archived(ledger, KEY))
        assert caught.value.code is Code.ITEM_TOO_LARGE
    monkeypatch.undo()
    monkeypatch.setattr("gristmill.archive.parquet_part.MOST_VALUES", 4)
    with PartitionWriter(place_of(tmp_path / "runs"), "a") as writer:
        with pytest.raises(LedgerError) as caught:
            writer.add(archived(ledger, KEY))
        assert caught.value.code is Code.ITEM_TOO_LARGE


@pytest.mark.parametrize("limit", ["MOST_ROWS", "MOST_VALUES", "MOST_CHUNK_BYTES", "MOST_GROUP_BYTES"])
def test_honest_files_beyond_a_limit(runs: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """A file that is what it says can still be more than a reader wants to hold."""
    monkeypatch.setattr(parquet_guard, limit, 3)
    assert "at most" in _refused(runs).message or "values" in _refused(runs).message


def test_a_file_with_dictionaries_or_other_columns(runs: Path) -> None:
    """A dictionary can stand for any number of large values."""
    path = runs / "run=a" / "calls-00000.parquet"
    table = pq.read_table(path)
    pq.write_table(table, path, use_dictionary=True, compression="zstd")
    assert "dictionary" in _refused(runs).message
    pq.write_table(table.drop_columns(["kind"]), path, use_dictionary=False, compression="zstd")
    assert "columns" in _refused(runs).message


def _edit_manifest(runs: Path, **fields: Any) -> None:
    path = runs / "run=a" / "manifest.json"
    manifest = msgspec.json.decode(path.read_bytes(), type=ArchiveManifest)
    path.write_bytes(sealed(msgspec.structs.replace(manifest, **fields)).encode())


def test_manifests(runs: Path) -> None:
    """What proves the files is itself proved."""
    path = runs / "run=a" / "manifest.json"
    whole = path.read_bytes()
    manifest = msgspec.json.decode(whole, type=ArchiveManifest)
    for data, code in (
        (b"", Code.FILE_MALFORMED),
        (b"[]", Code.FILE_MALFORMED),
        (b'{"kind": "other"}', Code.FILE_MALFORMED),
        (b'{"kind": "gristmill.archive", "schema": 9}', Code.SCHEMA_UNSUPPORTED),
        (whole.replace(b'"calls": 6', b'"calls": 7'), Code.MANIFEST_DIFFERS),
        (b"[" * 100_000, Code.FILE_MALFORMED),
    ):
        path.write_bytes(data)
        with pytest.raises(DecodeError) as caught:
            ArchiveReader(runs)
        assert caught.value.code is code, data[:40]
    path.write_bytes(whole)
    first = manifest.files[0]
    changes: list[dict[str, Any]] = [
        {"parts": 2**40},
        {"parts": 2},
        {"files": (msgspec.structs.replace(first, name="../../etc/passwd"), *manifest.files[1:])},
        {"files": (msgspec.structs.replace(first, rows=-1), *manifest.files[1:])},
        {"files": (msgspec.structs.replace(first, sha256="x"), *manifest.files[1:])},
        {"partition": "b"},
    ]
    for fields in changes:
        _edit_manifest(runs, **fields)
        with pytest.raises(DecodeError):
            ArchiveReader(runs)
        path.write_bytes(whole)
    _edit_manifest(runs, files=(msgspec.structs.replace(first, sha256="0" * 64), *manifest.files[1:]))
    told: list[DecodeError] = []
    with ArchiveReader(runs, on_damage=told.append) as reader:
        assert list(reader.attempts()) == []
    assert [(error.code, error.where) for error in told] == [(Code.MANIFEST_DIFFERS, str(path.parent / first.name))]
    calls = manifest.files[2]
    path.write_bytes(whole)
    _edit_manifest(runs, files=(*manifest.files[:2], msgspec.structs.replace(calls, sha256="0" * 64)))
    with ArchiveReader(runs, on_damage=told.append) as reader:
        assert any("as its manifest says" in sentence for sentence in reader.check(KEY))
        with pytest.raises(DecodeError) as caught:
            reader.prove(KEY)
        assert caught.value.code is Code.MANIFEST_DIFFERS


READS: dict[str, Callable[[ArchiveReader], object]] = {
    "attempts": lambda reader: list(reader.attempts()),
    "rollout": lambda reader: reader.rollout("rollout-00000"),
    "summaries": lambda reader: list(reader.summaries()),
    "summary": lambda reader: reader.summary(AttemptKey("rollout-00000")),
    "snapshots": lambda reader: list(reader.snapshots()),
    "read": lambda reader: reader.read(AttemptKey("rollout-00000"), tokens=False),
    "setup": lambda reader: reader.setup(AttemptKey("rollout-00000")),
    "check": lambda reader: reader.check(AttemptKey("rollout-00000")),
    "prove": lambda reader: reader.prove(AttemptKey("rollout-00000")),
    "open_part": lambda reader: list(reader.open_part(1).rows(("result",))),
}


@pytest.mark.parametrize("read", READS)
def test_nothing_is_read_of_a_file_that_is_not_as_its_manifest_says(tmp_path: Path, read: str) -> None:
    """A reward, a group, an id: the row is good Parquet, and another than was archived."""
    for number, name in enumerate("ab"):
        write_archive(tmp_path / "runs", list(rollouts(2, 2 * number)), name)
    rows = pq.read_table(tmp_path / "runs" / "run=b" / "attempts-00000.parquet").to_pylist()
    rows[0]["reward"] = 0.5
    path = tmp_path / "runs" / "run=b" / "attempts-00000.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMAS["attempts"]), path, **write_options(ATTEMPTS))
    with ArchiveReader(tmp_path / "runs") as reader, pytest.raises(DecodeError) as caught:
        READS[read](reader)
    assert (caught.value.code, caught.value.where) == (Code.MANIFEST_DIFFERS, str(path))


def test_files_are_compared_once_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts than are kept open are not digested again each time they are opened."""
    write_archive(tmp_path / "runs", list(rollouts(12)), part_bytes=1)
    checked: list[str] = []
    check = ArchiveFile.check
    monkeypatch.setattr(ArchiveFile, "check", lambda own, file, where: (checked.append(where), check(own, file, where)))
    with ArchiveReader(tmp_path / "runs") as reader:
        assert len(reader.parts) == 12
        list(reader.summaries())
        assert {Path(where).name.partition("-")[0] for where in checked} == {"attempts"}
        for _ in range(2):
            for key in list(reader.attempts()):
                reader.read(key, exchanges=True)
                reader.prove(key)
    assert len(checked) == len(set(checked)) == 36


def test_what_queries_see_is_compared_with_the_evidence(runs: Path) -> None:
    """A column that disagrees with its record misleads whoever asks in SQL."""
    _rewrite(runs, CALLS, lambda rows: rows[1].update(model="another"))
    _rewrite(runs, ATTEMPTS, lambda rows: rows[0].update(reward=9.0))
    with ArchiveReader(runs) as reader:
        found = " ".join(reader.check(KEY))
    assert "model of call c1" in found
    assert "reward of attempts" in found
    _rewrite(runs, ATTEMPTS, lambda rows: rows[0].update(snapshot_id="0" * 64))
    with ArchiveReader(runs) as reader:
        assert any("snapshot_id" in sentence for sentence in reader.check(KEY))


def test_an_attempt_in_two_places_is_refused(tmp_path: Path) -> None:
    """Nothing says which of them is right, and both would be trained."""
    write_archive(tmp_path / "runs", list(rollouts(5)), "a")
    write_archive(tmp_path / "other", list(rollouts(5, first=4)), "b")
    (tmp_path / "other" / "run=b").rename(tmp_path / "runs" / "run=b")
    with ArchiveReader(tmp_path / "runs") as reader, pytest.raises(DecodeError, match="rollout-00004") as caught:
        list(reader.attempts())
    assert "take one of the two partitions away" in str(caught.value.hint)


def test_partitions_without_a_manifest_are_not_read(tmp_path: Path) -> None:
    """They are being written."""
    write_archive(tmp_path / "runs", list(rollouts(2)), "a")
    write_archive(tmp_path / "runs", list(rollouts(2, first=2)), "b")
    (tmp_path / "runs" / "run=b" / "manifest.json").unlink()
    with ArchiveReader(tmp_path / "runs") as reader:
        assert len(list(reader.attempts())) == 2
        assert reader.unfinished == ["b"]
    (tmp_path / "runs" / "run=a" / "manifest.json").unlink()
    with pytest.raises(DecodeError, match="only unfinished ones"):
        ArchiveReader(tmp_path / "runs")


_PROBE = """
import json, resource, sys
from gristmill.archive import ArchiveReader
from gristmill.errors import DecodeError
from gristmill.ledger import AttemptKey
with ArchiveReader(sys.argv[1]) as reader:
    reader.whole(AttemptKey("all-0", 1))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
codes = []
for path in sys.argv[2:]:
    try:
        with ArchiveReader(path) as reader:
            reader.whole(AttemptKey("all-0", 1))
        codes.append("read")
    except DecodeError as error:
        codes.append(str(error.code))
unit = 1 if sys.platform == "darwin" else 1024
print(json.dumps([codes, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit]))
"""


def test_claims_are_given_no_memory(tmp_path: Path) -> None:
    """2^40 values, or a page of two gigabytes, in a file of some kilobytes."""
    ledger = memory_ledger()
    places: list[Path] = []
    claims = [CLAIMS[name] for name in ("rows of a row group", "values of a column", "bytes after decompression")]
    claims.append(lambda fields: _column(fields, CALLS.names.index("token_ids"))[5].__setitem__(1, 2**24))
    for number, change in enumerate([lambda fields: None, *claims]):
        places.append(tmp_path / str(number))
        with PartitionWriter(place_of(places[-1]), "a") as writer:
            writer.add(archived(ledger, KEY))
            writer.finish()
        edit_footer(places[-1] / "run=a" / "calls-00000.parquet", change)
        reseal(places[-1] / "run=a")
    done = subprocess.run([sys.executable, "-c", _PROBE, *map(str, places)], capture_output=True, text=True, check=True)
    codes, grown_bytes = json.loads(done.stdout)
    assert codes == ["file_malformed"] * len(claims)
    assert grown_bytes < 32 * 2**20


def test_lists_of_ids_are_numbers_of_32_bits(runs: Path) -> None:
    """The arrays that are trained are views of what was read, not Python numbers."""
    delta = _read(runs).capture.tokens["c0"]
    assert (delta.ids_T.dtype, delta.logprobs_T.dtype, delta.mask_T.dtype) == (np.int32, np.float32, np.uint8)
