"""Streams: what a client adds up, what it is told before the record is durable, and how a stream fails."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.captures import decode_reply
from gristmill.captures.decode import decode_value
from gristmill.captures.reply import Unexpected
from gristmill.gateway.dialects.messages import MESSAGES
from gristmill.records import Dialect, ResponseStatus
from tests.gateway.dialects.messages.exchange import (
    ONE_CHOICE,
    Json,
    add_up,
    called,
    chunks_of,
    encoder,
    engine,
    events,
    finish,
    piece,
    plain,
    start,
    stream,
    usage,
)

LEAKS = (b"token_ids", b"logprob", b"chatcmpl-9", b"system_fingerprint", b"prompt_text")


# A client that adds up a stream by the published rules must end with the message that is kept as evidence.
@pytest.mark.parametrize("name", ONE_CHOICE)
def test_a_stream_adds_up_to_the_served_message(name: str) -> None:
    chunks = chunks_of(engine(name))
    streamed = stream(*chunks)
    added = add_up(streamed.events())
    assert added.message == streamed.message
    assert not [leak for leak in LEAKS if leak in streamed.now + streamed.held]
    served = decode_value(Dialect.MESSAGES, 200, streamed.encoder.served())
    if added.stopped:
        assert decode_reply("messages", sse=streamed.now + streamed.held) == served
        assert served.status is not ResponseStatus.UNKNOWN
    else:
        assert added.error is not None
        assert served.status is ResponseStatus.UNKNOWN


# What the engine said must be what the client reads: reasoning, text and calls, each to the last character.
@pytest.mark.parametrize("name", ONE_CHOICE)
def test_nothing_of_the_reply_is_lost(name: str) -> None:
    said: dict[str, str] = {"reasoning": "", "content": ""}
    for chunk in chunks_of(engine(name)):
        for choice in chunk["choices"]:
            for key in said:
                said[key] += choice["delta"].get(key) or ""
    blocks = stream(*chunks_of(engine(name))).message["content"]
    assert "".join(block["thinking"] for block in blocks if block["type"] == "thinking") == said["reasoning"]
    assert "".join(block["text"] for block in blocks if block["type"] == "text") == said["content"]


# A harness starts tools and ends turns on the finish; before the record is durable it may see neither.
@pytest.mark.parametrize("name", ["stream_tool_call", "stream_tool_call_parallel", "stream_basic"])
def test_inputs_and_stop_reason_are_held(name: str) -> None:
    streamed = stream(*chunks_of(engine(name)))
    early, late = events(streamed.now), events(streamed.held)
    assert "message_delta" not in [event["type"] for event in early]
    assert not [event for event in early if event.get("delta", {}).get("partial_json")]
    assert [event["type"] for event in late][-2:] == ["message_delta", "message_stop"]
    assert late[0]["type"] in {"content_block_stop", "content_block_delta"}


# The prompt's length is shown before any text, as clients that draw a context meter expect.
def test_the_first_event_counts_the_prompt() -> None:
    chunks = chunks_of(engine("stream_tool_call"))
    begun = stream(chunks[0], end=False).events()
    assert begun[0]["message"]["usage"] == {"input_tokens": len(chunks[0]["prompt_token_ids"]), "output_tokens": 0}
    without_ids = {**chunks[0], "prompt_token_ids": None, "usage": {"prompt_tokens": 12, "completion_tokens": 0}}
    assert stream(without_ids, end=False).events()[0]["message"]["usage"]["input_tokens"] == 12
    unknown = stream(piece({"role": "assistant"}), end=False)
    assert (
        "cache_read_input_tokens"
        not in stream(
            start(), finish(), {**usage(), "usage": {"prompt_tokens": 3, "prompt_tokens_details": {}}}
        ).message["usage"]
    )
    assert unknown.events()[0]["message"]["usage"]["input_tokens"] == 0
    assert encoder().begin() == b""


# The counts at the end decide what a harness thinks is left of its context; the cache's part stands apart.
def test_usage_splits_the_prompt() -> None:
    chunks = (start(), piece({"content": "a"}), finish())
    streamed = stream(*chunks, usage(300, 9, cached_tokens=256, created_cache_tokens=32))
    assert streamed.message["usage"] == {
        "input_tokens": 12,
        "output_tokens": 9,
        "cache_read_input_tokens": 256,
        "cache_creation_input_tokens": 32,
    }
    assert stream(*chunks, usage(300, 9)).message["usage"] == {"input_tokens": 300, "output_tokens": 9}
    assert stream(*chunks).message["usage"] == {"input_tokens": 3, "output_tokens": 1}


# An aborted generation that looks finished would be scored as if the model had ended there.
@pytest.mark.parametrize(
    ("reason", "kind"), [("abort", "overloaded_error"), ("error", "api_error"), ("x", "api_error")]
)
def test_an_aborted_reply_never_looks_complete(reason: str, kind: str) -> None:
    streamed = stream(start(), piece({"content": "half"}), finish(reason), usage())
    added = add_up(streamed.events())
    assert (added.stopped, added.message["stop_reason"]) == (False, None)
    assert added.error is not None
    assert added.error["type"] == kind
    assert reason in added.error["message"]
    assert streamed.message["content"] == [{"type": "text", "text": "half"}]
    reply = decode_value(Dialect.MESSAGES, 200, streamed.encoder.served())
    assert reply.status is ResponseStatus.UNKNOWN


# A tool call cut by an abort must not run with half of its arguments.
def test_an_aborted_call_has_no_input() -> None:
    cut = stream(start(), called(0, "c1", "bash", '{"command": "rm -rf /'), finish("abort"))
    assert add_up(cut.events()).message["content"] == [{"type": "tool_use", "id": "c1", "name": "bash", "input": {}}]
    assert b"rm -rf" not in cut.now + cut.held


# `[DONE]` without a finish reason is an engine that died politely; the client must see a failure.
def test_a_stream_without_a_finish_reason_fails() -> None:
    added = add_up(stream(start(), piece({"content": "half"})).events())
    assert (added.stopped, added.message["stop_reason"]) == (False, None)
    assert added.error is not None
    assert added.error["type"] == "api_error"


# When the upstream breaks, the client's library must raise, and the record must not claim a stop reason.
def test_failure_ends_a_stream() -> None:
    streamed = stream(start(), piece({"content": "a"}), finish(), usage())
    assert streamed.message["stop_reason"] == "end_turn"
    [event] = events(streamed.encoder.failure(503, "the engine went away"))
    assert event["error"] == {"type": "overloaded_error", "message": "the engine went away"}
    assert streamed.message["stop_reason"] is None
    [early] = events(encoder().failure(500, "no engine"))
    assert early["error"]["type"] == "api_error"


# While a long input grows, bytes must flow that client libraries do not skip, or they take the stream for dead.
def test_a_growing_input_keeps_the_stream_alive() -> None:
    made = encoder()
    made.chunk(start())
    made.chunk(piece({"content": "I call."}))
    opened = events(made.chunk(called(0, "c1", "bash", "")).now)
    assert [event["type"] for event in opened] == ["content_block_stop", "content_block_start", "content_block_delta"]
    assert opened[1]["content_block"] == {"type": "tool_use", "id": "c1", "name": "bash", "input": {}}
    for text in ('{"command"', ': "ls"}'):
        [event] = events(made.chunk(called(0, arguments=text)).now)
        assert event["delta"] == {"type": "input_json_delta", "partial_json": ""}
    [event] = events(made.chunk(called(1, "c2", "bash", "{}")).now)
    assert event["index"] == 1
    served = made.chunk(finish("tool_calls"))
    assert not served.now
    assert [event["type"] for event in events(served.held)] == [
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
    ]


# Calls whose pieces are mixed, or text behind a call, are odd but must not lose or move a character.
def test_pieces_in_any_order() -> None:
    streamed = stream(
        start(),
        called(0, "c1", "one", '{"a"'),
        called(1, "c2", "two", '{"b"'),
        piece({"content": "behind "}),
        called(0, arguments=":1}"),
        piece({"reasoning": "late thought"}),
        called(1, arguments=":2}"),
        piece({"content": "a"}),
        piece({"content": "ll"}),
        finish("tool_calls"),
        usage(),
    )
    added = add_up(streamed.events())
    assert added.message == streamed.message
    assert [plain(block) for block in added.message["content"]] == [
        {"type": "tool_use", "id": "c1", "name": "one", "input": {"a": 1}},
        {"type": "tool_use", "id": "c2", "name": "two", "input": {"b": 2}},
        {"type": "text", "text": "behind "},
        {"type": "thinking", "thinking": "late thought", "signature": "unsigned.t0k3n.3"},
        {"type": "text", "text": "all"},
    ]


# Engines that send the id late, or never, still need an id that a result can refer to.
def test_a_call_without_an_id_gets_one() -> None:
    late = stream(start(), called(0, None, "bash", "{"), called(0, "c1", None, "}"), finish("tool_calls"), usage())
    assert late.message["content"][0]["id"] == "c1"
    never = stream(start(), piece({"content": "x"}), called(0, None, "bash", "{}"), finish("tool_calls"), usage())
    assert add_up(never.events()).message["content"][1]["id"] == "toolu_t0k3n_0"


# Some servers send each call whole, without an index.
def test_calls_without_an_index() -> None:
    calls: list[Json] = [
        {"id": "c1", "function": {"name": "one", "arguments": '{"a"'}},
        {"id": None, "function": {"arguments": ": 1}"}},
        {"id": "c2", "type": "function"},
        {"function": {"name": "two"}},
    ]
    streamed = stream(start(), *[piece({"tool_calls": [call]}) for call in calls], finish("tool_calls"), usage())
    assert [(block["id"], block["name"], block["input"]) for block in streamed.message["content"]] == [
        ("c1", "one", {"a": 1}),
        ("c2", "two", {}),
    ]


# Both names of the reasoning field are in use, and some engines send both at once.
def test_reasoning_under_either_name() -> None:
    for delta in ({"reasoning": "hm"}, {"reasoning_content": "hm"}, {"reasoning": "hm", "reasoning_content": "hm"}):
        streamed = stream(start(), piece(delta), finish(), usage())
        assert streamed.message["content"][0]["thinking"] == "hm"


# Clients look at the first block; a reply of nothing must have one.
def test_an_empty_reply_has_an_empty_text() -> None:
    streamed = stream(start(), finish(), usage())
    assert add_up(streamed.events()).message["content"] == [{"type": "text", "text": ""}]


# Text that is no valid Unicode must not break the stream for what comes after it.
def test_a_lone_surrogate_is_escaped() -> None:
    streamed = stream(start(), piece({"content": "a\ud83d"}), piece({"content": "b"}), finish(), usage())
    assert add_up(streamed.events()).message["content"] == [{"type": "text", "text": "a\ud83db"}]


# Anything that the dialect cannot say, or that is no Chat chunk, must stop the call and not vanish from it.
@pytest.mark.parametrize(
    "chunk",
    [
        {"error": {"message": "out of memory"}},
        {"choices": 3},
        {"choices": ["x"]},
        {"choices": [{"index": 1, "delta": {"content": "another"}}]},
        piece({"content": [{"type": "text", "text": "a"}]}),
        piece({"content": 3}),
        piece({"audio": {"data": "AA=="}}),
        piece({"function_call": {"name": "old"}}),
        piece({"tool_calls": [{"index": 1, "id": "c", "function": {"name": "gap"}}]}),
        piece({"tool_calls": [{"index": 0, "id": "c", "type": "custom", "custom": {"name": "x", "input": "y"}}]}),
        piece({}, finish_reason=3),
        piece({}, token_ids=3),
    ],
)
def test_what_is_no_chunk_is_refused(chunk: Json) -> None:
    made = encoder()
    made.chunk(start())
    with pytest.raises(Unexpected):
        made.chunk(chunk)


# A reply that goes on after its end, or says a name twice, is not the reply that was recorded.
def test_contradictions_are_refused() -> None:
    for chunk in (piece({"content": "more"}), called(0, "c1", "bash", "{}"), finish("length")):
        made = encoder()
        made.chunk(start())
        made.chunk(finish())
        with pytest.raises(Unexpected):
            made.chunk(chunk)
    made = encoder()
    made.chunk(called(0, "c1", "bash", ""))
    made.chunk(called(0, "c1", "bash", ""))
    for again in (called(0, "c2"), called(0, None, "python")):
        with pytest.raises(Unexpected):
            made.chunk(again)


STOPS: list[tuple[str, Any, list[str], str, str | None]] = [
    ("stop", None, [], "end_turn", None),
    ("stop", 151645, [], "end_turn", None),
    ("stop", " the", [], "stop_sequence", " the"),
    ("length", None, [], "max_tokens", None),
    ("length", None, ["{}"], "max_tokens", None),
    ("content_filter", None, [], "refusal", None),
    ("tool_calls", None, ["{}"], "tool_use", None),
    ("tool_calls", None, [], "tool_use", None),
    ("stop", None, ["{}"], "tool_use", None),
    ("stop", "}", ["{}"], "tool_use", None),
    ("stop", "END", ['{"a": "'], "stop_sequence", "END"),
    ("tool_calls", None, ["[1]"], "tool_use", None),
]


# A harness runs tools on `tool_use` and asks for more on `max_tokens`; a wrong reason makes it do the wrong thing.
@pytest.mark.parametrize(("reason", "stopped_by", "arguments", "expected", "sequence"), STOPS)
def test_stop_reasons(reason: str, stopped_by: Any, arguments: list[str], expected: str, sequence: str | None) -> None:
    calls = [called(index, f"c{index}", "bash", text) for index, text in enumerate(arguments)]
    streamed = stream(start(), *calls, finish(reason, stopped_by), usage())
    assert (streamed.message["stop_reason"], streamed.message["stop_sequence"]) == (expected, sequence)
    assert add_up(streamed.events()).stopped


# SGLang says what it stopped at under another name.
def test_the_other_name_of_the_stop_string() -> None:
    streamed = stream(start(), piece({}, finish_reason="stop", matched_stop="END"), usage())
    assert streamed.message["stop_sequence"] == "END"


# A message that was served once is streamed again to a client whose connection broke; it must be the same message.
@pytest.mark.parametrize("name", ONE_CHOICE)
def test_a_replay_adds_up_to_the_same_message(name: str) -> None:
    streamed = stream(*chunks_of(engine(name)))
    added = add_up(events(b"".join(MESSAGES.replay(streamed.encoder.served()))))
    assert added.message == streamed.message
    assert added.stopped is (streamed.message["stop_reason"] is not None)
    assert (added.error is None) is added.stopped


# An empty text and a call without arguments replay too.
def test_a_replay_of_nothing() -> None:
    streamed = stream(start(), called(0, "c1", "now", ""), piece({"content": "x"}), finish("tool_calls"), usage())
    assert add_up(events(b"".join(MESSAGES.replay(streamed.encoder.served())))).message == streamed.message
    empty = stream(start(), finish(), usage())
    assert add_up(events(b"".join(MESSAGES.replay(empty.encoder.served())))).message == empty.message
