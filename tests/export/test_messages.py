from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.captures import read_lines
from gristmill.errors import Code
from gristmill.export import FolderCheck, Manifest, Needs, loss_lines, open_export
from gristmill.export.messages import conversations
from gristmill.pipeline import run_rollout, select_rollout
from gristmill.reconstruction import RowMode
from gristmill.records import Attribution, CallCredit, Capture, Failure, Result
from gristmill.selection import Rejected, Selection, resolve_selection_policy
from tests.export.attempts import captured
from tests.export.folders import change_entry, entry_paths, findings

Json = dict[str, Any]

SYSTEM = {"role": "system", "content": "You mend."}
GO, MORE = {"role": "user", "content": "go"}, {"role": "user", "content": "more"}
TOOL = {"type": "function", "function": {"name": "run", "description": "d", "parameters": {"type": "object"}}}
ARGUMENTS = '{"cmd":  "ls é"}'


def said(text: str, **fields: Any) -> Json:
    return {"role": "assistant", "content": text, **fields}


def chat(call_id: str, messages: list[Json], *replies: Json, parent: str | None = None, **request: Any) -> Json:
    """An `exchange` line of a Chat call, a choice a reply."""
    choices = [{"index": at, "message": reply, "finish_reason": "stop"} for at, reply in enumerate(replies)]
    return {
        "kind": "exchange",
        "rollout_id": "r",
        "model_call_id": call_id,
        "parent_call_id": parent,
        "request": {
            "path": "/v1/chat/completions",
            "body": {"model": "m", "messages": messages, "tools": [TOOL], **request},
        },
        "status": 200,
        "body": {"id": f"resp-{call_id}", "model": "m", "choices": choices},
    }


def other(call_id: str, path: str, request: Json, body: Json, **fields: Any) -> Json:
    """An `exchange` line of another dialect."""
    line = {"kind": "exchange", "rollout_id": "r", "model_call_id": call_id, "status": 200, **fields}
    return {**line, "request": {"path": path, "body": {"model": "m", **request}}, "body": {"model": "m", **body}}


def responses(call_id: str, given: Any, output: list[Json], **request: Any) -> Json:
    body = {"id": f"resp-{call_id}", "status": "completed", "output": output}
    return other(call_id, "/v1/responses", {"input": given, **request}, body)


def anthropic(call_id: str, messages: list[Json], content: list[Json], **request: Any) -> Json:
    body = {"id": f"resp-{call_id}", "type": "message", "role": "assistant", "content": content}
    return other(call_id, "/v1/messages", {"messages": messages, **request}, {**body, "stop_reason": "end_turn"})


def capture_of(*lines: Json) -> Capture:
    [rollout] = read_lines(json.dumps(line).encode() for line in lines).rollouts.values()
    return rollout.capture


def selection_of(capture: Capture, calls: Sequence[str] | None = None) -> Selection:
    """Select calls: all, or those that are named."""
    named = tuple(record.model_call_id for record in capture.records) if calls is None else tuple(calls)
    return Selection(
        rollout_id=capture.rollout_id,
        attempt=capture.attempt,
        policy="returned_history",
        calls=named,
        terminal_call_id=named[-1],
        terminal_response_id=named[-1],
        verdicts=(),
    )


class Made(msgspec.Struct):
    """The records of an attempt and what was lost."""

    records: list[Json]
    losses: dict[str, int]

    @property
    def messages(self) -> list[Json]:
        [record] = self.records
        return record["messages"]


def make(*lines: Json, calls: Sequence[str] | None = None) -> Made:
    from collections import Counter

    capture = capture_of(*lines)
    losses = Counter[str]()
    made = conversations(capture, Result(reward=1.0, group_id="g"), selection_of(capture, calls), losses)
    assert not isinstance(made, Rejected), made.message
    told = {name: count for name, count in losses.items() if count and name not in ("tokens", "request_settings")}
    return Made([json.loads(record.line) for record in made], told)


def refusal(*lines: Json) -> Rejected:
    from collections import Counter

    capture = capture_of(*lines)
    losses = Counter[str]()
    made = conversations(capture, Result(), selection_of(capture), losses)
    assert isinstance(made, Rejected)
    assert not losses
    return made


