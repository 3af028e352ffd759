from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gristmill.scripted import ScriptedEngine, script_from
from gristmill.scripted.asked import read_chat, read_completions
from gristmill.scripted.choice import choose
from gristmill.scripted.fitting import fitted
from tests.scripted.talk import BASH, CHAT, always, ask, chat

ASSISTANT = {"role": "assistant", "content": "a"}


def rule_for(when: dict[str, Any], body: dict[str, Any], attempt: int = 0, **headers: str) -> bool:
    """Whether a condition holds of a request."""
    script = script_from(
        {
            "tool_names": {"shell": ["exec_command", "bash"]},
            "rules": [{"name": "yes", "when": when, "reply": {}}, {"name": "no", "reply": {}}],
        }
    )
    asked = read_completions(body, headers) if "prompt" in body else read_chat(body, headers)
    return choose(script, asked, attempt).rule.name == "yes"


BODY: dict[str, Any] = {
    "model": "coder-7b",
    "messages": [
        {"role": "system", "content": "You are a miller."},
        {"role": "user", "content": [{"type": "text", "text": "Grind"}, {"type": "text", "text": "the corn"}]},
        ASSISTANT,
        {"role": "user", "content": "Finer"},
        {**ASSISTANT, "content": None, "tool_calls": []},
        {"role": "tool", "content": "flour"},
    ],
    "tools": [BASH],
}

HOLDS: list[dict[str, Any]] = [
    {"turn": 2},
    {"turn": [1, 2]},
    {"step": 1},
    {"try": 0},
    {"user": "Finer"},
    {"user": ["coarser", "Fin"]},
    {"first_user": {"matches": "^Grind\nthe (corn|rye)$"}},
    {"tool": "flour"},
    {"last": "flour"},
    {"system": "miller"},
    {"any": "Grind"},
    {"model": "coder"},
    {"offers": "bash"},
    {"offers": ["shell", "*"]},
    {"offers": "@shell"},
    {"tools": True},
    {"structured": False},
    {"tool_choice": "auto"},
    {"route": "chat"},
    {"stream": False},
    {"header": {"X-Session": "s1"}},
    {"not": {"user": "Grind"}},
    {"not": {"not": {"turn": 2}}},
]


@pytest.mark.parametrize("when", HOLDS, ids=str)
def test_conditions_that_hold(when: dict[str, Any]) -> None:
    """A rule that is passed over answers with another rule's reply."""
    assert rule_for(when, BODY, **{"x-session": "s1"})
    assert not rule_for({"not": when}, BODY, **{"x-session": "s1"})


FAILS: list[dict[str, Any]] = [
    {"turn": 1},
    {"turn": [3, 9]},
    {"step": 2},
    {"try": 1},
    {"user": "Grind"},
    {"tool": "corn"},
    {"tools": False},
    {"offers": "zsh"},
    {"structured": True},
    {"tool_choice": "none"},
    {"route": "completions"},
    {"prompt": "x"},
    {"stream": True},
    {"header": {"x-session": "s1"}},
    {"user": "Finer", "model": "other"},
]


@pytest.mark.parametrize("when", FAILS, ids=str)
def test_conditions_that_do_not_hold(when: dict[str, Any]) -> None:
    """A rule that matches too much hides the rules after it."""
    assert not rule_for(when, BODY)


def test_structured_output_by_any_of_its_names() -> None:
    """Title calls ask for JSON in several ways."""
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    asked = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": schema}}},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": schema}},
        {"guided_json": schema},
    ]
    for more in asked:
        assert rule_for({"structured": True}, {**BODY, **more})
    with ScriptedEngine(always({"json": {"name|title": "Mend {{model}}"}})).serve() as url:
        said = ask(url, CHAT, chat(**asked[0])).json["choices"][0]["message"]["content"]
    assert json.loads(said) == {"title": "Mend scripted"}


