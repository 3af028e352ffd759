"""Which captured call was scored: witnesses, their agreement, and the lineage walk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings

from gristmill.errors import Code
from gristmill.fingerprint import output_items
from gristmill.records import CallRecord
from gristmill.terminal import resolve_terminal
from tests.strategies.json_values import any_json

Json = dict[str, Any]


def said(text: str) -> Json:
    return {"role": "assistant", "content": text}


def record(call_id: str, *texts: str, parent: str | None = None, twin: str | None = None, **fields: Any) -> CallRecord:
    tokens = {} if twin is None else {"sequence_digest": twin, "logprobs_digest": "p", "cum_len": 2, "usable": True}
    return CallRecord(
        model_call_id=call_id,
        response_id=f"r-{call_id}",
        parent_call_id=parent,
        output_items=output_items([said(text) for text in texts]),
        **{**tokens, **fields},
    )


TWO = [record("c1", "one"), record("c2", "two", parent="c1")]
USER = {"role": "user", "content": "go on"}


def named(*args: Any, **options: Any) -> tuple[str | None, Code | None]:
    found = resolve_terminal(*args, **options)
    return found.model_call_id, found.code


def output(*items: Json, **fields: Any) -> Json:
    return {"output": list(items), **fields}


UNKNOWN = (None, Code.TERMINAL_UNATTRIBUTED)
DISAGREE = (None, Code.WITNESS_DISAGREEMENT)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        # The id, the content of one reply, the whole continuation, the trailing run: each is a witness.
        ({"id": "r-c2"}, ("c2", None)),
        (output(said("two")), ("c2", None)),
        (output(said("one"), USER, said("two")), ("c2", None)),
        (output(said("zero"), USER, said("two")), ("c2", None)),
        (output(said("one"), said("two")), ("c2", None)),
        ({"messages": [USER, said("one")]}, ("c1", None)),
        (output([said("one")], [said("one"), said("two")], contains_transitions=True), ("c2", None)),
        # Agreement is kept, contradiction names nobody.
        (output(said("two"), id="r-c2"), ("c2", None)),
        (output(said("two"), id="r-c1"), DISAGREE),
        (output(said("nobody"), id="r-c1"), ("c1", None)),
        # Nobody knows.
        (None, UNKNOWN),
        ("text", UNKNOWN),
        ({}, UNKNOWN),
        ({"id": 7}, UNKNOWN),
        (output(said("three")), UNKNOWN),
        (output(USER), UNKNOWN),
        (output({"type": "hologram"}), UNKNOWN),
        ({"output": 7}, UNKNOWN),
        ({"output": [], "contains_transitions": True}, UNKNOWN),
        (output(said("")), UNKNOWN),
    ],
)
def test_witnesses(response: Any, expected: tuple[str | None, Code | None]) -> None:
    # A reward that lands on the wrong call teaches the wrong thing.
    assert named(TWO, response) == expected


def test_a_declared_id_decides_or_stops() -> None:
    # A harness that is wrong about its own reply must not be overruled by luck.
    assert named(TWO, None, declared_response_id="r-c1") == ("c1", None)
    assert named(TWO, output(said("two")), declared_response_id="r-c1") == DISAGREE
    assert named(TWO, output(said("two")), declared_response_id="r-c9") == UNKNOWN
    assert named(TWO, {"id": "r-c2"}, declared_response_id="r-c1") == DISAGREE


def test_several_calls_of_one_id() -> None:
    # Choices share a response id: it names nobody, and content may still decide.
    choices = [record("c1", "left"), record("c2", "right")]
    shared = [SimpleNamespace(**{name: getattr(call, name) for name in call.__struct_fields__}) for call in choices]
    for call in shared:
        call.response_id = "r"
    assert named(shared, None, declared_response_id="r") == UNKNOWN
    assert named(shared, {"id": "r"}) == UNKNOWN
    assert named(shared, output(said("right"), id="r")) == ("c2", None)


def test_twins_collapse() -> None:
    # Equal tokens, equal everything: which of them is named makes no difference, so the smallest id is.
    twins = [record("c2", "one", twin="s"), record("c1", "one", twin="s")]
    assert named(twins, output(said("one"))) == ("c1", None)
    assert named(twins, output(said("one"), id="r-c2")) == ("c2", None)
    assert named([record("c1", "one"), record("c2", "one")], output(said("one"))) == UNKNOWN
    assert named([record("c1", "one"), record("c2", "one")], output(said("one"), id="r-c2")) == ("c2", None)
    three = [record("c1", "one"), record("c2", "one"), record("c3", "three")]
    assert named(three, output(said("one"), id="r-c3")) == DISAGREE


def test_empty_replies() -> None:
    # An empty reply is named only by a returned empty reply.
    calls = [record("c1", "one"), record("c2", "", parent="c1"), record("c3", parent="c1")]
    assert named(calls, output(said(""))) == ("c2", None)
    assert named(calls, output(said("one"), USER, said("")))[0] in {"c2", None}
    assert named(calls, output(said("one")))[0] in {"c1", None}


def test_trail_is_kept() -> None:
    # People must see who said what.
    trail = resolve_terminal(TWO, output(said("two"), id="r-c1")).evidence()["witnesses"]
    assert [(witness["name"], witness["calls"]) for witness in trail] == [
        ("response_id", ("c1",)),
        ("content", ("c2",)),
    ]


def walk(*records: CallRecord) -> tuple[str | None, Code | None]:
    return named(list(records), None, lineage_walk=True)


def test_lineage_walk() -> None:
    # Harnesses that return nothing but a reward: the one conversation that was continued has one end.
    a, b, c = record("a"), record("b", parent="a"), record("c", parent="b")
    assert walk(a, b, c) == ("c", None)
    assert walk(record("title"), a, b) == ("b", None)
    assert walk(a, record("x", parent="a"), b, c) == ("c", None)
    assert walk(a) == ("a", None)
    assert walk(a, b, record("x", parent="a")) == UNKNOWN
    assert walk(a, b, c, record("x", parent="a"), record("y", parent="x")) == UNKNOWN
    assert walk(a, record("b")) == UNKNOWN
    assert walk() == UNKNOWN
    assert walk(record("a", parent="b"), b) == UNKNOWN
    assert walk(record("b", parent="a")) == UNKNOWN


def test_the_walk_is_for_the_silent_only() -> None:
    # Witnesses that named calls and did not agree are not silence.
    same = [record("a", "x"), record("b", "x", parent="a")]
    assert named(same, output(said("x")), lineage_walk=True) == UNKNOWN
    assert named(TWO, None) == UNKNOWN


def test_broken_lineage_does_not_raise() -> None:
    # `resolve_terminal` never raises: a broken capture just gives fewer witnesses.
    calls = [record("c1", "one", parent="c2"), record("c2", "two", parent="c1"), record("c3", "three", parent="gone")]
    assert named(calls, output(said("two"))) == ("c2", None)
    assert named(calls, output(said("x"), USER, said("three"))) == ("c3", None)


def test_foreign_fingerprints() -> None:
    # Another system's records and its own fingerprint function.
    calls = [
        SimpleNamespace(
            model_call_id=name,
            response_id=name,
            parent_call_id=None,
            output_items=(SimpleNamespace(id=None, fingerprint=f"fp:{name}"),),
        )
        for name in "ab"
    ]
    assert named(calls, output(said("b")), fingerprint=lambda item: f"fp:{item['content']}") == ("b", None)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(any_json())
def test_fuzz_responses(value: Any) -> None:
    # Any JSON: an attribution, never an exception.
    for response in (value, {"output": value}, {"output": [value]}, {"messages": [value], "id": value}):
        found = resolve_terminal(TWO, response, lineage_walk=True)
        assert (found.code is None) is (found.position is not None)
