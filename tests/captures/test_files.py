from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gristmill.captures import read_capture, read_result_file
from gristmill.errors import Code, ConfigError, DecodeError
from tests.captures.engine import FOLDER

CALL = {"model_call_id": "c", "output_items": []}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# A story folder is how examples and reports are handed around.
def test_a_story_folder(tmp_path: Path) -> None:
    write(tmp_path / "capture.jsonl", CALL, CALL | {"model_call_id": "d"})
    write(tmp_path / "result.json", {"reward": 2})
    [(capture, result)] = read_capture(tmp_path).rollouts.values()
    assert len(capture.records) == 2
    assert result is not None
    assert result.reward == 2.0
    [(_, beside)] = read_capture(tmp_path / "capture.jsonl").rollouts.values()
    assert beside == result


# A given result is taken instead of the one that lies about.
def test_a_given_result_wins(tmp_path: Path) -> None:
    lines = write(tmp_path / "x.jsonl", CALL, {"kind": "result", "result": {"reward": 1}})
    write(tmp_path / "result.json", {"reward": 2})
    other = write(tmp_path / "other.json", {"reward": 3})
    found = read_capture(lines)
    [(_, own)] = found.rollouts.values()
    assert own is not None
    assert own.reward == 1.0
    assert "not used" in found.notes[0].message
    [(_, given)] = read_capture(lines, result=other).rollouts.values()
    assert given is not None
    assert given.reward == 3.0


# One result cannot belong to several attempts.
def test_a_result_needs_one_attempt(tmp_path: Path) -> None:
    lines = write(tmp_path / "x.jsonl", CALL | {"rollout_id": "a"}, CALL | {"rollout_id": "b"})
    result = write(tmp_path / "r.json", {})
    with pytest.raises(ConfigError):
        read_capture(lines, result=result)
    write(tmp_path / "result.json", {})
    assert "several attempts" in read_capture(lines).notes[0].message


# Recorded exchanges of an engine are the main job's input.
def test_a_folder_of_exchanges(tmp_path: Path) -> None:
    found = read_capture(FOLDER)
    [(capture, _)] = found.rollouts.values()
    assert "chat_basic_stop" in {record.model_call_id for record in capture.records}
    assert sum(record.usable for record in capture.records) > 40
    for name in ("chat_length", "chat_n2"):
        shutil.copy(FOLDER / f"{name}.json", tmp_path)
    write(tmp_path / "result.json", {"reward": 1})
    [(two, result)] = read_capture(tmp_path).rollouts.values()
    assert [record.model_call_id for record in two.records] == ["chat_length", "chat_n2", "chat_n2#1"]
    assert result is not None


# One exchange alone is read too; one of another route is no call and says so.
def test_one_exchange() -> None:
    [(capture, result)] = read_capture(FOLDER / "chat_length.json").rollouts.values()
    assert (len(capture.records), result) == (1, None)
    with pytest.raises(DecodeError) as caught:
        read_capture(FOLDER / "tokenize_prompt.json")
    assert "samples nothing" in caught.value.message


# Errors must name the file and the line, or nobody finds them in a run of thousands.
def test_errors_name_file_and_line(tmp_path: Path) -> None:
    lines = write(tmp_path / "x.jsonl", CALL, {"model_call_id": 1})
    with pytest.raises(DecodeError) as caught:
        read_capture(lines)
    assert caught.value.where == f"{lines} line 2 $.model_call_id"
    assert caught.value.code is Code.FILE_MALFORMED
    skipped = read_capture(lines, skip_bad=True)
    assert [error.where for error in skipped.bad_lines] == [f"{lines} line 2 $.model_call_id"]
    (tmp_path / "bad.json").write_bytes(b"{")
    for path in (tmp_path / "bad.json", tmp_path):
        with pytest.raises(DecodeError) as caught:
            read_capture(path)
        assert caught.value.where == str(tmp_path / "bad.json")
    with pytest.raises(DecodeError) as caught:
        read_result_file(tmp_path / "bad.json")
    assert (caught.value.where or "").startswith(str(tmp_path / "bad.json"))
    write(tmp_path / "reward.json", {"reward": "x"})
    with pytest.raises(DecodeError) as caught:
        read_result_file(tmp_path / "reward.json")
    assert caught.value.where == f"{tmp_path / 'reward.json'} $.reward"


# A path that cannot be read is the environment's fault, not the data's.
def test_unreadable_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path / "no.jsonl", tmp_path / "no.json"):
        with pytest.raises(DecodeError) as caught:
            read_capture(path)
        assert caught.value.code is Code.FILE_UNREADABLE
        assert caught.value.hint
    with pytest.raises(DecodeError):
        read_capture(write(tmp_path / "x.jsonl", CALL), result=tmp_path / "no.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DecodeError) as caught:
        read_capture(empty)
    assert caught.value.code is Code.FILE_MALFORMED

    def refuse(self: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(DecodeError) as caught:
        read_capture(empty)
    assert caught.value.code is Code.FILE_UNREADABLE
