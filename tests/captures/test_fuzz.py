"""Any bytes in, a reply with a code or a `DecodeError` out: never another exception."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gristmill.canonical import loads
from gristmill.captures import (
    CallContext,
    Reply,
    calls_from_reply,
    decode_reply,
    read_lines,
    read_result,
    write_lines,
)
from gristmill.captures.decode import decode_value
from gristmill.captures.exact import dumps
from gristmill.errors import DecodeError
from gristmill.tokens import TokenBook
from tests.captures.engine import load

DIALECTS = ["chat", "completions", "responses", "messages", "generate"]
SMALL = [
    "chat_length",
    "chat_tool_call_with_content",
    "chat_extra_top_logprobs",
    "chat_error_model",
    "completions_echo",
    "completions_multi_prompt_n2",
    "generate_text_mode",
    "generate_n2_stop",
    "messages_tool_call",
    "responses_tool_call",
    "responses_messages",
    "responses_logprobs_text",
    "stream_no_logprobs",
    "stream_prompt_ids_via_kv_transfer_params",
    "messages_stream_tool_call",
    "responses_messages_stream",
    "generate_stream",
]
FIXTURES = {name: load(name) for name in SMALL}
NASTY = [
    "1" * 5000,
    "-" + "9" * 5000,
    "1e999999999",
    "-1e-999999999",
    "[" * 300 + "]" * 300,
    "[" * 2000 + "]" * 2000,
    '"\\ud800"',
    '{"a": 1, "a": 2}',
    '{"\\udfff": 1}',
    "NaN",
    "-0",
    "2147483648",
    "null",
    "true",
    '""',
    "[]",
    "{}",
    "[null]",
    "[1]",
    '["\\ud800"]',
    "1.5",
    "-1",
]
MARK = "gristmill-mark"

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=6,
)
replacements = st.sampled_from(NASTY) | json_values.map(json.dumps)
relaxed = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (holder, key) of a JSON value."""
    found: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        holder = stack.pop()
        pairs = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, member in list(pairs):
            found.append((holder, key))
            if isinstance(member, dict | list) and member:
                stack.append(member)
    return found


def mutate(data: st.DataObject, value: Any) -> str:
    """Replace one node, chosen at random, by any JSON text."""
    copy = json.loads(json.dumps(value))
    holder, key = data.draw(st.sampled_from(places(copy)))
    holder[key] = MARK
    return json.dumps(copy).replace(f'"{MARK}"', data.draw(replacements), 1)


def check(reply: Reply) -> None:
    assert reply.choices
    made = calls_from_reply(reply, CallContext(model_call_id="c"), TokenBook())
    for choice, call in zip(reply.choices, made, strict=True):
        assert call.record.usable == (call.record.unusable_reason is None)
        assert choice.reason is None or choice.detail
        msgspec.json.encode([call.record.response_id, call.record.model, call.record.unusable_detail])
        if call.record.usable:
            assert call.tokens is not None
            assert choice.token_ids is not None
            assert call.tokens.mask_T.sum() == len(choice.token_ids)


# A collection run meets every kind of garbage; one crash loses the rollouts of everyone else.
@relaxed
@given(st.sampled_from(DIALECTS), st.binary(max_size=200) | st.sampled_from(NASTY).map(str.encode))
def test_any_bytes(dialect: str, data: bytes) -> None:
    check(decode_reply(dialect, body=data))
    check(decode_reply(dialect, sse=data))
    check(decode_reply(dialect, sse=b"data: " + data + b"\n\ndata: [DONE]\n\n"))
    check(decode_reply(dialect, 500, body=data))


# Engines change; a field of another type must be reported, wherever it is.
@relaxed
@given(st.data(), st.sampled_from([name for name in SMALL if "body" in FIXTURES[name]]))
def test_wrong_types_anywhere_in_a_body(data: st.DataObject, name: str) -> None:
    fixture = FIXTURES[name]
    text = mutate(data, fixture["body"]).encode()
    check(decode_reply(fixture["request"]["path"], body=text, echo=name == "completions_echo"))


# The same for every event of a stream.
@relaxed
@given(st.data(), st.sampled_from([name for name in SMALL if "sse_raw" in FIXTURES[name]]))
def test_wrong_types_anywhere_in_a_stream(data: st.DataObject, name: str) -> None:
    fixture = FIXTURES[name]
    events = fixture["sse_raw"].split("\n\n")
    position = data.draw(st.integers(0, len(events) - 1))
    head, mark, payload = events[position].partition("data: ")
    if payload.startswith("{"):
        events[position] = head + mark + mutate(data, json.loads(payload))
    else:
        del events[position]
    check(decode_reply(fixture["request"]["path"], sse="\n\n".join(events)))


