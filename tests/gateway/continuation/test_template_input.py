from __future__ import annotations

import copy
from typing import Any

import pytest

from gristmill.gateway.continuation.template_input import (
    UnrenderableMessageError,
    template_messages,
    template_tools,
    template_variables,
)

Json = dict[str, Any]


def given(*messages: Json, parts: bool = False, developer: bool = False) -> list[Json]:
    kept = copy.deepcopy(messages)
    made = template_messages(messages, parts=parts, developer=developer)
    assert messages == kept
    return made


def call(arguments: Any) -> Json:
    return {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": arguments}}


def test_content_is_one_text() -> None:
    """A template that adds texts fails on a list, and on nothing at all."""
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}, "three"]
    said = given({"role": "user", "content": parts}, {"role": "assistant", "content": None}, {"role": "user"})
    assert [message["content"] for message in said] == ["one\ntwo\nthree", "", ""]


def test_empty_parts() -> None:
    """Engines leave them out of one text, and leave them in among parts, results included."""
    content = [{"type": "text", "text": ""}, {"type": "text", "text": "a"}]
    messages = [{"role": "user", "content": content}, {"role": "tool", "content": content}]
    assert [message["content"] for message in given(*messages)] == ["a", "a"]
    assert [message["content"] for message in given(*messages, parts=True)] == [content, "\na"]


def test_content_as_parts() -> None:
    """A template that goes through parts joins them itself; tool results are text for it too."""
    said = given(
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": None},
        parts=True,
    )
    assert said[0]["content"] == [{"type": "text", "text": "one"}]
    assert said[1]["content"] == [{"type": "text", "text": "no"}]
    assert said[2] == {"role": "tool", "tool_call_id": "c1", "content": "a\nb"}
    assert said[3]["content"] == []


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a":1.0 , "a":2,"b":1e3}', {"a": 2, "b": 1000.0}),
        ({"cmd": "ls"}, {"cmd": "ls"}),
        ('{"cmd": ', {}),
        ("[1]", {}),
        ("", {}),
        (None, {}),
    ],
)
def test_arguments(written: Any, read: Json) -> None:
    """Arguments are written by the template, so they have to be read the way the engine reads them."""
    [said] = given({"role": "assistant", "content": "", "tool_calls": [call(written)]})
    assert said["tool_calls"] == [call(read)]


def test_no_calls_is_no_key() -> None:
    """Templates ask whether the key is there."""
    assert "tool_calls" not in given({"role": "assistant", "content": "x", "tool_calls": []})[0]


@pytest.mark.parametrize(
    ("message", "thought"),
    [
        ({"reasoning": "a"}, "a"),
        ({"reasoning_content": "b"}, "b"),
        ({"reasoning": "a", "reasoning_content": "b"}, "a"),
        ({"reasoning": None, "reasoning_content": "b"}, "b"),
    ],
)
def test_reasoning_has_both_names(message: Json, thought: str) -> None:
    """Harnesses use one name, templates the other."""
    [said] = given({"role": "assistant", "content": "x", **message})
    assert (said["reasoning"], said["reasoning_content"]) == (thought, thought)


def test_developer_speaks_as_the_system() -> None:
    """Engines put both at the start, as one message, where a template knows no developer."""
    conversation: list[Json] = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "u"},
        {"role": "developer", "content": "D"},
    ]
    assert given(*conversation) == [{"role": "system", "content": "S\n\nD"}, {"role": "user", "content": "u"}]
    assert [message["role"] for message in given(*conversation, developer=True)] == ["system", "user", "developer"]
    alone = given({"role": "developer", "content": "D"}, {"role": "user", "content": "u"}, parts=True)
    assert alone[0] == {"role": "system", "content": [{"type": "text", "text": "D"}]}
    late = given({"role": "user", "content": "u"}, {"role": "developer", "content": "D"}, parts=True)
    assert late[0] == {"role": "system", "content": "D"}


def test_system_messages_stay_where_they_are_without_a_developer() -> None:
    """Only a developer makes engines move them."""
    said = given({"role": "user", "content": "u"}, {"role": "system", "content": "S"})
    assert [message["role"] for message in said] == ["user", "system"]


def test_what_no_template_is_given() -> None:
    """Unknown keys never reach a template; neither does the line that says what a call is billed as."""
    said = given(
        {"role": "system", "content": "x-anthropic-billing-header: v=1", "cache_control": {}},
        {"role": "system", "content": "x-anthropic-billing-header: v=1\nYou mend."},
        {"role": "user", "name": "ann", "content": "u", "id": 3},
    )
    assert said == [
        {"role": "system", "content": ""},
        {"role": "system", "content": "You mend."},
        {"role": "user", "content": "u", "name": "ann"},
    ]


@pytest.mark.parametrize(
    "message",
    [
        "text",
        {"content": "x"},
        {"role": "user", "content": 3},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
        {"role": "user", "content": [3]},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "custom", "custom": {}}]},
    ],
)
def test_refused(message: Any) -> None:
    """What is no text has no rendering that could be compared."""
    with pytest.raises(UnrenderableMessageError):
        template_messages([message], parts=False, developer=False)


def test_tools_in_the_engine_s_order() -> None:
    """Templates write tools as JSON, key by key."""
    function = {"parameters": {"type": "object"}, "name": "bash", "strict": True, "extra": 1}
    assert template_tools([{"function": function, "cache_control": {}}]) == [
        {
            "type": "function",
            "function": {"name": "bash", "description": None, "parameters": {"type": "object"}, "strict": True},
        }
    ]
    assert list((template_tools([{"function": function}]) or [])[0]["function"]) == [
        *("name", "description", "parameters", "strict"),
    ]
    assert template_tools([]) is None
    assert template_tools(None) is None
    with pytest.raises(UnrenderableMessageError):
        template_tools([{"type": "web_search"}])


@pytest.mark.parametrize(
    ("settings", "variables"),
    [
        ({}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final_message": True, "documents": [1]}, {"continue_final_message": True, "documents": [1]}),
    ],
)
def test_variables(settings: Json, variables: Json) -> None:
    """A template that is told something else than by the engine renders another prompt."""
    given = template_variables(settings)
    assert given == {"add_generation_prompt": True, "continue_final_message": False, **variables}
