from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.captures import CaptureFile, read_capture
from gristmill.captures.stream import CaptureStream
from gristmill.errors import Code, ConfigError, DecodeError

Json = dict[str, Any]


def call(rollout_id: str | None, call_id: str, **fields: Any) -> Json:
    named = {} if rollout_id is None else {"rollout_id": rollout_id}
    return {
        "kind": "call",
        **named,
        "model_call_id": call_id,
        "response_id": f"{rollout_id}-{call_id}",
        "output_items": [{"role": "assistant", "content": call_id}],
        "prompt_token_ids": [1, 2],
        "generation_token_ids": [3],
        "generation_log_probs": [-1.0],
        **fields,
    }


def result(rollout_id: str, **fields: Any) -> Json:
    return {"kind": "result", "rollout_id": rollout_id, "result": {"output": []}, "reward": 1, **fields}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def parts(path: Path, **options: Any) -> list[CaptureFile]:
    return list(CaptureStream(path, **options).parts())


def same(one: Any, other: Any) -> bool:
    """Compare captures by what can be compared: arrays by their bytes."""
    first, second = ({key: delta.ids_T.tobytes() for key, delta in capture.tokens.items()} for capture in (one, other))
    return first == second and (one.records, one.lost) == (other.records, other.lost)


def check_as_whole(path: Path, **options: Any) -> list[CaptureFile]:
    """A stream must give what reading the whole file gives, and what could not be read once."""
    whole, found = read_capture(path, **options), parts(path, **options)
    streamed = {key: rollout for part in found for key, rollout in part.rollouts.items()}
    assert list(streamed) == list(whole.rollouts)
    for key, rollout in whole.rollouts.items():
        assert same(streamed[key].capture, rollout.capture)
        assert streamed[key].result == rollout.result
    bad = sorted((str(error.where), error.message) for part in found for error in part.bad_lines)
    assert bad == sorted((str(error.where), error.message) for error in whole.bad_lines)
    return found


def test_each_attempt_is_a_part(tmp_path: Path) -> None:
    """Reading a run as one piece would need as much memory as the run has bytes."""
    lines = [call("a", "c1"), call("a", "c2"), result("a"), call("b", "c1"), call("a", "c1", attempt=1), result("b")]
    found = check_as_whole(write(tmp_path / "run.jsonl", lines))
    assert [list(part.rollouts) for part in found] == [[("a", 0)], [("b", 0)], [("a", 1)]]


def test_lines_in_any_order(tmp_path: Path) -> None:
    """Programs that write several rollouts at once mix their lines."""
    lines = [call(name, f"c{number}") for number in range(5) for name in "abc"] + [result(name) for name in "cab"]
    check_as_whole(write(tmp_path / "run.jsonl", lines))


def test_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    """`--rollout` on a large file must not decode all the others."""
    path = write(tmp_path / "run.jsonl", [call("a", "c1"), {**call("b", "c1"), "kind": "odd"}, call("c", "c1")])
    stream = CaptureStream(path)
    assert stream.keys == (("a", 0), ("b", 0), ("c", 0))
    assert [list(part.rollouts) for part in stream.parts(lambda key: key[0] == "c")] == [[("c", 0)]]
    with pytest.raises(DecodeError) as refused:
        list(stream.parts())
    assert refused.value.where == f"{path} line 2 $.kind"


def test_one_attempt_is_read_as_ever(tmp_path: Path) -> None:
    """A story's result.json must still be found, in a folder or beside the lines."""
    path = write(tmp_path / "capture.jsonl", [call("a", "c1"), call("a", "c2")])
    (tmp_path / "result.json").write_text('{"output": [], "reward": 0.5}')
    for source in (path, tmp_path):
        [part] = parts(source)
        rollout = part.rollouts["a", 0]
        assert rollout.result is not None
        assert rollout.result.reward == 0.5
    [given] = parts(path, result=tmp_path / "result.json")
    assert given.rollouts["a", 0].result is not None