def flags(messages: Sequence[Json]) -> list[Any]:
    return [message.get("train") for message in messages]


CALL = {"id": "t1", "type": "function", "function": {"name": "run", "arguments": ARGUMENTS}}
NAMED = {"role": "tool", "tool_call_id": "t1", "name": "run", "content": "a b"}
RESULT = {"role": "tool", "tool_call_id": "t1", "content": "a b"}
FIRST = said("I look.", reasoning_content="Hm.", tool_calls=[CALL])


# The three dialects


def test_a_chat_conversation() -> None:
    """Both turns are trained once, in one record; ids and arguments are exactly as sampled."""
    history = [SYSTEM, GO]
    made = make(
        chat("c1", history, {**FIRST, "content": "I look.", "refusal": None}),
        chat("c2", [*history, FIRST, RESULT], said("done"), parent="c1"),
    )
    assert made.messages == [SYSTEM, GO, {**FIRST, "train": 1}, RESULT, {**said("done"), "train": 1}]
    [record] = made.records
    assert json.loads(record["tools"]) == [TOOL]
    assert record["calls"] == ["c1", "c2"]
    assert (record["reward"], record["group_id"], record["advantage"], record["model"]) == (1.0, "g", None, "m")
    assert made.losses == {"tokens_unusable": 2}


def test_a_responses_conversation() -> None:
    """Items of one turn become one message, and the turn is found again in the next request."""
    reasoning = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    message = {
        "type": "message",
        "id": "m1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
    }
    call = {"type": "function_call", "id": "fc", "call_id": "t1", "name": "run", "arguments": ARGUMENTS}
    output = {"type": "function_call_output", "call_id": "t1", "output": "a b"}
    tools = [{"type": "function", **TOOL["function"]}, {"type": "web_search"}]
    begun = [{"role": "user", "content": [{"type": "input_text", "text": "go"}]}]
    made = make(
        responses("c1", begun, [reasoning, message, call], instructions="You mend.", tools=tools),
        responses("c2", [*begun, reasoning, message, call, output], [{**message, "content": [
            {"type": "output_text", "text": "done"}]}], instructions="You mend.", tools=tools),
    )  # fmt: skip
    assert made.messages == [SYSTEM, GO, {**FIRST, "train": 1}, RESULT, {**said("done"), "train": 1}]
    assert json.loads(made.records[0]["tools"]) == [TOOL]
    assert made.losses == {"tokens_unusable": 2, "tools_dropped": 1}


def test_a_messages_conversation() -> None:
    """Claude's blocks become the same messages; arguments that were served as a value are written as JSON."""
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t1", "name": "run", "input": {"cmd": "ls é", "n": 1.50, "deep": [True, None]}},
    ]
    answer = {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a b"}], "is_error": True},
        {"type": "text", "text": "more", "cache_control": {"type": "ephemeral"}},
    ]}  # fmt: skip
    fields = {
        "system": [{"type": "text", "text": "You mend."}],
        "tools": [{"name": "run", "description": "d", "input_schema": {"type": "object"}}, {"type": "bash_20250124"}],
    }
    made = make(
        anthropic("c1", [GO], blocks, **fields),
        anthropic(
            "c2", [GO, {"role": "assistant", "content": blocks}, answer], [{"type": "text", "text": "done"}], **fields
        ),
    )
    arguments = '{"cmd": "ls é", "n": 1.5, "deep": [true, null]}'
    call = {**CALL, "function": {"name": "run", "arguments": arguments}}
    first = {**FIRST, "tool_calls": [call], "train": 1}
    assert made.messages == [SYSTEM, GO, first, RESULT, MORE, {**said("done"), "train": 1}]
    assert json.loads(made.records[0]["tools"]) == [TOOL]
    lost = {"tokens_unusable": 2, "arguments_rewritten": 1, "error_flags": 1, "tools_dropped": 1}
    assert made.losses == lost


def test_numbers_and_repeated_keys_in_arguments_stay() -> None:
    """A number that no float holds must not be trained as another one."""
    from gristmill.canonical import loads
    from gristmill.export.chat_turn import json_text

    text = '{"a": 1e999, "b": 12345678901234567890.10, "a": "ü\\n", "c": [], "d": {}}'
    assert json_text(loads(text)) == text


