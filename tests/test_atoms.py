"""From a message or item of any dialect to its canonical atoms: every row of the table, every transport key."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.atoms import EMPTY, environment_atoms, read_item, strip_transport
from gristmill.canonical import MAX_ITEM_CHARS, JsonNumber, RepeatedKeys, loads
from gristmill.errors import Code, SelectionError
from gristmill.records import Atom
from gristmill.tool_calls import argument_atom
from tests.strategies.json_values import any_json

Json = dict[str, Any]


def assistant(**fields: Any) -> Json:
    return {"role": "assistant", **fields}


def call(arguments: Any, **fields: Any) -> Json:
    return {"type": "function_call", "call_id": "t", "name": "f", "arguments": arguments, **fields}


def atoms(item: Any) -> tuple[Atom, ...]:
    return read_item(item).atoms


def text(words: str) -> Atom:
    return Atom("text", words)


# ---- messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "item",
    [
        assistant(content="hi"),
        assistant(content="hi", id="m", status="completed", type="message"),
        assistant(content="hi", name="bob", tool_calls=None, function_call=None),
        assistant(content=[{"type": "output_text", "text": "hi"}]),
        assistant(content=[{"type": "text", "text": "h"}, {"type": "input_text", "text": "i"}]),
        assistant(content=[{"type": "text", "text": None}, {"type": "text", "text": "hi"}], tool_calls=[]),
        assistant(content=({"type": "text", "text": "hi"},), audio=None),
    ],
)
def test_one_text_in_every_form(item: Json) -> None:
    # The same words in another wrapping must be the same reply.
    assert atoms(item) == (text("hi"),)


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}], [{"type": "text"}]])
def test_nothing_visible_is_empty(content: Any) -> None:
    # An empty reply is one thing, however it is written.
    assert atoms(assistant(content=content)) == (EMPTY,)
    assert atoms(assistant(content=content, name="x")) == (EMPTY,)


def test_the_order_inside_a_message() -> None:
    # Reasoning, then text and refusals in order, then calls: as one Responses reply would say it.
    item = assistant(
        reasoning_content="hm",
        content=[
            {"type": "text", "text": "a"},
            {"type": "refusal", "refusal": "no"},
            {"type": "thinking", "thinking": "!"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "redacted_thinking", "data": ""},
            {"type": "tool_use", "id": "u", "name": "g", "input": {"b": 1}},
            {"type": "text", "text": "b"},
            {"type": "image", "source": {"id": "keep"}, "id": "drop", "cache_control": {}, "alt": None},
        ],
        refusal="never",
        audio={"id": "a1"},
        tool_calls=[{"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        function_call={"name": "old", "arguments": "1"},
    )
    assert atoms(item) == (
        Atom("reasoning", "hm!"),
        Atom("reasoning_payload", "x"),
        text("a"),
        Atom("refusal", "no"),
        text("b"),
        Atom("other", '{"source":{"id":"keep"},"type":"image"}'),
        Atom("refusal", "never"),
        Atom("other", '{"audio":{"id":"a1"},"type":"audio"}'),
        Atom("tool_call", '{"b":1}', "json", "function", "g", "u"),
        Atom("tool_call", "{}", "json", "function", "f", "t"),
        Atom("tool_call", "1", "json", "function", "old", ""),
    )


def test_reasoning_fields_are_one_text() -> None:
    # Some engines fill both names; two different texts cannot both be what was sampled.
    assert atoms(assistant(content="a", reasoning="hm"))[0] == Atom("reasoning", "hm")
    assert atoms(assistant(content="a", reasoning="hm", reasoning_content="hm"))[0] == Atom("reasoning", "hm")
    assert atoms(assistant(content="a", reasoning="", reasoning_content=None)) == (text("a"),)
    with pytest.raises(SelectionError, match="two texts"):
        read_item(assistant(content="a", reasoning="hm", reasoning_content="ha"))


def test_ids_of_messages() -> None:
    # The tool-call id of a message that is one call is what restarted ids are recognised by.
    one = assistant(content=None, tool_calls=[{"id": "t", "function": {"name": "f"}}], id="m")
    assert (read_item(one).id, read_item(one).tool_call_id) == ("m", "t")
    assert read_item(assistant(content="a", tool_calls=one["tool_calls"])).tool_call_id is None
    assert read_item(assistant(content="a", id="")).id is None


# ---- tool calls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [None, "", "null", "{}", " { } ", {}, " null "])
def test_no_arguments_are_one_value(arguments: Any) -> None:
    # Engines and harnesses write a call without arguments in five ways.
    assert atoms(call(arguments)) == (Atom("tool_call", "{}", "json", "function", "f", "t"),)


@pytest.mark.parametrize("arguments", [0, False, [], "0", "false", "[]", '""', '"null"', " ", "nul"])
def test_other_false_values_are_arguments(arguments: Any) -> None:
    # What Python calls false is not what JSON calls nothing.
    assert atoms(call(arguments))[0].text != "{}"


def test_a_string_of_json_equals_the_value() -> None:
    # Anthropic gives objects where Chat gives strings.
    assert argument_atom({"a": 1.0}, name="f", call_id="t") == argument_atom('{"a":1}', name="f", call_id="t")
    assert argument_atom("{", name="f", call_id="t").form == "text"


def test_namespaces_are_joined() -> None:
    # Two tools of the same name in two namespaces are two tools.
    assert atoms(call("", namespace="ns"))[0].name == "ns__f"
    assert atoms(call("", namespace=None))[0].name == "f"


@pytest.mark.parametrize(
    ("item", "atom"),
    [
        ({"type": "custom_tool_call", "name": "c", "input": "x"}, Atom("tool_call", "x", "text", "custom", "c", "t")),
        ({"type": "custom_tool_call", "name": "c"}, Atom("tool_call", "", "text", "custom", "c", "t")),
        (
            {"type": "custom_tool_call", "name": "c", "input": {"id": 1}},
            Atom("tool_call", '{"id":1}', "json", "custom", "c", "t"),
        ),
        (
            {"type": "local_shell_call", "action": {"command": ["ls"]}},
            Atom("tool_call", '{"command":["ls"]}', "json", "local_shell", "local_shell", "t"),
        ),
        (
            {"type": "shell_call", "action": {"commands": []}},
            Atom("tool_call", '{"commands":[]}', "json", "shell", "shell", "t"),
        ),
        (
            {"type": "apply_patch_call", "operation": None, "input": "*** Begin"},
            Atom("tool_call", "*** Begin", "text", "apply_patch", "apply_patch", "t"),
        ),
        (
            {"type": "computer_call", "actions": None, "action": {"x": 1}},
            Atom("tool_call", '{"x":1}', "json", "computer", "computer", "t"),
        ),
    ],
)
def test_free_form_calls(item: Json, atom: Atom) -> None:
    # A patch that looks like JSON is still a patch, and a shell call is no function.
    read = read_item({**item, "call_id": "t", "id": "i", "status": "completed"})
    assert (read.atoms, read.id, read.tool_call_id, read.authored) == ((atom,), "i", "t", True)


def test_chat_custom_calls() -> None:
    # The Chat form of a custom call equals the Responses form.
    chat = assistant(tool_calls=[{"id": "t", "type": "custom", "custom": {"name": "c", "input": "x"}}])
    assert atoms(chat) == atoms({"type": "custom_tool_call", "call_id": "t", "name": "c", "input": "x"})


@pytest.mark.parametrize(
    ("item", "atom"),
    [
        ({"content": [{"text": "a"}, {"text": "b"}], "summary": [{"text": "no"}]}, Atom("reasoning", "ab")),
        ({"content": [], "summary": [{"text": "s"}], "encrypted_content": "x"}, Atom("reasoning", "s")),
        ({"content": None, "summary": [], "encrypted_content": "x"}, Atom("reasoning_payload", "x")),
        ({"content": [{"text": ""}]}, EMPTY),
    ],
)
def test_reasoning_items(item: Json, atom: Atom) -> None:
    # Content, else summary, else opaque bytes, else nothing.
    assert atoms({"type": "reasoning", **item}) == (atom,)


# ---- environment -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "result"),
    [
        ({"role": "user", "content": "hi"}, False),
        ({"role": "system", "content": None}, False),
        ({"role": "developer", "type": "message"}, False),
        ({"role": "tool", "tool_call_id": "t", "content": "x"}, True),
        ({"role": "function", "name": "f", "content": "x"}, True),
        ({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}, True),
        ({"role": "user", "content": [{"type": "tool_result"}, {"type": "text", "text": "x"}]}, False),
        ({"role": "user", "content": []}, False),
        ({"type": "function_call_output", "call_id": "t"}, True),
        ({"type": "function_call_output", "id": "o"}, True),
        ({"type": "shell_call_output", "role": "assistant"}, True),
        ({"type": "hologram_output"}, True),
        *(({"type": kind}, False) for kind in ("compaction", "compaction_summary", "context_management")),
    ],
)
def test_environment_items(item: Json, result: bool) -> None:
    # A tool result does not cut a reply in two; a user turn does.
    read = read_item(item)
    assert (read.authored, read.tool_result, read.atoms) == (False, result, ())


SERVER = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "tool_search_call",
)


@pytest.mark.parametrize(
    "item",
    [
        *({"type": kind, "id": "i"} for kind in SERVER),
        {"type": "hologram", "id": "i", "role": "assistant"},
        {"role": "judge", "content": "x", "id": "i"},
        assistant(content=[{"type": "hologram", "id": "i"}]),
        assistant(content=[{"type": "server_tool_use", "id": "i"}]),
        assistant(tool_calls=[{"id": "i", "type": "hologram"}]),
    ],
)
def test_unknown_never_means_ignore(item: Json) -> None:
    # A new item type of an API would silently leave its tokens in somebody else's reply.
    with pytest.raises(SelectionError) as caught:
        read_item(item, "$.at")
    assert caught.value.code is Code.ITEM_TYPE_UNSUPPORTED
    assert caught.value.where.startswith("$.at")
    assert "i" in caught.value.message
    assert ("executed by a server" in caught.value.message) is (item.get("type") in SERVER)


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("item", "where"),
    [
        (None, "$"),
        ([], "$"),
        ("x", "$"),
        (7, "$"),
        (RepeatedKeys([("role", "user"), ("role", "user")]), "$"),
        ({}, "$.role"),
        ({"role": None}, "$.role"),
        ({"role": deep(5_000)}, "$.role"),
        ({"role": 10**5_000}, "$.role"),
        ({"type": 7}, "$.type"),
        ({"type": ["message"]}, "$.type"),
        ({"type": deep(5_000)}, "$.type"),
        (assistant(content=7), "$.content"),
        (assistant(content={}), "$.content"),
        (assistant(content=True), "$.content"),
        (assistant(content="x", id=7), "$.id"),
        ({"role": "user", "id": []}, "$.id"),
        ({"type": "function_call_output", "id": 1}, "$.id"),
        (assistant(content=["x"]), "$.content[0]"),
        (assistant(content=[{"type": "text", "text": 7}]), "$.content[0].text"),
        (assistant(content=[{"type": "text", "text": 7}, {}]), "$.content[0].text"),
        (assistant(content=[{"type": 7}]), "$.content[0].type"),
        (assistant(content=[{}]), "$.content[0].type"),
        (assistant(content=[{"type": "refusal", "refusal": []}]), "$.content[0].refusal"),
        (assistant(content=[{"type": "thinking", "thinking": {}}]), "$.content[0].thinking"),
        (assistant(content=[{"type": "redacted_thinking", "data": 1}]), "$.content[0].data"),
        (assistant(refusal=1), "$.refusal"),
        (assistant(reasoning=JsonNumber("1.0")), "$.reasoning"),
        (assistant(reasoning_content=1), "$.reasoning_content"),
        (assistant(tool_calls={}), "$.tool_calls"),
        (assistant(tool_calls=[1]), "$.tool_calls[0]"),
        (assistant(tool_calls=[{"type": 1}]), "$.tool_calls[0].type"),
        (assistant(tool_calls=[{}]), "$.tool_calls[0].function"),
        (assistant(tool_calls=[{"function": {}}]), "$.tool_calls[0].function.name"),
        (assistant(tool_calls=[{"id": 1, "function": {"name": "f"}}]), "$.tool_calls[0].function.call_id"),
        (assistant(tool_calls=[{"type": "custom"}]), "$.tool_calls[0].custom"),
        (assistant(function_call=1), "$.function_call"),
        (assistant(audio=float("nan"), content=None), "$.audio"),
        (call("", name=None), "$.name"),
        (call("", namespace=1), "$.namespace"),
        (call(float("nan")), "$"),
        (call("", call_id=1), "$.call_id"),
        ({"type": "custom_tool_call", "call_id": "t", "name": 1}, "$.name"),
        ({"type": "reasoning", "content": "x"}, "$.content"),
        ({"type": "reasoning", "content": [1]}, "$.content[0]"),
        ({"type": "reasoning", "summary": [{"text": 1}]}, "$.summary[0].text"),
        ({"type": "reasoning", "encrypted_content": 1}, "$.encrypted_content"),
    ],
    ids=[str(number) for number in range(47)],
)
def test_wrong_types_are_refused_with_their_path(item: Any, where: str) -> None:
    # A refusal must lead to the place in the result, and never be a Python error.
    with pytest.raises(SelectionError) as caught:
        read_item(item)
    assert (caught.value.code, caught.value.where) == (Code.OUTPUT_MALFORMED, where)


@pytest.mark.parametrize(
    "item",
    [
        assistant(content="x" * (MAX_ITEM_CHARS + 1)),
        assistant(content=[{"type": "text", "text": "x" * (MAX_ITEM_CHARS + 1)}]),
        call('"' + "x" * MAX_ITEM_CHARS + '"'),
    ],
    ids=["text", "part", "arguments"],
)
def test_size_limit(item: Json) -> None:
    # A text of any size must be refused in time, not exhaust the machine.
    with pytest.raises(SelectionError) as caught:
        read_item(item)
    assert caught.value.code is Code.ITEM_TOO_LARGE


@pytest.mark.parametrize("arguments", ["[" * 200 + "]" * 200, deep(200)])
def test_depth_limit(arguments: Any) -> None:
    # Arguments nested very deep must be refused, not crash.
    with pytest.raises(SelectionError) as caught:
        read_item(call(arguments))
    assert caught.value.code is Code.ITEM_TOO_DEEP


def test_mappings_of_other_kinds_are_read() -> None:
    # A harness in Python may hand over read-only mappings.
    assert atoms(MappingProxyType(assistant(content="hi"))) == (text("hi"),)


def test_transport_keys_of_a_part_only() -> None:
    # What only transports goes on the part itself and stays inside its payload.
    part = {"id": "i", "status": "s", "index": 1, "logprobs": [], "x": {"id": "j", "n": None}, "n": None}
    assert strip_transport(part) == {"x": {"id": "j", "n": None}}


# ---- environment atoms, for lineage ------------------------------------------------------------------------


def test_a_tool_result_is_one_thing_in_every_dialect() -> None:
    # A parent is found across dialects only if results are equal across them.
    forms = [
        {"type": "function_call_output", "call_id": "t", "output": "x"},
        {"role": "tool", "tool_call_id": "t", "content": [{"type": "text", "text": "x"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]},
    ]
    assert {environment_atoms(form) for form in forms} == {(Atom("tool_result", "x", "text", call_id="t"),)}
    assert environment_atoms({"role": "tool", "tool_call_id": "t"}) == (Atom("tool_result", "", "text", call_id="t"),)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"role": "user", "content": "hi"}, (text("hi"),)),
        ({"role": "user", "content": ""}, ()),
        ({"role": "user"}, ()),
        ({"role": "user", "content": ["a", {"type": "text", "text": "b"}, {"type": "text"}]}, (text("ab"),)),
        (
            {"role": "user", "content": [{"type": "image", "id": "i", "url": "u"}, "a"]},
            (Atom("other", '{"type":"image","url":"u"}'), text("a")),
        ),
        ({"role": "user", "content": {"k": 1}}, (Atom("other", '{"k":1}'),)),
        ({"type": "compaction", "id": "i", "summary": "s"}, (Atom("other", '{"summary":"s","type":"compaction"}'),)),
        (
            {"type": "computer_call_output", "call_id": "t", "output": {"image": "x"}},
            (Atom("tool_result", '[["other","{\\"image\\":\\"x\\"}"]]', "json", call_id="t"),),
        ),
    ],
)
def test_environment_atoms(item: Json, expected: tuple[Atom, ...]) -> None:
    # A changed earlier turn must have no parent; an equal one must have it.
    assert environment_atoms(item) == expected


@pytest.mark.parametrize("item", [7, {"role": "user", "content": [7]}, {"role": "tool", "tool_call_id": 7}])
def test_malformed_environment(item: Any) -> None:
    # A request that cannot be read is a refusal.
    with pytest.raises(SelectionError) as caught:
        environment_atoms(item)
    assert caught.value.code is Code.OUTPUT_MALFORMED


TYPES = st.sampled_from(
    ["message", "reasoning", "function_call", "custom_tool_call", "shell_call", "x_output", "compaction", "mcp_call"]
)
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "type": TYPES | any_json(),
        "role": st.sampled_from(["assistant", "user", "tool"]) | any_json(),
        **{
            key: any_json()
            for key in ("content", "id", "tool_calls", "refusal", "reasoning", "audio", "arguments", "name", "call_id")
        },
    },
)


@settings(max_examples=500, derandomize=True, deadline=None)
@given(ITEMS | any_json())
def test_fuzz_items(item: Any) -> None:
    # Any JSON gives an item or a coded refusal.
    for read in (read_item, environment_atoms):
        code = None
        try:
            read(item)
        except SelectionError as error:
            code = error.code
        assert code in READING_CODES


READING_CODES = {None, Code.OUTPUT_MALFORMED, Code.ITEM_TYPE_UNSUPPORTED, Code.ITEM_TOO_DEEP, Code.ITEM_TOO_LARGE}


def test_numbers_of_a_file_are_compared_exactly() -> None:
    # Inputs read from a capture file keep the text of their numbers.
    item = loads('{"type":"function_call","call_id":"t","name":"f","arguments":{"a":9007199254740993.0}}')
    assert atoms(item)[0].text == '{"a":9007199254740993}'