def test_a_result_beside_several_attempts_is_not_used(tmp_path: Path) -> None:
    """It cannot be known whose it is; giving one is an error."""
    write(tmp_path / "capture.jsonl", [call("a", "c1"), call("b", "c1")])
    (tmp_path / "result.json").write_text("{}")
    first, second = parts(tmp_path)
    assert "not used" in first.notes[0].message
    assert second.notes == ()
    with pytest.raises(ConfigError, match="one attempt to go with"):
        CaptureStream(tmp_path, result=tmp_path / "result.json")


def test_lines_that_name_no_rollout(tmp_path: Path) -> None:
    """Without ids there is one rollout, or one for each attempt number."""
    check_as_whole(write(tmp_path / "one.jsonl", [call(None, "c1"), call(None, "c2")]))
    check_as_whole(write(tmp_path / "two.jsonl", [call(None, "c1"), call(None, "c1", attempt=1)]))


@pytest.mark.parametrize(
    "bad",
    [
        b"{broken",
        b"[1]",
        b"\xff\xfe{}",
        b'{"rollout_id": 5}',
        b'{"rollout_id": "a", "attempt": "x", "model_call_id": "c"}',
        b'{"rollout_id": "a", "attempt": -1, "model_call_id": "c"}',
        b'{"kind": "call", "rollout_id": "a"}',
        b'{"kind": "odd", "rollout_id": "b"}',
        b'{"model_call_id": "nobody"}',
    ],
)
def test_bad_lines(tmp_path: Path, bad: bytes) -> None:
    """A hole must be seen in every attempt that it may belong to, and told once, by its number."""
    path = write(tmp_path / "run.jsonl", [call("a", "c1"), bad, call("b", "c1"), b"", call("a", "c2")])
    with pytest.raises(DecodeError) as refused:
        parts(path)
    assert refused.value.where is not None
    assert refused.value.where.startswith(f"{path} line 2")
    whole, found = read_capture(path, skip_bad=True), parts(path, skip_bad=True)
    streamed = {key: rollout.capture for part in found for key, rollout in part.rollouts.items()}
    for key, rollout in whole.rollouts.items():
        assert len(streamed[key].lost) == len(rollout.capture.lost)
        assert streamed[key].records == rollout.capture.records
    assert [error.where for part in found for error in part.bad_lines] == [error.where for error in whole.bad_lines]


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file and one without permission have a code, whenever the reading fails."""
    with pytest.raises(DecodeError) as missing:
        CaptureStream(tmp_path / "none.jsonl")
    assert missing.value.code is Code.FILE_UNREADABLE
    stream = CaptureStream(write(tmp_path / "run.jsonl", [call("a", "c1"), call("b", "c1")]))
    (tmp_path / "run.jsonl").unlink()
    with pytest.raises(DecodeError) as gone:
        list(stream.parts())
    assert gone.value.code is Code.FILE_UNREADABLE


def test_a_pipe_is_read_whole(tmp_path: Path) -> None:
    """`gristmill ls <(zcat run.jsonl.gz)` cannot be read twice."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    data = write(tmp_path / "run.jsonl", [call("a", "c1"), call("b", "c1")]).read_bytes()
    writer = threading.Thread(target=pipe.write_bytes, args=(data,))
    writer.start()
    stream = CaptureStream(pipe)
    writer.join()
    assert stream.keys == (("a", 0), ("b", 0))


_lines = st.lists(
    st.one_of(
        st.builds(call, st.sampled_from("abc"), st.sampled_from(["c1", "c2", "c3"])),
        st.builds(lambda name, attempt: call(name, "c4", attempt=attempt), st.sampled_from("ab"), st.integers(0, 2)),
        st.sampled_from([b"", b"{broken", b'{"kind": "odd", "rollout_id": "a"}', b"[]"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(lines=_lines)
def test_any_file_reads_as_if_whole(tmp_path_factory: pytest.TempPathFactory, lines: list[Any]) -> None:
    """However the lines lie, streaming must not change what is trained."""
    check_as_whole(write(tmp_path_factory.mktemp("s") / "run.jsonl", lines), skip_bad=True)
