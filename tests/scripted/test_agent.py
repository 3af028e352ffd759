from __future__ import annotations

import json
from typing import Any

import pytest

from gristmill.scripted import ScriptedEngine
from tests.scripted.talk import CHAT, ask, chat


def tool(name: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


TEXT = {"type": "string"}
HARNESSES: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "claude-code": (
        [tool("Agent", ("prompt",), prompt=TEXT), tool("Bash", ("command",), command=TEXT, description=TEXT)],
        "Bash",
        "command",
    ),
    "codex": (
        [
            tool("exec_command", ("cmd",), cmd=TEXT, yield_time_ms={"type": "number"}),
            tool("update_plan", ("plan",), plan={"type": "array", "items": TEXT}),
        ],
        "exec_command",
        "cmd",
    ),
    "opencode": (
        [
            tool("bash", ("command", "description"), command=TEXT, description=TEXT),
            tool("edit", ("path",), path=TEXT),
        ],
        "bash",
        "command",
    ),
    "old shell": (
        [tool("shell", ("command",), command={"type": "array", "items": TEXT})],
        "shell",
        "command",
    ),
    "a tool of its own": (
        [tool("get_weather", ("city", "days"), city=TEXT, days={"type": "integer"})],
        "get_weather",
        "city",
    ),
}


def drive(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Do what a harness does: run calls, hand back results, until there are none."""
    messages = list(body["messages"])
    said: list[dict[str, Any]] = []
    for _ in range(8):
        reply = ask(url, CHAT, {**body, "messages": messages}).json["choices"][0]["message"]
        said.append(reply)
        calls = reply.get("tool_calls") or []
        if not calls:
            return said
        messages.append({key: reply.get(key) for key in ("role", "content", "reasoning", "tool_calls")})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "out"} for call in calls]
    raise AssertionError("the agent does not end")


@pytest.mark.parametrize("name", HARNESSES)
def test_an_agent_for_any_harness(name: str) -> None:
    """A user tries a harness on it before there is a model, or a GPU."""
    tools, called, argument = HARNESSES[name]
    with ScriptedEngine("agent").serve() as url:
        said = drive(url, chat("Look around", model="anything", tools=tools))
    assert len(said) == 4
    assert said[-1]["content"]
    schema = next(one["function"]["parameters"] for one in tools if one["function"]["name"] == called)
    ids: set[str] = set()
    for message in said[:-1]:
        (call,) = message["tool_calls"]
        ids.add(call["id"])
        assert call["function"]["name"] == called
        arguments = json.loads(call["function"]["arguments"])
        assert argument in arguments
        assert set(schema["required"]) <= set(arguments) <= set(schema["properties"])
    assert len(ids) == 3


def test_a_harness_that_ends_by_a_command() -> None:
    """Some harnesses go on until a certain command was run."""
    mark = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    messages = [{"role": "system", "content": f"End with `echo {mark}`."}, {"role": "user", "content": "Go"}]
    with ScriptedEngine("agent").serve() as url:
        body = chat(messages=messages, tools=[tool("bash", ("command",), command=TEXT)])
        said = drive(url, body)
    assert mark in said[2]["tool_calls"][0]["function"]["arguments"]


def test_a_harness_that_ends_by_a_tool() -> None:
    """Others end when their last tool is called; its calls are demanded, and its results come as user messages."""
    tools = [tool("bash", ("command",), command=TEXT), tool("final_answer", ("answer",), answer=TEXT)]
    with ScriptedEngine("agent").serve() as url:
        body = chat("Go", tools=tools, tool_choice="required", stop=["Observation:", "Calling tools:"])
        first = ask(url, CHAT, body).json["choices"][0]["message"]
        messages = [*body["messages"], {"role": "assistant", "content": "called"}, {"role": "user", "content": "out"}]
        second = ask(url, CHAT, {**body, "messages": messages}).json["choices"][0]["message"]
    assert first["tool_calls"][0]["function"]["name"] == "bash"
    assert second["tool_calls"][0]["function"]["name"] == "final_answer"


@pytest.mark.parametrize(
    ("system", "first", "last"),
    [
        ("Put commands into ```mswea_bash_command fences.", "```mswea_bash_command\nls\n```", "COMPLETE_TASK"),
        ("Put code between <code> and </code>.", "<code>\nprint(", "final_answer("),
    ],
)
def test_protocols_in_text(system: str, first: str, last: str) -> None:
    """Harnesses without tools read commands out of the text."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Go"}]
    with ScriptedEngine("agent").serve() as url:
        said: list[str] = []
        while not said or last not in said[-1]:
            said.append(ask(url, CHAT, chat(messages=messages)).json["choices"][0]["message"]["content"])
            messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": "out"}]
            assert len(said) < 5
    assert first in said[0]


def test_calls_beside_the_work() -> None:
    """Title calls, calls without tools and calls that must not call a tool get an answer, too."""
    schema = {"type": "object", "properties": {"title": TEXT, "isNewTopic": {"type": "boolean"}}, "required": ["title"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "t", "schema": schema}}
    titles = [{"role": "system", "content": "You are a title generator."}, {"role": "user", "content": "Go"}]
    with ScriptedEngine("agent").serve() as url:
        structured = ask(url, CHAT, chat(response_format=wanted)).json["choices"][0]["message"]["content"]
        title = ask(url, CHAT, chat(messages=titles)).json["choices"][0]["message"]["content"]
        text = ask(url, CHAT, chat()).json["choices"][0]["message"]["content"]
        none = ask(url, CHAT, chat(tools=[tool("bash")], tool_choice="none")).json["choices"][0]["message"]
    assert json.loads(structured) == {"title": "Look around", "isNewTopic": True}
    assert title.strip() == "Look around"
    assert text.strip()
    assert "tool_calls" not in none
