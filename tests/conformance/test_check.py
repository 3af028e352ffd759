"""The judge of conformance cases: a judge that lets a wrong answer pass makes every case worthless."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.conformance import check

Json = dict[str, Any]

SELECTED: Json = {"outcome": "select", "calls": ["c1", "c2"], "terminal": "r2"}
AMBIGUOUS: Json = {
    "outcome": "reject",
    "code": "match_ambiguous",
    "where": "$.response",
    "message": "Two Readings",
    "evidence": {"candidates": ["c1"]},
}


def expected(**fields: Any) -> Json:
    return {"input": {"kind": "select"}, "expected": fields}


def truth(*calls: str, clean: bool = True, **fields: Any) -> Json:
    return {"input": {"kind": "select"}, "truth": list(calls), "terminal": "r2", "clean": clean, **fields}


@pytest.mark.parametrize(
    ("case", "outcome", "ok"),
    [
        (truth("c1", "c2"), SELECTED, True),
        # A wrong call, an order that differs, or a wrong terminal is a wrong selection.
        (truth("c1", "c3"), SELECTED, False),
        (truth("c2", "c1"), SELECTED, False),
        (truth("c1", "c2"), {**SELECTED, "terminal": "r1"}, False),
        # A clean history may be refused for ambiguity, never because nothing matched.
        (truth("c1", "c2"), AMBIGUOUS, True),
        (truth("c1", "c2"), {**AMBIGUOUS, "code": "match_missing"}, False),
        # A dialect crossing has to be selected.
        (truth("c1", "c2", served="chat"), AMBIGUOUS, False),
        # A broken history may be refused, or lack calls; it never holds a call outside the truth.
        (truth("c1", "c2", "c3", clean=False), SELECTED, True),
        (truth("c1", clean=False), SELECTED, False),
        (truth("c1", clean=False), {**AMBIGUOUS, "code": "match_missing"}, True),
    ],
)
def test_against_the_truth(case: Json, outcome: Json, ok: bool) -> None:
    # The simulator knows what ran; nothing else is right.
    checked = check(case, outcome)
    assert checked.ok is ok
    assert bool(checked.problems) is not ok


@pytest.mark.parametrize(
    ("wanted", "outcome", "ok"),
    [
        ({"outcome": "select", "calls": ["c1", "c2"], "terminal": "r2"}, SELECTED, True),
        ({"outcome": "select", "calls": ["c1"]}, SELECTED, False),
        ({"outcome": "reject", "code": "match_ambiguous"}, AMBIGUOUS, True),
        ({"outcome": "reject", "code": "match_missing"}, AMBIGUOUS, False),
        ({"outcome": "select"}, AMBIGUOUS, False),
        ({"outcome": "reject"}, SELECTED, False),
        ({"outcome": "reject", "error_must_mention": ["two readings", "C1", "$.RESPONSE"]}, AMBIGUOUS, True),
        ({"outcome": "reject", "error_must_mention": ["c9"]}, AMBIGUOUS, False),
        ({"outcome": "select", "never_select": ["c3"]}, SELECTED, True),
        ({"outcome": "select", "never_select": ["c2"]}, SELECTED, False),
    ],
)
def test_against_an_expectation(wanted: Json, outcome: Json, ok: bool) -> None:
    # Each field that a case gives must be compared, or the case promises what nobody tests.
    assert check(expected(**wanted), outcome).ok is ok


def test_acceptable_answers() -> None:
    # Some faults have two right answers; a third one must still fail.
    case = expected(outcome="reject", code="match_missing", acceptable=[{"outcome": "select", "calls": ["c1", "c2"]}])
    assert check(case, SELECTED).ok
    assert not check(case, AMBIGUOUS).ok


def test_acceptable_only_under_an_option() -> None:
    # What an option allows must not pass where the option is off.
    case = expected(
        outcome="reject",
        code="match_missing",
        acceptable=[{"when": 'options.reasoning = "optional"', "outcome": "select", "calls": ["c1", "c2"]}],
    )
    assert not check(case, SELECTED).ok
    case["input"]["options"] = {"reasoning": "optional"}
    assert check(case, SELECTED).ok
    case["expected"]["acceptable"][0]["when"] = "the moon is full"
    assert not check(case, SELECTED).ok


def test_never_select_holds_for_acceptable_answers() -> None:
    # An acceptable answer must not smuggle in the very call that the case forbids.
    case = expected(outcome="reject", code="match_missing", never_select=["c2"], acceptable=[{"outcome": "select"}])
    assert not check(case, SELECTED).ok


def test_unsupported_kinds() -> None:
    # Kinds of gateway and ledger are run elsewhere; a kind that nobody knows must fail, not vanish.
    outcome = {"outcome": "unsupported", "kind": "gateway"}
    assert check({"input": {"kind": "gateway"}, "expected": {}}, outcome).ok
    assert not check({"input": {"kind": "teleport"}, "expected": {}}, outcome).ok
    assert not check({"expected": {}}, outcome).ok


def test_a_case_without_expectation_fails() -> None:
    # A case with a misspelt key would otherwise pass for ever.
    assert not check({"input": {"kind": "select"}}, SELECTED).ok


def test_variants_are_named() -> None:
    # One wrong variant among several must be found, and named.
    case = expected(outcome="variants", first={"outcome": "select"}, second={"outcome": "reject"})
    outcome = {"outcome": "variants", "first": SELECTED, "second": SELECTED}
    [problem] = check(case, outcome).problems
    assert problem.startswith("second: ")
    assert not check(case, {"outcome": "variants", "first": SELECTED}).ok


ROW = {"calls": ["c1"], "tokens": [1, 2], "mask": [0, 1], "logprobs": [0.0, -0.5]}


@pytest.mark.parametrize(
    ("rows", "ok"),
    [
        ([ROW], True),
        ([{**ROW, "logprobs": [0.0, -0.5000001]}], True),
        ([{**ROW, "logprobs": [0.0, -0.51]}], False),
        ([{**ROW, "logprobs": [0.0]}], False),
        ([{**ROW, "tokens": [1, 3]}], False),
        ([ROW, ROW], False),
        ([], False),
    ],
)
def test_rows(rows: list[Json], ok: bool) -> None:
    # One wrong id, mask bit or log-prob is a wrong row.
    assert check(expected(outcome="rows", rows=[ROW]), {"outcome": "rows", "rows": rows}).ok is ok


def test_rows_in_any_order() -> None:
    # The order of rows is not part of the expectation.
    other = {**ROW, "calls": ["c2"]}
    assert check(expected(outcome="rows", rows=[ROW, other]), {"outcome": "rows", "rows": [other, ROW]}).ok


def test_digests() -> None:
    # Equal, distinct and unreadable items are three different things.
    outcome = {"outcome": "fingerprint", "digests": {"a": "1", "b": "1", "c": "2"}}
    assert check(expected(outcome="fingerprint", equal=[["a", "b"]], distinct=[["a", "c"]]), outcome).ok
    assert not check(expected(outcome="fingerprint", equal=[["a", "c"]]), outcome).ok
    assert not check(expected(outcome="fingerprint", distinct=[["a", "b"]]), outcome).ok
    assert not check(expected(outcome="fingerprint", equal=[["a", "d"]]), outcome).ok
