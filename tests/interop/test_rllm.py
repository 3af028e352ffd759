"""Traces of rLLM's gateway and SDK."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import Code, DecodeError
from tests.interop.foreign_files import (
    ASKED,
    TEXTS,
    TURNS,
    Json,
    chat_response,
    imported,
    lines,
    linked,
    messages,
    sdk_trace,
    store,
    tokens_of,
    trace,
    written,
)

ALL = dict(zip(("t0", "t1", "t2"), TURNS, strict=True))


def compact(*turns: int) -> Json:
    """What the gateway answers with messages in a tree: a node is a message and the one before it."""
    nodes: Json = {}
    traces: list[Json] = []
    for turn in turns:
        value = trace(turn)
        del value["messages"]
        asked = messages(turn)
        for number, message in enumerate(asked):
            nodes[f"n{number}"] = {"m": message, "p": f"n{number - 1}" if number else None}
        traces.append({**value, "messages_ref": [f"n{len(asked) - 1}", len(asked)]})
    return {"format": "compact", "nodes": nodes, "traces": traces}


def test_every_place_that_traces_stand_in(tmp_path: Path) -> None:
    """Files, answers and the store of a gateway hold the same traces."""
    traces = [trace(0), linked(1), linked(2)]
    places = [
        lines(tmp_path / "a.jsonl", traces),
        written(tmp_path / "b.json", traces),
        store(tmp_path / "c.db", traces),
        lines(tmp_path / "d.jsonl", [trace(turn) for turn in range(3)]),
        written(tmp_path / "e.json", compact(0, 1, 2)),
    ]
    for path in places:
        found = imported("rllm", path)
        assert tokens_of(found.capture) == ALL
        assert found.capture.rollout_id == "task-7:0"
        assert found.parents == {"t0": None, "t1": "t0", "t2": "t1"}
        assert [record.finish_reason for record in found.capture.records] == ["stop"] * 3
        assert [record.weights_at_start for record in found.capture.records] == ["4"] * 3
        request: Any = found.capture.exchanges["t1"].request
        assert request["messages"] == messages(1)


def test_a_folder_of_sessions(tmp_path: Path) -> None:
    """A run leaves a file a session."""
    for number in range(2):
        lines(tmp_path / f"s{number}.jsonl", [trace(0, session_id=f"task-{number}:0")])
    (tmp_path / "notes.txt").write_text("x")
    found = imported("rllm", tmp_path)
    assert [rollout.capture.rollout_id for rollout in found.rollouts] == ["task-0:0", "task-1:0"]


def test_sessions_are_kept_apart(tmp_path: Path) -> None:
    """Traces of all rollouts stand in one file, in the order of time."""
    other = [trace(0, session_id="task-8:1", trace_id="x")]
    found = imported("rllm", lines(tmp_path / "t.jsonl", [trace(0), *other, linked(1)]))
    assert [list(tokens_of(rollout.capture)) for rollout in found.rollouts] == [["t0", "t1"], ["x"]]


@pytest.mark.parametrize(
    "more",
    [
        {"parent_trace_id": "t9"},
        {"parent_trace_id": None},
        {"parent_trace_id": "t1"},
        {"parent_trace_id": 4},
    ],
)
def test_a_prompt_whose_beginning_is_not_there(tmp_path: Path, more: Json) -> None:
    """A prompt that is put together from the wrong trace trains on a context that nobody saw."""
    value = linked(1, **more)
    if more["parent_trace_id"] == 4:
        with pytest.raises(DecodeError, match="a string, got number"):
            imported("rllm", lines(tmp_path / "t.jsonl", [trace(0), value]))
        return
    found = imported("rllm", lines(tmp_path / "t.jsonl", [trace(0), value, linked(2)]))
    assert found.reasons == {"t0": None, "t1": Code.PROMPT_IDS_MISSING, "t2": Code.PROMPT_IDS_MISSING}
    assert found.report.losses["prompts"] == 2
    assert [note.where for note in found.report.notes] == ["task-7:0 t1", "task-7:0 t2"]


def test_a_trace_that_stands_twice_is_no_beginning(tmp_path: Path) -> None:
    """Which of the two the next prompt goes on from is not said."""
    found = imported("rllm", lines(tmp_path / "t.jsonl", [trace(0), trace(0), linked(1)]))
    assert [record.unusable_reason for record in found.capture.records][2] == Code.PROMPT_IDS_MISSING


def test_an_empty_list_is_none(tmp_path: Path) -> None:
    """The gateway writes empty lists where an engine gave no ids."""
    bare = trace(0, completion_token_ids=[], logprobs=None, token_counts={})
    found = imported("rllm", lines(tmp_path / "t.jsonl", [bare, trace(1, prompt_token_ids=[])]))
    assert found.reasons == {"t0": Code.TOKEN_IDS_MISSING, "t1": Code.PROMPT_IDS_MISSING}


def test_a_count_that_differs(tmp_path: Path) -> None:
    """The engine's count is held against the ids."""
    found = imported("rllm", lines(tmp_path / "t.jsonl", [trace(0, token_counts={"prompt": 3, "completion": 9})]))
    assert found.reasons == {"t0": Code.TOKEN_COUNT_MISMATCH}


