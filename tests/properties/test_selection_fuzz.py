"""Anything at all as a result, or as what a call served: a selection or a refusal, never another exception."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import SelectionError
from gristmill.fingerprint import output_items
from gristmill.selection import AllCaptured, FinalContext, ReturnedHistory, select_captured_calls
from tests.properties.profiles import checked
from tests.strategies.histories import histories
from tests.strategies.json_values import ODD, any_json, spoiled

POLICIES = (select_captured_calls, AllCaptured(), FinalContext())
LENIENT = ReturnedHistory(reasoning="optional", whitespace="trim", tool_call_ids="renamed", unmatched="context")


def refuse_or_select(records: Any, result: Any, policy: Any = select_captured_calls) -> None:
    refusal = None
    try:
        selected, _ = policy(records, result)
    except SelectionError as error:
        selected, refusal = [], error
    assert {id(record) for record in selected} <= {id(record) for record in records}
    if refusal is not None:
        assert refusal.where
        assert refusal.message
        json.dumps([refusal.where, refusal.message, refusal.evidence])  # a refusal is written into a JSON file


# One odd result would stop a whole batch with a traceback instead of being refused.
@checked
@given(st.data())
def test_a_result_spoiled_at_any_place(data: st.DataObject) -> None:
    case = data.draw(histories())
    result = spoiled(data.draw, case.result)
    refuse_or_select(case.records, result, data.draw(st.sampled_from((*POLICIES, LENIENT))))


# The same for a result that was never one.
@checked
@given(histories(), any_json(), st.sampled_from((*POLICIES, LENIENT)))
def test_any_json_as_a_result(case: Any, result: Any, policy: Any) -> None:
    refuse_or_select(case.records, result, policy)
    refuse_or_select(case.records, {"messages": [result]}, policy)
    refuse_or_select(case.records, {"responses": [{"output": [[result]], "contains_transitions": True}]}, policy)
    refuse_or_select(case.records, {"response": {"output": [{"role": "assistant", "content": result}]}}, policy)


# A reply that an engine garbled must make one call that is never matched, not an attempt that cannot be read.
@checked
@given(histories(), st.lists(any_json(), max_size=3))
def test_any_json_as_what_a_call_served(case: Any, served: list[Any]) -> None:
    spoiled_call = msgspec.structs.replace(case.records[0], output_items=output_items(served))
    refuse_or_select((spoiled_call, *case.records[1:]), case.result)
    refuse_or_select((spoiled_call, *case.records[1:]), {"messages": served})


# The known hard ones, at every place of one item.
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: type(odd).__name__)
def test_odd_values_at_every_place(odd: Any) -> None:
    records = ()
    for key in ("type", "role", "content", "id", "tool_calls", "reasoning", "call_id", "arguments", "name", "status"):
        for base in ({"role": "assistant"}, {"type": "function_call", "name": "f", "call_id": "c"}, {"role": "user"}):
            item = {**base, key: odd}
            refuse_or_select(records, {"messages": [item]})
            refuse_or_select(records, {"response": {"id": "r", "output": [item]}})
    for key in ("id", "output", "metadata", "contains_transitions"):
        refuse_or_select(records, {"response": {"output": [], key: odd}})
        refuse_or_select(records, {"responses": [{"output": [], key: odd}]})
    for key in ("response", "responses", "messages", "ng_trajectory", "trajectory", "terminal_response_id"):
        refuse_or_select(records, {key: odd})
    for reference in (odd, {"response_id": odd}, {"model_call_id": odd}, {"response_id": "r", "choice_index": odd}):
        refuse_or_select(records, {"ng_trajectory": {"turns": [{"model_calls": [reference]}]}})