def test_a_stream_is_read_like_a_body() -> None:
    """Agents stream: what the events say is what was served."""
    line = chat("c1", [GO], said("x"))
    chunks = [
        {"id": "resp-c1", "model": "m", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "do"}}]},
        {"id": "resp-c1", "choices": [{"index": 0, "delta": {"content": "ne"}, "finish_reason": "stop"}]},
    ]
    del line["body"]
    line["sse_raw"] = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    assert make(line).messages == [GO, {**said("done"), "train": 1}]


def test_a_body_that_was_kept_as_text() -> None:
    """Some recorders keep the body as it came."""
    capture = capture_of(chat("c1", [GO], said("done")))
    [exchange] = capture.exchanges.values()
    kept = msgspec.structs.replace(exchange, reply=json.dumps(exchange.reply), status=None)
    from collections import Counter

    made = conversations(
        msgspec.structs.replace(capture, exchanges={"c1": kept}), Result(), selection_of(capture), Counter()
    )
    assert not isinstance(made, Rejected)


@pytest.mark.parametrize(
    "line",
    [
        chat("c1", [GO], said("done")),
        responses("c1", "go", [{"type": "message", "role": "assistant", "content": "done"}]),
        anthropic("c1", [GO], [{"type": "text", "text": "done"}]),
    ],
)
def test_the_dialect_is_found_where_it_is_not_said(line: Json) -> None:
    """Lines of other systems often do not name it."""
    from collections import Counter

    capture = capture_of(line)
    from gristmill.records import Dialect

    records = tuple(msgspec.structs.replace(record, dialect=Dialect.UNKNOWN) for record in capture.records)
    made = conversations(msgspec.structs.replace(capture, records=records), Result(), selection_of(capture), Counter())
    assert not isinstance(made, Rejected)
    assert json.loads(made[0].line)["messages"] == [GO, {**said("done"), "train": 1}]


# Which calls share a conversation


def test_a_fork_begins_again_and_trains_once() -> None:
    """A call that two later calls continue is trained in the first of them only."""
    one = [GO, said("one")]
    made = make(
        chat("c1", [GO], said("one")),
        chat("c2", [*one, MORE], said("two"), parent="c1"),
        chat("c3", [*one, {"role": "user", "content": "else"}], said("three"), parent="c1"),
    )
    assert [flags(record["messages"]) for record in made.records] == [[None, 1, None, 1], [None, 0, None, 1]]
    assert [record["calls"] for record in made.records] == [["c1", "c2"], ["c3"]]
    assert [(record["record_index"], record["record_count"]) for record in made.records] == [(0, 2), (1, 2)]
    assert len({record["record_id"] for record in made.records}) == 2


def test_one_conversation_per_call(tmp_path: Path) -> None:
    """Templates that drop the reasoning of earlier turns need each turn as the last one."""
    lines = [chat("c1", [GO], FIRST), chat("c2", [GO, FIRST, RESULT], said("two"), parent="c1")]
    capture = capture_of(*lines)
    attempt = (capture, Result(), selection_of(capture))
    with open_export(
        "messages", tmp_path / "out", policy="returned_history", options={}, mode=RowMode.PER_CALL
    ) as held:
        held.add(*attempt)
        held.finish()
    records = [json.loads(line) for line in (tmp_path / "out" / "messages.jsonl").read_bytes().splitlines()]
    assert [record["calls"] for record in records] == [["c1"], ["c2"]]
    assert [flags(record["messages"]) for record in records] == [[None, 1], [None, 0, None, 1]]
    assert findings(tmp_path / "out", [attempt]) == []


