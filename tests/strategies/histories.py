"""Hypothesis strategies for selection: captured calls, a returned result, and what the harness really kept.

`histories()` draws faithful cases; `broken_histories()` draws cases that one or two mutations broke.
Every case is small enough for the brute-force oracle.

    @given(histories())
    def test_selection_is_never_wrong(case: Case) -> None: ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from gristmill.records import CallRecord
from tests.strategies.draws import Draws, HypothesisDraws
from tests.strategies.forests import grow, record
from tests.strategies.mutations import mutate
from tests.strategies.results import returned

__all__ = ["Case", "broken_histories", "draw_case", "histories"]


@dataclass(frozen=True)
class Case:
    """One generated case.

    Attributes:
        records: captured calls in commit order.
        result: what the harness returned.
        truth: model call ids of what it kept, in the order of the history.
        terminal: response id of the call it scored.
        clean: the result is faithful, so that anything but the truth is wrong.
        renamed: tool-call ids were renamed on return: only `tool_call_ids="renamed"` can match them.
        notes: form of the result and mutations, for people.
    """

    records: tuple[CallRecord, ...]
    result: Any
    truth: tuple[str, ...]
    terminal: str
    clean: bool
    renamed: bool
    notes: tuple[str, ...]


def draw_case(draws: Draws, mutations: int = 0, *, rename: bool = False) -> Case:
    """Make a case out of any source of choices."""
    forest = grow(draws)
    records = [record(call, forest, draws) for call in forest.calls]
    made = returned(draws, forest, rename=rename)
    notes = [made.shape, forest.habits.dialect]
    result = made.result
    for _ in range(mutations):
        name, records, result = mutate(draws, records, result)
        notes.append(name)
    clean = made.faithful and not made.renamed and not mutations
    return Case(tuple(records), result, tuple(forest.truth), made.terminal, clean, made.renamed, tuple(notes))


@st.composite
def histories(draw: st.DrawFn, *, rename: bool = False) -> Case:
    """Draw faithful cases; `clean` says whether the default options must be able to read them.

    With `rename` the harness always renames tool-call ids, which only an option can match.
    """
    return draw_case(HypothesisDraws(draw), rename=rename)


@st.composite
def broken_histories(draw: st.DrawFn) -> Case:
    """Draw cases that one or two mutations broke."""
    draws = HypothesisDraws(draw)
    return draw_case(draws, draws.count(1, 2))