# Fast and exact decoding must agree on mutated replies too.
@relaxed
@given(st.data(), st.sampled_from(["chat_length", "completions_multi_prompt_n2", "generate_text_mode"]))
def test_fast_decoding_is_exact_decoding(data: st.DataObject, name: str) -> None:
    fixture = FIXTURES[name]
    text = mutate(data, fixture["body"]).encode()
    fast = decode_reply(fixture["request"]["path"], body=text)
    try:
        value = loads(text)
    except DecodeError:
        return
    assert repr(decode_value(fast.dialect, 200, value)) == repr(fast)


LINES: list[dict[str, Any]] = [
    {
        "kind": "call",
        "rollout_id": "r",
        "attempt": 0,
        "model_call_id": "c1",
        "response_id": "r1",
        "choice_index": 0,
        "ordinal": 3,
        "parent_call_id": "c0",
        "parent_resolution": "resolved",
        "dialect": "chat",
        "model": "m",
        "response_status": "completed",
        "finish_reason": "stop",
        "output_items": [{"role": "assistant", "content": [{"type": "text", "text": "x"}]}],
        "prompt_token_ids": [1, 2],
        "generation_token_ids": [3],
        "generation_log_probs": [-0.5],
        "usage": {"completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
        "weight_versions": [{"version": "v", "start": 0, "end": 1}],
        "sampling": {"temperature": 1.0, "top_k": 3, "logprobs_mode": "raw"},
        "media": [{"digest": "d", "offset": 0, "length": 1}],
        "request_media": ["d"],
        "request": {"messages": [{"role": "user", "content": "hi"}], "tools": [], "temperature": 1},
        "reply": {"x": 1},
        "request_headers": {"a": "b"},
        "http_status": 200,
        "delivery": "delivered",
        "admitted_at": 1.0,
        "purpose": {"label": "agent", "evidence": "e"},
        "schema": 4,
        "requested_model": "asked",
        "upstream": "a",
        "upstream_id": "chatcmpl-1",
        "engine_epoch": 1,
        "weights_at_start": "7",
        "weights_at_end": "8",
        "changes": ["removed:cache_salt"],
        "retry_of": "c0",
        "request_digest": "d",
        "continuation": {"state": "refused", "reason": "media", "model": "m", "settings_digest": "d", "ended": True},
        "extras": {"e": {"dtype": "int8", "shape": [1], "data": "AA=="}},
    },
    {
        "kind": "call",
        "rollout_id": "r",
        "model_call_id": "c2",
        "output_items": [{"kind": "text", "fingerprint": "f", "atoms": [["text", "a", "", "", "", ""]]}],
    },
    {
        "kind": "exchange",
        "rollout_id": "r",
        **{key: FIXTURES["chat_length"][key] for key in ("request", "status", "body")},
    },
    {
        "kind": "lost",
        "rollout_id": "r",
        "model_call_id": "l",
        "parent_call_id": "c1",
        "reason": "x",
        "maybe_received": True,
    },
    {"kind": "delivery", "rollout_id": "r", "model_call_id": "c1", "state": "partial"},
    {"kind": "result", "rollout_id": "r", "result": {"x": [1]}, "reward": 1.0, "group_id": "g", "metadata": {"a": 1}},
]


# Imported files are written by others; each of their lines is read, or refused with its place.
@relaxed
@given(st.data(), st.integers(0, len(LINES) - 1))
def test_wrong_types_anywhere_in_a_line(data: st.DataObject, position: int) -> None:
    lines = [json.dumps(line).encode() for line in LINES]
    lines[position] = mutate(data, LINES[position]).encode()
    place: str | None = "line "
    try:
        found = read_lines(lines)
    except DecodeError as error:
        place = error.where
        found = read_lines(lines, skip_bad=True)
        assert found.bad_lines
    assert (place or "").startswith("line ")
    for capture, result in found.rollouts.values():
        again = read_lines(list(write_lines(capture, result)))
        for other in again.rollouts.values():
            assert other.capture.records == capture.records


# A result file may hold anything at all.
@relaxed
@given(st.binary(max_size=100) | json_values.map(dumps) | st.sampled_from(NASTY).map(str.encode))
def test_any_result(data: bytes) -> None:
    message = "expected"
    try:
        read_result(data)
    except DecodeError as error:
        message = error.message
    assert message.startswith("expected")