@pytest.mark.parametrize(
    "later",
    [
        [GO, said("one", reasoning_content=None), MORE],
        [GO, said("One", reasoning_content="Hm."), MORE],
        [SYSTEM, GO, said("one", reasoning_content="Hm."), MORE],
    ],
    ids=["reasoning dropped", "text edited", "system added"],
)
def test_a_changed_history_begins_again(later: list[Json]) -> None:
    """What was sampled is trained as it was sampled, and each turn after what the model really saw."""
    made = make(chat("c1", [GO], said("one", reasoning_content="Hm.")), chat("c2", later, said("two"), parent="c1"))
    assert [record["calls"] for record in made.records] == [["c1"], ["c2"]]
    assert made.records[0]["messages"] == [GO, {**said("one", reasoning_content="Hm."), "train": 1}]
    assert flags(made.records[1]["messages"])[-1] == 1
    assert sum(flag == 1 for flag in flags(made.records[1]["messages"])) == 1


def test_other_tools_or_another_model_begin_again() -> None:
    """Tools and model are part of what a turn was sampled under."""
    later = [GO, said("one"), MORE]
    first = chat("c1", [GO], said("one"))
    assert len(make(first, chat("c2", later, said("two"), tools=[])).records) == 2
    second = chat("c2", later, said("two"))
    second["body"]["model"] = "n"
    assert len(make(first, second).records) == 2
    assert make(chat("c1", [GO], said("one"), tools=[])).records[0]["tools"] is None


def test_calls_that_were_not_selected_are_context() -> None:
    """Few-shot examples and replies of other models must not be trained."""
    made = make(
        chat("c1", [GO], said("one")),
        chat("c2", [GO, said("one"), MORE], said("two"), parent="c1"),
        calls=["c2"],
    )
    assert flags(made.messages) == [None, 0, None, 1]


def test_equal_replies_are_each_trained_once() -> None:
    """Of twins the recorded parent is continued, else the smallest id; the other stands alone."""
    twins = [chat("c1", [GO], said("one")), chat("c2", [GO], said("one"))]
    later = [GO, said("one"), MORE]
    made = make(*twins, chat("c3", later, said("two"), parent="c2"))
    assert [record["calls"] for record in made.records] == [["c1"], ["c2", "c3"]]
    made = make(*twins, chat("c3", later, said("two")))
    assert [record["calls"] for record in made.records] == [["c1", "c3"], ["c2"]]


def test_each_choice_is_a_call() -> None:
    """With n > 1 every choice was sampled."""
    made = make(chat("c1", [GO], said("one"), said("two")))
    assert [record["messages"][-1]["content"] for record in made.records] == ["one", "two"]


def test_a_call_that_said_nothing_is_left_out() -> None:
    """An empty turn teaches to say nothing; it is counted, and alone it is a refusal."""
    empty = chat("c1", [GO], said(""))
    made = make(empty, chat("c2", [GO], said("two")))
    assert [record["calls"] for record in made.records] == [["c2"]]
    assert made.losses["empty_replies"] == 1
    assert refusal(empty).code is Code.NOTHING_TO_TRAIN


def test_a_turn_that_was_cut_is_marked() -> None:
    """Half a sentence can be filtered out by whoever trains."""
    line = chat("c1", [GO], said("one"))
    line["body"]["choices"][0]["finish_reason"] = "length"
    assert make(line).records[0]["truncated"] is True


@st.composite
def trees(draw: st.DrawFn) -> list[Json]:
    """Calls of which each continues an earlier one, begins anew, or continues an edited history."""
    lines: list[Json] = []
    ends: list[list[Json]] = [[]]
    for number in range(draw(st.integers(1, 7))):
        history = [*draw(st.sampled_from(ends)), {"role": "user", "content": draw(st.sampled_from("uv"))}]
        if len(history) > 1 and draw(st.integers(0, 4)) == 0:
            at = draw(st.integers(0, len(history) - 1))
            history[at] = {**history[at], "content": "edited"}
        fields = draw(st.sampled_from([{}, {"reasoning_content": "Hm."}, {"tool_calls": [CALL]}]))
        reply = said(draw(st.sampled_from("ab")), **fields)
        lines.append(chat(f"c{number}", history, reply))
        ends.append([*history, reply])
    return lines


