"""`all_captured`, `final_context` and how a finish is read: policies that look at what was captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.errors import Code, SelectionError
from gristmill.records import Purpose, PurposeLabel
from gristmill.selection import AllCaptured, FinalContext
from gristmill.selection.completion import effective_status, is_finished, is_interrupted, stopped_by_length
from tests.selection.calls import call, history, said

TWO = [call("c1", "one"), call("c2", "two", parent="c1")]


def finish(status: str | None, reason: str | None) -> Any:
    return SimpleNamespace(response_status=status, finish_reason=reason)


@pytest.mark.parametrize(
    ("status", "reason", "effective", "finished", "interrupted", "by_length"),
    [
        ("completed", "stop", "completed", True, False, False),
        ("completed", None, "completed", True, False, False),
        ("completed", "something new", "completed", True, False, False),
        ("completed", "length", "completed", True, False, True),
        ("completed", "abort", "completed", False, True, False),
        ("incomplete", "length", "incomplete", True, False, True),
        ("incomplete", "max_tokens", "incomplete", True, False, True),
        ("incomplete", "max_output_tokens", "incomplete", True, False, True),
        ("incomplete", "content_filter", "incomplete", False, True, False),
        ("incomplete", "stop", "incomplete", False, False, False),
        ("incomplete", None, "incomplete", False, False, False),
        ("failed", None, "failed", False, False, False),
        ("failed", "length", "failed", False, False, False),
        ("unknown", "stop", "unknown", False, False, False),
        (None, "stop", "completed", True, False, False),
        (None, "end_turn", "completed", True, False, False),
        (None, "length", "incomplete", True, False, True),
        (None, "cancelled", "failed", False, True, False),
        (None, "something new", None, False, False, False),
        (None, None, None, True, False, False),
    ],
)
def test_how_a_finish_is_read(
    status: str | None, reason: str | None, effective: str | None, finished: bool, interrupted: bool, by_length: bool
) -> None:
    # An aborted or failed reply that counts as finished would be trained as if the model had meant it.
    record = finish(status, reason)
    assert effective_status(record) == effective
    assert is_finished(record) is finished
    assert is_interrupted(record) is interrupted
    assert stopped_by_length(record) is by_length


def refused(policy: Any, records: Any, result: Any) -> Code:
    with pytest.raises(SelectionError) as caught:
        policy(records, result)
    return caught.value.code


@pytest.mark.parametrize("policy", [AllCaptured(), FinalContext()])
@pytest.mark.parametrize("result", [None, [], "x", {"terminal_response_id": 7}])
def test_malformed_results(policy: Any, result: Any) -> None:
    # Wrong types are refused as under every policy.
    assert refused(policy, TWO, result) is Code.OUTPUT_MALFORMED


@pytest.mark.parametrize(
    "result",
    [
        {"response": {"id": "r-c2"}},
        {"responses": [{"id": "r-c1"}, {"id": "r-c2"}]},
        {"messages": [said("one"), said("two")]},
        {"terminal_response_id": "r-c2"},
        history(said("two")),
    ],
)
def test_where_the_scored_response_stands(result: Any) -> None:
    # Every form of result names the same scored call.
    assert AllCaptured()(TWO, result)[1] == "r-c2"
    assert FinalContext()(TWO, result)[1] == "r-c2"


def test_all_captured_keeps_what_others_depend_on() -> None:
    # An unfinished call is dropped only where nothing needs it.
    records = [
        call("c1", "one", finish_reason="abort"),
        call("c2", "two", parent="c1"),
        call("x3", "thr", parent="c2", response_status="failed"),
        call("c4", "four", parent="c2", response_status="incomplete", finish_reason="content_filter"),
    ]
    decision = AllCaptured().decide(records, {"response": {"id": "r-c4"}})
    assert decision.selected == (0, 1, 3)
    assert decision.reasons[2].code is Code.UNFINISHED_LEAF
    assert decision.reasons[0].evidence["kept_although_unfinished"] == "continued by another call"
    assert decision.reasons[3].evidence["kept_although_unfinished"] == "scored"


def test_labels_are_notes() -> None:
    # A label is advice: it never removes a call.
    labelled = call("t1", "A title", purpose=Purpose(PurposeLabel.AUXILIARY))
    decision = AllCaptured().decide([labelled, *TWO], {"response": {"id": "r-c2"}})
    assert decision.selected == (0, 1, 2)
    assert "auxiliary" in decision.notes[-1]
    silent = FinalContext().decide([labelled, *TWO], {})
    assert silent.selected == (1, 2)


def test_silence_and_terminals() -> None:
    # all_captured asks for a witness; final_context walks only where nothing at all was returned.
    assert refused(AllCaptured(), TWO, {}) is Code.TERMINAL_UNATTRIBUTED
    assert FinalContext()(TWO, {"reward": 1.0, "response": None})[1] == "r-c2"
    assert refused(FinalContext(), TWO, history(said("nobody"))) is Code.TERMINAL_UNATTRIBUTED
    assert refused(
        FinalContext(), TWO, history(said("one"), id=1) | {"response": {"id": "r-c2", "output": [said("one")]}}
    ) is (Code.WITNESS_DISAGREEMENT)


def test_identities_are_checked_under_every_policy() -> None:
    # A capture with one id for two calls is broken, whatever is asked of it.
    for policy in (AllCaptured(), FinalContext()):
        assert refused(policy, [TWO[0], TWO[0]], {}) is Code.CALL_IDENTITY_REUSED


def test_final_context_and_broken_ancestry() -> None:
    # A missing parent, or a cycle, has no final context.
    scored = {"response": {"id": "r-c2"}}
    assert refused(FinalContext(), TWO[1:], scored) is Code.LINEAGE_BROKEN
    cycle = [call("c1", "one", parent="c2"), TWO[1]]
    assert refused(FinalContext(), cycle, scored) is Code.LINEAGE_BROKEN
    gap = [call("c1", "one", parent="c0"), TWO[1]]
    assert refused(FinalContext(), gap, scored) is Code.LINEAGE_BROKEN
