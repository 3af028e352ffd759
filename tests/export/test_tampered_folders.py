"""Folders of an export that somebody prepared: what is there beside it, in it, and in its way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gristmill.canonical import loads
from gristmill.errors import Code, DecodeError, ExportError
from gristmill.export import FORMATS, REJECTED_NAME, ROWS_NAME, decode_row, encode_row, open_export
from gristmill.pipeline import RebuiltRollout, run_rollout
from gristmill.reconstruction import RowMode
from gristmill.records import Result
from gristmill.selection import resolve_selection_policy
from tests.export.attempts import captured, made
from tests.export.folders import Attempt, findings, reseal

SETTINGS: dict[str, Any] = {"policy": "returned_history", "options": {}, "mode": RowMode.MERGED}
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)


def attempts() -> list[Attempt]:
    """A good attempt, and one that is refused with a lone surrogate in its evidence."""
    good, odd = captured(rollout_id="a"), captured(rollout_id="b")
    outcome, result = made(good)
    returned = Result(value={"messages": [{"type": "\ud800", "role": "assistant", "content": "a"}]})
    return [(good, result, outcome), (odd, returned, run_rollout(odd, returned, resolve_selection_policy()))]


ATTEMPTS = attempts()


def export(name: str, folder: Path, **fields: Any) -> Path:
    with open_export(name, folder, **{**SETTINGS, **fields}) as writer:
        for attempt in ATTEMPTS:
            writer.add(*attempt)
        writer.finish()
    return folder


@EVERY_FORMAT
def test_evidence_with_a_lone_surrogate_is_read_back(tmp_path: Path, name: str) -> None:
    folder = export(name, tmp_path / "out")
    line = (folder / REJECTED_NAME).read_bytes().splitlines()[-1]
    assert b"\\ud800" in line
    assert loads(line)["rollout_id"] == "b"
    assert findings(folder, ATTEMPTS) == []
    (folder / REJECTED_NAME).write_bytes((folder / REJECTED_NAME).read_bytes().replace(b"\\ud800", b"\\ud801"))
    reseal(folder)
    assert [finding.code for finding in findings(folder, ATTEMPTS)] == [Code.MANIFEST_DIFFERS]


def test_a_repeated_key_is_found(tmp_path: Path) -> None:
    """One reader sees the first reward, another the last."""
    folder = export("jsonl", tmp_path / "out")
    data = (folder / ROWS_NAME).read_bytes()
    for old, new in (
        (b'"reward":1.0', b'"reward":9.0,"reward":1.0'),
        (b'"reward":1.0', b'"rewar\\u0064":9.0,"reward":1.0'),
        (b'"role":"sampled"', b'"role":"context","role":"sampled"'),
    ):
        assert old in data
        (folder / ROWS_NAME).write_bytes(data.replace(old, new, 1))
        reseal(folder)
        found = findings(folder, ATTEMPTS)
        assert Code.ROW_MALFORMED in {finding.code for finding in found}, new
        assert any("twice" in finding.message for finding in found)


def test_a_line_that_is_written_otherwise_is_read() -> None:
    outcome = ATTEMPTS[0][2]
    assert isinstance(outcome, RebuiltRollout)
    line = encode_row(outcome.rows[0])
    spaced = line.replace(b'":', b'" : ') + b" \n"
    assert encode_row(decode_row(spaced, "x")) == line
    with pytest.raises(DecodeError) as caught:
        decode_row(line.replace(b'"attempt":0', b'"attempt":1,"attempt":0'), "x")
    assert (caught.value.code, caught.value.where) == (Code.ROW_MALFORMED, "x")


@EVERY_FORMAT
@pytest.mark.parametrize(
    "stray", ["rows-00009.parquet", "rows.jsonl", "messages.jsonl", "train.parquet", "more.jsonl", "UP.JSONL"]
)
def test_files_that_the_manifest_does_not_list(tmp_path: Path, name: str, stray: str) -> None:
    """A trainer that loads the folder by a pattern trains them too."""
    folder = export(name, tmp_path / "out")
    (folder / "notes.txt").write_text("mine")
    assert findings(folder, ATTEMPTS) == []
    if (folder / stray).exists():
        return
    source = next(folder.glob("*.parquet" if name == "parquet" else "*s.jsonl"))
    shutil.copy(source, folder / stray)
    found = [finding for finding in findings(folder, ATTEMPTS) if finding.where == str(folder / stray)]
    assert any(
        finding.code is Code.MANIFEST_DIFFERS and "a file that the manifest does not list" in finding.message
        for finding in found
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("file", ["rows.jsonl", "messages.jsonl", "rejected.jsonl", "manifest.json"])
def test_an_input_is_never_replaced(tmp_path: Path, name: str, file: str) -> None:
    """`--overwrite` means the old output, never what the new one is made of."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / file).write_text("evidence")
    link = tmp_path / "link"
    link.symlink_to(folder / file)
    for given in (folder / file, folder / ".." / "in" / file, link, folder):
        with pytest.raises(ExportError) as caught:
            open_export(name, folder, **SETTINGS, overwrite=True, inputs=[tmp_path / "gone", given])
        assert caught.value.code is Code.OUTPUT_EXISTS
        assert "is an input" in caught.value.message
        assert caught.value.hint
        assert [entry.name for entry in folder.iterdir()] == [file]
        assert (folder / file).read_text() == "evidence"


def test_an_input_beside_the_output_is_left_alone(tmp_path: Path) -> None:
    folder = export("jsonl", tmp_path / "out")
    source = folder / "calls.txt"
    source.write_text("evidence")
    export("jsonl", folder, overwrite=True, inputs={source, tmp_path / "out.jsonl"})
    assert source.read_text() == "evidence"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_stands_in_the_way_is_named(tmp_path: Path, name: str, overwrite: bool) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place, words in (("file", "is a file"), ("link", f"is a symbolic link to {tmp_path / 'nowhere'}")):
        with pytest.raises(ExportError) as caught:
            open_export(name, tmp_path / place, **SETTINGS, overwrite=overwrite)
        assert caught.value.code is Code.OUTPUT_EXISTS
        assert words in caught.value.message
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()
