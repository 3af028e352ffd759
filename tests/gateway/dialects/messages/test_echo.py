"""What a harness sends back: it must be recognised as the reply, and reach the engine as the reply it was."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.canonical import canonical_text_of_json
from gristmill.captures.decode import decode_value
from gristmill.fingerprint import fingerprint
from gristmill.gateway.dialects.messages import MESSAGES
from gristmill.gateway.dialects.messages.arguments import arguments_of, input_of
from gristmill.lineage import LineageIndex, request_digests
from gristmill.records import Dialect, ParentResolution
from tests.gateway.dialects.messages.exchange import (
    ONE_CHOICE,
    USER,
    Added,
    Json,
    add_up,
    called,
    chunks_of,
    engine,
    events,
    finish,
    harness,
    no_history,
    piece,
    plain,
    start,
    stream,
    translate,
    usage,
)

CACHED = {"cache_control": {"type": "ephemeral"}}
HIDDEN_OVER = 22
"""Recorded texts longer than this stand as their digest and length."""


def item_of(served: Json) -> Any:
    [choice] = decode_value(Dialect.MESSAGES, 200, served).choices
    [item] = choice.items
    return item


def echo_of(message: Json) -> Json:
    """What a harness makes of a message: ids and stop reason dropped, keys of inputs sorted, a cache mark added."""
    blocks: list[Json] = []
    for block in message["content"]:
        made = dict(block)
        if block["type"] == "tool_use":
            made["input"] = dict(sorted(block["input"].items(), reverse=True))
        blocks.append(made)
    if blocks:
        blocks[-1] |= CACHED
    return {"role": "assistant", "content": blocks}


def said(chunks: list[Json]) -> tuple[str, str, list[tuple[str, str, str | None]]]:
    """Join the deltas of a Chat stream by hand: reasoning, content, and calls with the value of their arguments."""
    reasoning = content = ""
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            reasoning += choice["delta"].get("reasoning") or ""
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                known = calls.setdefault(call["index"], ["", "", ""])
                known[0] += call.get("id") or ""
                known[1] += call["function"].get("name") or ""
                known[2] += call["function"].get("arguments") or ""
    return reasoning, content, [(call[0], call[1], canonical_text_of_json(call[2])) for call in calls.values()]


def translated(echo: Json) -> tuple[str, str, list[tuple[str, str, str | None]]]:
    """Read the assistant message that the engine is given for an echo, in the form of `said`."""
    message = translate(USER, echo, USER).body["messages"][1]
    calls = [
        (call["id"], call["function"]["name"], canonical_text_of_json(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return message.get("reasoning") or "", message["content"] or "", calls


# An echo that is not recognised breaks the selection of the call; one that is changed breaks the prompt.
@pytest.mark.parametrize("name", [name for name in ONE_CHOICE if "abort" not in name])
def test_echoes_of_recorded_replies(name: str) -> None:
    chunks = chunks_of(engine(name))
    streamed = stream(*chunks)
    echo = echo_of(add_up(streamed.events()).message)
    assert fingerprint(item_of(streamed.encoder.served())) == fingerprint(echo)
    assert translated(echo) == said(chunks)


# The engine's own Messages route is what harnesses were seen to work with.
@pytest.mark.parametrize("name", ["messages_stream", "messages_stream_tool_call"])
def test_the_engine_s_own_stream(name: str) -> None:
    read = events(engine(name)["sse_raw"].rstrip("\n").encode() + b"\n\n")
    ours, theirs = add_up(stream(*_chat_chunks(read)).events()), add_up(read)
    assert _unsigned(ours.message["content"]) == _unsigned(theirs.message["content"])
    assert ours.message["stop_reason"] == theirs.message["stop_reason"]
    assert ours.stopped
    assert ours.message["usage"].items() <= theirs.message["usage"].items()


# And its own bodies.
@pytest.mark.parametrize(
    "name",
    ["messages_basic", "messages_max_tokens", "messages_stop_sequence", "messages_tool_call", "messages_kv_prompt_ids"],
)
def test_the_engine_s_own_bodies(name: str) -> None:
    theirs = engine(name)["body"]
    ours = stream(*_chat_chunks_of_message(theirs)).message
    assert _unsigned(ours["content"]) == _unsigned(theirs["content"])
    assert (ours["stop_reason"], ours["stop_sequence"]) == (theirs["stop_reason"], theirs.get("stop_sequence"))


def _unsigned(blocks: list[Json]) -> list[Json]:
    return [{key: value for key, value in block.items() if key != "signature"} for block in blocks]


def _chat_chunks(read: list[Json]) -> list[Json]:
    """Say a Messages stream as the Chat stream that it came from."""
    chunks = [start()]
    calls = -1
    for event in read:
        delta = event.get("delta", {})
        kind = delta.get("type")
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls += 1
            chunks.append(called(calls, event["content_block"]["id"], event["content_block"]["name"], ""))
        elif kind == "thinking_delta":
            chunks.append(piece({"reasoning": delta["thinking"]}))
        elif kind == "text_delta":
            chunks.append(piece({"content": delta["text"]}))
        elif kind == "input_json_delta":
            chunks.append(called(calls, arguments=delta["partial_json"]))
        elif event["type"] == "message_delta":
            reasons = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
            chunks.append(finish(reasons[delta["stop_reason"]], delta["stop_sequence"]))
            chunks.append(_usage_chunk(event["usage"]))
    return chunks


def _usage_chunk(counts: Json) -> Json:
    cached, created = counts.get("cache_read_input_tokens", 0), counts.get("cache_creation_input_tokens", 0)
    prompt = counts.get("input_tokens", 0) + cached + created
    return usage(prompt, counts["output_tokens"], cached_tokens=cached, created_cache_tokens=created)


def _chat_chunks_of_message(message: Json) -> list[Json]:
    delta = {"stop_reason": message["stop_reason"], "stop_sequence": message.get("stop_sequence")}
    read = list(events(b"".join(MESSAGES.replay({**message, **delta}))))
    return _chat_chunks(read)


def _hidden(value: Any) -> Any:
    """Replace long texts the way the recordings do."""
    if isinstance(value, str) and len(value) > HIDDEN_OVER:
        return f"<text {sha256(value.encode()).hexdigest()[:12]} len={len(value)}>"
    if isinstance(value, dict):
        return {key: _hidden(member) for key, member in value.items()}
    return [_hidden(member) for member in value] if isinstance(value, list) else value


# Real harnesses, turn by turn: every turn must be found to continue the one before, whatever they re-ordered.
@pytest.mark.parametrize(
    "name", ["claude-code--run1", "claude-code--run4-model-parallel", "opencode--run5-anthropic", "pi--run3-anthropic"]
)
def test_turns_of_harnesses(name: str) -> None:
    turns = [call for call in harness(name) if call["body"].get("tools")]
    assert len(turns) >= 3
    index, before = LineageIndex(), None
    for turn in turns:
        made = MESSAGES.translate(turn["body"], no_history)
        link = index.parent_of(made.understood)
        assert (link.parent_call_id, link.resolution) == (
            (None, ParentResolution.ROOT) if before is None else (before, ParentResolution.RESOLVED)
        )
        assert (link.system_changed, link.tools_changed) == (False, False)
        streamed = stream(*_chat_chunks(events(turn["response_raw"].encode())))
        item = _hidden(plain(item_of(streamed.encoder.served())))
        before = f"call-{turn['seq']}"
        index.add(before, request_digests(made.understood, (item,)))


# The conversation that the engine gets must have one result for each call, in order, whatever the harness.
@pytest.mark.parametrize(
    "name",
    [
        "claude-code--run1",
        "claude-code--run2-inject",
        "claude-code--run4-model-parallel",
        "claude-code--run8-compact",
        "opencode--run5-anthropic",
        "pi--run3-anthropic",
    ],
)
def test_requests_of_harnesses(name: str) -> None:
    for turn in harness(name):
        if "messages" not in turn["body"]:
            continue
        made = MESSAGES.translate(turn["body"], no_history)
        waiting: list[str] = []
        for message in made.body["messages"]:
            if message["role"] == "tool":
                assert message["tool_call_id"] == waiting.pop(0)
            else:
                assert not waiting
            waiting += [call["id"] for call in message.get("tool_calls") or ()]
        assert not waiting
        assert "x-anthropic-billing-header" not in json.dumps(made.body)
        assert "cache_control" not in json.dumps(made.body["messages"])
        assert made.stream is turn["body"].get("stream", False)
        assert "stream" not in made.body


MALFORMED = [
    '{"command": "rm -rf /',
    '{"command": ls}',
    "[1, 2]",
    '"ls"',
    "3",
    "{'command': 'ls'}",
    '{"a": NaN}',
    '{"a": "\\ud83d"}',
    '{"INVALID_JSON": "{"}',
    "{}{}",
    "[" * 2000,
]


# Arguments that are no object must not crash a client or run half a command, and must stay what the model wrote.
@pytest.mark.parametrize("arguments", MALFORMED)
def test_malformed_arguments(arguments: str) -> None:
    pieces = [called(0, arguments=letter) for letter in arguments[:40]]
    streamed = stream(
        start(), called(0, "c1", "bash", ""), *pieces, called(0, arguments=arguments[40:]), finish("length"), usage()
    )
    added: Added = add_up(streamed.events())
    [block] = added.message["content"]
    assert block["input"] == {"INVALID_JSON": arguments}
    echo = echo_of(added.message)
    assert fingerprint(item_of(streamed.encoder.served())) == fingerprint(echo)
    message = translate(USER, echo, USER).body["messages"][1]
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


# No arguments are no arguments, however a model or an engine spells that.
@pytest.mark.parametrize("arguments", ["", "  \n", "null", " null "])
def test_no_arguments(arguments: str) -> None:
    streamed = stream(start(), called(0, "c1", "now", arguments), finish("tool_calls"), usage())
    assert streamed.message["content"][0]["input"] == {}
    assert b"partial_json" not in streamed.held


# Numbers must keep their value to the last digit, in the stream and in the evidence.
def test_numbers_stay_exact() -> None:
    text = '{"a": 1.0, "b": 1e2, "c": 9007199254740993, "d": 0.1000, "e": 123456789012345678901234567890}'
    streamed = stream(start(), called(0, "c1", "sum", text), finish("tool_calls"), usage())
    assert json.dumps(text).encode() in streamed.held
    assert fingerprint(item_of(streamed.encoder.served())) == fingerprint(echo_of(add_up(streamed.events()).message))


# Every client reads the last value of a repeated key; the evidence must be what it read.
def test_repeated_keys_are_read_as_clients_do() -> None:
    text = '{"a": 1, "a": 2.0, "b": [{"c": 1, "c": 2}, 1.50]}'
    streamed = stream(start(), called(0, "c1", "sum", text), finish("tool_calls"), usage())
    added = add_up(streamed.events())
    assert added.message["content"][0]["input"] == {"a": 2.0, "b": [{"c": 2}, 1.5]}
    assert fingerprint(item_of(streamed.encoder.served())) == fingerprint(echo_of(added.message))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


# Text to input and back must be the same value, or the same text.
@settings(max_examples=200, deadline=None)
@given(JSON.map(json.dumps) | st.text(max_size=30))
def test_arguments_survive_the_round(arguments: str) -> None:
    given_input = input_of(arguments)
    back = arguments_of(given_input.value)
    if not given_input.valid:
        assert back == arguments
    elif given_input.text:
        assert canonical_text_of_json(back) == canonical_text_of_json(arguments)
    else:
        assert (back, arguments.strip() in {"", "null"}) == ("{}", True)
    assert json.loads(given_input.text or "{}") == plain(given_input.value)
