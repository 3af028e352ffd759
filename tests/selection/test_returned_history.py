"""The default policy, rule by rule, where a story would say too little: every branch of the steps 1 to 13."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings

from gristmill.canonical import RepeatedKeys
from gristmill.errors import Code, SelectionError
from gristmill.records import CallRecord
from gristmill.selection import ReturnedHistory
from gristmill.selection.result import read_returned_result
from tests.selection.calls import Json, call, function_call, history, said, user
from tests.strategies.json_values import any_json


def select(records: list[CallRecord], result: Any, **options: str) -> tuple[list[str], str | None]:
    selected, terminal = ReturnedHistory(**options)(records, result)
    assert all(any(record is given for given in records) for record in selected)
    return [record.model_call_id for record in selected], terminal


def refusal(records: list[CallRecord], result: Any, **options: str) -> SelectionError:
    with pytest.raises(SelectionError) as caught:
        ReturnedHistory(**options)(records, result)
    return caught.value


TWO = [call("c1", "one"), call("c2", "two", parent="c1")]
CHOICES = [
    call("c1", "left", response_id="r"),
    call("c2", "right", response_id="r", choice_index=1),
]


def turns(*references: Json | None, key: str = "ng_trajectory") -> Json:
    return {key: {"turns": [{"model_calls": None if given is None else [given]} for given in references]}}


# ---- the result --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "where"),
    [
        (None, "$"),
        ([], "$"),
        ("text", "$"),
        (RepeatedKeys([("a", 1), ("a", 2)]), "$"),
        ({"response": 7}, "$.response"),
        ({"response": True}, "$.response"),
        ({"response": {"id": 7}}, "$.response.id"),
        ({"response": RepeatedKeys([("id", "a"), ("id", "b")])}, "$.response"),
        ({"terminal_response_id": 7, "messages": []}, "$.terminal_response_id"),
        ({"responses": {}}, "$.responses"),
        ({"responses": [7]}, "$.responses[0]"),
        ({"responses": [{"metadata": 7, "output": []}]}, "$.responses[0].metadata"),
        ({"responses": [{"metadata": {"session_id": 7}}]}, "$.responses[0].metadata.session_id"),
        ({"responses": [{"id": [], "output": []}]}, "$.responses[0].id"),
        ({"responses": [{"output": [], "contains_transitions": "yes"}]}, "$.responses[0].contains_transitions"),
        ({"responses": [{"output": [{}], "contains_transitions": True}]}, "$.responses[0].output[0]"),
        ({"responses": [{"output": [[7]], "contains_transitions": True}]}, "$.responses[0].output[0][0]"),
        ({"messages": {}}, "$.messages"),
        ({"messages": [7]}, "$.messages[0]"),
        ({"ng_trajectory": 7}, "$.ng_trajectory"),
        ({"ng_trajectory": {"turns": 7}}, "$.ng_trajectory.turns"),
        ({"ng_trajectory": {"turns": [7]}}, "$.ng_trajectory.turns[0]"),
        ({"ng_trajectory": {"turns": [{"model_calls": 7}]}}, "$.ng_trajectory.turns[0].model_calls"),
        ({"ng_trajectory": {"turns": [{"model_calls": [7]}]}}, "$.ng_trajectory.turns[0].model_calls[0]"),
        *(
            (turns({key: bad}), f"$.ng_trajectory.turns[0].model_calls[0].{key}")
            for key, bad in [
                ("response_id", 7),
                ("model_call_id", []),
                ("choice_index", "0"),
                ("choice_index", True),
                ("choice_index", -1),
                ("choice_index", 2**40),
            ]
        ),
        ({"trajectory": {"turns": [7]}}, "$.trajectory.turns[0]"),
    ],
)
def test_wrong_json_types_have_their_path(result: Any, where: str) -> None:
    # A harness author must see which field is wrong, and a batch must not stop with a TypeError.
    error = refusal(TWO, result)
    assert (error.code, error.where) == (Code.OUTPUT_MALFORMED, where)


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"response": None},
        {"responses": [], "response": {}},
        {"response": {"id": "x"}},
        {"response": {"output": {}}},
        {"responses": [{}]},
        {"ng_trajectory": {}, "reward": 1},
        {"trajectory": {"turns": "none"}},
        {"messages": None},
    ],
)
def test_no_history_at_all(result: Json) -> None:
    # A result without a history is a clear refusal, not an empty selection.
    assert refusal(TWO, result).code is Code.OUTPUT_MISSING


def test_read_only_mappings() -> None:
    # A harness in Python may return something that only behaves like a dict.
    result = MappingProxyType({"response": MappingProxyType({"output": [said("one"), user(), said("two")]})})
    assert select(TWO, result) == (["c1", "c2"], "r-c2")


def test_which_form_of_history_is_read() -> None:
    # `responses` before `response` before `messages`; an empty list counts as absent.
    both = {"responses": [{"output": [said("one")]}], "response": {"output": [said("two")]}}
    assert select(TWO, both)[0] == ["c1"]
    assert select(TWO, {**both, "responses": []})[0] == ["c2"]
    assert select(TWO, {"response": {"id": "r-c2"}, "messages": [said("one"), user(), said("two")]})[0] == ["c1", "c2"]


@settings(max_examples=300, derandomize=True, deadline=None)
@given(any_json())
def test_fuzz_results(value: Any) -> None:
    # Any JSON in any place that the result is read: a value or a coded refusal.
    shapes = [value, {"response": value}, {"responses": [value]}, {"ng_trajectory": value}, turns(value)]
    for shape in [*shapes, {"trajectory": value}, {"messages": value}, {"terminal_response_id": value, "messages": []}]:
        code: Code | None = None
        try:
            read_returned_result(shape).envelopes()
        except SelectionError as error:
            code = error.code
        assert code is None or code in Code


# ---- references --------------------------------------------------------------------------------------------


def test_choices_by_reference() -> None:
    # A response id alone names both choices; index, call id or content must pick one.
    assert select(CHOICES, turns({"response_id": "r", "choice_index": 1})) == (["c2"], "r")
    assert select(CHOICES, turns({"model_call_id": "c2", "choice_index": 1})) == (["c2"], "r")
    assert select(CHOICES, turns({"response_id": "r"}) | history(said("right"))) == (["c2"], "r")
    assert refusal(CHOICES, turns({"response_id": "r"})).code is Code.REFERENCE_CONTRADICTORY
    assert refusal(CHOICES, turns({"response_id": "r", "choice_index": 2})).code is Code.REFERENCE_UNKNOWN
    assert refusal(CHOICES, turns({"model_call_id": "c2", "choice_index": 0})).code is Code.REFERENCE_CONTRADICTORY
    assert refusal(CHOICES, turns({"model_call_id": "c9"})).code is Code.REFERENCE_UNKNOWN


def test_two_trajectories() -> None:
    # Two that agree are one; one without turns is none.
    agreeing = turns({"model_call_id": "c1"}) | turns({"model_call_id": "c1"}, key="trajectory")
    assert select(TWO, agreeing)[0] == ["c1"]
    assert select(TWO, {**turns({"model_call_id": "c1"}, key="trajectory"), "ng_trajectory": None})[0] == ["c1"]
    assert select(TWO, {"ng_trajectory": {"turns": [{}]}} | history(said("one")))[0] == ["c1"]


def test_references_and_scored_calls() -> None:
    # References only: S and D are checked against the list; an id that nobody captured is the harness's own.
    listed = turns({"model_call_id": "c1"})
    assert select(TWO, listed)[1] == "r-c1"
    assert select(TWO, {**listed, "terminal_response_id": "r-c1"})[1] == "r-c1"
    assert refusal(TWO, {**listed, "terminal_response_id": "r-c9"}).code is Code.DECLARED_TERMINAL_NOT_SELECTED


def test_references_longer_or_shorter_than_the_history() -> None:
    # Both directions of a disagreement are refused.
    listed = turns({"model_call_id": "c1"}, {"model_call_id": "c2"})
    error = refusal(TWO, listed | history(said("one")))
    assert (error.code, error.evidence["unreturned"]) == (Code.REFERENCE_UNRETURNED, ["model_call_id 'c2'"])
    assert refusal(TWO, listed | history(user())).code is Code.REFERENCE_UNRETURNED
    error = refusal(TWO, turns({"model_call_id": "c1"}) | history(said("one"), user(), said("two")))
    assert (error.code, error.where) == (Code.MATCH_MISSING, "$.response.output[2]")
    assert "nothing more" in error.message


def test_references_that_repeat_a_call_with_its_content() -> None:
    # Content twice and references twice still are one call.
    twice = turns({"model_call_id": "c1"}, {"model_call_id": "c1"})
    assert refusal(TWO, twice | history(said("one"), user(), said("one"))).code is Code.SELECTION_DUPLICATED


# ---- S and D -----------------------------------------------------------------------------------------------


def test_both_choices_in_the_history() -> None:
    # The scored id names two choices and the history holds both: content does not pick exactly one.
    assert refusal(CHOICES, {"response": {"id": "r", "output": [said("left"), user(), said("right")]}}).code is (
        Code.TERMINAL_NOT_SELECTED
    )


def test_an_unknown_scored_id_is_the_harness_own() -> None:
    # Harnesses make up ids for their exports.
    assert select(TWO, {"response": {"id": "export-1", "output": [said("one"), user(), said("two")]}})[1] == "r-c2"


def test_nothing_authored_with_a_scored_call() -> None:
    # The refusal names the terminal, which is what the user looks for.
    empty = {"responses": [{"output": [user()]}]}
    assert refusal(TWO, {**empty, "response": {"id": "r-c1"}}).code is Code.TERMINAL_NOT_SELECTED
    assert refusal(TWO, {**empty, "terminal_response_id": "r-c1"}).code is Code.DECLARED_TERMINAL_NOT_SELECTED
    assert refusal(TWO, {**empty, "terminal_response_id": "gone"}).code is Code.DECLARED_TERMINAL_NOT_SELECTED
    assert refusal(TWO, empty).code is Code.SELECTION_EMPTY


# ---- snapshots ---------------------------------------------------------------------------------------------


def snapshots(*output: list[Json]) -> Json:
    return {"response": {"contains_transitions": True, "output": list(output)}}


def test_snapshots_without_replies() -> None:
    # Neither flattening holds anything.
    assert refusal(TWO, snapshots([user()], [user()])).code is Code.SELECTION_EMPTY


def test_snapshots_that_no_flattening_explains() -> None:
    # The refusal is that of the shorter reading.
    assert refusal(TWO, snapshots([said("x")], [said("x"), said("y")])).code is Code.MATCH_MISSING


def test_a_snapshot_reading_that_is_ambiguous_refuses() -> None:
    # One flattening cannot be settled, so the other proves nothing.
    same = [call("c1", "ok"), call("c2", "ok"), call("c3", "ok")]
    assert refusal(same, snapshots([said("ok")], [said("ok")])).code is Code.MATCH_AMBIGUOUS


def test_snapshots_that_differ_are_not_repeats() -> None:
    # A changed user turn, or another id, is new content.
    calls = [call("c1", "ok"), call("c2", "ok", parent="c1"), call("c3", "end", parent="c2")]
    kept = snapshots([user("a"), said("ok")], [user("b"), said("ok"), user(), said("end")])
    assert select(calls, kept)[0] == ["c1", "c2", "c3"]
    shorter = snapshots([said("ok"), user(), said("ok")], [said("end")])
    assert select(calls, shorter)[0] == ["c1", "c2", "c3"]


# ---- options -----------------------------------------------------------------------------------------------


def test_trim_and_texts_of_blanks() -> None:
    # A text of nothing but blanks is no atom under the option.
    calls = [call("c1", said(" "), function_call("t1")), call("c2", " \n", parent="c1")]
    assert select(calls, history(function_call("t1"), user(), said("")), whitespace="trim")[0] == ["c1", "c2"]


def test_renaming_must_be_one_to_one() -> None:
    # Two returned ids for one captured id, in both directions, and conflicts inside one call.
    restarted = [call("c1", function_call("s1", '{"a":1}')), call("c2", function_call("s1", '{"a":2}'), parent="c1")]
    given = history(function_call("h1", '{"a":1}'), user(), function_call("h2", '{"a":2}'))
    assert refusal(restarted, given, tool_call_ids="renamed").code is Code.MATCH_MISSING
    calls = [
        call("c0", function_call("s0", '{"g":1}')),
        call("c1", function_call("s1"), function_call("s2", '{"g":1}')),
        call("c2", function_call("s3"), function_call("s4", '{"g":1}')),
    ]
    given = history(function_call("h2", '{"g":1}'), user(), function_call("h1"), function_call("h2", '{"g":1}'))
    assert refusal(calls, given, tool_call_ids="renamed").code is Code.MATCH_MISSING


def test_two_renamings_are_ambiguous() -> None:
    # The calls are certain, and which id is whose is not: a row could join the wrong results.
    calls = [call("c1", function_call("s1")), call("c2", function_call("s2"))]
    given = history(function_call("h1"), user(), function_call("h2"))
    assert refusal(calls, given, tool_call_ids="renamed").code is Code.MATCH_AMBIGUOUS


def test_context_runs_and_empties() -> None:
    # An unmatched run is passed over as a whole, also where it holds the items of several replies.
    given = history(said("hello"), said("there"), user(), said("one"), user(), said("two"))
    assert select(TWO, given, unmatched="context") == (["c1", "c2"], "r-c2")
    assert refusal(TWO, history(said("x"), user(), said("y")), unmatched="context").code is Code.MATCH_MISSING


def test_every_option_is_reported() -> None:
    # The verdicts of a tolerant run must say that it was tolerant.
    options = {"reasoning": "optional", "whitespace": "trim", "tool_call_ids": "renamed", "unmatched": "context"}
    policy = ReturnedHistory(**options)
    assert policy.options() == options
    notes = policy.decide(TWO, history(said("one"))).notes
    assert [note for note in notes if "in force" in note] == [
        f"option {name}={value} was in force" for name, value in options.items()
    ]


# ---- limits of the work ------------------------------------------------------------------------------------


def test_too_many_lengths_are_undecided() -> None:
    # A capture made to slow the search down must be refused in time.
    calls = [call(f"c{count}", *(["a"] * count)) for count in range(1, 203)]
    error = refusal(calls, history(said("a")))
    assert (error.code, error.where) == (Code.MATCH_UNDECIDED, "$.response.output[0]")


def test_a_long_history_of_equal_texts() -> None:
    # Equal words in every turn must not make the search long.
    calls = [call(f"c{number:04}", "ok", parent=f"c{number - 1:04}" if number else None) for number in range(2_000)]
    given = history(*(item for _ in calls for item in (said("ok"), user())))
    selected, terminal = select(calls, given)
    assert (len(selected), terminal) == (2_000, "r-c1999")


# ---- nearest calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("served", "returned", "difference"),
    [
        ([said("The answer is 4.")], [said("The answer is 5.")], "text_edited"),
        ([said("The answer is 4.")], [said("The  answer is 4.")], "whitespace_only"),
        ([said("Cafe\u0301 is open")], [said("Caf\u00e9 is open")], "unicode_form"),
        ([said("one\ntwo")], [said("one\r\ntwo")], "unicode_form"),
        ([function_call("t", '{"a":1}')], [function_call("t", '{"a":2}')], "arguments_changed"),
        ([function_call("t", '{"a":1}')], [function_call("u", '{"a":1}')], "call_id_changed"),
        ([function_call("t")], [{**function_call("t"), "name": "g"}], "text_edited"),
        ([said("a", reasoning="hm"), function_call("t")], [said("a"), function_call("t")], "reasoning_missing"),
        ([said("a", reasoning="hm, so")], [said("a", reasoning="hm, or")], "reasoning_changed"),
        ([said("a"), function_call("t")], [said("a")], "call_incomplete"),
        ([said("a"), function_call("t")], [said("a"), said("b")], "call_incomplete"),
        ([function_call("t"), function_call("u")], [function_call("u"), function_call("t")], "order_changed"),
        ([said("one", id="m1")], [said("x" * 60, id="m1")], "text_edited"),
        ([said("one")], [function_call("t")], "not_captured"),
        ([], [said("one")], "not_captured"),
    ],
)
def test_nearest_calls(served: list[Json], returned: list[Json], difference: str) -> None:
    # The class of the first difference tells the user which setting of the harness to look at.
    error = refusal([call("c1", *served)], history(*returned))
    assert error.code is Code.MATCH_MISSING
    assert error.evidence["nearest"]["difference"] == difference, error.message
    if difference != "not_captured":
        assert error.evidence["nearest"]["model_call_id"] == "c1"


def test_identity_conflicts_name_the_owner() -> None:
    # The words are right, and the item's id is another call's.
    calls = [call("c1", said("one", id="m1")), call("c2", said("one", id="m2")), call("c3", said("x", id="m3"))]
    error = refusal(calls, history(said("one", id="m1"), said("one", id="m3")))
    assert error.evidence["owners"] == ["c3"]
    joined = call("c4", said("one", id="m4"), function_call("t", id="m5"))
    error = refusal([joined, calls[0]], history(said("one", id="m4"), function_call("t", id="m1")))
    assert error.code is Code.MATCH_MISSING
    assert error.evidence["owners"]


# ---- identity and place ------------------------------------------------------------------------------------


def test_a_named_call_that_cannot_be_matched() -> None:
    # The id names a call of which a part was executed by a server: its words alone are not its reply.
    calls = [call("c1", said("one", id="m1"), {"type": "web_search_call", "id": "ws"}), call("c2", "one")]
    assert refusal(calls, history(said("one", id="m1"))).code is Code.MATCH_MISSING


def test_a_named_call_outside_its_envelope() -> None:
    # The response id and the item id of one call stand in two envelopes: one of them is wrong.
    calls = [call("c1", said("one", id="m1")), call("c2", "one")]
    result = {"responses": [{"id": "r-c1", "output": [said("one")]}, {"output": [said("one", id="m1")]}]}
    error = refusal(calls, result)
    assert (error.code, error.where) == (Code.MATCH_MISSING, "$.responses[1].output[0]")


def test_ids_inside_a_span_of_several_items() -> None:
    # Every identity in a call's span is its own; one foreign id in the middle forbids it.
    joined = call("c1", said("a", id="m1"), function_call("t", id="m2"))
    other = call("c2", "x", parent="c1")
    assert select([joined, other], history(said("a", id="m1"), function_call("t", id="m2")))[0] == ["c1"]
    named = call("c2", said("x", id="m3"), parent="c1")
    error = refusal([joined, named], history(said("a", id="m1"), function_call("t", id="m3")))
    assert error.code is Code.MATCH_MISSING
    assert (
        refusal([joined], history(said("a", id="m1"), user(), function_call("t", id="m2"))).code is Code.MATCH_MISSING
    )
    cut = call("c1", said("a", id="m1"), function_call("t"))
    whole = {**said("b"), "tool_calls": [{"id": "t", "function": {"name": "f"}}]}
    assert refusal([cut], history(said("a", id="m1"), whole)).code is Code.MATCH_MISSING
    longer = {**said("b", id="m1"), "tool_calls": [{"id": "t", "function": {"name": "f"}}]}
    assert refusal([call("c1", said("b", id="m1"))], history(longer)).code is Code.MATCH_MISSING


def test_work_is_bounded_where_replies_show_nothing() -> None:
    """A harness that returns hundreds of empty messages must get an answer at once, not after minutes."""
    records = [call(f"c{number}", said("")) for number in range(300)]
    error = refusal(records, {"messages": [said("") for _ in range(300)]})
    assert error.code is Code.MATCH_UNDECIDED


def test_work_is_bounded_where_all_ids_are_renamed() -> None:
    """Hundreds of equal tool calls under new ids must be refused at once, not compared pair by pair."""
    records = [call(f"c{number}", function_call(f"own-{number}")) for number in range(300)]
    returned = [function_call(f"new-{number}") for number in range(300)]
    error = refusal(records, history(*returned), tool_call_ids="renamed")
    assert error.code is Code.MATCH_UNDECIDED
