from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.captures import read_lines
from gristmill.captures.headers import Session, session_of
from gristmill.captures.purpose import first_label, label_calls
from gristmill.fingerprint import output_items
from gristmill.lineage import NO_TOOLS, request_digests
from gristmill.records import UNLABELLED, CallRecord, Capture, Exchange, Purpose, PurposeLabel
from tests.captures.harness import NAMES, capture_of, recorded
from tests.strategies.json_values import any_json

AGENT, SUBAGENT = PurposeLabel.AGENT, PurposeLabel.SUBAGENT
TITLE, COMPACTION = PurposeLabel.AUXILIARY, PurposeLabel.COMPACTION

SPECIAL: dict[str, dict[PurposeLabel, set[int]]] = {
    **{f"claude-code--run{run}": {TITLE: {0}} for run in ("1", "2-inject", "3-hang", "5-bare", "7-resume")},
    **{f"opencode--run{run}": {TITLE: {0}} for run in ("1", "2-reasoning", "3-inject", "7-stall")},
    **{f"opencode--run{run}": {TITLE: {0}} for run in ("4-openai", "5-anthropic")},
    "claude-code--run6-subagent": {TITLE: {0}, SUBAGENT: set(range(2, 17))},
    "claude-code--run8-compact": {TITLE: {0}, COMPACTION: {4}},
    "codex--run5-subagent": {SUBAGENT: {2}},
    "codex--run6-compact": {COMPACTION: {1, 3, 5, 7}},
    "opencode--run6-subagent": {TITLE: {0}, SUBAGENT: {2, 3, 4}},
}
"""Calls of the recorded runs that are not the agent's own turns."""


def labels_of(capture: Capture) -> dict[str, Purpose]:
    return label_calls(capture.records, capture.exchanges)


# A title trained as the agent's own turn, or a turn taken for a title: both would be seen by the model.
@pytest.mark.parametrize("name", NAMES)
def test_calls_of_real_harnesses(name: str) -> None:
    calls = recorded(name)
    expected = [AGENT] * len(calls)
    for label, numbers in SPECIAL.get(name, {}).items():
        for number in numbers:
            expected[number] = label
    capture = capture_of(calls)
    labels = labels_of(capture)
    assert [labels[record.model_call_id].label for record in capture.records] == expected
    assert all(purpose.evidence for purpose in labels.values())
    for call, label in zip(calls, expected, strict=True):
        first = first_label(session_of(call.headers, call.body), call.body).label
        marked = label in {SUBAGENT, COMPACTION} and name != "claude-code--run8-compact"
        assert first == label if marked else first in {label, AGENT, PurposeLabel.UNKNOWN}


# A gateway labels at admission and again at the end, perhaps several times: the label must not wander.
@pytest.mark.parametrize("name", ["claude-code--run6-subagent", "claude-code--run8-compact", "codex--run6-compact"])
def test_labels_are_stable(name: str) -> None:
    calls = recorded(name)
    capture = capture_of(calls)
    wanted = labels_of(capture)
    labels = {
        f"c{number}": first_label(session_of(call.headers, call.body), call.body) for number, call in enumerate(calls)
    }
    for _ in range(3):
        records = [msgspec.structs.replace(record, purpose=labels[record.model_call_id]) for record in capture.records]
        labels = label_calls(records, capture.exchanges)
        assert {call_id: purpose.label for call_id, purpose in labels.items()} == {
            call_id: purpose.label for call_id, purpose in wanted.items()
        }