@settings(deadline=None)
@given(trees(), st.data())
def test_every_selected_call_is_trained_once_where_it_was_sampled(lines: list[Json], data: st.DataObject) -> None:
    """The promise of the format, whatever agents do: once, as sampled, after what the model saw."""
    names = [line["model_call_id"] for line in lines]
    calls = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True).map(sorted))
    by_id = {line["model_call_id"]: line for line in lines}
    made = make(*lines, calls=calls)
    trained: list[str] = []
    for record in made.records:
        messages = [{key: part for key, part in held.items() if key != "train"} for held in record["messages"]]
        places = [at for at, held in enumerate(record["messages"]) if held.get("train") == 1]
        assert len(places) == len(record["calls"])
        for at, call_id in zip(places, record["calls"], strict=True):
            line = by_id[call_id]
            assert messages[:at] == line["request"]["body"]["messages"]
            assert messages[at] == line["body"]["choices"][0]["message"]
            trained.append(call_id)
    assert sorted(trained) == calls


# What is lost


def test_lost_things_are_counted() -> None:
    """What a chat message has no place for is named, never silently dropped."""
    user = {
        "role": "user",
        "name": "ann",
        "content": [{"type": "text", "text": "g"}, "", {"type": "text", "text": "o"}],
    }
    reply = said("", content=None, refusal="No.", reasoning="Hm.")
    made = make(chat("c1", [{"role": "developer", "content": "x"}, user], reply))
    assert made.messages == [
        {"role": "developer", "content": "x"},
        {"role": "user", "name": "ann", "content": "go"},
        {**said("No.", reasoning_content="Hm."), "train": 1},
    ]
    assert made.losses == {"texts_joined": 1, "refusals": 1, "tokens_unusable": 1}
    parts = said("", content=[{"type": "thinking", "thinking": "Hm."}, {"type": "refusal", "refusal": "No."}])
    made = make(chat("c1", [GO], parts, tools=None, functions=[{"name": "f"}]))
    assert made.messages[-1] == {**said("No.", reasoning_content="Hm."), "train": 1}
    assert json.loads(made.records[0]["tools"]) == [{"type": "function", "function": {"name": "f"}}]


def test_fields_of_a_providers_own_are_counted() -> None:
    """What a provider adds to its messages is no part of a conversation, but it may have been rendered."""
    extra = {"provider_specific_fields": {"x": 1}, "annotations": [], "reasoning_details": []}
    made = make(chat("c1", [{**GO, **extra}, said("x"), {**NAMED, **extra}], said("done", **extra)))
    assert made.messages == [GO, {**said("x"), "train": 0}, NAMED, {**said("done"), "train": 1}]
    assert made.losses == {"fields_dropped": 3, "tokens_unusable": 1}


def test_reasoning_that_cannot_be_read_is_counted() -> None:
    """A summary is not what was sampled, and what is encrypted is not readable."""
    hidden = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}]}
    bare = {"type": "reasoning", "id": "r", "summary": []}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]}
    made = make(responses("c1", "go", [hidden, bare, message]))
    assert made.messages == [GO, {**said("done"), "train": 1}]
    assert made.losses["reasoning_hidden"] == 1
    redacted = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "done"}]
    history = [GO, {"role": "assistant", "content": "one"}, MORE]
    made = make(anthropic("c1", history, redacted))
    assert made.messages == [GO, {**said("one"), "train": 0}, MORE, {**said("done"), "train": 1}]
    assert made.losses["reasoning_hidden"] == 1


def test_parts_of_a_context_turn_keep_their_order() -> None:
    """Text after a tool call is a message of its own: nothing is moved."""
    blocks = [{"type": "tool_use", "id": "t1", "name": "run", "input": {}}, {"type": "text", "text": "after"}]
    result = {"role": "user", "content": [
        {"type": "text", "text": "first"}, {"type": "tool_result", "tool_use_id": "t1", "content": "a b"},
    ]}  # fmt: skip
    history = [GO, {"role": "assistant", "content": blocks}, result, {"role": "user", "content": []}]
    made = make(anthropic("c1", history, [{"type": "text", "text": "done"}]))
    call = {**CALL, "function": {"name": "run", "arguments": "{}"}}
    assert made.messages == [
        GO,
        {**said("", tool_calls=[call]), "train": 0},
        {**said("after"), "train": 0},
        {"role": "user", "content": "first"},
        RESULT,
        {"role": "user", "content": ""},
        {**said("done"), "train": 1},
    ]


