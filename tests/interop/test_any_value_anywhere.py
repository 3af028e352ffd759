"""No value at any place of a foreign file is an error of ours, or becomes what cannot be written."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gristmill.captures import read_lines, write_lines
from gristmill.errors import DecodeError
from tests.interop.foreign_files import (
    Json,
    chat_response,
    detail,
    imported,
    linked,
    pair,
    sdk_trace,
    step,
    tokens_of,
    trace,
    trajectory,
    trial,
)

_CALL = {"tool_call_id": "c1", "function_name": "f", "arguments": {"a": 1}}
_SEEN = {
    "results": [{"source_call_id": "c1", "content": "x", "subagent_trajectory_ref": [{"trajectory_id": "helper"}]}]
}
_IMAGE = {"type": "image", "source": {"media_type": "image/png", "path": "1.png"}}
_TRAJECTORY = trajectory(
    [
        {"step_id": 1, "source": "user", "message": [{"type": "text", "text": "x"}, _IMAGE]},
        step(2, 0, tool_calls=[_CALL], observation=_SEEN, llm_call_count=1, timestamp="2026-01-01T00:00:00Z"),
        step(3, 1, is_copied_context=False),
    ],
    subagent_trajectories=[trajectory([step(1, 2)], trajectory_id="helper")],
    extra={"gristmill": {"rollout_id": "r", "attempt": 1, "reward": 1.0, "group_id": "g", "advantage": 0.5}},
    continued_trajectory_ref="none.json",
)
_TRAJECTORY["steps"][2]["extra"] = {
    "gristmill": {"model_call_id": "b", "parent_call_id": None, "sampling": {"temperature": 1.0}, "weight_versions": []}
}
_STEPS = [{"step_name": "one", "agent_result": {"rollout_details": [detail((0,))]}, "verifier_result": {"rewards": {}}}]
_WRAPPED = {"url": "/v1/chat/completions", "headers": {"x-session-id": "h"}, "body": pair(0)["request"]}

_PIECES = [{"index": 0, "id": "c", "function": {"name": "f", "arguments": text}} for text in ("{", "}")]
_STREAMED = {"role": "assistant", "tool_calls": _PIECES}

FILES: dict[str, tuple[str, str, Any]] = {
    "pairs": ("request-response", "log.jsonl", [pair(0), pair(1, reward=1.0, group_id="g"), pair(2)]),
    "wrapped": (
        "request-response",
        "log.jsonl",
        [
            {"request": _WRAPPED, "response": {"status_code": 200, "body": chat_response(0)}, "attempt": 1},
            {**pair(0), "prompt_ids": [1, 2, 3], "token_ids": [10, 11], "completion_logprobs": [-0.25, -0.5]},
            {"session_id": "s", "result": {"messages": []}, "reward": 1.0},
        ],
    ),
    "trajectory": ("atif", "trajectory.json", _TRAJECTORY),
    "trajectories": (
        "atif",
        "all.jsonl",
        [trajectory(trajectory_id="a"), {"made_for": "atif", "sample": trajectory()}],
    ),
    "trial": ("harbor", "result.json", trial(step_results=_STEPS, exception_info={"exception_type": "E"})),
    "traces": ("rllm", "traces.jsonl", [trace(0, response_message=_STREAMED), linked(1), linked(2)]),
    "answers": ("rllm", "traces.json", [trace(0), linked(1), sdk_trace(2), sdk_trace(0, output=chat_response(0))]),
    "tree": (
        "rllm",
        "traces.json",
        {
            "format": "compact",
            "nodes": {"n0": {"m": {"role": "user", "content": "x"}, "p": None}},
            "traces": [{**trace(0), "messages_ref": ["n0", 1]}],
        },
    ),
}

VALUES = st.one_of(
    st.sampled_from(
        [None, True, 0, -1, 2**63, 10**400, 1.5, float("nan"), float("inf"), "", "x", "\ud800", [], {}, [[]], {"a": []}]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Give every place of a document: what holds it, and its key or index."""
    if isinstance(value, dict | list):
        for key, held in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from places(held)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(choose=st.randoms(use_true_random=False), value=VALUES)
def test_any_value_anywhere(name: str, choose: Any, value: Any, tmp_path: Path) -> None:
    """One strange value among millions of lines must not end an import that was asked to pass over bad ones."""
    form, file, whole = FILES[name]
    document: Json = {"whole": copy.deepcopy(whole)}
    holder, key = choose.choice(list(places(document["whole"])))
    holder[key] = value
    path = tmp_path / file
    values = document["whole"]
    path.write_text("".join(json.dumps(one) + "\n" for one in values) if file.endswith("l") else json.dumps(values))
    found = imported(form, path, skip_bad=True, completed=True)
    for rollout in found.rollouts:
        [again] = read_lines(write_lines(rollout.capture, rollout.result)).rollouts.values()
        assert again.capture.records == rollout.capture.records
        assert again.capture.lost == rollout.capture.lost
        if len({record.model_call_id for record in rollout.capture.records}) == len(rollout.capture.records):
            assert tokens_of(again.capture) == tokens_of(rollout.capture)
    if found.report.bad:
        with pytest.raises(DecodeError):
            imported(form, path, completed=True)
