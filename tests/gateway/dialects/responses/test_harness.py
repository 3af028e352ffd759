"""Requests that real harnesses sent, recorded: all of them are served, and each continues the one before."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.gateway.dialects.responses import RESPONSES
from gristmill.lineage import LineageIndex, request_digests
from gristmill.records import ParentResolution
from tests.gateway.dialects.responses.exchange import NAMES, events, harness_requests, no_history, translated

RUNS = (
    "codex--run2-inject",
    "codex--run4-parallel",
    "codex--run5-subagent",
    "codex--run6-compact",
    "openai-agents--run2-responses",
    "opencode--run4-openai",
    "pi--run2-responses",
)
AUTHORED = {"reasoning", "message", "function_call"}


def authored(item: dict[str, Any]) -> bool:
    kind = item.get("type", "message")
    return kind in AUTHORED and (kind != "message" or item["role"] == "assistant")


# A harness whose request is refused, or loses an item, cannot be trained with.
@pytest.mark.parametrize("run", RUNS)
def test_every_recorded_request_is_served(run: str) -> None:
    for body in harness_requests(run):
        made = RESPONSES.translate(body, no_history)
        items = body["input"]
        results = [item for item in items if item.get("type") == "function_call_output"]
        calls = [item for item in items if item.get("type") == "function_call"]
        messages = made.body["messages"]
        assert [(each["tool_call_id"], each["content"]) for each in messages if each["role"] == "tool"] == [
            (item["call_id"], item["output"]) for item in results
        ]
        assert [call["id"] for each in messages for call in each.get("tool_calls", ())] == [
            item["call_id"] for item in calls
        ]
        assert [each["role"] for each in messages if each["role"] in {"system", "user"}] == (
            ["system"] * (messages[0]["role"] == "system")
            + ["user"] * sum(item.get("role") == "user" for item in items)
        )
        assert all(each["role"] != "assistant" or each["content"] != "" for each in messages)
        assert all(note.isascii() and "," not in note for note in made.notes)
        offered = {tool["function"]["name"] for tool in made.body.get("tools", ())}
        shown = {call["function"]["name"] for each in messages for call in each.get("tool_calls", ())}
        assert not offered or shown <= offered


# A turn that is shown differently when it is history breaks the prefix of every later prompt.
@pytest.mark.parametrize("run", RUNS)
def test_a_request_begins_with_the_messages_of_the_one_it_continues(run: str) -> None:
    continued = 0
    earlier: list[dict[str, Any]] = []
    for body in harness_requests(run):
        messages = translated(body).body["messages"]
        for before in earlier:
            if len(before["input"]) < len(body["input"]) and body["input"][: len(before["input"])] == before["input"]:
                shown = translated(before).body["messages"]
                assert messages[: len(shown)] == shown
                assert messages[len(shown)]["role"] == "assistant"
                continued += 1
        earlier.append(body)
    assert continued > 0


# What a harness does to a reply before it sends it back must not hide which call it continues.
@pytest.mark.parametrize("run", RUNS)
def test_a_served_turn_is_found_again(run: str) -> None:
    found = 0
    for body in harness_requests(run):
        start = next((index for index, item in enumerate(body["input"]) if authored(item)), None)
        if start is None:
            continue
        end = next(index for index in range(start, len(body["input"])) if not authored(body["input"][index]))
        first = {**body, "input": body["input"][:start]}
        turn = translated({"model": "m", "input": body["input"][start:end]}).body["messages"]
        assert len(turn) == 1
        encoder = RESPONSES.encoder(first, translated(first), NAMES)
        served = encoder.body({"choices": [{"index": 0, "message": turn[0], "finish_reason": "stop"}]})
        index = LineageIndex()
        index.add("c1", request_digests(first, served["output"]))
        cut = {**body, "input": body["input"][: end + 1]}
        assert index.parent_of(cut).resolution is ParentResolution.RESOLVED
        found += 1
    assert found > 0


# A tool of a namespace must be called by the names that the harness gave it, or it knows no such tool.
def test_a_call_of_a_namespaced_tool_names_both() -> None:
    body = harness_requests("codex--run5-subagent")[0]
    made = translated(body)
    assert "multi_agent_v1__spawn_agent" in {tool["function"]["name"] for tool in made.body["tools"]}
    assert "removed:tool.web_search" in made.notes
    encoder = RESPONSES.encoder(body, made, NAMES)
    function = {"name": "multi_agent_v1__spawn_agent", "arguments": "{}"}
    encoder.begin()
    piece = {"index": 0, "id": "c", "type": "function", "function": function}
    said = encoder.chunk({"choices": [{"index": 0, "delta": {"tool_calls": [piece]}, "finish_reason": None}]})
    added = events(said.now)[0]["item"]
    assert (added["name"], added["namespace"], added["call_id"]) == ("spawn_agent", "multi_agent_v1", "c")