def user(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls_tool(call_id: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": "task", "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": function}]}


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


TOOLS = [{"type": "function", "function": {"name": "task"}}]


def attempt(*calls: tuple[list[Any], dict[str, Any]], **fields: dict[str, Any]) -> Capture:
    """Make a capture of (messages, reply) pairs; `c0={…}` adds to the request of a call, `line0={…}` to its line."""
    lines: list[bytes] = []
    for number, (messages, reply) in enumerate(calls):
        request = {"messages": messages, "tools": TOOLS} | fields.get(f"c{number}", {})
        line = {"model_call_id": f"c{number}", "request": request, "output_items": [reply]}
        lines.append(json.dumps(line | fields.get(f"line{number}", {})).encode())
    [rollout] = read_lines(lines).rollouts.values()
    return rollout.capture


TASK, REPORT = "Count the files below src", "There are 42 files, all of them tested."
FIRST = [user("Describe the project")]
SPAWNED = calls_tool("t1", prompt=TASK, retries=3)


def spawning(report: Any = REPORT, task: str = TASK, spawned: dict[str, Any] = SPAWNED) -> Capture:
    return attempt(
        (FIRST, spawned),
        ([user("<environment>", task)], calls_tool("t2", command="find src")),
        ([user("<environment>", task), calls_tool("t2", command="find src"), result("t2", "42")], said(REPORT)),
        ([*FIRST, spawned, result("t1", report)], said("It has 42 files.")),
    )


# Harnesses without session headers still give a subagent its task and take its report.
@pytest.mark.parametrize(
    "capture",
    [
        spawning(),
        spawning(f"<report>{REPORT}</report>"),
        spawning([{"type": "text", "text": "Report:"}, {"type": "text", "text": REPORT}]),
        spawning(spawned=calls_tool("t1", tasks=[{"agent": "a", "prompt": TASK}])),
    ],
)
def test_a_subagent_is_known_by_its_task_and_its_report(capture: Capture) -> None:
    labels = labels_of(capture)
    assert [purpose.label for purpose in labels.values()] == [AGENT, SUBAGENT, SUBAGENT, AGENT]
    for name in ("t1", "c0", "c3"):
        assert name in labels["c1"].evidence


# One half of the evidence is a coincidence: a task that is only alike, a result that says something else.
@pytest.mark.parametrize(
    "capture",
    [
        spawning("Nothing was found."),
        spawning(task=TASK + "!"),
        spawning(spawned=calls_tool("t9", prompt=TASK)),
        spawning(spawned=calls_tool("t1", n=1)),
    ],
)
def test_half_of_the_evidence_is_none(capture: Capture) -> None:
    assert {purpose.label for purpose in labels_of(capture).values()} == {AGENT}


HISTORY = [user("Fix the parser"), calls_tool("t1", command="pytest"), result("t1", "2 failed")]
SUMMARY = "The parser fails on nested brackets; two tests show it."
INSTRUCTION = user("Summarise what happened so far.")


# After a compaction the old history is gone; whoever summarised it is no turn of the agent's.
@pytest.mark.parametrize(
    "shape", [[user(f"Earlier: {SUMMARY} Go on.")], [user("Before:"), said(SUMMARY), user("Go on")]]
)
def test_a_compaction_is_known_by_what_begins_with_it(shape: list[Any]) -> None:
    capture = attempt(
        (HISTORY[:1], HISTORY[1]),
        ([*HISTORY, INSTRUCTION], said(SUMMARY)),
        (shape, calls_tool("t2", command="edit")),
        c1={"tools": []},
    )
    labels = labels_of(capture)
    assert [purpose.label for purpose in labels.values()] == [AGENT, COMPACTION, AGENT]
    assert "c2" in labels["c1"].evidence


# A subagent that compacts its history stays the subagent.
def test_a_subagent_goes_on_after_its_compaction() -> None:
    begun = [user(TASK)]
    capture = attempt(
        (FIRST, SPAWNED),
        (begun, calls_tool("t2", command="find")),
        ([*begun, calls_tool("t2", command="find"), result("t2", "x"), INSTRUCTION], said(SUMMARY)),
        ([user(f"Summary: {SUMMARY}")], said(REPORT)),
        ([*FIRST, SPAWNED, result("t1", SUMMARY)], said("Done.")),
    )
    labels = [purpose.label for purpose in labels_of(capture).values()]
    assert labels == [AGENT, SUBAGENT, COMPACTION, SUBAGENT, AGENT]


# A history that is only rendered anew, or cut at its beginning, was not summarised.
@pytest.mark.parametrize(
    "later",
    [
        [HISTORY[0], user("Answer:"), said(f" {SUMMARY} "), user("And now?")],
        [INSTRUCTION, said(SUMMARY), user("And now?")],
        [user("Ok."), said("Ok.")],
    ],
)
def test_a_repeated_reply_is_no_compaction(later: list[Any]) -> None:
    capture = attempt(
        (HISTORY[:1], HISTORY[1]),
        ([HISTORY[0], said("I look at it."), INSTRUCTION if later[0] is INSTRUCTION else HISTORY[0]], said(SUMMARY)),
        (later, said("Done.")),
    )
    assert {purpose.label for purpose in labels_of(capture).values()} == {AGENT}


# A plan that the next agent is told is no summary of a conversation.
def test_a_handoff_is_no_compaction() -> None:
    capture = attempt(
        ([user("Plan it")], said(SUMMARY)),
        ([user(f"The plan: {SUMMARY}")], calls_tool("t1", command="edit")),
        c0={"tools": []},
    )
    assert labels_of(capture)["c0"].label is not COMPACTION


# Something on the side is told from a turn by what its session does otherwise.
def test_auxiliary_calls() -> None:
    schema = {"type": "json_schema", "json_schema": {}}
    plain = ([user("Name this conversation")], said("A title"))
    turn = (FIRST, calls_tool("t1", command="ls"))

    def label(*calls: Any, **fields: Any) -> Purpose:
        return labels_of(attempt(*calls, **fields))["c0"]

    alone = {"tools": None}
    assert label(plain, turn, c0=alone).label is TITLE
    assert "JSON" in label(plain, turn, c0=alone | {"response_format": schema}).evidence
    assert "c1" in label(plain, turn, c0=alone).evidence
    assert label(plain, c0=alone) == Purpose(AGENT, "no call of its session has tools")
    assert label(plain, turn, c0=alone, line1={"session_id": "other"}).label is AGENT
    continued = ([plain[0][0], plain[1], user("Shorter")], said("Title"))
    assert label(plain, turn, continued, c0=alone, c2=alone) == Purpose(
        AGENT, "belongs to a conversation, though it has no tools"
    )
    assert labels_of(attempt(plain, turn, continued, c0=alone, c2=alone))["c2"].evidence == "continues call c0"
    asked = ([*FIRST, said("Hm."), user("So?")], said("So."))
    assert label(asked, turn, c0=alone).label is AGENT


# Nothing may be read into a call of which nothing is known.
def test_what_is_not_known_is_unknown() -> None:
    records = [CallRecord(model_call_id="a", response_id="a"), CallRecord(model_call_id="b", response_id="b")]
    assert label_calls(records, {}) == {"a": UNLABELLED, "b": UNLABELLED}
    child = CallRecord(model_call_id="c", response_id="c", parent_call_id="a")
    assert label_calls([*records, child], {})["c"] == Purpose(AGENT, "continues call a")
    assert label_calls([], {}) == {}
    for request in (None, [], {"messages": 5}, {"messages": [{"role": "user", "content": [5]}]}, {"input": "x"}):
        capture = attempt((FIRST, said("x")), line0={"request": request})
        assert labels_of(capture)["c0"].label in {AGENT, PurposeLabel.UNKNOWN}


# Parents that go round in a circle, or are missing, stand in captures that somebody else made.
def test_links_that_lead_nowhere() -> None:
    def call(call_id: str, parent: str) -> CallRecord:
        return CallRecord(model_call_id=call_id, response_id=call_id, parent_call_id=parent)

    records = [call("a", "b"), call("b", "c"), call("c", "a"), call("d", "gone"), call("e", "a")]
    assert {purpose.label for purpose in label_calls(records, {}).values()} == {AGENT}


# Responses give text as a string; arguments need not be JSON.
def test_texts_in_other_places() -> None:
    capture = attempt(
        (FIRST, {"role": "assistant", "content": None, "tool_calls": [_plain_call(TASK)]}),
        ([], said(REPORT)),
        ([*FIRST, {"role": "assistant", "tool_calls": [_plain_call(TASK)]}, result("t1", REPORT)], said("Done.")),
        line1={"request": {"input": TASK, "tools": TOOLS}},
    )
    assert labels_of(capture)["c1"].label is SUBAGENT


def _plain_call(arguments: str) -> dict[str, Any]:
    return {"id": "t1", "function": {"name": "task", "arguments": arguments}}


# A number that JSON could not say again must not stop the labels of a whole attempt; nor what is no conversation.
def test_what_cannot_be_read_shows_nothing() -> None:
    odd = {"role": "assistant", "tool_calls": [_plain_call('{"prompt": "Count the files", "n": 1e' + "9" * 4500 + "}")]}
    labels = labels_of(attempt((FIRST, odd), ([{"role": "tool"}, user(TASK)], said(REPORT)), (FIRST, said(REPORT))))
    assert {purpose.label for purpose in labels.values()} <= {AGENT, PurposeLabel.UNKNOWN}
    unread = {"messages": [{"role": "user", "content": [5]}], "input": TASK}
    exchange = Exchange(model_call_id="a", request=unread)
    record = CallRecord(model_call_id="a", response_id="a", tools_digest=NO_TOOLS)
    with_tools = CallRecord(model_call_id="b", response_id="b", tools_digest="t")
    assert label_calls([record, with_tools], {"a": exchange})["a"].label is TITLE


# Requests come from any program at all; whatever they hold, the attempt is labelled.
@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(any_json(), max_size=4), any_json())
def test_any_request_is_labelled(requests: list[Any], item: Any) -> None:
    records: list[CallRecord] = []
    exchanges: dict[str, Exchange] = {}
    for number, value in enumerate(requests):
        for shape in (value, {"messages": value}, {"messages": [value], "tools": item}, {"input": [item, value]}):
            call_id = f"c{len(records)}"
            digests = request_digests(shape, [item])
            record = CallRecord(
                model_call_id=call_id,
                response_id=call_id,
                output_items=output_items([item]),
                tools_digest=digests.tools_digest,
                parent_call_id=None if number % 2 else f"c{len(records) - 1}",
            )
            records.append(record)
            exchanges[call_id] = Exchange(model_call_id=call_id, request=shape)
            first_label(session_of({}, shape), shape)
    assert label_calls(records, exchanges).keys() == exchanges.keys()


# At admission only the request itself is known.
def test_first_labels() -> None:
    named = Session(session_id="s", places={"session_id": "header session-id"})
    schema = {"response_format": {"type": "json_schema"}, "messages": [user("x")]}
    assert first_label(Session(), {"tools": TOOLS}).label is AGENT
    assert first_label(Session(), {"messages": [user("x")]}) == UNLABELLED
    assert first_label(named, {"messages": [user("x")]}) == UNLABELLED
    assert first_label(Session(), schema) == UNLABELLED
    assert "header session-id" in first_label(named, schema).evidence
    assert first_label(named, schema | {"messages": [user("x"), said("y"), user("z")]}) == UNLABELLED
    assert first_label(named, {"text": {"format": {"type": "json_object"}}, "input": "x"}).label is TITLE
    compact = Session(subagent="compact", places={"subagent": "header x-openai-subagent"})
    assert first_label(compact, {"tools": TOOLS}) == Purpose(COMPACTION, "header x-openai-subagent says compact")
    assert first_label(Session(), None) == UNLABELLED


class _Looked(Mapping[str, Exchange]):
    """Exchanges that count how often one is decoded."""

    def __init__(self, capture: Capture) -> None:
        self.exchanges = capture.exchanges
        self.times = 0

    def __getitem__(self, call_id: str) -> Exchange:
        self.times += 1
        return self.exchanges[call_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self.exchanges)

    def __len__(self) -> int:
        return len(self.exchanges)


# A rollout of thousands of calls is labelled when it finishes, while others run.
def test_the_work_grows_with_the_attempt() -> None:
    calls: list[tuple[list[Any], dict[str, Any]]] = []
    for number in range(100):
        task, report = f"Look at file number {number}", f"File number {number} has nothing in it."
        step, spawned = user(f"Step {number}"), calls_tool(f"t{number}", prompt=task)
        calls += [
            ([step], spawned),
            ([user(task)], said(report)),
            ([step, spawned, result(f"t{number}", report)], said(report)),
        ]
    capture = attempt(*calls)
    looked = _Looked(capture)
    labels = label_calls(capture.records, looked)
    assert sum(purpose.label is SUBAGENT for purpose in labels.values()) == 100
    assert looked.times <= 6 * len(calls)


# What a gateway labelled at admission is not looked at again, but for the calls that begin a conversation.
def test_labelled_turns_are_not_decoded() -> None:
    messages: list[Any] = list(FIRST)
    calls: list[tuple[list[Any], dict[str, Any]]] = []
    for number in range(50):
        call = calls_tool(f"t{number}", command=f"command {number}")
        calls.append((list(messages), call))
        messages += [call, result(f"t{number}", "done")]
    capture = attempt(*calls)
    looked = _Looked(capture)
    purpose = Purpose(AGENT, "its request has tools")
    label_calls([msgspec.structs.replace(record, purpose=purpose) for record in capture.records], looked)
    assert looked.times == 1
