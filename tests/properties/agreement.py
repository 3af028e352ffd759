"""Compares the policy with the oracle and with the truth; says in one sentence what is wrong, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gristmill.errors import Code, SelectionError
from gristmill.records import CallRecord
from gristmill.selection import ReturnedHistory
from tests.properties.oracle import Answer, Options, decide
from tests.strategies.histories import Case

__all__ = ["CLEAN_REFUSALS", "OPTIONS", "check", "options_for", "wrong_for_the_oracle", "wrong_for_the_truth"]

CLEAN_REFUSALS: Final = frozenset(
    {
        Code.MATCH_AMBIGUOUS,
        Code.MATCH_UNDECIDED,
        Code.ITEM_IDENTITY_REUSED,
        Code.SELECTION_DUPLICATED,
        Code.TERMINAL_UNATTRIBUTED,
        Code.SNAPSHOT_AMBIGUOUS,
    }
)
"""Codes with which a faithful result may be refused."""

OPTIONS: Final[tuple[Mapping[str, str], ...]] = (
    {},
    {"reasoning": "optional"},
    {"whitespace": "trim"},
    {"tool_call_ids": "renamed"},
    {"unmatched": "context"},
    {"reasoning": "optional", "whitespace": "trim", "tool_call_ids": "renamed", "unmatched": "context"},
)
_NAMES: Final = {
    "reasoning": "reasoning_optional",
    "whitespace": "trim",
    "tool_call_ids": "renamed",
    "unmatched": "context",
}


def options_for(index: int) -> Mapping[str, str]:
    """Use the default options most of the time."""
    return OPTIONS[index // 10 % len(OPTIONS)] if index % 10 == 0 else {}


def check(case: Case, options: Mapping[str, str] = {}) -> tuple[str, str | None]:
    """Run both on a case; return what happened, and what is wrong about it.

    Raises:
        TooManyReadings: the case is too large for the oracle.
    """
    answer = decide(case.records, case.result, Options(**{_NAMES[name]: True for name in options}))
    try:
        selected, terminal = ReturnedHistory(**options)(case.records, case.result)
    except Exception as refusal:  # noqa: BLE001 - whatever it raises is the finding
        if not isinstance(refusal, SelectionError):
            return "crashed", f"raised {type(refusal).__name__}: {refusal}"
        problem = _wrong_refusal(refusal, answer, options)
        if case.clean and refusal.code not in CLEAN_REFUSALS:
            problem = problem or f"a faithful history is refused with {refusal}"
        return f"refused {refusal.code}", problem
    calls = tuple(record.model_call_id for record in selected)
    problem = wrong_for_the_oracle(calls, terminal, answer)
    if case.clean:
        problem = wrong_for_the_truth(case, selected, terminal) or problem
    return "selected", problem


def wrong_for_the_oracle(calls: tuple[str, ...], terminal: str | None, answer: Answer) -> str | None:
    """Say how a selection differs from the oracle's answer."""
    if answer.calls is None:
        return f"selected {calls}, the oracle refuses with {answer.code} (readings {sorted(answer.readings)[:4]})"
    if calls != answer.calls:
        return f"selected {calls}, the oracle {answer.calls}"
    if terminal != answer.terminal:
        return f"selected {calls} with terminal {terminal}, the oracle says {answer.terminal}"
    return None


def wrong_for_the_truth(case: Case, selected: list[Any], terminal: str | None) -> str | None:
    """Say how a selection differs from what the harness kept; calls of the same tokens may stand for each other."""
    tokens = {record.model_call_id: _tokens(record) for record in case.records}
    if sorted(str(tokens[record.model_call_id]) for record in selected) != sorted(str(tokens[c]) for c in case.truth):
        return f"selected {[record.model_call_id for record in selected]}, the harness kept {case.truth}"
    kept = next(record for record in case.records if record.response_id == case.terminal)
    if terminal not in {None, case.terminal}:
        named = next(record for record in case.records if record.response_id == terminal)
        if tokens[named.model_call_id] != tokens[kept.model_call_id]:
            return f"scored {terminal}, the harness scored {case.terminal}"
    return None


def _tokens(record: CallRecord) -> Any:
    """Give what makes a call interchangeable; a call without tokens is itself only."""
    if record.sequence_digest is None:
        return record.model_call_id
    equal = (record.sequence_digest, record.logprobs_digest, record.prompt_len, record.weight_versions)
    return (*equal, record.model, record.delivery, record.usable, record.parent_call_id)


def _wrong_refusal(refusal: SelectionError, answer: Answer, options: Mapping[str, str]) -> str | None:
    if refusal.code is Code.MATCH_UNDECIDED:
        return f"a small history is refused with {refusal}"
    if answer.calls is not None:
        return None if options else f"refused with {refusal}, the oracle selects {answer.calls}"
    if not answer.allows(refusal.code):
        return None if options else f"refused with {refusal}, the oracle refuses with {answer.code} {set(answer.also)}"
    readings = [tuple(reading) for reading in refusal.evidence.get("readings", ())]
    if readings and not options and answer.code is refusal.code:
        if len(readings) != 2 or readings[0] == readings[1]:
            return f"{refusal.code} shows no two different readings: {readings}"
        if not answer.readings.issuperset(readings):
            return f"{refusal.code} shows {readings}, not all of which remain: {sorted(answer.readings)[:6]}"
    return None
