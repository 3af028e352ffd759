"""Deciding whether all readings that the evidence leaves select the same calls.

Invariant: `Settled` comes only with a proof that every remaining reading has the same set of calls, `Ambiguous` only
with two readings to show, and `Undecided` when the budget is spent; nothing takes the first that fits.

Not here: the two ways of proving it (counting, search).
"""

from __future__ import annotations

from gristmill.selection.counting import Counting
from gristmill.selection.readings import Evidence, NoReading, Outcome, Problem, Settled, Undecided
from gristmill.selection.search import Search
from gristmill.selection.walk import Budget, BudgetSpent

__all__ = ["settle"]


def settle(problem: Problem, evidence: Evidence) -> Outcome:
    """Decide whether all readings that the evidence leaves select the same calls."""
    if not problem.graph.options and problem.graph.goal != 0:
        return NoReading("missing")
    counted = Counting(problem, evidence).settle()
    if isinstance(counted, Settled | NoReading):
        return counted
    budget = Budget()
    try:
        return Search(problem, evidence, budget).settle()
    except BudgetSpent:
        return counted if counted is not None else Undecided(budget.steps)