def test_turns_tries_and_the_rule_after_them() -> None:
    """Several turns of a conversation, one of them failing at first, are the everyday script."""
    script = {
        "rules": [
            {"turns": [{"content": "one"}, [{"fault": {"kind": "status", "status": 500}}, {"content": "two"}]]},
            {"reply": {"content": "later {{turn}}"}},
        ]
    }
    with ScriptedEngine(script).serve() as url:
        messages = [{"role": "user", "content": "x"}]
        said: list[Any] = []
        for turn in (0, 1, 1, 1, 2, 3):
            answer = ask(url, CHAT, chat(messages=[*messages, *[ASSISTANT] * turn]))
            said.append(answer.json["choices"][0]["message"]["content"] if answer.status == 200 else answer.status)
    assert said == ["one", 500, "two", "two", "later 2", "later 3"]


def test_a_repeat_without_its_stream_is_a_repeat() -> None:
    """A harness repeats a cut stream as a body, with everything else unchanged."""
    with ScriptedEngine(always([{"content": "first"}, {"content": "second"}])).serve() as url:
        ask(url, CHAT, chat(stream=True), x_request_id="a")
        body = chat()
        assert ask(url, CHAT, body, x_request_id="b").json["choices"][0]["message"]["content"] == "second"


def test_sessions_that_ask_the_same() -> None:
    """Equal requests of two rollouts would take each other's tries."""
    replies = [{"content": "first"}, {"content": "second"}]
    with ScriptedEngine(always(replies, session_header="X-Session")).serve() as url:
        said = [ask(url, CHAT, chat(), x_session=name).json["choices"][0]["message"]["content"] for name in "abab"]
        ask(url, "/script/reset", {})
        again = ask(url, CHAT, chat(), x_session="a").json["choices"][0]["message"]["content"]
    assert said == ["first", "first", "second", "second"]
    assert again == "first"


def test_rollouts_at_once_get_what_each_gets_alone() -> None:
    """A load test whose replies depend on who came first proves nothing."""
    script = {
        "split": 0.2,
        "rules": [
            {
                "when": {"first_user": {"matches": "task (\\d+)"}},
                "turns": [
                    [{"fault": {"kind": "status", "status": 503}}, {"content": "start {{match.1}}"}],
                    {"content": "end of {{match.1}} after {{last}}"},
                ],
            }
        ],
    }

    def rollout(url: str, number: int) -> list[Any]:
        first = {"role": "user", "content": f"task {number}"}
        said = [ask(url, CHAT, chat(messages=[first])).status]
        said += [ask(url, CHAT, chat(messages=[first])).json["choices"][0]["token_ids"]]
        second = [first, ASSISTANT, {"role": "user", "content": "go on"}]
        return [*said, ask(url, CHAT, chat(messages=second)).json["choices"][0]["token_ids"]]

    with ScriptedEngine(script).serve() as url:
        alone = [rollout(url, number) for number in range(6)]
    with ScriptedEngine(script).serve() as url, ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda number: rollout(url, number), range(6)))
    assert together == alone
    assert alone[0][0] == 503


def test_no_rule() -> None:
    """A hole in a script is said, not filled."""
    with ScriptedEngine({"rules": [{"name": "never", "when": {"turn": 9}, "reply": {}}]}).serve() as url:
        said = ask(url, CHAT, chat())
        assert said.status == 400
        assert "no rule matches" in said.json["error"]["message"]
        assert ask(url, "/script").json["by_ending"] == {"refused": 1}


def test_choices_of_one_request() -> None:
    """Each choice may say something else."""
    with ScriptedEngine(always({"content": "number {{choice}}"})).serve() as url:
        said = ask(url, CHAT, chat(n=3)).json["choices"]
    assert [choice["message"]["content"] for choice in said] == ["number 0", "number 1", "number 2"]


# ---- arguments fitted to a tool --------------------------------------------------------------------------------------

