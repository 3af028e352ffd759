"""Whole bodies, and that they give the message that the stream of the same content gives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.captures.assembly import StreamAssembly
from gristmill.captures.reply import Unexpected
from gristmill.records import Dialect
from tests.gateway.dialects.messages.exchange import (
    FIXTURES,
    ONE_CHOICE,
    Json,
    add_up,
    chat_body,
    chunks_of,
    encoder,
    engine,
    finish,
    piece,
    plain,
    start,
    stream,
    usage,
)

BODIES = sorted(
    path.stem
    for path in (FIXTURES / "engine").glob("*.json")
    if (recorded := engine(path.stem))["request"]["path"] == "/v1/chat/completions"
    and recorded["status"] == 200
    and len(recorded.get("body", {}).get("choices", ())) == 1
)


def whole(chunks: list[Json]) -> Json:
    assembly = StreamAssembly(Dialect.CHAT, lambda choice, where: ())
    for chunk in chunks:
        assembly.add_chunk(chunk)
    return assembly.body()


def message_of(body: Json) -> Json:
    return plain(encoder().body(body))


# A harness that falls back from stream to body after a cut must be told the same.
@pytest.mark.parametrize("name", ONE_CHOICE)
def test_body_and_stream_agree(name: str) -> None:
    chunks = chunks_of(engine(name))
    assert message_of(whole(chunks)) == stream(*chunks).message


# Every recorded body must be served whole, without the engine's token fields.
@pytest.mark.parametrize("name", BODIES)
def test_recorded_bodies(name: str) -> None:
    body = engine(name)["body"]
    made = encoder()
    served = plain(made.body(body))
    assert served == plain(made.served())
    assert (served["id"], served["model"]) == ("msg_t0k3n", "asked-model")
    message = body["choices"][0]["message"]
    blocks = served["content"]
    assert "".join(block.get("thinking", "") for block in blocks) == (message.get("reasoning") or "")
    assert "".join(block.get("text", "") for block in blocks) == (message["content"] or "")
    assert [block["id"] for block in blocks if block["type"] == "tool_use"] == [
        call["id"] for call in message.get("tool_calls") or ()
    ]
    assert set(served) == {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    assert served["usage"]["output_tokens"] == (body["usage"]["completion_tokens"] if served["stop_reason"] else 0)


# An abort answered as a whole body has no stop reason either.
def test_an_aborted_body_has_no_stop_reason() -> None:
    assert message_of(engine("abort_api_nonstream")["body"])["stop_reason"] is None


# A body that is an error, or none of Chat, must not be served as an empty message.
@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "no"}},
        {"object": "error", "message": "no"},
        {},
        {"choices": []},
        {"choices": [{"index": 0}]},
        {"choices": [{"message": {"content": "a"}}, {"message": {"content": "b"}}]},
        chat_body({"content": 3}),
        chat_body({"content": "a", "tool_calls": ["x"]}),
    ],
)
def test_what_is_no_body_is_refused(body: Json) -> None:
    with pytest.raises(Unexpected):
        encoder().body(body)


# Some engines give the calls of a body neither index nor id.
def test_calls_without_index_and_id() -> None:
    calls = [{"function": {"name": name, "arguments": "{}"}} for name in ("one", "two")]
    served = message_of(chat_body({"content": None, "tool_calls": calls}, "tool_calls"))
    assert [(block["id"], block["name"]) for block in served["content"]] == [
        ("toolu_t0k3n_0", "one"),
        ("toolu_t0k3n_1", "two"),
    ]


ARGUMENTS = st.one_of(
    st.sampled_from(
        ["", "null", "{}", '{"a": 1.0, "b": [true, null]}', '{"a": "\\u00e9"}', '{"a": "x', "[1]", '{"a":1,"a":2}']
    ),
    st.text(max_size=12),
)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
CALL = st.tuples(st.sampled_from(["bash", "edit"]), ARGUMENTS)
REPLY = st.fixed_dictionaries({"reasoning": TEXT, "content": TEXT, "calls": st.lists(CALL, max_size=3)})


def cut(draw: Any, text: str) -> list[str]:
    """Cut a text at drawn places."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[low:high] for low, high in zip([0, *places], [*places, len(text)], strict=True)]


@st.composite
def deltas(draw: Any, reply: Json) -> list[Json]:
    """Draw the deltas of a stream that brings the reply."""
    made: list[Json] = [{key: part} for key in ("reasoning", "content") for part in cut(draw, reply[key])]
    for index, (name, arguments) in enumerate(reply["calls"]):
        first, *rest = cut(draw, arguments)
        head = {"index": index, "id": f"c{index}", "function": {"name": name, "arguments": first}}
        made.append({"tool_calls": [head]})
        made.extend({"tool_calls": [{"index": index, "function": {"arguments": part}}]} for part in rest)
    return made


# Chunks may end anywhere; where they end must not change what was served.
@settings(max_examples=150, deadline=None)
@given(st.data(), REPLY, st.sampled_from(["stop", "length", "tool_calls", "abort"]))
def test_the_cutting_of_a_stream_changes_nothing(data: Any, reply: Json, reason: str) -> None:
    pieces = [piece(delta) for delta in data.draw(deltas(reply))]
    streamed = stream(start(), *pieces, finish(reason), usage())
    assert add_up(streamed.events()).message == streamed.message
    calls = [
        {"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(reply["calls"])
    ]
    body = chat_body({"reasoning": reply["reasoning"], "content": reply["content"], "tool_calls": calls}, reason)
    assert message_of(body) == streamed.message
