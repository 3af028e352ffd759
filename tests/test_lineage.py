"""Which call a request continues: chained digests, the index of parents, and the forest of recorded ones."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings

from gristmill.errors import Code, SelectionError
from gristmill.lineage import (
    MISSING_PARENT,
    NO_PARENT,
    Forest,
    LineageIndex,
    ParentLink,
    RequestDigests,
    request_digests,
)
from gristmill.records import Delivery, ParentResolution
from tests.strategies.json_values import any_json

Json = dict[str, Any]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def said(text: str, **fields: Any) -> Json:
    return {"role": "assistant", "content": text, **fields}


ASK = {"messages": [user("2+2")]}
REPLY = [said("4")]
NEXT = {"messages": [user("2+2"), said("4"), user("3+3")]}


def index(*calls: tuple[str, Json, list[Json]], **delivery: Delivery) -> LineageIndex:
    made = LineageIndex()
    for call_id, request, served in calls:
        made.add(call_id, request_digests(request, served), delivery.get(call_id, Delivery.UNKNOWN))
    return made


def parent(index: LineageIndex, request: Any) -> str | None:
    return index.parent_of(request).parent_call_id


def test_a_continued_conversation_has_its_parent() -> None:
    # Without a parent every turn would be a row of its own and lost calls could not be judged.
    link = index(("c1", ASK, REPLY)).parent_of(NEXT)
    assert link == ParentLink("c1", ParentResolution.RESOLVED)


def test_a_new_conversation_is_a_root() -> None:
    # A title call must not become the child of the work.
    assert index(("c1", ASK, REPLY)).parent_of({"messages": [user("title?")]}).resolution is ParentResolution.ROOT
    assert LineageIndex().parent_of(NEXT).resolution is ParentResolution.ROOT


@pytest.mark.parametrize(
    "request_body",
    [
        {"messages": [user("2+3"), said("4"), user("3+3")]},
        {"messages": [user("2+2"), said("5"), user("3+3")]},
        {"messages": [user("2+2"), user("!"), said("4"), user("3+3")]},
        {"messages": [{"role": "tool", "tool_call_id": "t", "content": "2+2"}, said("4")]},
    ],
)
def test_a_changed_past_has_no_parent(request_body: Json) -> None:
    # A parent by likeness is a guess; tokens would not extend it.
    assert parent(index(("c1", ASK, REPLY)), request_body) is None


def test_the_longest_beginning_wins() -> None:
    # A grandparent is no parent.
    second = (NEXT["messages"][:], [said("6")])
    calls = index(("c1", ASK, REPLY), ("c2", {"messages": second[0]}, second[1]))
    assert parent(calls, {"messages": [*NEXT["messages"], said("6"), user("more")]}) == "c2"


def test_unresolved_where_a_later_reply_is_unknown() -> None:
    # The history goes on behind the last known call: some call in between was not captured.
    link = index(("c1", ASK, REPLY)).parent_of({"messages": [*NEXT["messages"], said("lost"), user("go on")]})
    assert (link.resolution, link.candidates) == (ParentResolution.UNRESOLVED, ("c1",))


def test_equal_candidates_are_ambiguous_unless_one_was_not_delivered() -> None:
    # A retry with the same words leaves two parents; one that the client never got is none.
    calls = [("c1", ASK, REPLY), ("c2", ASK, REPLY)]
    link = index(*calls).parent_of(NEXT)
    assert (link.resolution, link.candidates) == (ParentResolution.AMBIGUOUS, ("c1", "c2"))
    assert parent(index(*calls, c1=Delivery.ABORTED), NEXT) == "c2"
    assert parent(index(*calls, c1=Delivery.PARTIAL, c2=Delivery.PARTIAL), NEXT) is None
    assert parent(index(("c1", ASK, REPLY), c1=Delivery.ABORTED), NEXT) == "c1"


def test_dropped_reasoning_is_still_a_parent() -> None:
    # Harnesses leave reasoning out of the next request; the words still name the call.
    calls = index(("c1", ASK, [said("4", reasoning_content="hm")]))
    assert parent(calls, NEXT) == "c1"
    assert parent(calls, {"messages": [user("2+2"), said("4", reasoning_content="hm"), user("x")]}) == "c1"
    assert parent(calls, {"messages": [user("2+2"), said("4", reasoning_content="ha"), user("x")]}) == "c1"
    only = index(("c1", ASK, [said("", reasoning_content="hm")]))
    assert only.parent_of({"messages": [user("2+2"), said("", reasoning_content="ha")]}).parent_call_id is None


def test_dialects_meet() -> None:
    # A call served as Chat is continued by a Responses request.
    calls = index(("c1", ASK, REPLY))
    items = [user("2+2"), {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "4"}]}]
    assert parent(calls, {"input": [*items, user("3+3")]}) == "c1"
    asked = index(("c1", {"input": "2+2"}, REPLY))
    assert parent(asked, NEXT) == "c1"
    assert parent(index(("c1", {"prompt": "2+2"}, REPLY)), NEXT) == "c1"


def test_system_and_tools_stand_apart() -> None:
    # A changed system prompt is reported, and does not hide the parent.
    first = {"messages": [{"role": "system", "content": "a"}, user("2+2")], "tools": [{"name": "f"}]}
    again = {"messages": [{"role": "system", "content": "b"}, user("2+2"), said("4")], "tools": []}
    link = index(("c1", first, REPLY)).parent_of(again)
    assert (link.parent_call_id, link.system_changed, link.tools_changed) == ("c1", True, True)
    same = {**again, "messages": [first["messages"][0], *again["messages"][1:]], "tools": first["tools"]}
    link = index(("c1", first, REPLY)).parent_of(same)
    assert (link.parent_call_id, link.system_changed, link.tools_changed) == ("c1", False, False)


def test_new_system_text_changes_nothing_that_was_said() -> None:
    # Some harnesses put system text behind a tool result: what the model saw before is as it was.
    system = {"role": "system", "content": "a"}
    first = {"messages": [system, user("2+2")]}
    calls = index(("c1", first, REPLY))
    late = {"messages": [system, user("2+2"), said("4"), system, user("3+3")]}
    link = calls.parent_of(late)
    assert (link.parent_call_id, link.system_changed) == ("c1", False)
    # The call after it is compared with all that was said up to there.
    calls.add("c2", request_digests(late, [said("6")]))
    said_on = [*late["messages"], said("6"), user("4+4")]
    link = calls.parent_of({"messages": said_on})
    assert (link.parent_call_id, link.system_changed) == ("c2", False)
    edited = {"role": "system", "content": "b"}
    link = calls.parent_of({"messages": [*said_on[:3], edited, *said_on[4:]]})
    assert (link.parent_call_id, link.system_changed) == ("c2", True)
    items = [user("2+2"), {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "4"}]}, system]
    link = index(("c1", {"input": "2+2"}, REPLY)).parent_of({"input": [*items, user("3+3")]})
    assert (link.parent_call_id, link.system_changed) == ("c1", False)


def test_what_cannot_be_matched_still_changes_the_past() -> None:
    # A server-executed item in the history is part of what the model saw.
    search = {"type": "web_search_call", "id": "ws", "query": "q"}
    calls = index(("c1", {"input": [user("2+2"), search]}, REPLY))
    assert parent(calls, {"input": [user("2+2"), {**search, "id": "other"}, said("4")]}) == "c1"
    assert parent(calls, {"input": [user("2+2"), said("4")]}) is None


def test_prompts_of_tokens_and_nothing() -> None:
    # Completion requests may hold ids, several prompts, or nothing.
    assert request_digests({"prompt": [1, 2]}, REPLY) == request_digests({"prompt": [1, 2]}, REPLY)
    assert request_digests({"prompt": [1, 2]}, REPLY) != request_digests({"prompt": [1, 3]}, REPLY)
    assert request_digests({"prompt": ""}, []).context_digest is not None
    assert request_digests({}, []).context_digest is not None


def test_an_empty_reply_has_no_continuation() -> None:
    # Nothing can continue a reply that served nothing.
    digests = request_digests(ASK, [])
    assert digests.context_digest is not None
    assert digests.continuation_digest is None
    assert parent(index(("c1", ASK, [])), NEXT) is None


@pytest.mark.parametrize(
    "request_body",
    [
        None,
        [],
        "x",
        {"messages": 7},
        {"messages": [7]},
        {"messages": [{"role": 7}]},
        {"messages": [], "tools": [float("nan")]},
        {"input": {}},
    ],
)
def test_an_unreadable_request_has_no_keys(request_body: Any) -> None:
    # A garbled request must not stop the capture, and is nobody's parent.
    assert request_digests(request_body, REPLY) == RequestDigests()


def test_an_unreadable_request_has_no_parent() -> None:
    # Asking for its parent says why there is none.
    for request in (None, {"messages": 7}, {"messages": [{"role": 7}]}):
        with pytest.raises(SelectionError) as caught:
            LineageIndex().parent_of(request)
        assert caught.value.code is Code.OUTPUT_MALFORMED


def test_a_reply_may_arrive_after_all() -> None:
    # A gateway learns later what became of a reply, and of two equal ones the client has the one that arrived.
    ask, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
    index = LineageIndex()
    for call_id in ("c1", "c2"):
        index.add(call_id, request_digests({"messages": [ask]}, [answer]))
    request = {"messages": [ask, answer, ask]}
    assert index.parent_of(request).resolution is ParentResolution.AMBIGUOUS
    index.deliver("c1", Delivery.ABORTED)
    assert index.parent_of(request).parent_call_id == "c2"
    index.deliver("c1", Delivery.DELIVERED)
    index.deliver("c2", Delivery.PARTIAL)
    assert index.parent_of(request).parent_call_id == "c1"


def test_what_only_bills_or_caches_changes_nothing() -> None:
    # Claude Code's billing line and cache marks change with every call; each turn would look like a new system text.
    def asked(hash_: str, place: int) -> Json:
        system: list[Any] = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{hash_};"},
            {"type": "text", "text": "Be brief.", **({"cache_control": {"type": "ephemeral"}} if place == 0 else {})},
            "plain",
        ]
        tools = [{"name": "bash", "input_schema": {}, **({"cache_control": {}} if place == 1 else {})}, "odd"]
        return {"system": system, "tools": tools, "messages": [user("2+2")]}

    first, second = (request_digests(asked(*given), REPLY) for given in (("a", 0), ("b", 1)))
    assert first == second
    other = asked("a", 0)
    other["system"][1]["text"] = "Be long."
    assert request_digests(other, REPLY).system_digest != first.system_digest
    other = asked("a", 0)
    other["tools"][0]["name"] = "sh"
    assert request_digests(other, REPLY).tools_digest != first.tools_digest


CALL = {"id": "t1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "t1", "content": "ok"}


def test_white_space_between_thought_and_call_may_be_dropped() -> None:
    # Qwen3's usual tool turn has such a text; Claude Code and pi do not send it back, and every turn lost its parent.
    served = [said("\n\n", reasoning="hm", tool_calls=[CALL])]
    calls = index(("c1", ASK, served))
    for echo in (said("\n\n", reasoning="hm", tool_calls=[CALL]), said("", reasoning="hm", tool_calls=[CALL])):
        assert parent(calls, {"messages": [user("2+2"), echo, RESULT]}) == "c1"
    assert parent(calls, {"messages": [user("2+2"), said("", tool_calls=[CALL]), RESULT]}) == "c1"
    items = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "t1", "name": "bash", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t1", "output": "ok"},
    ]
    assert parent(calls, {"input": [user("2+2"), *items]}) == "c1"


def test_an_empty_message_beside_a_reply_is_nothing() -> None:
    # opencode leaves one in its history after a stream that was cut.
    calls = index(("c1", ASK, REPLY))
    assert parent(calls, {"messages": [user("2+2"), said(""), said("4"), user("3+3")]}) == "c1"
    assert parent(calls, {"messages": [user("2+2"), said("4"), said(""), user("3+3")]}) == "c1"


def test_white_space_alone_is_what_was_said() -> None:
    # Where nothing else was said, dropping it would make two conversations one.
    calls = index(("c1", ASK, [said("\n\n")]), ("c2", ASK, [said(" ")]))
    assert parent(calls, {"messages": [user("2+2"), said("\n\n"), user("3+3")]}) == "c1"
    assert parent(calls, {"messages": [user("2+2"), said(" "), user("3+3")]}) == "c2"
    assert parent(calls, {"messages": [user("2+2"), user("3+3")]}) is None


def test_a_delivery_is_noted_later() -> None:
    # The gateway learns whether a reply arrived only after the call could already be a parent.
    calls = index(("c1", ASK, REPLY), ("c2", ASK, REPLY))
    assert calls.parent_of(NEXT).resolution is ParentResolution.AMBIGUOUS
    calls.deliver("c1", Delivery.PARTIAL)
    assert parent(calls, NEXT) == "c2"
    calls.deliver("c1", Delivery.DELIVERED)
    assert calls.parent_of(NEXT).resolution is ParentResolution.AMBIGUOUS


# ---- the forest --------------------------------------------------------------------------------------------


def forest(**parents: str | None) -> Forest:
    return Forest([SimpleNamespace(model_call_id=call, parent_call_id=above) for call, above in parents.items()])


def test_paths() -> None:
    # Evidence of a proven call is all that it continues.
    tree = forest(a=None, b="a", c="b", x="gone", y="x")
    assert tree.path_to_root(2) == ([1, 0], NO_PARENT)
    assert tree.path_to_root(4) == ([3], MISSING_PARENT)
    assert tree.children() == {NO_PARENT: [0], 0: [1], 1: [2], MISSING_PARENT: [3], 3: [4]}
    assert tree.with_ancestors([2, 4]) == {0, 1, 2, 3, 4}
    assert tree.with_ancestors([]) == set()


def test_cycles_end() -> None:
    # A broken capture must not hang the command.
    assert forest(a="b", b="a").path_to_root(0) == ([1], 0)
    assert forest(a="a").path_to_root(0) == ([], 0)
    assert forest(a="b", b="a", c="a").path_to_root(2)[1] >= 0
    assert forest(a="b", b="a").with_ancestors([0]) == {0, 1}


@settings(max_examples=300, derandomize=True, deadline=None)
@given(any_json(), any_json())
def test_fuzz_requests(request: Any, item: Any) -> None:
    # Any JSON as request or reply gives keys or none, and a link or a coded refusal.
    for body in (request, {"messages": [item]}, {"input": [item], "system": item, "tools": item}, {"prompt": item}):
        made = LineageIndex()
        made.add("c1", request_digests(body, [item]))
        with suppress(SelectionError):
            made.parent_of(body)