FITTED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"command|cmd": "ls"}, {"properties": {"cmd": {"type": "string"}}}, {"cmd": "ls"}),
    ({"command|cmd": "ls", "why": "x"}, {"properties": {"cmd": {}}}, {"cmd": "ls"}),
    ({"command|cmd": "ls"}, {}, {"command": "ls"}),
    ({"c": "ls"}, {"properties": {"c": {"type": "array", "items": {"type": "string"}}}}, {"c": ["bash", "-lc", "ls"]}),
    ({"n": "3"}, {"properties": {"n": {"type": ["null", "integer"]}}}, {"n": 3}),
    ({"n": "x"}, {"properties": {"n": {"type": "integer"}}}, {"n": "x"}),
    ({"o": {"a|b": "1"}}, {"properties": {"o": {"properties": {"b": {"type": "number"}}}}}, {"o": {"b": 1}}),
    (
        {},
        {
            "properties": {
                "s": {"type": "string", "maxLength": 2},
                "i": {"type": "integer", "minimum": 5},
                "b": {"type": "boolean"},
                "e": {"enum": ["x", "y"]},
                "d": {"type": "string", "default": "d"},
                "k": {"const": 4},
                "a": {"type": "array"},
                "f": {"type": "array", "minItems": 1, "items": {"type": "number"}},
                "o": {"$ref": "#/$defs/o"},
                "u": {"anyOf": [{"type": "null"}, {"type": "string"}]},
                "z": {"type": "null"},
                "not": {"type": "string"},
            },
            "required": ["s", "i", "b", "e", "d", "k", "a", "f", "o", "u", "z"],
            "$defs": {"o": {"type": "object", "properties": {"p": {"type": "string"}}, "required": ["p"]}},
        },
        {"s": "te", "i": 5, "b": False, "e": "x", "d": "d", "k": 4, "a": [], "f": [1], "o": {"p": "text"}}
        | {"u": "text", "z": None},
    ),
    ({}, {"properties": {"r": {"$ref": "#"}}, "required": ["r"]}, {}),
]


@pytest.mark.parametrize(("values", "schema", "expected"), FITTED[:-1], ids=str)
def test_arguments_that_a_tool_takes(values: dict[str, Any], schema: dict[str, Any], expected: dict[str, Any]) -> None:
    """One script has to drive tools that call the same argument differently."""
    assert fitted(values, schema) == expected


def test_a_schema_that_contains_itself_ends() -> None:
    """A recursive schema must not hang the engine."""
    values, schema, _ = FITTED[-1]
    assert json.dumps(fitted(values, schema)).count("r") < 40


def test_a_tool_that_is_not_offered() -> None:
    """Several names are a choice among what is offered; one name may be called all the same, as models do."""
    none = always({"tool_calls": [{"name": ["Bash", "zsh"]}]})
    with ScriptedEngine(none).serve() as url:
        said = ask(url, CHAT, chat(tools=[BASH]))
        assert said.status == 400
        assert "got bash" in said.json["error"]["message"]
    with ScriptedEngine(always({"tool_calls": [{"name": "zsh"}]})).serve() as url:
        call = ask(url, CHAT, chat(tools=[BASH])).json["choices"][0]["message"]["tool_calls"][0]
        assert call["function"]["name"] == "zsh"
    with ScriptedEngine(always({"tool_calls": [{"name": "bash"}]})).serve() as url:
        spaced = {**BASH, "function": {**BASH["function"], "name": "functions__bash"}}
        call = ask(url, CHAT, chat(tools=[spaced])).json["choices"][0]["message"]["tool_calls"][0]
        assert call["function"] == {"name": "functions__bash", "arguments": '{"command": "text"}'}


def test_a_call_that_is_demanded() -> None:
    """A harness that demands a call gets one, whatever the script says."""
    other = {**BASH, "function": {**BASH["function"], "name": "edit"}}
    named = {"type": "function", "function": {"name": "edit"}}
    with ScriptedEngine(always({"tool_calls": [{"name": "bash"}, {"name": "edit"}]})).serve() as url:
        one = ask(url, CHAT, chat(tools=[BASH, other], tool_choice=named)).json["choices"][0]
        both = ask(url, CHAT, chat(tools=[BASH, other], tool_choice="required")).json["choices"][0]
        assert ask(url, CHAT, chat(tool_choice="required")).status == 400
        assert ask(url, CHAT, chat(tools=[BASH], tool_choice=named)).status == 400
        assert ask(url, CHAT, chat(tools=[BASH], tool_choice="some")).status == 400
    assert [call["function"]["name"] for call in one["message"]["tool_calls"]] == ["edit"]
    assert one["finish_reason"] == "stop"
    assert [call["function"]["name"] for call in both["message"]["tool_calls"]] == ["bash", "edit"]
    assert both["finish_reason"] == "tool_calls"
