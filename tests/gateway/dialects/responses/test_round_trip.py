"""What is served comes back: through any stream, and through any harness's echo, to what the engine said."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.captures.decode import decode_value
from gristmill.fingerprint import output_items
from gristmill.lineage import LineageIndex, request_digests
from gristmill.records import Dialect, ParentResolution
from tests.gateway.dialects.responses.accumulate import accumulate
from tests.gateway.dialects.responses.exchange import (
    BODIES,
    STREAMS,
    chat_body,
    chunk,
    encoder,
    events,
    messages_of,
    output_types,
    recorded,
    recorded_chunks,
    streamed,
    translated,
    whole,
)

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "bash", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "apply_patch"},
]
ASKED: dict[str, Any] = {
    "model": "m",
    "input": [{"role": "user", "content": "Do it."}],
    "tools": TOOLS,
    "stream": True,
    "include": ["message.output_text.logprobs"],
}
USER = ASKED["input"][0]

_texts = st.text(max_size=12)
_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_texts, inner, max_size=2),
    max_leaves=4,
)
_arguments = st.one_of(
    _texts,
    st.dictionaries(_texts, _json_values, max_size=2).map(json.dumps),
    _texts.map(lambda text: json.dumps({"input": text})),
    _texts.map(lambda text: json.dumps({"command": [text]}, indent=1)),
    _texts.map(lambda text: json.dumps({"commands": [text], "timeout_ms": 5})),
    _texts.map(lambda text: json.dumps({"type": "delete_file", "path": text})),
    st.sampled_from(['{"input": "a", "input": "b"}', '{"commands": ["a"], "timeout_ms": 1.0}', '{"type": 1}', "null"]),
)
_names = st.sampled_from(["bash", "patch", "agents__spawn", "local_shell", "shell", "apply_patch", "never_offered"])


@st.composite
def _messages(draw: st.DrawFn) -> dict[str, Any]:
    """An assistant message as an engine's body holds it."""
    calls = [
        {"id": f"call-{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(draw(st.lists(st.tuples(_names, _arguments), max_size=3)))
    ]
    message: dict[str, Any] = {"role": "assistant", "content": draw(st.none() | _texts)}
    thought = draw(st.none() | _texts)
    return {**message, "reasoning": thought, "tool_calls": calls} if calls else {**message, "reasoning": thought}


def _pieces(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def _replies(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """A message, one of the streams that an engine may have said it in, and the finish reason."""
    message = draw(_messages())
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning": piece} for piece in _pieces(draw, message["reasoning"] or "")]
    deltas += [{"content": piece} for piece in _pieces(draw, message["content"] or "")]
    for index, each in enumerate(message.get("tool_calls", ())):
        head = {"index": index, "id": each["id"], "type": "function", "function": {"name": each["function"]["name"]}}
        deltas.append({"content": None, "tool_calls": [head]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
            for piece in _pieces(draw, each["function"]["arguments"])
        ]
    joined: list[dict[str, Any]] = []
    for delta in deltas:
        # Engines that lag put several tokens into one chunk, a thought and a text too.
        if joined and not joined[-1].keys() & delta.keys() and draw(st.booleans()):
            joined[-1] = {**joined[-1], **delta}
        else:
            joined.append(delta)
    finish = draw(st.sampled_from(["stop", "tool_calls", "length"]))
    chunks = [chunk(delta) for delta in joined]
    return message, [*chunks[:-1], {**chunks[-1]}, chunk({}, finish)], finish


def _said(message: dict[str, Any]) -> dict[str, Any]:
    """What a Chat message says, with arguments of tools that are no plain functions as values."""
    calls: list[Any] = []
    for each in message.get("tool_calls") or ():
        name, arguments = each["function"]["name"], each["function"]["arguments"]
        if name in {"patch", "local_shell", "shell", "apply_patch"}:
            arguments = _value(arguments)
        calls.append((each["id"], name, arguments))
    return {
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning") or "",
        "calls": calls,
    }


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _without(item: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in names}


def _verbatim(item: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(item))


def _without_ids(item: dict[str, Any]) -> dict[str, Any]:
    """As harnesses echo that keep what they understood: no ids, no status, no log-probabilities."""
    kept = _without(item, "id", "status")
    if item["type"] == "message":
        parts = [_without(part, "annotations", "logprobs") for part in item["content"]]
        return {"role": "assistant", "content": parts}
    return kept


def _has_infinity(arguments: str) -> bool:
    """Tell whether a text holds the infinities that Python takes for JSON."""
    found: list[str] = []
    json.loads(arguments, parse_constant=found.append)
    return bool(found)


def _dumped_again(item: dict[str, Any]) -> dict[str, Any]:
    """As harnesses echo that parse arguments and write them again, compactly."""
    if item["type"] != "function_call" or not isinstance(_value(item["arguments"]), dict):
        return item
    if json.dumps(_value(item["arguments"])) != item["arguments"]:
        return item  # a repeated key, or a number that Python writes otherwise: not the same arguments any more
    if _has_infinity(item["arguments"]):
        return item  # no JSON, so the text itself is what the model said
    compact = json.dumps(_value(item["arguments"]), separators=(",", ":"), ensure_ascii=False)
    return {**item, "arguments": compact}


ECHOES = (_verbatim, _without_ids, _dumped_again)


# A client that reads a stream would get another reply than one that does not, or than the one that is recorded.
@given(_replies())
def test_a_stream_adds_up_to_what_is_served_and_to_the_body(
    reply: tuple[dict[str, Any], list[dict[str, Any]], str],
) -> None:
    message, chunks, finish = reply
    stream = streamed(chunks, ASKED)
    assert accumulate(events(stream.now + stream.held)) == stream.served
    assert whole(chat_body(message, finish), ASKED) == stream.served


# What the model is shown as its own earlier turn would not be what it said.
@given(_replies())
def test_an_echo_is_the_message_that_the_engine_said(reply: tuple[dict[str, Any], list[dict[str, Any]], str]) -> None:
    message, chunks, _ = reply
    output = streamed(chunks, ASKED).served["output"]
    results = [{"type": "function_call_output", "call_id": each["id"], "output": "ok"} for each in _calls(message)]
    for echo in (_verbatim, _without_ids):
        messages = messages_of([USER, *map(echo, output), *results, USER], tools=TOOLS)
        said = messages[1 : len(messages) - 1 - len(results)]
        assert len(said) == bool(output)
        for each in said:
            assert _said(each) == _said(message)


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    return message.get("tool_calls", [])


def test_a_number_that_json_does_not_have_is_echoed_as_text() -> None:
    """Python's json writes Infinity; written again with other white space it is another text, and nothing else."""
    item = {"type": "function_call", "arguments": json.dumps({"a": float("inf")})}
    assert _dumped_again(item) == item
    assert _dumped_again({**item, "arguments": '{"a": 1}'})["arguments"] == '{"a":1}'


# A harness's next request would match no captured call, and the rollout would fall apart into roots.
@given(_replies())
def test_an_echo_has_the_fingerprints_of_what_was_served(
    reply: tuple[dict[str, Any], list[dict[str, Any]], str],
) -> None:
    _, chunks, _ = reply
    served = streamed(chunks, ASKED).served
    items = decode_value(Dialect.RESPONSES, 200, served).choices[0].items
    assert list(items) == served["output"]
    index = LineageIndex()
    index.add("c1", request_digests(translated(ASKED).understood, items))
    for echo in ECHOES:
        echoed = [echo(item) for item in served["output"]]
        assert [item.fingerprint for item in output_items(echoed)] == [item.fingerprint for item in output_items(items)]
        following = translated({**ASKED, "input": [USER, *echoed, USER]}).understood
        expected = ParentResolution.RESOLVED if items else ParentResolution.ROOT
        assert index.parent_of(following).resolution is expected


# The same for what a real engine said.
@pytest.mark.parametrize("name", [*STREAMS, *BODIES])
def test_a_recorded_reply_comes_back(name: str) -> None:
    fixture = recorded(name)
    if "body" in fixture:
        message = fixture["body"]["choices"][0]["message"]
        output = whole(fixture["body"])["output"]
    else:
        reply = streamed(recorded_chunks(name))
        output = reply.served["output"]
        message = _assembled(recorded_chunks(name))
    messages = messages_of([USER, *output, USER])
    assert [each["role"] for each in messages] == ["user", "assistant", "user"]
    assert _said(messages[1]) == _said(message)


def _assembled(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for delta in (choice["delta"] for each in chunks for choice in each["choices"]):
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        for piece in delta.get("tool_calls") or ():
            if "id" in piece:
                function = {"name": piece["function"]["name"], "arguments": ""}
                message["tool_calls"].append({"id": piece["id"], "function": function})
            else:
                message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message


# Free text in the wrong wrapping must reach the harness as the model wrote it, and come back the same.
@pytest.mark.parametrize(
    "arguments",
    [
        "*** Begin Patch",
        '{"patch": "a"}',
        '{"input": "a", "why": "b"}',
        '{"input": 1}',
        '["input"]',
        "",
        '{"input": "a',
    ],
)
def test_free_text_in_another_form_is_served_as_the_function_call_it_was(arguments: str) -> None:
    function = {"name": "patch", "arguments": arguments}
    body = chat_body({"tool_calls": [{"id": "c", "type": "function", "function": function}]}, "tool_calls")
    [item] = whole(body, ASKED)["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "patch", arguments)
    assert item["id"].startswith("fc_")
    assert messages_of([item])[0]["tool_calls"][0]["function"] == function


# Free text in its wrapping is what a custom tool is given.
def test_free_text_is_a_custom_tool_call() -> None:
    function = {"name": "patch", "arguments": '{"input":"*** Begin Patch\\n\\u00e9"}'}
    made = encoder(ASKED)
    made.begin()
    head = {"index": 0, "id": "c", "type": "function", "function": {"name": "patch"}}
    assert made.chunk(chunk({"tool_calls": [head]})).now == b""
    rest = {"index": 0, "function": {"arguments": function["arguments"]}}
    assert made.chunk(chunk({"tool_calls": [rest]}, "tool_calls")).now == b""
    assert [event["type"] for event in events(made.end().held)] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
    ]
    [item] = made.served()["output"]
    assert item["input"] == "*** Begin Patch\né"
    assert item["id"] == "ctc_0a1b2c3d_0"


# A tool with an item type of its own is run by clients that look for that type.
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        (
            "local_shell",
            '{"command": ["ls", "-l"]}',
            {"type": "local_shell_call", "action": {"type": "exec", "env": {}, "command": ["ls", "-l"]}},
        ),
        (
            "shell",
            '{"commands": ["ls"], "timeout_ms": 5}',
            {"type": "shell_call", "action": {"commands": ["ls"], "timeout_ms": 5, "max_output_length": None}},
        ),
        (
            "apply_patch",
            '{"type": "delete_file", "path": "a"}',
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
        ),
        ("agents__spawn", "{}", {"type": "function_call", "name": "spawn", "namespace": "agents", "arguments": "{}"}),
        ("shell", '{"commands": "ls"}', {"type": "function_call", "name": "shell", "arguments": '{"commands": "ls"}'}),
    ],
)
def test_a_call_is_told_as_the_client_knows_the_tool(name: str, arguments: str, expected: dict[str, Any]) -> None:
    function = {"name": name, "arguments": arguments}
    calls = [{"index": 0, "id": "c", "type": "function", "function": function}]
    reply = streamed([chunk({"tool_calls": calls}, "tool_calls")], ASKED)
    [item] = reply.served["output"]
    assert _without(item, "id", "status", "call_id") == expected
    assert accumulate(events(reply.now + reply.held)) == reply.served
    assert output_types(reply.served) == [expected["type"]]
