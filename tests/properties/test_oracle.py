"""The oracle itself, on histories that a person can decide."""

from __future__ import annotations

from typing import Any

import msgspec

from gristmill.errors import Code
from gristmill.fingerprint import output_items
from gristmill.records import CallRecord
from tests.properties.oracle import Answer, Options, decide


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def call(name: str, *texts: str, parent: str | None = None, **fields: Any) -> CallRecord:
    items = output_items([say(text) for text in texts])
    return CallRecord(model_call_id=name, response_id=f"r-{name}", parent_call_id=parent, output_items=items, **fields)


def read(records: list[CallRecord], *items: Any, options: Options | None = None, **result: Any) -> Answer:
    return decide(records, {"messages": list(items), **result}, options or Options())


# Each of these pins one rule; an oracle that had it wrong would teach the policy the same mistake.
def test_plain_history() -> None:
    answer = read([call("a", "x"), call("b", "y"), call("c", "z")], say("x"), say("z"))
    assert answer.calls == ("a", "c")
    assert answer.terminal == "r-c"


def test_two_sets_are_ambiguous_and_both_are_listed() -> None:
    answer = read([call("a", "x"), call("b", "x")], say("x"))
    assert answer.code is Code.MATCH_AMBIGUOUS
    assert answer.readings == {("a",), ("b",)}


def test_a_proven_child_proves_its_parent() -> None:
    records = [call("a", "x"), call("b", "x"), call("c", "y", parent="b")]
    assert read(records, say("x"), say("y")).calls == ("b", "c")


def test_a_candidate_proves_nothing() -> None:
    records = [call("a", "x"), call("b", "x"), call("c", "y", parent="a"), call("d", "y", parent="b")]
    assert read(records, say("x"), say("y")).code is Code.MATCH_AMBIGUOUS


def test_the_declared_call_decides() -> None:
    records = [call("a", "x"), call("b", "x")]
    assert read(records, say("x"), terminal_response_id="r-b").calls == ("b",)
    assert read(records, say("x"), terminal_response_id="r-z").code is Code.DECLARED_TERMINAL_NOT_SELECTED


def test_a_call_reaches_across_items_but_not_across_a_bound() -> None:
    records = [call("a", "x", "y")]
    assert read(records, say("x"), say("y")).calls == ("a",)
    assert read(records, say("x"), {"role": "tool", "content": "1"}, say("y")).calls == ("a",)
    assert read(records, say("x"), {"role": "user", "content": "?"}, say("y")).code is Code.MATCH_MISSING


def test_an_ancestor_does_not_follow_its_descendant() -> None:
    records = [call("a", "x"), call("b", "y", parent="a")]
    assert read(records, say("y"), say("x")).code is Code.LINEAGE_CONTRADICTION


def test_only_repeats_are_duplicates() -> None:
    assert read([call("a", "x")], say("x"), say("x")).code is Code.SELECTION_DUPLICATED


def test_equal_tokens_stand_for_each_other() -> None:
    tokens: dict[str, Any] = {
        "sequence_digest": "s",
        "logprobs_digest": "l",
        "prompt_len": 1,
        "cum_len": 2,
        "delta_len": 2,
    }
    records = [call("b", "x", **tokens), call("a", "x", **tokens)]
    assert read(records, say("x")).calls == ("a",)
    empty = [msgspec.structs.replace(record, cum_len=1) for record in records]
    assert read(empty, say("x")).code is Code.MATCH_AMBIGUOUS


def test_what_shows_nothing_stands_beside_a_call_and_not_alone() -> None:
    assert read([call("a", "x")], say(""), say("x"), say("")).calls == ("a",)
    assert read([call("a", "x")], say("x"), {"role": "user"}, say("")).code is Code.MATCH_MISSING
    assert read([call("a", "x"), call("b", "")], say("x"), {"role": "user"}, say("")).calls == ("a", "b")


def test_options() -> None:
    thinking = {"role": "assistant", "content": " x ", "reasoning": "r"}
    made = msgspec.structs.replace(call("a"), output_items=output_items([thinking]))
    assert read([made], say("x")).code is Code.MATCH_MISSING
    assert read([made], say("x"), options=Options(reasoning_optional=True, trim=True)).calls == ("a",)
    noise = [say("n"), {"role": "user"}, say("x")]
    assert read([call("a", "x")], *noise, options=Options(context=True)).calls == ("a",)
