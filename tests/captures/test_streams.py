"""Streams: joined as a body would be, complete only by the protocol's terminal event."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gristmill.captures import Reply, ReplyChoice, decode_reply
from gristmill.errors import Code
from gristmill.records import ResponseStatus
from tests.captures.engine import load, logprobs, sse


def piece(delta: Any = None, **fields: Any) -> dict[str, Any]:
    return {"id": "r", "choices": [{"index": 0, **({} if delta is None else {"delta": delta}), **fields}]}


START = {**piece({"role": "assistant", "content": ""}), "prompt_token_ids": [1, 2]}
END = piece({}, finish_reason="stop")


def chat(*chunks: Any, done: bool = True) -> ReplyChoice:
    [choice] = decode_reply("chat", sse=sse(*chunks, done=done)).choices
    return choice


# Chunks carry none, one or many ids, ids without text, and text without ids.
def test_ids_and_text_come_at_different_times() -> None:
    choice = chat(
        START,
        piece({}, token_ids=[5], logprobs=logprobs(-1)),
        piece({"content": "a"}, token_ids=[6, 7], logprobs=logprobs(-2, -3)),
        piece({"content": "b"}),
        piece({"content": "c"}, token_ids=None, logprobs=None),
        piece({}, finish_reason="stop", token_ids=[8], logprobs=logprobs(-4)),
        {"choices": [], "usage": {"completion_tokens": 4}},
    )
    assert (choice.token_ids, choice.logprobs, choice.reason) == ([5, 6, 7, 8], [-1, -2, -3, -4], None)
    assert choice.items == ({"role": "assistant", "content": "abc"},)


# SGLang sends whole lists at the end, sometimes as an event of its own name.
@pytest.mark.parametrize("named", [True, False])
def test_sglang_extension_at_the_end(named: bool) -> None:
    extension = {"input_ids": [1, 2], "output_ids": [[5]]}
    tail = (
        f"event: sglext\ndata: {json.dumps(extension)}\n\n"
        if named
        else sse({"sglext": extension, "choices": []}, done=False)
    )
    first = sse(piece({"content": "a"}, logprobs=logprobs(-1)), END, done=False)
    [choice] = decode_reply("chat", sse=first + tail + "data: [DONE]\n\n").choices
    assert (choice.prompt_ids, choice.token_ids, choice.reason) == ([1, 2], [5], None)


# Other places for ids are joined too where they come in pieces.
def test_provider_fields_are_joined() -> None:
    choice = chat(
        START,
        piece({"content": "a"}, provider_specific_fields={"token_ids": [5], "x": 1}, logprobs=logprobs(-1)),
        piece({"content": "b"}, provider_specific_fields={"token_ids": [6], "x": None}, logprobs=logprobs(-1)),
        END,
    )
    assert choice.token_ids == [5, 6]
    inner = chat(
        START,
        piece({"content": "a", "provider_specific_fields": {"token_ids": [5]}}, logprobs=logprobs(-1)),
        piece({"content": "b", "provider_specific_fields": {"token_ids": [6]}}, logprobs=logprobs(-1)),
        END,
    )
    assert inner.token_ids == [5, 6]


# A tool call is served in pieces; joined wrongly it can never be matched with the history.
def test_tool_calls_are_joined_by_index() -> None:
    def call(**fields: Any) -> dict[str, Any]:
        return piece({"content": None, "tool_calls": [fields]})

    choice = chat(
        START,
        call(index=0, id="a", type="function", function={"name": "f", "arguments": ""}),
        call(index=0, id="a", function={"name": None, "arguments": '{"x"'}),
        call(index=0, id="", function={"name": "f", "arguments": ": 1}"}),
        call(index=1, id="b", type="custom", custom={"name": "g", "input": "ra"}),
        call(index=1, custom={"input": "w"}),
        call(id="c", type="function", function={"name": "h", "arguments": "{}"}),
        call(function={"arguments": " "}),
        END,
    )
    assert choice.items[0]["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "custom", "custom": {"name": "g", "input": "raw"}},
        {"id": "c", "type": "function", "function": {"name": "h", "arguments": "{} "}},
    ]


# Legacy function calls, reasoning under both names, refusals and lists of parts are served text too.
def test_other_delta_fields_are_joined() -> None:
    choice = chat(
        piece({"role": "assistant", "reasoning_content": "x", "refusal": None}),
        piece({"reasoning_content": "y", "refusal": "n", "annotations": [1]}),
        piece({"refusal": "o", "annotations": [2], "function_call": {"name": "f", "arguments": "{"}}),
        piece({"function_call": {"arguments": "}"}}),
        END,
    )
    assert choice.items == (
        {
            "role": "assistant",
            "reasoning_content": "xy",
            "refusal": "no",
            "annotations": [1, 2],
            "function_call": {"name": "f", "arguments": "{}"},
        },
    )


# Pieces that contradict each other have no one reading; a guess would be a wrong training target.
@pytest.mark.parametrize(
    "chunks",
    [
        [piece({"tool_calls": [{"index": 0, "id": "a"}]}), piece({"tool_calls": [{"index": 0, "id": "b"}]})],
        [piece({"tool_calls": [{"index": 1, "id": "a"}]})],
        [piece({"content": "a"}), piece({"content": ["b"]})],
        [
            piece({"tool_calls": [{"index": 0, "function": {"arguments": "a"}}]}),
            piece({"tool_calls": [{"index": 0, "function": 1}]}),
        ],
        [
            piece({"tool_calls": [{"index": 0, "function": 1}]}),
            piece({"tool_calls": [{"index": 0, "function": {"name": "a"}}]}),
        ],
        [START, {**START, "prompt_token_ids": [9]}],
        [piece(1)],
        [piece({"function_call": 1})],
        [piece({}, logprobs=1)],
        [1],
    ],
)
def test_contradicting_pieces_are_malformed(chunks: list[Any]) -> None:
    assert chat(*chunks, END).reason is Code.REPLY_MALFORMED


# An event that is no JSON means that the recording is damaged.
def test_a_damaged_event_is_malformed() -> None:
    assert decode_reply("chat", sse=b"data: {\n\n").choices[0].reason is Code.REPLY_MALFORMED
    assert decode_reply("chat", sse=b"data: \xff\n\n").choices[0].reason is Code.REPLY_MALFORMED
    for dialect in ("responses", "messages"):
        assert decode_reply(dialect, sse=b"data: {\n\n").choices[0].reason is Code.REPLY_MALFORMED


# A finished answer is never cut short by what comes behind its end.
def test_what_follows_done_is_ignored() -> None:
    assert decode_reply("chat", sse=sse(START, END) + "data: {broken\n\n").choices[0].finish_reason == "stop"


# HTTP's end is not the answer's end: without the terminal event the call is cut, in every dialect.
@pytest.mark.parametrize(
    "stream",
    [
        "",
        sse(START, done=False),
        sse(START, piece({"content": "a"})),
        sse(START, END, done=False),
    ],
)
def test_streams_without_their_end_are_truncated(stream: str) -> None:
    [choice] = decode_reply("chat", sse=stream).choices
    assert (choice.reason, choice.response_status) == (Code.STREAM_TRUNCATED, ResponseStatus.UNKNOWN)


# Every prefix of a recorded stream is truncated: no cut may ever look like a finished answer.
@pytest.mark.parametrize(
    "name",
    [
        "stream_no_logprobs",
        "completions_stream",
        "generate_stream",
        "messages_stream_tool_call",
        "responses_stream_tool_call",
    ],
)
def test_no_prefix_of_a_stream_looks_complete(name: str) -> None:
    fixture = load(name)
    raw: str = fixture["sse_raw"]
    whole = decode_reply(fixture["request"]["path"], sse=raw)
    assert whole.choices[0].reason is not Code.STREAM_TRUNCATED
    events = raw.split("\n\n")
    for count in range(0, len(events) - 2, max(1, len(events) // 12)):
        cut = decode_reply(fixture["request"]["path"], sse="\n\n".join(events[:count]) + "\n\n")
        assert cut.status is ResponseStatus.UNKNOWN
        assert all(choice.reason is Code.STREAM_TRUNCATED for choice in cut.choices)


# A malformed reply stays malformed when it is also cut; the first cause is the one to mend.
def test_a_cut_malformed_stream_keeps_its_cause() -> None:
    [choice] = decode_reply("chat", sse=sse({"choices": [{"index": 0, "finish_reason": 1}]}, done=False)).choices
    assert choice.reason is Code.REPLY_MALFORMED


# A stream that ends without one choice is no answer.
def test_done_without_a_choice() -> None:
    assert decode_reply("chat", sse=sse({"id": "r"})).choices[0].reason is Code.REPLY_MALFORMED


# The whole response stands in the terminal event; what came before it is only its preview.
def test_responses_streams() -> None:
    response = {"id": "r", "model": "m", "status": "completed", "output": [{"type": "message"}]}
    item = {"type": "response.output_item.done", "item": {"type": "reasoning"}}
    created = {"type": "response.created", "response": {"id": "r", "model": "m"}}
    whole = decode_reply("responses", sse=sse(created, item, {"type": "response.completed", "response": response}))
    assert whole.choices[0].items == ({"type": "message"},)
    cut = decode_reply("responses", sse=sse(created, item))
    assert (cut.response_id, cut.model, cut.choices[0].items) == ("r", "m", ({"type": "reasoning"},))
    assert cut.choices[0].reason is Code.STREAM_TRUNCATED
    failed = decode_reply("responses", sse=sse({"type": "error", "message": "m"}))
    assert failed.choices[0].reason is Code.CALL_FAILED
    ended = decode_reply("responses", sse=sse({"type": "response.failed", "response": {"status": "failed"}}))
    assert ended.choices[0].reason is Code.CALL_FAILED


def messages(*events: dict[str, Any], stop: bool = True) -> Reply:
    start = {
        "type": "message_start",
        "message": {"id": "m", "role": "assistant", "content": [], "usage": {"input_tokens": 3}},
    }
    tail = [{"type": "message_stop"}] if stop else []
    return decode_reply("messages", sse=sse(start, *events, *tail, done=False))


def block(index: int, content: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": content},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


STOP = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}}


# Blocks of a Messages stream are what the harness echoes; all of them must be joined exactly.
def test_messages_blocks_are_joined() -> None:
    tool = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    reply = messages(
        {"type": "ping"},
        *block(
            0,
            {"type": "thinking", "thinking": ""},
            {"type": "thinking_delta", "thinking": "a"},
            {"type": "signature_delta", "signature": "s"},
        ),
        *block(
            1,
            {"type": "text", "text": "x"},
            {"type": "text_delta", "text": "y"},
            {"type": "citations_delta", "citation": 1},
            {"type": "citations_delta", "citation": 2},
        ),
        *block(
            2,
            tool,
            {"type": "input_json_delta", "partial_json": '{"n": 1'},
            {"type": "input_json_delta", "partial_json": "e2}"},
        ),
        *block(3, tool, {"type": "input_json_delta", "partial_json": ""}),
        *block(4, tool, {"type": "input_json_delta", "partial_json": "{oops"}),
        STOP,
    )
    [message] = reply.choices[0].items
    blocks = message["content"]
    assert blocks[0] == {"type": "thinking", "thinking": "a", "signature": "s"}
    assert blocks[1] == {"type": "text", "text": "xy", "citations": [1, 2]}
    assert blocks[2]["input"]["n"].text == "1e2"
    assert (blocks[3]["input"], blocks[4]["input"]) == ({}, "{oops")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 5)
    assert reply.status is ResponseStatus.COMPLETED


# Out of order or unknown pieces would put text where the model did not say it.
@pytest.mark.parametrize(
    "events",
    [
        [{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x"}}],
        [*block(0, {"type": "text"}), *block(0, {"type": "text"})],
        block(0, {"type": "text"}, {"type": "new_delta"}),
        block(0, {"type": "text"}, {"type": "text_delta", "text": 1}),
    ],
)
def test_messages_pieces_out_of_order(events: list[dict[str, Any]]) -> None:
    assert messages(*events, STOP).choices[0].reason is Code.REPLY_MALFORMED


# The stop reason alone is not the end of a Messages stream.
def test_messages_end_is_message_stop() -> None:
    assert messages(STOP, stop=False).choices[0].reason is Code.STREAM_TRUNCATED
    assert messages(stop=False).choices[0].reason is Code.STREAM_TRUNCATED
    assert messages({"type": "message_delta", "delta": {}}).status is ResponseStatus.UNKNOWN
