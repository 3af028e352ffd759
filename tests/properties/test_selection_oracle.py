"""`returned_history` against the brute-force oracle, and against what the harness really kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import assume, given
from hypothesis import strategies as st

from gristmill.errors import Code, SelectionError
from gristmill.selection import ReturnedHistory, select_captured_calls
from tests.properties.agreement import CLEAN_REFUSALS, OPTIONS, check, options_for, wrong_for_the_truth
from tests.properties.long_run import as_json, cases
from tests.properties.oracle import TooManyReadings, decide
from tests.properties.profiles import checked
from tests.strategies.histories import Case, broken_histories, histories


def agreement(case: Case, options: Mapping[str, str] = {}) -> str | None:
    """Say what the policy does other than the oracle."""
    try:
        _, problem = check(case, options)
    except TooManyReadings:
        assume(False)
    return problem


Made = tuple[list[Any], str | None]


def attempt(case: Case, policy: Callable[..., Made] = select_captured_calls) -> Made | SelectionError:
    """Return the selection, or the refusal."""
    try:
        return policy(case.records, case.result)
    except SelectionError as refusal:
        return refusal


# A call too many or too few in the rows, in the wrong order, or the wrong call scored.
@checked
@given(histories())
def test_a_faithful_history_is_read_as_the_oracle_reads_it(case: Case) -> None:
    assert agreement(case) is None


# A broken result that is trained on anyway, or a refusal that names the wrong cause.
@checked
@given(broken_histories())
def test_a_broken_history_is_judged_as_the_oracle_judges_it(case: Case) -> None:
    assert agreement(case) is None


# The one error that nobody would notice: a run trained on calls that the agent did not make.
@checked
@given(histories().filter(lambda case: case.clean))
def test_a_faithful_history_is_never_selected_wrongly(case: Case) -> None:
    made = attempt(case)
    if isinstance(made, SelectionError):
        assert made.code in CLEAN_REFUSALS, str(made)
    else:
        assert wrong_for_the_truth(case, *made) is None


# A refusal for ambiguity that nobody can check or act on.
@checked
@given(histories() | broken_histories())
def test_an_ambiguity_is_shown_by_two_readings_that_remain(case: Case) -> None:
    made = attempt(case)
    if not isinstance(made, SelectionError) or "readings" not in made.evidence:
        return
    try:
        answer = decide(case.records, case.result)
    except TooManyReadings:
        assume(False)
    first, second = map(tuple, made.evidence["readings"])
    assert first != second
    if answer.code is Code.MATCH_AMBIGUOUS:
        assert {first, second} <= answer.readings


# A custom option that selects a call which no reading under that option holds.
@checked
@given(histories() | broken_histories(), st.sampled_from(OPTIONS))
def test_an_option_selects_nothing_that_the_oracle_does_not(case: Case, options: Mapping[str, str]) -> None:
    assert agreement(case, options) is None


# Renamed tool-call ids are the reason for the option: with it, a faithful history must still never be wrong.
@checked
@given(histories(rename=True))
def test_renamed_tool_call_ids_are_never_selected_wrongly(case: Case) -> None:
    made = attempt(case, ReturnedHistory(tool_call_ids="renamed"))
    assert isinstance(made, SelectionError) or wrong_for_the_truth(case, *made) is None


# Rows made of copies, of calls of another attempt, or of one call twice.
@checked
@given(histories() | broken_histories())
def test_selected_calls_are_captured_ones_each_once(case: Case) -> None:
    made = attempt(case)
    if isinstance(made, SelectionError):
        return
    selected, terminal = made
    identities = [id(record) for record in selected]
    assert len(set(identities)) == len(identities)
    assert set(identities) <= {id(record) for record in case.records}
    assert terminal is None or terminal in {record.response_id for record in selected}


# A selection that differs between two runs, or between two JSON libraries.
@checked
@given(histories() | broken_histories())
def test_the_order_of_keys_changes_nothing(case: Case) -> None:
    assert plain(attempt(case)) == plain(attempt(replace(case, result=turned(case.result))))


def turned(value: Any) -> Any:
    """Put the members of every object into the opposite order."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(value)}
    return [turned(member) for member in value] if isinstance(value, list) else value


def plain(made: Made | SelectionError) -> Any:
    if isinstance(made, SelectionError):
        return made.code, made.where, made.message, made.evidence
    return [record.model_call_id for record in made[0]], made[1]


# Five thousand histories of the fast generator find what a few hundred shrinkable ones do not. A generator that lost a
# form or an outcome would leave it untested without anybody seeing it.
def test_five_thousand_histories_of_every_form_and_outcome() -> None:
    seen: set[str] = set()
    for index, case in enumerate(cases(20_000, 5_000)):
        seen.update(case.notes)
        try:
            name, problem = check(case, options_for(index))
        except TooManyReadings:
            continue
        assert problem is None, msgspec.json.encode(as_json(case)).decode()
        seen.add(name.removeprefix("refused "))
    shapes = {"response", "native", "harness", "chunks", "snapshots", "cumulative_snapshots", "references"}
    assert shapes | {"chat", "messages", "cumulative", "responses", "selected"} <= seen
    refusals = {
        Code.CALL_IDENTITY_REUSED,
        Code.DECLARED_TERMINAL_CONFLICT,
        Code.DECLARED_TERMINAL_NOT_SELECTED,
        Code.ENVELOPE_EMPTY,
        Code.ITEM_IDENTITY_REUSED,
        Code.ITEM_TYPE_UNSUPPORTED,
        Code.LINEAGE_BROKEN,
        Code.LINEAGE_CONTRADICTION,
        Code.MATCH_AMBIGUOUS,
        Code.MATCH_MISSING,
        Code.OUTPUT_MISSING,
        Code.REFERENCE_CONTRADICTORY,
        Code.REFERENCE_UNKNOWN,
        Code.REFERENCE_UNRETURNED,
        Code.REFERENCES_PARTIAL,
        Code.SELECTION_DUPLICATED,
        Code.SELECTION_EMPTY,
        Code.SESSIONS_MIXED,
        Code.SNAPSHOT_AMBIGUOUS,
        Code.SNAPSHOT_ITEM_CONFLICT,
        Code.TERMINAL_NOT_SELECTED,
    }
    assert {str(code) for code in refusals} <= seen