# What is refused


IMAGE = {"type": "image_url", "image_url": {"url": "data:,x"}}
DONE = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]}]


@pytest.mark.parametrize(
    ("line", "code", "where"),
    [
        (chat("c1", [{"role": "user", "content": [IMAGE]}], said("x")), Code.ITEM_TYPE_UNSUPPORTED, "[0].content[0]"),
        (chat("c1", [{"role": "critic", "content": "x"}], said("x")), Code.ITEM_TYPE_UNSUPPORTED, "[0].role"),
        (chat("c1", [7], said("x")), Code.OUTPUT_MALFORMED, "$.messages[0]"),
        (chat("c1", [{"role": "user", "content": 7}], said("x")), Code.OUTPUT_MALFORMED, "[0].content"),
        (chat("c1", [{"role": "tool", "tool_call_id": 7}], said("x")), Code.OUTPUT_MALFORMED, "tool_call_id"),
        (chat("c1", [said("x", function_call={"name": "f"})], said("x")), Code.ITEM_TYPE_UNSUPPORTED, "function_call"),
        (chat("c1", [said("x", audio={"id": "a"})], said("x")), Code.ITEM_TYPE_UNSUPPORTED, "audio"),
        (
            chat("c1", [said("x", tool_calls=[{"type": "custom", "custom": {}}])], said("x")),
            Code.ITEM_TYPE_UNSUPPORTED,
            "tool_calls[0]",
        ),
        (chat("c1", [{"role": "user", "content": "\ud800"}], said("x")), Code.OUTPUT_MALFORMED, "record=0"),
        (responses("c1", "go", DONE, previous_response_id="r"), Code.CAPTURE_INCOMPLETE, "$.previous_response_id"),
        (responses("c1", [{"type": "compaction"}], DONE), Code.ITEM_TYPE_UNSUPPORTED, "$.input[0]"),
        (
            responses("c1", "go", [{"type": "function_call", "call_id": "t", "name": "f", "namespace": "n"}]),
            Code.ITEM_TYPE_UNSUPPORTED,
            "namespace",
        ),
        (
            responses("c1", "go", [{"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"}, *DONE]),
            Code.ITEM_TYPE_UNSUPPORTED,
            "$.reply",
        ),
        (
            other("c1", "/v1/completions", {"prompt": "x"}, {"id": "r", "choices": [
                {"index": 0, "text": "y", "finish_reason": "stop"}]}),
            Code.ITEM_TYPE_UNSUPPORTED,
            "$.request",
        ),
    ],
)  # fmt: skip
def test_what_no_chat_message_holds_is_refused(line: Json, code: Code, where: str) -> None:
    """A turn that would be trained on another context than the model saw is a refusal with its place."""
    made = refusal(line)
    assert made.code is code
    assert made.where.endswith(where)
    assert made.message.startswith("c1: ") or "surrogate" in made.message


def test_exchanges_that_were_not_kept_are_refused() -> None:
    """Text cannot be made from digests; the refusal says what is missing."""
    from collections import Counter

    capture = captured()
    made = conversations(capture, Result(), selection_of(capture, ["c1"]), Counter())
    assert isinstance(made, Rejected)
    assert (made.code, made.where) == (Code.CAPTURE_INCOMPLETE, "call=c1")
    assert "request and reply of call c1" in made.message
    capture = capture_of(chat("c1", [GO], said("one")))
    exchange = msgspec.structs.replace(capture.exchanges["c1"], reply=None)
    capture = msgspec.structs.replace(capture, exchanges={"c1": exchange})
    made = conversations(capture, Result(), selection_of(capture), Counter())
    assert isinstance(made, Rejected)
    assert "expected the reply of call c1" in made.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"choice_index": 3}, "choice 3"),
        ({"output_items": ()}, "the reply that the record was made of"),
    ],
)
def test_the_reply_is_the_records(changes: Json, message: str) -> None:
    """A reply that was put beside the wrong record must not be trained."""
    from collections import Counter

    capture = capture_of(chat("c1", [GO], said("one")))
    records = tuple(msgspec.structs.replace(record, **changes) for record in capture.records)
    capture = msgspec.structs.replace(capture, records=records)
    made = conversations(capture, Result(), selection_of(capture), Counter())
    assert isinstance(made, Rejected)
    assert message in made.message


