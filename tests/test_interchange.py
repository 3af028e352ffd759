"""Which calls are equal in everything that training could tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.interchange import interchange_groups
from gristmill.records import CallRecord, Delivery, WeightSpan


def record(call_id: str, **fields: Any) -> CallRecord:
    same = {"sequence_digest": "s", "logprobs_digest": "p", "prompt_len": 2, "cum_len": 4, "usable": True}
    return CallRecord(model_call_id=call_id, response_id=f"r-{call_id}", **{**same, **fields})


def test_twins_are_represented_by_the_smallest_id() -> None:
    # Which of two equal calls is trained must not depend on the order in which they were stored.
    records = [record("b"), record("a"), record("c", sequence_digest="other")]
    assert interchange_groups(records, range(3)) == {0: 1, 1: 1}


def test_a_preferred_call_represents() -> None:
    # A proven call must not be replaced by its twin.
    assert interchange_groups([record("a"), record("b")], range(2), preferred={1}) == {0: 1, 1: 1}


@pytest.mark.parametrize(
    "other",
    [
        {"logprobs_digest": "q"},
        {"prompt_len": 1},
        {"model": "m"},
        {"parent_call_id": "p"},
        {"usable": False},
        {"delivery": Delivery.ABORTED},
        {"weight_versions": (WeightSpan("1", 0, 2),)},
    ],
)
def test_one_difference_is_enough(other: dict[str, Any]) -> None:
    # Calls that training could tell apart must stay a question.
    assert interchange_groups([record("a"), record("b", **other)], range(2)) == {}


@pytest.mark.parametrize("absent", [{"sequence_digest": None}, {"logprobs_digest": None}, {"cum_len": 2}])
def test_absent_or_empty_tokens_are_never_interchangeable(absent: dict[str, Any]) -> None:
    # Two calls without tokens are not known to be equal.
    assert interchange_groups([record("a", **absent), record("b", **absent)], range(2)) == {}


def test_foreign_records_are_never_interchangeable() -> None:
    # Another system's records say nothing about tokens.
    foreign = [SimpleNamespace(model_call_id=name) for name in "ab"]
    assert interchange_groups(foreign, range(2)) == {}
