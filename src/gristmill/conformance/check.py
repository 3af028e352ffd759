"""Compare the outcome of a conformance case with what is right.

Invariant: a selection that differs from a known truth is a difference, whatever else the case allows; a refusal passes
only where the case says so.

Not here: making outcomes (run).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from gristmill.canonical import JsonNumber, JsonValue
from gristmill.conformance.run import UNSUPPORTED_KINDS
from gristmill.errors import Code

__all__ = ["Checked", "check"]

_COMPARED: Final = (
    "code",
    "calls",
    "terminal",
    "parents",
    "state",
    "states",
    "reason",
    "weight_version",
    "reported_empty",
)
_CLEAN_REFUSALS: Final = frozenset(
    {
        Code.MATCH_AMBIGUOUS,
        Code.MATCH_UNDECIDED,
        Code.ITEM_IDENTITY_REUSED,
        Code.SELECTION_DUPLICATED,
        Code.TERMINAL_UNATTRIBUTED,
    }
)
_LOGPROB_TOLERANCE: Final = 1e-6
_option_condition = re.compile(r'options\.(\w+)\s*=\s*"([^"]*)"')


class Checked(msgspec.Struct, frozen=True):
    """Whether an outcome is right, and each way in which it is not."""

    ok: bool
    problems: tuple[str, ...] = ()


def check(case: Mapping[str, JsonValue], outcome: Mapping[str, Any]) -> Checked:
    """Compare an outcome with the expectation of its case."""
    given = cast(Mapping[str, JsonValue], case.get("input") or {})
    if outcome.get("outcome") == "unsupported":
        known = given.get("kind") in UNSUPPORTED_KINDS
        return Checked(known, () if known else (f"kind {given.get('kind')!r} is not known",))
    if "truth" in case:
        problems = _against_truth(case, outcome)
    elif "expected" in case:
        problems = _against(cast(Mapping[str, Any], case["expected"]), outcome, given)
    else:
        problems = ["the case has neither `expected` nor `truth`"]
    return Checked(not problems, tuple(problems))


def _against_truth(case: Mapping[str, JsonValue], outcome: Mapping[str, Any]) -> list[str]:
    """Check a generated rollout: the truth or an allowed refusal, never a call in place of another."""
    truth = cast(list[str], case["truth"])
    if outcome["outcome"] == "reject":
        if not case.get("clean"):
            return []
        if "served" in case or outcome["code"] not in _CLEAN_REFUSALS:
            return [f"expected calls {truth}, got the refusal {outcome['code']}: {outcome['message']}"]
        return []
    calls = cast(list[str], outcome.get("calls", []))
    if not case.get("clean"):
        foreign = [call for call in calls if call not in truth]
        return [f"selected {foreign}, which the truth {truth} does not hold"] if foreign else []
    problems = [] if calls == truth else [f"expected calls {truth}, got {calls}"]
    if outcome.get("terminal") != case.get("terminal"):
        problems.append(f"expected terminal {case.get('terminal')!r}, got {outcome.get('terminal')!r}")
    return problems


def _against(expected: Mapping[str, Any], outcome: Mapping[str, Any], given: Mapping[str, JsonValue]) -> list[str]:
    problems = _problems(expected, outcome, given)
    if not problems:
        return []
    for other in cast(Sequence[Mapping[str, Any]], expected.get("acceptable", [])):
        if _applies(other.get("when"), given) and not _problems({**_common(expected), **other}, outcome, given):
            return []
    return problems


def _common(expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return what holds for every acceptable answer too."""
    return {"never_select": expected["never_select"]} if "never_select" in expected else {}


def _applies(condition: object, given: Mapping[str, JsonValue]) -> bool:
    if condition is None:
        return True
    match = _option_condition.fullmatch(str(condition))
    options = cast(Mapping[str, JsonValue], given.get("options") or {})
    return match is not None and options.get(match.group(1)) == match.group(2)


def _problems(expected: Mapping[str, Any], outcome: Mapping[str, Any], given: Mapping[str, JsonValue]) -> list[str]:
    if outcome.get("outcome") != expected.get("outcome"):
        told = f" ({outcome['code']}: {outcome.get('message')})" if "code" in outcome else ""
        return [f"expected outcome {expected.get('outcome')!r}, got {outcome.get('outcome')!r}{told}"]
    if outcome["outcome"] == "variants":
        return [
            f"{name}: {problem}"
            for name, wanted in expected.items()
            if isinstance(wanted, Mapping)
            for problem in _against(cast(Mapping[str, Any], wanted), outcome.get(name, {}), given)
        ]
    problems = [
        f"expected {key} {expected[key]!r}, got {outcome.get(key)!r}"
        for key in _COMPARED
        if key in expected and expected[key] != outcome.get(key)
    ]
    if "rows" in expected and not _same_rows(expected["rows"], outcome.get("rows", [])):
        problems.append(f"expected rows {expected['rows']!r}, got {outcome.get('rows')!r}")
    problems.extend(_digest_problems(expected, outcome))
    problems.extend(_mention_problems(expected, outcome))
    wrong = set(expected.get("never_select", ())) & set(outcome.get("calls", ()))
    if wrong:
        problems.append(f"selected {sorted(wrong)}, which must never be")
    return problems


def _digest_problems(expected: Mapping[str, Any], outcome: Mapping[str, Any]) -> list[str]:
    digests = cast(Mapping[str, str], outcome.get("digests", {}))
    problems: list[str] = []
    for relation, wanted in (("equal", True), ("distinct", False)):
        for first, second in expected.get(relation, ()):
            if first not in digests or second not in digests:
                problems.append(f"expected digests of {first!r} and {second!r}, got an error")
            elif (digests[first] == digests[second]) is not wanted:
                problems.append(f"expected {first!r} and {second!r} to be {relation}")
    return problems


def _mention_problems(expected: Mapping[str, Any], outcome: Mapping[str, Any]) -> list[str]:
    told = " ".join(str(outcome.get(key, "")) for key in ("where", "message", "evidence", "reason")).lower()
    return [
        f"expected the error to mention {wanted!r}, got {told!r}"
        for wanted in expected.get("error_must_mention", ())
        if str(wanted).lower() not in told
    ]


def _same_rows(expected: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Compare rows in any order."""
    left = list(rows)
    for wanted in expected:
        found = next((row for row in left if _same_row(wanted, row)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _same_row(expected: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    for key, wanted in expected.items():
        if key == "logprobs":
            got = cast(Sequence[float], row["logprobs"])
            if len(got) != len(wanted) or not all(map(_close, map(_number, wanted), got)):
                return False
        elif row.get(key) != wanted:
            return False
    return True


def _number(value: object) -> float:
    return float(value.text) if isinstance(value, JsonNumber) else float(cast(float, value))


def _close(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=0, abs_tol=_LOGPROB_TOLERANCE)