def test_a_request_of_no_known_shape() -> None:
    """It is refused with its place, not guessed."""
    from collections import Counter

    from gristmill.records import Dialect

    capture = capture_of(chat("c1", [GO], said("one")))
    record = msgspec.structs.replace(capture.records[0], dialect=Dialect.UNKNOWN)
    exchange = msgspec.structs.replace(capture.exchanges["c1"], request={"model": "m"})
    capture = msgspec.structs.replace(capture, records=(record,), exchanges={"c1": exchange})
    made = conversations(capture, Result(), selection_of(capture), Counter())
    assert isinstance(made, Rejected)
    assert made.code is Code.ITEM_TYPE_UNSUPPORTED


# Folders


def attempts() -> list[tuple[Capture, Result, Any]]:
    """A conversation with a retry that nobody got, one whose exchanges are missing, and one that is refused."""
    policy = resolve_selection_policy()
    lines = [
        chat("c1", [GO], said("one")),
        chat("x1", [GO, said("one"), MORE], said("other"), parent="c1"),
        chat("c2", [GO, said("one"), MORE], said("two"), parent="c1"),
    ]
    made: list[tuple[Capture, Result, Any]] = []
    for rollout_id, texts in (("a", ("one", "two")), ("b", ("one", "two")), ("c", ("nobody said this",))):
        capture = capture_of(*[{**line, "rollout_id": rollout_id} for line in lines])
        if rollout_id == "b":
            capture = msgspec.structs.replace(capture, exchanges={})
        output = [message for text in texts for message in (GO, said(text))]
        result = Result(value={"response": {"output": output}}, reward=0.5, group_id="g")
        made.append((capture, result, select_rollout(capture, result, policy)))
    return made


def export(folder: Path) -> Manifest:
    with open_export("messages", folder, policy="returned_history", options={}) as writer:
        refused = [writer.add(*attempt) for attempt in attempts()]
        assert [one and one.code for one in refused] == [None, Code.CAPTURE_INCOMPLETE, None]
        return writer.finish()


def test_what_a_conversation_has_no_place_for_is_counted(tmp_path: Path) -> None:
    """Credits and advantages are for rows; whoever exports conversations must see that he goes without."""
    capture, result, outcome = attempts()[0]
    credited = msgspec.structs.replace(
        result,
        advantage=1.0,
        credits=(CallCredit(model_call_id=capture.records[0].model_call_id, reward=1.0),),
        failure=Failure("out of steps", Attribution.SCORE),
    )
    with open_export("messages", tmp_path / "out", policy="returned_history", options={}) as writer:
        writer.add(capture, credited, outcome)
        losses = {loss.name: loss.count for loss in writer.finish().losses}
    assert (losses["advantages"], losses["credits"], losses["failures"]) == (1, 1, 1)


def test_a_folder_of_conversations(tmp_path: Path) -> None:
    """Calls whose tokens are of no use for rows make conversations; refusals stand beside them and are counted."""
    manifest = export(tmp_path / "out")
    assert manifest.format == "messages"
    assert {entry.name: entry.rows for entry in manifest.files} == {"messages.jsonl": 1, "rejected.jsonl": 2}
    assert (manifest.rollouts.selected, manifest.rejected) == (1, {"capture_incomplete": 1, "match_missing": 1})
    assert manifest.funnel.selected_calls == 2
    assert manifest.funnel.trained_calls == 0
    losses = {loss.name: loss.count for loss in manifest.losses}
    assert losses == {"tokens": 2, "tokens_unusable": 2, "request_settings": 2}
    assert any("without their token ids" in line for line in loss_lines(manifest))
    lines = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_bytes().splitlines()]
    codes = [(verdict["model_call_id"], verdict["code"]) for verdict in lines[0]["verdicts"]]
    assert codes == [("c1", "rollout_rejected"), ("x1", "retry_superseded"), ("c2", "rollout_rejected")]


