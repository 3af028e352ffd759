"""The tools that a model is offered, and which of them it must call."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.errors import Code
from gristmill.gateway.front import RequestRefused
from tests.gateway.dialects.responses.exchange import translated

F = {"type": "function", "name": "f", "description": "Does f.", "parameters": {"type": "object"}, "strict": False}
G = {"type": "function", "name": "g", "parameters": None, "strict": True}
CHAT_F = {"type": "function", "function": {"name": "f", "description": "Does f.", "parameters": {"type": "object"}}}
CHAT_G = {
    "type": "function",
    "function": {"name": "g", "parameters": {"type": "object", "properties": {}}, "strict": True},
}


def made(**fields: Any) -> Any:
    return translated({"model": "m", "input": "hi", **fields})


def named(body: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in body.get("tools", ())]


# A tool that is described otherwise, or not at all, is called otherwise.
def test_functions_are_offered_as_they_are() -> None:
    body = made(tools=[F, G], tool_choice="auto", parallel_tool_calls=False).body
    assert body["tools"] == [CHAT_F, CHAT_G]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("auto", False)


# Tools of a namespace are called by one name, and what the namespace says about them would be lost.
def test_a_namespace_is_flattened() -> None:
    inner = [F, {"type": "custom", "name": "c"}, {"type": "namespace", "name": "deep", "tools": []}]
    offered = made(tools=[{"type": "namespace", "name": "n", "description": "About n.", "tools": inner}])
    assert named(offered.body) == ["n__f", "n__c"]
    assert offered.body["tools"][0]["function"]["description"] == "About n.\n\nDoes f."
    assert offered.body["tools"][1]["function"]["description"] == "About n."
    assert offered.notes == ("removed:tool.namespace",)


# A tool that takes free text needs one parameter for it, and the model needs to know its grammar.
def test_a_custom_tool_is_a_function_of_one_text() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    plain = made(tools=[{"type": "custom", "name": "c", "description": "Does c.", "format": {"type": "text"}}])
    [tool] = plain.body["tools"]
    assert tool["function"]["description"] == "Does c."
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }
    assert plain.notes == ()
    described = made(tools=[{"type": "custom", "name": "c", "format": grammar}])
    [tool] = described.body["tools"]
    assert 'start: "a"' in tool["function"]["parameters"]["properties"]["input"]["description"]
    assert described.notes == ("replaced:tool.c.format",)


# A tool that only a server runs would be called in vain; one that the client runs must stay.
def test_tools_of_servers_are_removed_with_a_note() -> None:
    hosted = [
        "web_search",
        "file_search",
        "code_interpreter",
        "image_generation",
        "mcp",
        "computer_use_preview",
        "odd,",
    ]
    offered = made(tools=[F, *({"type": kind} for kind in hosted)])
    assert offered.body["tools"] == [CHAT_F]
    assert offered.notes == tuple(f"removed:tool.{kind.replace(',', '_')}" for kind in hosted)
    local = [{"type": "local_shell"}, {"type": "shell", "environment": {"type": "local"}}, {"type": "apply_patch"}]
    assert named(made(tools=local).body) == ["local_shell", "shell", "apply_patch"]
    container = made(tools=[{"type": "shell", "environment": {"type": "container_auto"}}])
    assert (container.body.get("tools"), container.notes) == (None, ("removed:tool.shell",))


# An engine refuses a choice among no tools; without any left, nothing is said about them.
def test_without_tools_there_is_no_choice() -> None:
    body = made(tools=[{"type": "web_search"}], tool_choice="auto", parallel_tool_calls=True).body
    assert body.keys() == {"model", "messages"}
    assert made(tools=[], tool_choice="none").body.keys() == {"model", "messages"}


NAMESPACE = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h"}]}
TOOLS = [F, G, {"type": "custom", "name": "c"}, {"type": "shell"}, NAMESPACE]


# A choice that is lost or widened lets the model do what the harness excluded.
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, "f"),
        ({"type": "custom", "name": "c"}, "c"),
        ({"type": "shell"}, "shell"),
        ({"type": "function", "name": "h"}, "n__h"),
        ({"type": "function", "name": "h", "namespace": "n"}, "n__h"),
        ({"type": "function", "name": "n__h"}, "n__h"),
    ],
)
def test_the_choice_is_told_to_the_engine(choice: Any, expected: str) -> None:
    body = made(tools=TOOLS, tool_choice=choice).body
    said = expected if isinstance(choice, str) else {"type": "function", "function": {"name": expected}}
    assert body["tool_choice"] == said
    assert named(body) == ["f", "g", "c", "shell", "n__h"]


# A harness that allows some of its tools for one turn must get calls of those alone.
def test_allowed_tools_are_the_only_ones_offered() -> None:
    allowed = [{"type": "function", "name": "g"}, {"type": "shell"}, {"type": "mcp", "server_label": "s"}]
    offered = made(tools=TOOLS, tool_choice={"type": "allowed_tools", "mode": "required", "tools": allowed})
    assert (named(offered.body), offered.body["tool_choice"]) == (["g", "shell"], "required")
    assert offered.notes == ("replaced:tool_choice.allowed_tools", "removed:tool_choice.allowed_tools")
    auto = made(tools=TOOLS, tool_choice={"type": "allowed_tools", "tools": allowed[:1]})
    assert (named(auto.body), auto.body["tool_choice"]) == (["g"], "auto")


# A demand that cannot be met must not silently become a wish.
@pytest.mark.parametrize(
    ("fields", "code", "where"),
    [
        ({"tools": TOOLS, "tool_choice": "any"}, Code.REQUEST_MALFORMED, "$.tool_choice"),
        ({"tools": TOOLS, "tool_choice": 1}, Code.REQUEST_MALFORMED, "$.tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, Code.PARAMETER_REFUSED, "$.tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}},
            Code.PARAMETER_REFUSED,
            "$.tool_choice",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, Code.PARAMETER_REFUSED, "$.tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
            Code.PARAMETER_REFUSED,
            "$.tool_choice",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "some"}},
            Code.REQUEST_MALFORMED,
            "$.tool_choice.mode",
        ),
        ({"tools": {}}, Code.REQUEST_MALFORMED, "$.tools"),
        ({"tools": [1]}, Code.REQUEST_MALFORMED, "$.tools[0]"),
        ({"tools": [{"type": "function"}]}, Code.REQUEST_MALFORMED, "$.tools[0].name"),
        ({"tools": [{"type": "namespace", "tools": []}]}, Code.REQUEST_MALFORMED, "$.tools[0].name"),
        ({"tools": [F, F]}, Code.REQUEST_MALFORMED, "$.tools[1]"),
        (
            {"tools": [NAMESPACE, {"type": "function", "name": "n__h"}]},
            Code.REQUEST_MALFORMED,
            "$.tools[1]",
        ),
    ],
)
def test_what_cannot_be_demanded_is_refused(fields: dict[str, Any], code: Code, where: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        made(**fields)
    assert (caught.value.code, caught.value.where) == (code, where)
