"""Messages, blocks and tools: each said to the model, noted as left out, or refused with its path."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gristmill.errors import Code
from gristmill.gateway.front import RequestRefused
from tests.gateway.dialects.messages.exchange import USER, Json, engine, translate

TEXT: Json = {"type": "text", "text": "T"}
IMAGE: Json = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
IMAGE_PART: Json = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CALLS: Json = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": name, "name": "bash", "input": {}} for name in ("c1", "c2")],
}
SCHEMA: Json = {"type": "object", "properties": {"z": {}, "a": {}}}


def user(*blocks: Any) -> Json:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> Json:
    return {"role": "assistant", "content": list(blocks)}


def result(call_id: str, **fields: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": call_id, **fields}


def messages(*given: Json, **fields: Any) -> list[Json]:
    return translate(*given, **fields).body["messages"]


def refusal(*given: Json, **fields: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        translate(*given, **fields)
    return caught.value


# The system prompt must reach the model whole, without the line whose hash changes with every call.
def test_system_prompts() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.a"}
    assert messages(system="S") == [{"role": "system", "content": "S"}, USER]
    assert messages(system="") == messages(system=[billing]) == messages(system=None) == [USER]
    made = translate(system=[billing, {**TEXT, "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "U"}])
    assert made.body["messages"][0] == {"role": "system", "content": "TU"}
    assert made.notes == ("removed:system.billing_header",)
    assert refusal(system=[IMAGE]).where == "$.system[0]"


# Harnesses put reminders between the turns; moved to the front they would change every prompt from its first token.
def test_system_messages_keep_their_place() -> None:
    made = messages(USER, {"role": "system", "content": "mid"}, USER, {"role": "system", "content": [TEXT]})
    assert [message["role"] for message in made] == ["user", "system", "user", "system"]
    assert made[3] == {"role": "system", "content": "T"}
    recorded = engine("messages_system_midconversation")["request"]["body"]
    assert messages(*recorded["messages"], system=recorded["system"]) == [
        {"role": "system", "content": "Real system"},
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": "mid system"},
    ]
    assert messages(USER, {"role": "system", "content": ""}) == [USER]


# What a user says and shows must arrive in order.
def test_user_content() -> None:
    assert messages(user(TEXT)) == [{"role": "user", "content": "T"}]
    assert messages(user(TEXT, {"type": "text", "text": ""}, IMAGE, TEXT)) == [
        {"role": "user", "content": [TEXT, IMAGE_PART, TEXT]}
    ]
    assert messages(user(IMAGE)) == [{"role": "user", "content": [IMAGE_PART]}]
    assert messages(user()) == [{"role": "user", "content": ""}]
    inline = {"type": "image", "source": {"type": "url", "url": "data:image/png;base64,AAAA"}}
    assert messages(user(inline)) == messages(user(IMAGE))


# A document is text to a model without eyes for it: all of it, its title too.
def test_documents() -> None:
    plain = {"type": "document", "title": "N", "context": "C", "source": {"type": "text", "data": "D"}}
    made = translate(user(plain))
    assert [part["text"] for part in made.body["messages"][0]["content"]] == ["N", "C", "D"]
    assert made.notes == ("replaced:document",)
    listed = {"type": "document", "source": {"type": "content", "content": [TEXT, IMAGE]}, "citations": {"enabled": 1}}
    made = translate(user(listed))
    assert made.body["messages"][0]["content"] == [TEXT, IMAGE_PART]
    assert made.notes == ("removed:document.citations", "replaced:document")
    assert messages(user({"type": "document", "source": {"type": "content", "content": "D"}}))[0]["content"] == "D"


# Every result must answer its own call, before anything else the user says.
def test_tool_results() -> None:
    made = translate(
        USER,
        CALLS,
        user(
            result("c1", content=[TEXT, IMAGE, {"type": "text", "text": "U"}]),
            result("c2", content="out", is_error=True, cache_control={"type": "ephemeral"}),
            {"type": "text", "text": "and"},
            {"type": "text", "text": "more"},
        ),
    )
    assert made.body["messages"][2:] == [
        {"role": "tool", "tool_call_id": "c1", "content": "T\nU"},
        {"role": "tool", "tool_call_id": "c2", "content": "out"},
        {"role": "user", "content": [IMAGE_PART]},
        {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "more"}]},
    ]
    assert made.notes == ("removed:tool_result.is_error",)


# Results without content, or with what only names a tool, are results too.
def test_small_tool_results() -> None:
    made = translate(
        USER, CALLS, user(result("c1"), result("c2", content=[{"type": "tool_reference", "tool_name": "n"}]))
    )
    assert [message["content"] for message in made.body["messages"][2:]] == ["", "n"]
    assert made.notes == ("replaced:tool_reference",)
    document = {"type": "document", "source": {"type": "text", "data": "D"}}
    assert messages(USER, CALLS, user(result("c1", content=[document])))[2]["content"] == "D"


# The model must find its own earlier turn as it said it: thinking, text and calls, keys in the order given.
def test_assistant_content() -> None:
    blocks: list[Json] = [
        {"type": "thinking", "thinking": "one ", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "two", "signature": "s"},
        {"type": "text", "text": "a", "citations": []},
        {"type": "text", "text": "b"},
        {"type": "tool_use", "id": "c1", "name": "bash", "input": {"z": 1, "a": "é"}, "caller": {"type": "direct"}},
        {"type": "tool_use", "id": "c2", "name": "now", "input": {}},
        {"type": "tool_use", "id": "c3", "name": "now", "input": None},
    ]
    made = translate(USER, assistant(*blocks), user(result("c1"), result("c2"), result("c3")))
    message = made.body["messages"][1]
    assert (message["role"], message["content"], message["reasoning"]) == ("assistant", "ab", "one two")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"z":1,"a":"\\u00e9"}', "{}", "{}"]
    assert message["tool_calls"][0] == {
        "id": "c1",
        "type": "function",
        "function": {"name": "bash", "arguments": '{"z":1,"a":"\\u00e9"}'},
    }
    assert made.notes == ("removed:redacted_thinking", "removed:tool_use.caller")


# A turn without text is a turn: templates and engines differ in what they accept as its content.
def test_assistant_without_text() -> None:
    assert messages(USER, CALLS, user(result("c1"), result("c2")))[1]["content"] is None
    thinking = {"type": "thinking", "thinking": "hm", "signature": ""}
    assert messages(USER, assistant(thinking), USER)[1] == {"role": "assistant", "content": "", "reasoning": "hm"}
    assert messages(USER, assistant(), USER)[1] == {"role": "assistant", "content": ""}
    assert messages(USER, {"role": "assistant", "content": ""}, USER)[1] == {"role": "assistant", "content": ""}


# What cannot be said to the model must stop the request, with the place where it stands.
@pytest.mark.parametrize(
    ("message", "where"),
    [
        (user({"type": "image", "source": {"type": "url", "url": "https://e.org/a.png"}}), "[0].content[0].source"),
        (user({"type": "image", "source": {"type": "file", "file_id": "f"}}), "[0].content[0].source"),
        (user({"type": "document", "source": {"type": "base64", "data": "A"}}), "[0].content[0].source"),
        (
            user({"type": "document", "source": {"type": "content", "content": [{"type": "document"}]}}),
            "[0].content[0].source.content[0]",
        ),
        (user(TEXT, {"type": "search_result"}), "[0].content[1]"),
        (user({"type": "container_upload"}), "[0].content[0]"),
        (user({"type": "tool_use", "id": "c", "name": "n", "input": {}}), "[0].content[0]"),
        (user({"type": "thinking", "thinking": "x"}), "[0].content[0]"),
        (user(result("c", content=[{"type": "web_search_tool_result"}])), "[0].content[0].content[0]"),
        (assistant({"type": "server_tool_use", "id": "s"}), "[0].content[0]"),
        (assistant({"type": "web_search_tool_result"}), "[0].content[0]"),
        (assistant({"type": "mcp_tool_use"}), "[0].content[0]"),
        (assistant(IMAGE), "[0].content[0]"),
        (assistant(result("c")), "[0].content[0]"),
        (assistant({"type": "brand_new"}), "[0].content[0]"),
        ({"role": "system", "content": [{"type": "tool_addition"}]}, "[0].content[0]"),
    ],
)
def test_blocks_that_are_refused(message: Json, where: str) -> None:
    refused = refusal(message, USER)
    assert (refused.status, refused.code, refused.where) == (400, Code.PARAMETER_REFUSED, f"$.messages{where}")


# A block that is not what its type says is a mistake of the client, found before the engine sees it.
@pytest.mark.parametrize(
    ("message", "where"),
    [
        (user({"type": "image"}), "[0].content[0].source"),
        (user({"type": "image", "source": {"type": "base64", "data": "A"}}), "[0].content[0].source.media_type"),
        (
            user({"type": "image", "source": {"type": "base64", "media_type": "a/b,c", "data": "A"}}),
            "[0].content[0].source.media_type",
        ),
        (user({"type": "document", "source": {"type": "text"}}), "[0].content[0].source.data"),
        (user({"type": "tool_result", "content": "x"}), "[0].content[0].tool_use_id"),
        (user(result("c", content=3)), "[0].content[0].content"),
        (user(result("c", content=[{"type": "tool_reference"}])), "[0].content[0].content[0].tool_name"),
        (assistant({"type": "tool_use", "name": "n", "input": {}}), "[0].content[0].id"),
        (assistant({"type": "tool_use", "id": "c", "input": {}}), "[0].content[0].name"),
        (assistant({"type": "tool_use", "id": "c", "name": "n", "input": "{}"}), "[0].content[0].input"),
        (assistant({"type": "thinking", "thinking": 3}), "[0].content[0].thinking"),
    ],
)
def test_blocks_that_are_malformed(message: Json, where: str) -> None:
    refused = refusal(message, USER)
    assert (refused.code, refused.where) == (Code.REQUEST_MALFORMED, f"$.messages{where}")


# The model must be offered exactly the tools that the harness can run.
def test_tools() -> None:
    made = translate(
        tools=[
            {"name": "one", "description": "D", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
            {"type": "custom", "name": "two", "input_schema": {}, "strict": True, "eager_input_streaming": True},
            {"type": "web_search_20250305", "name": "web_search"},
            {"type": "bash_20250124", "name": "bash"},
            {"name": "three", "input_schema": {}, "defer_loading": True, "input_examples": [{}]},
        ]
    )
    assert made.body["tools"] == [
        {"type": "function", "function": {"name": "one", "description": "D", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "two", "parameters": {}, "strict": True}},
        {"type": "function", "function": {"name": "three", "parameters": {}}},
    ]
    assert json.dumps(made.body["tools"][0]["function"]["parameters"]) == json.dumps(SCHEMA)
    assert made.notes == (
        "removed:tools.web_search_20250305",
        "removed:tools.bash_20250124",
        "removed:tools.defer_loading",
        "removed:tools.input_examples",
    )
    assert "tools" not in translate(tools=[]).body


# A choice of tool constrains sampling; a wrong one makes a harness wait for a call that never comes.
@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "t"}, {"tool_choice": {"type": "function", "function": {"name": "t"}}}),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        ({"type": "any", "disable_parallel_tool_use": False}, {"tool_choice": "required"}),
    ],
)
def test_tool_choice(choice: Json, fields: Json) -> None:
    body = translate(tools=[{"name": "t", "input_schema": {}}], tool_choice=choice).body
    assert {key: body[key] for key in ("tool_choice", "parallel_tool_calls") if key in body} == fields


# Without a tool left, `auto` says nothing, and a demand for a call cannot be met.
def test_tool_choice_without_tools() -> None:
    search = [{"type": "web_search_20250305", "name": "web_search"}]
    for kind in ("auto", "none"):
        body = translate(tools=search, tool_choice={"type": kind}).body
        assert not {"tools", "tool_choice"} & body.keys()
    assert refusal(tools=search, tool_choice={"type": "any"}).where == "$.tool_choice"
    named = {"type": "tool", "name": "web_search"}
    assert refusal(tools=search, tool_choice=named).where == "$.tool_choice.name"


# Tools that are none must be named before the engine is asked.
@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"tools": {}}, "$.tools"),
        ({"tools": ["t"]}, "$.tools[0]"),
        ({"tools": [{"input_schema": {}}]}, "$.tools[0].name"),
        ({"tools": [{"name": "t"}]}, "$.tools[0].input_schema"),
        ({"tools": [{"name": "t", "input_schema": {}, "description": 3}]}, "$.tools[0].description"),
        ({"tool_choice": "auto"}, "$.tool_choice"),
        ({"tool_choice": {"type": "some"}}, "$.tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "$.tool_choice.name"),
    ],
)
def test_malformed_tools(fields: Json, where: str) -> None:
    refused = refusal(**fields)
    assert (refused.code, refused.where) == (Code.REQUEST_MALFORMED, where)
