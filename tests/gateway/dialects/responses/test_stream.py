"""What a client reads of a stream: the engine's own sequence of events, numbered, held and adding up."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gristmill.captures.reply import Unexpected
from gristmill.gateway.dialects.responses import RESPONSES
from tests.gateway.dialects.responses.accumulate import accumulate
from tests.gateway.dialects.responses.exchange import (
    BODIES,
    BODY,
    NAMES,
    STREAMS,
    call,
    chat_body,
    chunk,
    encoder,
    events,
    kinds,
    output_types,
    recorded,
    recorded_chunks,
    streamed,
    usage,
    whole,
)

_UNLIKE = {"id", "item_id", "call_id", "content", "logprobs", "part", "phase", "async", "caller", "namespace"}


def _comparable(event: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in event.items() if key not in _UNLIKE | {"response"}}
    if "item" in kept:
        kept["item"] = {key: value for key, value in kept["item"].items() if key not in _UNLIKE}
    return kept


# A harness that works with the engine's own Responses route would stumble over other events, or another order.
def test_the_events_are_those_of_the_engines_own_route() -> None:
    theirs = recorded("responses_stream_tool_call")
    reply = streamed(recorded_chunks("stream_tool_call"), theirs["request"]["body"])
    engine = [event["data"] for event in theirs["events"]]
    assert [_comparable(event) for event in events(reply.now + reply.held)] == [_comparable(event) for event in engine]


# Evidence that is not what the client can add up would prove a reply that nobody saw.
@pytest.mark.parametrize("name", STREAMS)
def test_the_events_of_a_recorded_stream_add_up_to_what_is_recorded(name: str) -> None:
    reply = streamed(recorded_chunks(name))
    read = events(reply.now + reply.held)
    assert accumulate(read) == reply.served == read[-1]["response"]
    assert reply.served["id"] == "resp_0a1b2c3d"
    assert reply.served["model"] == "asked-model"


# A client that runs a tool, or goes on, before the call is durable would act on a reply that may be withheld.
@pytest.mark.parametrize("name", STREAMS)
def test_nothing_that_ends_is_let_go_before_the_end(name: str) -> None:
    reply = streamed(recorded_chunks(name))
    last = len(reply.served["output"]) - 1
    for event in events(reply.now):
        assert event["type"] not in {"response.completed", "response.incomplete", "response.failed"}
        assert event["type"] != "response.output_item.done" or event["output_index"] < last
    assert kinds(reply.held)[-1] == f"response.{reply.served['status']}"


# Text that waits for the end of a reply makes a stream useless.
def test_text_goes_out_with_the_chunk_it_came_in() -> None:
    made = encoder()
    assert kinds(made.begin()) == ["response.created", "response.in_progress"]
    first = made.chunk(chunk({"content": "a"}))
    assert (kinds(first.now)[-1], first.held) == ("response.output_text.delta", b"")
    [delta] = events(made.chunk(chunk({"content": "b"}, "stop")).now)
    assert (delta["delta"], delta["logprobs"]) == ("b", [])  # clients with strict types need both


# Something that an engine says after the finish reason would tell the client of the finish.
def test_what_comes_after_the_finish_reason_is_held() -> None:
    made = encoder()
    made.begin()
    made.chunk(chunk({"content": "a"}, "stop"))
    late = made.chunk(chunk({"content": "b"}))
    assert (late.now, kinds(late.held)) == (b"", ["response.output_text.delta"])


# Token ids in a reply would be shown to a model, or fill a harness's log.
@pytest.mark.parametrize("name", STREAMS)
def test_no_token_field_reaches_the_client(name: str) -> None:
    reply = streamed(recorded_chunks(name))
    for word in (b"token_ids", b"prompt_text", b"metrics", b"fingerprint", b'"logprob"', b"chatcmpl-a"):
        assert word not in reply.now + reply.held


# The two forms of one reply would have different fingerprints, so a retry without a stream would match nothing.
@pytest.mark.parametrize("name", STREAMS)
def test_a_body_with_the_same_content_gives_the_same_object(name: str) -> None:
    served = streamed(recorded_chunks(name)).served
    message: dict[str, Any] = {"reasoning": "", "content": "", "tool_calls": []}
    finish = None
    for each in recorded_chunks(name):
        for choice in each["choices"]:
            delta = choice["delta"]
            message["reasoning"] += delta.get("reasoning") or ""
            message["content"] += delta.get("content") or ""
            for piece in delta.get("tool_calls") or ():
                if "id" in piece:
                    message["tool_calls"].append({"id": piece["id"], "type": "function", "function": {"arguments": ""}})
                function = message["tool_calls"][piece["index"]]["function"]
                function["name"] = piece["function"].get("name", function.get("name"))
                function["arguments"] += piece["function"].get("arguments", "")
            finish = choice["finish_reason"] or finish
    counted = [each["usage"] for each in recorded_chunks(name) if each.get("usage")]
    assert whole(chat_body(message, finish, usage=counted[-1] if counted else None)) == served


# A recorded body that cannot be served, or loses a part, would fail a harness that asks without a stream.
@pytest.mark.parametrize("name", BODIES)
def test_a_recorded_body_is_served_whole(name: str) -> None:
    body = recorded(name)["body"]
    served = whole(body)
    message = body["choices"][0]["message"]
    said = {item["type"]: item for item in served["output"]}
    if message["reasoning"]:
        assert said["reasoning"]["content"] == [{"type": "reasoning_text", "text": message["reasoning"]}]
    if message["content"]:
        assert said["message"]["content"][0]["text"] == message["content"]
    calls = [item for item in served["output"] if item["type"] == "function_call"]
    assert [(item["call_id"], item["name"], item["arguments"]) for item in calls] == [
        (each["id"], each["function"]["name"], each["function"]["arguments"])
        for each in message.get("tool_calls") or ()
    ]
    assert len(served["output"]) == bool(message["reasoning"]) + bool(message["content"]) + len(calls)
    assert served["usage"]["total_tokens"] == body["usage"]["total_tokens"]
    json.dumps(served)


# White space alone between a thought and a call is dropped by some servers in one form and not in the other.
@pytest.mark.parametrize("text", ["\n\n", " "])
def test_white_space_is_text(text: str) -> None:
    calls = [call(0, "bash", "{}")]
    stream = streamed([chunk({"content": text}), chunk({"tool_calls": calls}, "tool_calls")]).served
    assert output_types(stream) == ["message", "function_call"]
    assert stream == whole(chat_body({"content": text, "tool_calls": calls}, "tool_calls"))


# An item for nothing would be echoed as an empty assistant turn that the model never had.
def test_what_is_empty_makes_no_item() -> None:
    reply = streamed([chunk({"role": "assistant", "content": ""}), chunk({"reasoning": "", "tool_calls": []}, "stop")])
    assert (reply.served["output"], reply.served["status"]) == ([], "completed")


# Text after a call has no place in a Chat body, but a stream may hold it; losing it would be losing a sample's text.
def test_what_is_said_after_a_call_is_an_item_of_its_own() -> None:
    reply = streamed(
        [
            chunk({"content": "a"}),
            chunk({"tool_calls": [call(0, "bash", "{}")]}),
            chunk({"content": "b"}),
            chunk({"reasoning": "c"}, "stop"),
        ]
    )
    assert output_types(reply.served) == ["message", "function_call", "message", "reasoning"]
    assert accumulate(events(reply.now + reply.held)) == reply.served


# Engines that name thoughts `reasoning_content`, or say them under both names, must not lose or double them.
@pytest.mark.parametrize("delta", [{"reasoning_content": "a"}, {"reasoning": "a", "reasoning_content": "a"}])
def test_thoughts_are_read_under_either_name(delta: dict[str, Any]) -> None:
    [item] = streamed([chunk(delta, "stop")]).served["output"]
    assert item["content"] == [{"type": "reasoning_text", "text": "a"}]


# A refusal that is served as text would count as an answer.
def test_a_refusal_is_a_refusal() -> None:
    reply = streamed([chunk({"refusal": "I "}), chunk({"refusal": "won't"}, "stop")])
    [item] = reply.served["output"]
    assert item["content"] == [{"type": "refusal", "refusal": "I won't"}]
    assert accumulate(events(reply.now + reply.held)) == reply.served
    assert whole(chat_body({"refusal": "I won't"})) == reply.served


# Half a character in each of two chunks would be echoed whole, and then be another text than the recorded one.
def test_a_character_that_the_engine_split_is_joined() -> None:
    reply = streamed([chunk({"content": "\ud83d"}), chunk({"content": "\ude00"}, "stop")])
    assert reply.served["output"][0]["content"][0]["text"] == "😀"
    alone = streamed([chunk({"content": "\ud83d"}, "stop")])
    assert events(alone.held)[-1]["response"] == alone.served


# Without an id from the engine, the result of a call could not be told from that of another.
def test_a_call_without_an_id_gets_one() -> None:
    pieces = [{**call(index, "bash", "{}"), "id": None} for index in (0, 1)]
    reply = streamed([chunk({"tool_calls": pieces}, "tool_calls")])
    assert [item["call_id"] for item in reply.served["output"]] == ["call_0a1b2c3d_0", "call_0a1b2c3d_1"]


# Some engines leave the index of a call out.
def test_calls_without_an_index_are_told_apart_by_their_ids() -> None:
    def piece(**fields: Any) -> dict[str, Any]:
        return {"type": "function", "function": fields.pop("function"), **fields}

    reply = streamed(
        [
            chunk({"tool_calls": [piece(id="a", function={"name": "f", "arguments": "{"})]}),
            chunk({"tool_calls": [piece(function={"arguments": "}"})]}),
            chunk({"tool_calls": [piece(id="b", function={"name": "g", "arguments": ""})]}, "tool_calls"),
        ]
    )
    assert [(item["call_id"], item["name"], item["arguments"]) for item in reply.served["output"]] == [
        ("a", "f", "{}"),
        ("b", "g", ""),
    ]
    assert accumulate(events(reply.now + reply.held)) == reply.served


# A last piece without arguments for a call that is done is what some engines close it with.
def test_an_empty_piece_of_a_call_that_is_done_says_nothing() -> None:
    closing = {"index": 0, "function": {"arguments": ""}}
    reply = streamed(
        [chunk({"tool_calls": [call(0, "f", "{}")]}), chunk({"tool_calls": [call(1, "g", "{}"), closing]}, "stop")]
    )
    assert output_types(reply.served) == ["function_call", "function_call"]


# What cannot be served as it was said must fail the call, never be served without it.
@pytest.mark.parametrize(
    ("bad", "where"),
    [
        ({"choices": {}}, "$.choices"),
        ({"choices": [1]}, "$.choices[0]"),
        ({"error": {"message": "no"}}, "$.error"),
        ({"choices": [], "usage": {"prompt_tokens": "3"}}, "$.usage.prompt_tokens"),
        ({"choices": [{"index": 1, "delta": {}}]}, "$.choices[0].index"),
        ({"choices": [{"index": 0, "delta": []}]}, "$.choices[0].delta"),
        (chunk({"content": ["a"]}), "$.choices[0].delta.content"),
        (chunk({"reasoning": 1}), "$.choices[0].delta.reasoning"),
        (chunk({"reasoning": "a", "reasoning_content": "b"}), "$.choices[0].delta.reasoning_content"),
        (chunk({"function_call": {"name": "f"}}), "$.choices[0].delta.function_call"),
        (chunk({"audio": {"id": "a"}}), "$.choices[0].delta.audio"),
        (chunk({"tool_calls": {"a": 1}}), "$.choices[0].delta.tool_calls"),
        (chunk({"tool_calls": [call(1, "f", "{}")]}), "$.choices[0].delta.tool_calls[0].index"),
        (chunk({"tool_calls": [{"index": 0, "id": "a"}]}), "$.choices[0].delta.tool_calls[0].function.name"),
        (chunk({"tool_calls": [{**call(0, "f", ""), "type": "custom"}]}), "$.choices[0].delta.tool_calls[0].type"),
    ],
)
def test_a_chunk_that_is_none_is_refused_with_its_place(bad: dict[str, Any], where: str) -> None:
    made = encoder()
    made.begin()
    with pytest.raises(Unexpected) as caught:
        made.chunk(bad)
    assert caught.value.where == where


# Pieces of two calls mixed together cannot be served in order.
def test_arguments_for_a_call_that_is_done_are_refused() -> None:
    made = encoder()
    made.begin()
    made.chunk(chunk({"tool_calls": [call(0, "f", "{"), call(1, "g", "{")]}))
    with pytest.raises(Unexpected, match="calls in order"):
        made.chunk(chunk({"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}))


# A body without its one choice must not become an empty answer.
@pytest.mark.parametrize("choices", [[], None, [{"index": 0, "message": {}}, {"index": 1, "message": {}}]])
def test_a_body_that_has_not_one_choice_is_refused(choices: Any) -> None:
    with pytest.raises(Unexpected):
        encoder().body({"choices": choices})


# A client's cost accounts would be wrong.
def test_usage_is_that_of_the_engine() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 2}, "completion_tokens_details": {"reasoning_tokens": 1}}
    served = streamed([chunk({"content": "a"}, "stop"), usage(**details)]).served
    assert served["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 5,
    }
    assert streamed([chunk({"content": "a"}, "stop")]).served["usage"] is None


# A retry that is answered from the record must read like the first answer.
@pytest.mark.parametrize("name", STREAMS)
def test_a_replay_adds_up_to_what_was_served(name: str) -> None:
    served = streamed(recorded_chunks(name)).served
    assert accumulate(events(b"".join(RESPONSES.replay(served)))) == served


# Settings that a client reads back would be wrong, or fields of other clients would show.
def test_a_response_repeats_what_was_asked() -> None:
    asked = {
        **BODY,
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "temperature": 0.5,
        "metadata": {"a": "b"},
        "secret": 1,
    }
    served = streamed([chunk({"content": "a"}, "stop")], asked).served
    assert served["tools"] == asked["tools"]
    assert (served["temperature"], served["metadata"], served["created_at"]) == (0.5, {"a": "b"}, NAMES.created_s)
    assert "secret" not in served
    assert "input" not in served