def test_conversations_are_verified(tmp_path: Path) -> None:
    """The lines are made again from the captures and compared, byte by byte."""
    folder = tmp_path / "out"
    export(folder)
    assert FolderCheck(folder).needs is Needs.SELECTION
    assert findings(folder, attempts()) == []
    path = folder / "messages.jsonl"
    good = path.read_bytes()
    for bad, code in (
        (good.replace(b'"train":1', b'"train":0', 1), Code.ROW_METADATA_DIFFERS),
        (good.replace(b"two", b"tvo"), Code.ROW_METADATA_DIFFERS),
        (good + good, Code.ROW_UNEXPECTED),
        (b"", Code.ROW_MISSING),
        (good + b"{}\n", Code.FILE_MALFORMED),
        (good.replace(b'"rollout_id":"a"', b'"rollout_id":"b"'), Code.ROW_UNEXPECTED),
        (good.replace(b'"rollout_id":"a"', b'"rollout_id":"z"'), Code.ROW_UNEXPECTED),
    ):
        path.write_bytes(bad)
        assert {finding.code for finding in findings(folder, attempts())} >= {code, Code.MANIFEST_DIFFERS}
    path.unlink()
    assert "expected messages.jsonl, it is not there" in {finding.message for finding in findings(folder, attempts())}


def test_every_manifest_entry_of_conversations_is_checked(tmp_path: Path) -> None:
    """The loss report is a claim like the others."""
    export(tmp_path / "good")
    document = json.loads((tmp_path / "good" / "manifest.json").read_bytes())
    for number, place in enumerate(entry_paths(document)):
        folder = tmp_path / str(number)
        export(folder)
        change_entry(folder, place)
        found = findings(folder, attempts())
        assert Code.MANIFEST_DIFFERS in {finding.code for finding in found}, place


def test_a_rebuilt_rollout_is_a_selection(tmp_path: Path) -> None:
    """Whoever has rows can export conversations of the same calls."""
    [(capture, result, selection), *_] = attempts()
    from tests.cli.stories import call

    lines = [
        call("c1", "one", [1, 2], [3], request={"messages": [GO]}, reply=chat("c1", [], said("one"))["body"]),
        call("c2", "two", [1, 2, 3, 4], [5], request={"messages": [GO, said("one"), MORE]},
             reply=chat("c2", [], said("two"))["body"], parent_call_id="c1"),
    ]  # fmt: skip
    capture = captured(lines, rollout_id="a")
    outcome = run_rollout(capture, result, resolve_selection_policy())
    with open_export("messages", tmp_path / "out", policy="returned_history", options={}) as writer:
        assert writer.add(capture, result, outcome) is None
        manifest = writer.finish()
    assert manifest.funnel.trained_calls == 0
    assert "tokens_unusable" not in {loss.name for loss in manifest.losses}
    assert findings(tmp_path / "out", [(capture, result, outcome)]) == []
    assert selection.calls == ("c1", "c2")


@pytest.mark.slow
def test_datasets_loads_conversations(tmp_path: Path) -> None:
    """TRL's SFTTrainer takes a data set with `messages`, a list of role and content, and `tools`, a JSON text."""
    from datasets import load_dataset

    lines = [chat("c1", [SYSTEM, GO], FIRST), chat("c2", [SYSTEM, GO, FIRST, RESULT], said("done"))]
    capture = capture_of(*lines)
    with open_export("messages", tmp_path / "out", policy="p", options={}) as writer:
        writer.add(capture, Result(), selection_of(capture))
        writer.finish()
    loaded = load_dataset(
        "json", data_files=str(tmp_path / "out" / "messages.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    example = loaded[0]
    # What trl 1.16 asks of an example: data_utils.is_conversational, and sft_trainer's reading of `tools`.
    assert isinstance(example["messages"], list)
    assert all("role" in message and "content" in message for message in example["messages"])
    assert isinstance(example["tools"], str)
    assert json.loads(example["tools"]) == [TOOL]
    assert [message.get("train") for message in example["messages"]] == [None, None, 1, None, 1]
    [call] = example["messages"][2]["tool_calls"]
    assert call["function"]["arguments"] == ARGUMENTS
    assert example["advantage"] is None
