"""Items of a history as the messages that the model is shown."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.errors import Code
from gristmill.gateway.front import RequestRefused
from tests.gateway.dialects.responses.exchange import messages_of, translated

DATA = "data:image/png;base64,AAAA"
USER = {"role": "user", "content": "hi"}


def thought(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}], **fields}


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **fields}


def called(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": '{"a":1.0}', **fields}


def result(call_id: str, output: Any = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def tool_call(call_id: str, name: str = "f", arguments: str = '{"a":1.0}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(call_id: str, content: Any = "ok") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def assistant(content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def refusal_of(item: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        translated({"model": "m", "input": [item]})
    return caught.value


# A turn that falls apart into several messages is rendered as several turns, and no prefix of its tokens survives.
def test_the_items_of_one_turn_are_one_message() -> None:
    messages = messages_of([USER, thought("a"), said("b"), called("1"), called("2"), result("1"), result("2"), USER])
    assert messages == [
        USER,
        assistant("b", reasoning="a", tool_calls=[tool_call("1"), tool_call("2")]),
        tool("1"),
        tool("2"),
        USER,
    ]


# Thoughts without a text, a text without thoughts, and calls alone are turns as well.
@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([thought("a")], assistant("", reasoning="a")),
        ([said("")], assistant("")),
        ([called("1")], assistant(None, tool_calls=[tool_call("1")])),
        ([thought("a"), called("1")], assistant(None, reasoning="a", tool_calls=[tool_call("1")])),
        ([thought("a"), thought("b"), said("c")], assistant("c", reasoning="ab")),
        ([called("1"), said("b")], assistant("b", tool_calls=[tool_call("1")])),
        ([{"role": "assistant", "content": "b"}], assistant("b")),
        ([{"role": "assistant", "content": None}], assistant("")),
    ],
)
def test_a_turn_may_lack_parts(items: list[Any], expected: dict[str, Any]) -> None:
    assert messages_of([USER, *items, USER]) == [USER, expected, USER]


# Two answers in a row, as a harness keeps them after a cut, are two turns; run together they are a text nobody said.
def test_two_answers_in_a_row_stay_apart() -> None:
    first, second = assistant("a"), assistant("c", reasoning="b")
    assert messages_of([said("a"), thought("b"), said("c")]) == [first, second]
    assert messages_of([said(""), said("c")]) == [assistant(""), assistant("c")]


# Ids that this gateway made tell which items were one reply, whatever their order.
def test_ids_tell_which_items_are_one_turn() -> None:
    one = [said("a", id="msg_aa1_0"), thought("b", id="rs_aa1_1"), said("c", id="msg_aa1_2")]
    assert messages_of(one) == [assistant("ac", reasoning="b")]
    two = [thought("a", id="rs_aa1_0"), thought("b", id="rs_bb2_0"), said("c", id="msg_bb2_1")]
    assert messages_of(two) == [assistant("", reasoning="a"), assistant("c", reasoning="b")]
    calls = [called("1", id="fc_aa1_0"), called("2", id="fc_bb2_0")]
    assert messages_of(calls) == [
        assistant(None, tool_calls=[tool_call("1")]),
        assistant(None, tool_calls=[tool_call("2")]),
    ]


# Several system texts at the start, where templates know one place for them, would be lost or refused.
def test_system_texts_at_the_start_are_one_message() -> None:
    parts = [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]
    items = [{"role": "developer", "content": parts}, {"role": "system", "content": "d"}, {"role": "system"}, USER]
    assert messages_of(items, instructions="a") == [{"role": "system", "content": "a\n\nb\nc\n\nd"}, USER]


# A later system text belongs where it was said.
def test_a_later_system_text_stays_in_its_place() -> None:
    items = [USER, said("a"), {"role": "developer", "content": "b"}, USER]
    assert messages_of(items) == [USER, assistant("a"), {"role": "system", "content": "b"}, USER]
    assert messages_of([said("a"), {"role": "system", "content": "b"}]) == [
        assistant("a"),
        {"role": "system", "content": "b"},
    ]


# A summary stands for thoughts that were not given; the thoughts themselves come first.
def test_thoughts_come_from_the_content_or_the_summary() -> None:
    summary = [{"type": "summary_text", "text": "s"}]
    assert messages_of([thought("a", summary=summary)]) == [assistant("", reasoning="a")]
    assert messages_of([{"type": "reasoning", "summary": summary}]) == [assistant("", reasoning="s")]


# Encrypted thoughts cannot be read by the engine, which would refuse the whole request.
def test_encrypted_thoughts_alone_are_left_out_with_a_note() -> None:
    made = translated({"model": "m", "input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, USER]})
    assert made.body["messages"] == [USER]
    assert made.notes == ("removed:reasoning.encrypted_content",)
    assert messages_of([{"type": "reasoning", "summary": []}, USER]) == [USER]
    assert translated({"model": "m", "input": [thought("a", encrypted_content="x"), USER]}).notes == ()


# A picture that a tool made, or a user sent, must reach the model.
def test_parts_of_content() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": DATA, "detail": "low"},
        {"type": "input_image", "image_url": DATA},
        {"type": "input_file", "filename": "f", "file_data": DATA},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ]
    expected = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": DATA}},
        {"type": "file", "file": {"filename": "f", "file_data": DATA}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ]
    assert messages_of([{"role": "user", "content": parts}, called("1"), result("1", parts)]) == [
        {"role": "user", "content": expected},
        assistant(None, tool_calls=[tool_call("1")]),
        tool("1", expected),
    ]
    assert messages_of([{"role": "user", "content": parts[:1]}]) == [{"role": "user", "content": "a"}]
    assert messages_of([{"role": "user", "content": []}, result("1", None)]) == [
        {"role": "user", "content": ""},
        tool("1", ""),
    ]


# A refusal that comes back as text would be an answer of the model's.
def test_a_refusal_comes_back_as_one() -> None:
    content = [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert messages_of([{"role": "assistant", "content": content}]) == [
        assistant([{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}])
    ]


# Calls of other kinds, in histories from here or elsewhere, must be shown as what the model can call.
@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"type": "function_call", "call_id": "1", "name": "s", "namespace": "n", "arguments": ""}, ("n__s", "")),
        (
            {"type": "custom_tool_call", "call_id": "1", "name": "p", "input": 'a"é\n'},
            ("p", '{"input": "a\\"é\\n"}'),
        ),
        (
            {
                "type": "local_shell_call",
                "call_id": "1",
                "action": {"type": "exec", "command": ["ls"], "env": {}, "user": "u"},
            },
            ("local_shell", '{"command": ["ls"], "user": "u"}'),
        ),
        (
            {"type": "shell_call", "call_id": "1", "action": {"commands": ["ls"], "timeout_ms": None}},
            ("shell", '{"commands": ["ls"]}'),
        ),
        (
            {"type": "apply_patch_call", "call_id": "1", "operation": {"type": "delete_file", "path": "a"}},
            ("apply_patch", '{"type": "delete_file", "path": "a"}'),
        ),
        ({"type": "apply_patch_call", "call_id": "1", "input": "***"}, ("apply_patch", "***")),
        (
            {"type": "computer_call", "call_id": "1", "action": {"type": "click", "x": 1}},
            ("computer", '{"type": "click", "x": 1}'),
        ),
        (
            {"type": "computer_call", "call_id": "1", "actions": [{"type": "click"}]},
            ("computer", '{"actions": [{"type": "click"}]}'),
        ),
    ],
)
def test_every_kind_of_call(item: dict[str, Any], expected: tuple[str, str]) -> None:
    assert messages_of([item]) == [assistant(None, tool_calls=[tool_call("1", *expected)])]


# Results of such calls belong to them.
@pytest.mark.parametrize(
    ("item", "content"),
    [
        ({"type": "custom_tool_call_output", "call_id": "1", "output": "a"}, "a"),
        ({"type": "local_shell_call_output", "id": "1", "output": '{"output":"a"}'}, '{"output":"a"}'),
        ({"type": "shell_call_output", "call_id": "1", "output": [{"stdout": "a"}]}, '[{"stdout": "a"}]'),
        (
            {"type": "apply_patch_call_output", "call_id": "1", "status": "failed", "output": "no"},
            '{"status": "failed", "output": "no"}',
        ),
        (
            {
                "type": "computer_call_output",
                "call_id": "1",
                "output": {"type": "computer_screenshot", "image_url": DATA},
            },
            [{"type": "image_url", "image_url": {"url": DATA}}],
        ),
    ],
)
def test_every_kind_of_result(item: dict[str, Any], content: Any) -> None:
    assert messages_of([item]) == [tool("1", content)]


# An item that is passed over is a gap in what the model is shown; one in a wrong form must be named.
@pytest.mark.parametrize(
    ("item", "code", "where"),
    [
        ({"type": "web_search_call", "id": "ws"}, Code.PARAMETER_REFUSED, "$.input[0]"),
        ({"type": "compaction", "encrypted_content": "x"}, Code.PARAMETER_REFUSED, "$.input[0]"),
        ({"type": "x" * 99}, Code.PARAMETER_REFUSED, "$.input[0]"),
        ({"role": "tool", "content": "a"}, Code.REQUEST_MALFORMED, "$.input[0].role"),
        ({"content": "a"}, Code.REQUEST_MALFORMED, "$.input[0].role"),
        ({"type": 1}, Code.REQUEST_MALFORMED, "$.input[0].type"),
        ({"role": "user", "content": 1}, Code.REQUEST_MALFORMED, "$.input[0].content"),
        ({"role": "user", "content": [1]}, Code.REQUEST_MALFORMED, "$.input[0].content[0]"),
        ({"role": "user", "content": [{"text": "a"}]}, Code.REQUEST_MALFORMED, "$.input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, Code.REQUEST_MALFORMED, "$.input[0].content[0].text"),
        ({"role": "user", "content": [{"type": "odd"}]}, Code.PARAMETER_REFUSED, "$.input[0].content[0]"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "https://a/b"}]},
            Code.PARAMETER_REFUSED,
            "$.input[0].content[0].image_url",
        ),
        (
            {"role": "user", "content": [{"type": "input_image", "file_id": "f"}]},
            Code.PARAMETER_REFUSED,
            "$.input[0].content[0].image_url",
        ),
        (
            {"role": "user", "content": [{"type": "input_file", "file_url": "https://a/b"}]},
            Code.PARAMETER_REFUSED,
            "$.input[0].content[0].file_data",
        ),
        (
            {"role": "system", "content": [{"type": "input_image", "image_url": DATA}]},
            Code.PARAMETER_REFUSED,
            "$.input[0].content[0]",
        ),
        (
            {"role": "assistant", "content": [{"type": "input_image", "image_url": DATA}]},
            Code.PARAMETER_REFUSED,
            "$.input[0].content[0]",
        ),
        ({"type": "function_call", "call_id": "1"}, Code.REQUEST_MALFORMED, "$.input[0].name"),
        (
            {"type": "function_call", "name": "f", "arguments": {"a": 1}},
            Code.REQUEST_MALFORMED,
            "$.input[0].arguments",
        ),
        ({"type": "function_call_output", "output": "a"}, Code.REQUEST_MALFORMED, "$.input[0].call_id"),
        ({"type": "local_shell_call", "call_id": "1"}, Code.REQUEST_MALFORMED, "$.input[0].action"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_its_place(item: Any, code: Code, where: str) -> None:
    error = refusal_of(item)
    assert (error.code, error.where) == (code, where)


# A number that a float would change must stay what the model wrote when a shell call comes back from the ledger.
def test_arguments_that_were_decoded_exactly_are_written_exactly() -> None:
    from gristmill.canonical import loads

    item = loads('{"type": "shell_call", "call_id": "1", "action": {"commands": ["a"], "timeout_ms": 1.50}}')
    [message] = messages_of([item])
    assert message["tool_calls"][0]["function"]["arguments"] == '{"commands":["a"],"timeout_ms":1.50}'