def test_tool_calls_of_streams_are_put_together(tmp_path: Path) -> None:
    """Of a stream the gateway keeps the pieces; a call in pieces is no call that a harness ever returns."""
    pieces = [
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"na'}},
        {"index": 1, "id": "c2", "type": "function", "function": {"name": "stop", "arguments": ""}},
        {"index": 0, "function": {"arguments": 'me": "Ada"}'}},
        {"index": 1, "function": {"arguments": "{}"}},
    ]
    whole = [
        {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"name": "Ada"}'}},
        {"id": "c2", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
    ]
    values = [
        trace(0, response_message={"role": "assistant", "tool_calls": pieces}),
        trace(1, response_message={"role": "assistant", "tool_calls": whole}),
    ]
    found = imported("rllm", lines(tmp_path / "t.jsonl", values))
    first, second = found.capture.records
    assert first.output_items == second.output_items
    assert [atom.name for item in first.output_items for atom in item.atoms or ()] == ["find", "stop"]


def test_whole_requests_are_kept(tmp_path: Path) -> None:
    """Where the gateway kept request and response, tools and sampling are known."""
    request = {"model": "m", "messages": messages(0), "temperature": 0.5, "tools": []}
    value = trace(0, raw_request=request, raw_response=chat_response(0))
    found = imported("rllm", lines(tmp_path / "t.jsonl", [value]))
    [record] = found.capture.records
    assert record.sampling.temperature == 0.5
    # latency_ms
    assert found.report.losses == {"fields": 1}
    assert found.capture.exchanges["t0"].reply is not None


def test_losses_are_counted(tmp_path: Path) -> None:
    """Experts are kept as texts whose type and shape nobody states."""
    value = trace(0, routing_matrices=["AA=="], metadata={"run": 1}, tags=["x"])
    found = imported("rllm", lines(tmp_path / "t.jsonl", [value]))
    # latency_ms, metadata, tags
    assert found.report.losses == {"routing_matrices": 1, "fields": 3, "requests": 1}


def test_traces_of_the_sdk(tmp_path: Path) -> None:
    """The older SDK keeps input and output apart, the output as a message or as a whole response."""
    found = imported("rllm", lines(tmp_path / "t.jsonl", [sdk_trace(0), sdk_trace(1)]))
    assert tokens_of(found.capture) == {"t0": TURNS[0], "t1": TURNS[1]}
    assert found.capture.rollout_id == "task-7:0:0"
    assert found.parents["t1"] == "t0"
    whole = [sdk_trace(turn, output=chat_response(turn), tools=[]) for turn in range(2)]
    found = imported("rllm", lines(tmp_path / "t.jsonl", whole))
    assert tokens_of(found.capture) == {"t0": TURNS[0], "t1": TURNS[1]}
    assert [record.response_id for record in found.capture.records] == ["resp-0", "resp-1"]
    aborted = chat_response(0)
    aborted["choices"][0]["finish_reason"] = "abort"
    failed = sdk_trace(1, output={**chat_response(1), "error": {"message": "busy"}})
    found = imported("rllm", lines(tmp_path / "t.jsonl", [sdk_trace(0, output=aborted), failed]))
    assert found.reasons == {"t0": Code.ABORTED, "t1": Code.CALL_FAILED}


def two_choices() -> Json:
    body = chat_response(1)
    return {**body, "choices": [body["choices"][0], {**body["choices"][0], "index": 1}]}


BAD: list[tuple[Any, str]] = [
    (trace(1, session_id=None), "session_id or session_name"),
    (trace(1, session_id=["x"]), "a string, got array"),
    ({"session_id": "task-7:0", "trace_id": "t1"}, "response_message or completion_token_ids"),
    (trace(1, response_message="x"), "an object, got string"),
    (trace(1, completion_token_ids={"a": 1}), "an array, got object"),
    (trace(1, logprobs="x"), "an array, got string"),
    (trace(1, token_counts=[]), "an object, got array"),
    (trace(1, token_counts={"completion": -1}), "a count"),
    (trace(1, weight_version=1.5), "an integer"),
    (trace(1, finish_reason=1), "a string, got number"),
    (trace(1, messages=[{"role": "user", "content": float("nan")}]), "a JSON value, got nan"),
    (linked(1, prompt_delta_token_ids="x"), "an array, got string"),
    (sdk_trace(1, session_id="task-7:0", input=[]), "an object, got array"),
    (sdk_trace(1, session_id="task-7:0", output=two_choices()), "one choice, got 2"),
    ([1], "an object, got array"),
]


@pytest.mark.parametrize(("value", "told"), BAD)
def test_bad_traces(tmp_path: Path, value: Any, told: str) -> None:
    """A bad trace is named by its place; passed over, it leaves a hole in its session."""
    for path, place in (
        (lines(tmp_path / "t.jsonl", [trace(0), value, trace(2)]), "line 2"),
        (written(tmp_path / "t.json", [trace(0), value, trace(2)]), "trace 1"),
    ):
        with pytest.raises(DecodeError) as refused:
            imported("rllm", path)
        assert told in refused.value.message
        assert (refused.value.where or "").startswith(f"{path} {place}")
        found = imported("rllm", path, skip_bad=True)
        assert list(tokens_of(found.capture)) == ["t0", "t2"]
        assert len(found.capture.lost) == len(found.report.bad) == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"nodes": {}}, "a node without its parent"),
        ({"nodes": {"n0": {"m": {}, "p": "n0"}}}, "a node without its parent"),
        ({"nodes": []}, "an object, got array"),
        ({"traces": [{**trace(0), "messages_ref": ["n0"]}]}, "a leaf and a number"),
        ({"traces": [{**trace(0), "messages_ref": ["n0", 4]}]}, "as many messages as stated, got 1"),
    ],
)
def test_a_tree_of_messages_with_a_mistake(tmp_path: Path, change: Json, told: str) -> None:
    """A conversation that cannot be put together is not half put together."""
    path = written(tmp_path / "t.json", {**compact(0), **change})
    with pytest.raises(DecodeError) as refused:
        imported("rllm", path)
    assert told in refused.value.message


def test_a_store_with_damage(tmp_path: Path) -> None:
    """A row that is no JSON is a hole in its session; a database of something else is refused."""
    path = store(tmp_path / "t.db", [trace(0), "{", trace(2)])
    with pytest.raises(DecodeError, match="expected JSON"):
        imported("rllm", path)
    found = imported("rllm", path, skip_bad=True)
    assert (list(tokens_of(found.capture)), len(found.capture.lost)) == (["t0", "t2"], 1)
    with closing(sqlite3.connect(tmp_path / "o.db")) as other:
        other.execute("CREATE TABLE notes (text TEXT)")
    with pytest.raises(DecodeError, match="a store of traces"):
        imported("rllm", tmp_path / "o.db")
    assert path.read_bytes()[:15] == b"SQLite format 3"


def test_what_was_said_is_known(tmp_path: Path) -> None:
    """Selection by content needs the replies as they were served."""
    found = imported("rllm", lines(tmp_path / "t.jsonl", [trace(0, response_message={"content": TEXTS[0]})]))
    [record] = found.capture.records
    assert [atom.text for item in record.output_items for atom in item.atoms or ()] == [TEXTS[0]]
    assert ASKED[0] in str(found.capture.exchanges["t0"].request)
