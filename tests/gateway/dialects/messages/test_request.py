"""The fields of a request: what the engine is asked, what is noted, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.canonical import JsonNumber, loads
from gristmill.errors import Code
from gristmill.gateway.dialects.messages import MESSAGES, count_body
from gristmill.gateway.front import RequestRefused
from gristmill.records import Dialect
from tests.gateway.dialects.messages.exchange import USER, Json, engine, harness, no_history, translate

ASSISTANT: Json = {"role": "assistant", "content": "Sure, the"}


def refusal(*messages: Json, **fields: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        translate(*messages, **fields)
    assert caught.value.status == 400
    return caught.value


# The plainest request must arrive as the plainest request.
def test_the_least_request() -> None:
    made = translate()
    assert made.body == {"model": "m", "messages": [USER], "max_tokens": 9}
    assert (made.route, made.choices, made.stream, made.notes) == (Dialect.CHAT, 1, False, ())
    assert MESSAGES.dialect is Dialect.MESSAGES


# Sampling settings decide what is sampled; each must reach the engine as it was given.
def test_sampling_settings() -> None:
    made = translate(temperature=0.5, top_p=1, top_k=40, stop_sequences=["a", "b"], stream=True)
    assert made.stream
    assert made.body == {
        "model": "m",
        "messages": [USER],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 1,
        "top_k": 40,
        "stop": ["a", "b"],
    }
    assert "stop" not in translate(stop_sequences=[], temperature=None).body


# A body that was decoded exactly keeps numbers as text; settings must still be numbers for the engine.
def test_exact_numbers() -> None:
    body = loads('{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"Hi"}],"temperature":0.70}')
    assert isinstance(body["temperature"], JsonNumber)
    assert MESSAGES.translate(body, no_history).body["temperature"] == 0.7


# Whether a template renders a place for thinking depends on this setting.
@pytest.mark.parametrize(
    ("thinking", "settings", "notes"),
    [
        ({"type": "disabled"}, {"enable_thinking": False}, ()),
        ({"type": "adaptive"}, {"enable_thinking": True}, ()),
        (
            {"type": "enabled", "budget_tokens": 2048, "display": "summarized"},
            {"enable_thinking": True},
            ("removed:thinking.budget_tokens", "removed:thinking.display"),
        ),
    ],
)
def test_thinking(thinking: Json, settings: Json, notes: tuple[str, ...]) -> None:
    made = translate(thinking=thinking)
    assert (made.body["chat_template_kwargs"], made.notes) == (settings, notes)


# What the client says to the template itself is more exact than what is derived.
def test_template_settings_of_the_client_win() -> None:
    made = translate(thinking={"type": "enabled"}, chat_template_kwargs={"enable_thinking": False, "x": 1})
    assert made.body["chat_template_kwargs"] == {"enable_thinking": False, "x": 1}


# Effort and disabled thinking contradict each other on templates that know only effort.
def test_effort() -> None:
    assert translate(output_config={"effort": "max"}).body["reasoning_effort"] == "max"
    made = translate(output_config={"effort": "high"}, thinking={"type": "disabled"})
    assert "reasoning_effort" not in made.body
    assert made.notes == ("removed:output_config.effort",)


# An answer that the harness parses must be constrained by its schema, under the old name of the field and the new.
def test_the_format_of_the_answer() -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    chat = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": {"type": "object"}}}
    assert translate(output_config={"format": wanted}).body["response_format"] == chat
    assert translate(output_format=wanted).body["response_format"] == chat
    assert translate(output_config={"format": wanted}, output_format=wanted).body["response_format"] == chat
    other = {"type": "json_schema", "schema": {}}
    assert refusal(output_config={"format": wanted}, output_format=other).where == "$.output_format"
    assert refusal(output_format={"type": "grammar"}).where == "$.output_format.type"
    assert refusal(output_format={"type": "json_schema"}).code is Code.REQUEST_MALFORMED


# What is left out must be said; what only transports must not fill the notes of every call.
def test_fields_that_are_left_out() -> None:
    made = translate(
        metadata={"user_id": "u"},
        service_tier="auto",
        container="c1",
        mcp_servers=[{"url": "x"}],
        context_management={"edits": []},
        cache_control={"type": "ephemeral"},
        betas=[],
        inference_geo=None,
        **{"strange, name": 1},
    )
    assert made.body == translate().body
    assert made.notes == (
        "removed:metadata",
        "removed:service_tier",
        "removed:container",
        "removed:mcp_servers",
        "removed:context_management",
        "removed:strange__name",
    )


# Notes travel in a response header; a client that invents fields must not blow it up.
def test_notes_are_bounded() -> None:
    made = translate(**{f"field_{index}_{'x' * 300}": 1 for index in range(1000)})
    assert len(made.notes) == 25
    assert translate(USER, USER, **{"a b": 1, "a,b": 1}).notes == ("removed:a_b",)
    assert made.notes[-1] == "removed:976_more"
    assert max(map(len, made.notes)) < 80


# A prefilled reply must be continued, not answered by a new turn.
def test_the_last_message_is_continued() -> None:
    made = translate(USER, ASSISTANT)
    assert made.body["continue_final_message"] is True
    assert made.body["add_generation_prompt"] is False
    assert made.body["messages"][-1] == ASSISTANT
    assert "continue_final_message" not in translate(USER, ASSISTANT, USER).body
    recorded = engine("messages_assistant_prefill")["request"]["body"]
    assert MESSAGES.translate(recorded, no_history).body["continue_final_message"] is True


# An empty beginning is none: the engine would continue the end of the previous turn.
def test_an_empty_last_message_is_dropped() -> None:
    for content in ("", [], [{"type": "text", "text": ""}]):
        made = translate(USER, {"role": "assistant", "content": content})
        assert made.body["messages"] == [USER]
        assert made.notes == ("removed:empty_last_message",)
    assert refusal({"role": "assistant", "content": ""}).code is Code.PARAMETER_REFUSED


# Endings that templates cut, strip or cannot find again would silently become another prompt.
@pytest.mark.parametrize(
    "content",
    [
        "Sure, ",
        [{"type": "thinking", "thinking": "hm", "signature": "s"}],
        [{"type": "text", "text": "a"}, {"type": "tool_use", "id": "c", "name": "n", "input": {}}],
    ],
)
def test_endings_that_cannot_be_continued(content: Any) -> None:
    refused = refusal(USER, {"role": "assistant", "content": content})
    assert (refused.code, refused.where) == (Code.PARAMETER_REFUSED, "$.messages[1]")


# A request that is none must be answered with the place of the mistake, not sent to the engine.
@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"model": ""}, "$.model"),
        ({"model": 3}, "$.model"),
        ({"max_tokens": None}, "$.max_tokens"),
        ({"max_tokens": 0}, "$.max_tokens"),
        ({"max_tokens": True}, "$.max_tokens"),
        ({"max_tokens": 1.5}, "$.max_tokens"),
        ({"messages": []}, "$.messages"),
        ({"messages": "Hi"}, "$.messages"),
        ({"messages": ["Hi"]}, "$.messages[0]"),
        ({"messages": [{"role": "ctx", "content": "a"}]}, "$.messages[0].role"),
        ({"messages": [{"role": "user"}]}, "$.messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "$.messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "$.messages[0].content[0].text"),
        ({"temperature": "hot"}, "$.temperature"),
        ({"temperature": True}, "$.temperature"),
        ({"stop_sequences": "x"}, "$.stop_sequences"),
        ({"stop_sequences": [1]}, "$.stop_sequences"),
        ({"stream": "yes"}, "$.stream"),
        ({"thinking": "on"}, "$.thinking"),
        ({"thinking": {"type": "loud"}}, "$.thinking.type"),
        ({"output_config": []}, "$.output_config"),
        ({"output_config": {"effort": 3}}, "$.output_config.effort"),
        ({"chat_template_kwargs": 1}, "$.chat_template_kwargs"),
        ({"system": 3}, "$.system"),
        ({"system": [3]}, "$.system[0]"),
    ],
)
def test_what_is_no_request(fields: Json, where: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        MESSAGES.translate({"model": "m", "max_tokens": 9, "messages": [USER], **fields}, no_history)
    assert (caught.value.status, caught.value.code, caught.value.where) == (400, Code.REQUEST_MALFORMED, where)


# Counting must count the prompt that would be sampled from, or a harness compacts too late.
def test_counted_is_what_would_be_sent() -> None:
    fields: Json = {
        "system": [{"type": "text", "text": "x-anthropic-billing-header: a"}, {"type": "text", "text": "S"}],
        "tools": [{"name": "bash", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "disabled"},
    }
    body = {"model": "m", "messages": [USER, ASSISTANT], **fields}
    sent = translate(USER, ASSISTANT, **fields).body
    assert sent.pop("max_tokens") == 9
    assert count_body(body) == sent
    recorded = engine("messages_count_tokens")["request"]["body"]
    assert list(count_body(recorded)) == ["model", "messages", "tools"]
    with pytest.raises(RequestRefused):
        count_body({"model": "m", "messages": []})


# The translation may not change the body that it was given: it is stored as evidence.
@pytest.mark.parametrize("name", ["claude-code--run1", "opencode--run5-anthropic", "pi--run3-anthropic"])
def test_the_given_body_stays_as_it_was(name: str) -> None:
    for call, again in zip(harness(name), harness(name), strict=True):
        MESSAGES.translate(call["body"], no_history)
        assert call["body"] == again["body"]


# Labels and lineage read what the client sent; the line that no model sees says which calls are a subagent's.
def test_understood_is_what_was_sent() -> None:
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": [USER],
        "system": [{"type": "text", "text": "x-anthropic-billing-header: a"}],
    }
    made = MESSAGES.translate(body, no_history)
    assert made.understood is body
    assert made.body["messages"] == [USER]


# Errors must be of the type that the client's library turns into its exception.
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (402, "billing_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_error_bodies(status: int, kind: str) -> None:
    assert MESSAGES.error(status, "some_code", "why") == {
        "type": "error",
        "error": {"type": kind, "message": "why", "code": "some_code"},
    }
