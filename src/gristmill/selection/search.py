"""Settling a history exactly: fix what is forced, then search what is left within a budget.

Calls that stand alone at a place that every path passes are fixed; what they rule out is removed, until nothing
changes. What is left is searched: is there a reading without this call, with that one, ending otherwise? Invariant: an
answer is a proof over all readings; a spent budget is never an answer.

Not here: the search for one reading (walk).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Final

from gristmill.lineage import MISSING_PARENT, NO_PARENT
from gristmill.selection.graph import Option, cut_nodes
from gristmill.selection.readings import (
    Ambiguous,
    Evidence,
    NoReading,
    Outcome,
    Problem,
    Reading,
    Settled,
    Step,
)
from gristmill.selection.walk import BUDGET, Budget, Constraint, Walk

__all__ = ["Search"]

_MOST_EDGES: Final = 200_000


class Search:
    """Settles a problem exactly by fixing what is forced and searching the rest."""

    def __init__(self, problem: Problem, evidence: Evidence, budget: Budget) -> None:
        self.problem = problem
        self.evidence = evidence
        self.budget = budget
        self.options = {
            node: [Option(option.end, list(option.calls)) for option in found]
            for node, found in problem.graph.options.items()
            if self._count_edges(found)
        }
        self.goal = problem.graph.goal
        self.fixed: dict[int, Step] = {}
        self.required: set[int] = set()
        self.representative: Mapping[int, int] = {}
        self.one_of: list[frozenset[int]] = []

    def _count_edges(self, found: list[Option]) -> bool:
        edges = sum(len(option.calls) for option in found)
        self.budget.spend(edges * BUDGET // _MOST_EDGES)
        return True

    def settle(self) -> Outcome:
        if not self._fix():
            return self._why_none()
        self._prepare()
        if self._find(Constraint()) is None:
            return self._why_none()
        held = self._hold_must()
        return held if isinstance(held, NoReading) else self._close(held)

    # Fixing

    def _fix(self) -> bool:
        """Fix the only call at places that every path passes, and remove what that rules out, until stable."""
        while True:
            if not self._prune():
                return False
            before = len(self.fixed)
            self.fixed = {}
            cuts = list(cut_nodes(self.options, self.goal))
            for node, following in pairwise(cuts):
                found = self.options[node]
                if len(found) == 1 and found[0].end == following and len(found[0].calls) == 1:
                    self.fixed[node] = (node, found[0].calls[0], following)
            removed = self._remove_excluded()
            if removed is None:
                return False
            if not removed and len(self.fixed) == before:
                return True

    def _prune(self) -> bool:
        reached = {0}
        for node, found in self.options.items():
            if node in reached:
                reached.update(option.end for option in found)
        if self.goal not in reached:
            return False
        alive = {self.goal}
        kept: dict[int, list[Option]] = {}
        for node in sorted(self.options, reverse=True):
            if node in reached:
                found = [option for option in self.options[node] if option.end in alive]
                if found:
                    kept[node] = found
                    alive.add(node)
        self.options = {node: kept[node] for node in sorted(kept)}
        return 0 in alive

    def _remove_excluded(self) -> bool | None:
        """Remove calls from places where a fixed call forbids them; None where fixed calls forbid each other."""
        place_of = {call: node for node, call, _ in self.fixed.values()}
        if len(place_of) != len(self.fixed):
            return None
        parents = self.problem.parents_C
        first_descendant: dict[int, int] = {}
        for node, call, _ in sorted(self.fixed.values()):
            parent = parents[call]
            while parent >= 0 and parent not in first_descendant:
                first_descendant[parent] = node
                parent = parents[parent]
        last_ancestor: dict[int, int] = {}
        removed = False
        for node, found in self.options.items():
            for option in found:
                kept = [
                    call
                    for call in option.calls
                    if place_of.get(call, node) == node
                    and first_descendant.get(call, node) >= node
                    and self._last_fixed_ancestor(call, place_of, last_ancestor) <= node
                ]
                if len(kept) != len(option.calls):
                    removed = True
                    option.calls = kept
            self.options[node] = [option for option in found if option.calls]
        return removed

    def _last_fixed_ancestor(self, call: int, place_of: Mapping[int, int], known: dict[int, int]) -> int:
        """Return the last place of a fixed ancestor of a call, -1 if there is none."""
        path: list[int] = []
        seen: set[int] = set()
        while call >= 0 and call not in known and call not in seen:
            seen.add(call)
            path.append(call)
            call = self.problem.parents_C[call]
        place = -1
        if call >= 0 and call in known:
            place = max(known[call], place_of.get(call, -1))
        for member in reversed(path):
            known[member] = place
            place = max(place, place_of.get(member, -1))
        return known[path[0]] if path else known[call]

    # Searching

    def _prepare(self) -> None:
        """Index what the search runs over: the places that are not fixed, and the lineage among their calls."""
        self.open_calls: set[int] = set()
        self.last_node: dict[int, int] = {}
        for node, found in self.options.items():
            if node in self.fixed:
                continue
            for option in found:
                for call in option.calls:
                    self.open_calls.add(call)
                    self.last_node[call] = node
        self.fixed_calls = {call for _, call, _ in self.fixed.values()}
        self.representative = self.problem.group_of(self.open_calls)
        self.open_parent: dict[int, int] = {}
        for call in self.open_calls:
            seen = {call}
            parent = self.problem.parents_C[call]
            while parent >= 0 and parent not in self.open_calls and parent not in seen:
                seen.add(parent)
                parent = self.problem.parents_C[parent]
            if parent >= 0 and parent in self.open_calls and parent != call:
                self.open_parent[call] = parent
        self.moves = {
            node: sorted(
                ((call, option.end) for option in found for call in option.calls),
                key=self._preference,
            )
            for node, found in self.options.items()
            if node not in self.fixed
        }

    def _preference(self, move: tuple[int, int]) -> tuple[int, bool, str, int]:
        call, end = move
        group = self.group(call)
        return group, call != group, self.problem.ids[call], end

    def _find(self, constraint: Constraint) -> Reading | None:
        return Walk(self, constraint).run()

    def _why_none(self) -> NoReading:
        """Say why there is no reading: only ones against the lineage, only ones with repeats, or no renaming of ids."""
        self.options = {
            node: [Option(option.end, list(option.calls)) for option in found]
            for node, found in self.problem.graph.options.items()
        }
        self.fixed = {}
        self._prepare()
        if self._find(Constraint(ignore_lineage=True)) is not None:
            return NoReading("contradiction")
        if self.problem.pairs_of is None or self._find(Constraint(ignore_lineage=True, repeats=True)) is not None:
            return NoReading("duplicated")
        return NoReading("renamed")

    def _hold_must(self) -> Reading | NoReading:
        """Ask every later search for exactly one call of each group of the hard evidence (choices of one response)."""
        for group in self.evidence.must:
            self.one_of = [frozenset(group)]
            if not group or self._find(Constraint()) is None:
                return NoReading("evidence", group)
        self.one_of = [frozenset(group) for group in self.evidence.must]
        reading = self._find(Constraint())
        if reading is None:
            return NoReading("evidence", tuple(call for group in self.evidence.must for call in group))
        return reading

    def _close(self, reading: Reading) -> Outcome:
        """Add what the certain calls require, until nothing changes; then compare the readings that remain."""
        certain = set(self.evidence.identified)
        hard = {group[0] for group in self.evidence.must if len(group) == 1}
        constraint = Constraint()
        while True:
            self.required = self.evidence.ancestors(certain)
            wanted = {
                call
                for call in sorted(self.required & self.open_calls)
                if self._find(Constraint(constraint.must | {call})) is not None
            }
            # A filter that would leave no reading is not applied; what earlier ones ruled out stays out.
            narrower = Constraint(constraint.must | wanted)
            found = self._find(narrower)
            if found is not None:
                constraint, reading = narrower, found
            held = set(reading.calls)
            loose: dict[int, Reading] = {}
            for call in sorted(held & self.open_calls):
                other = self._find_with_fewer(call, held, constraint)
                if other is not None:
                    loose[call] = other
            alone = {call for call in held if call not in loose and call not in self.representative} | hard
            grown = alone | certain | self._parents_of_certain_groups(held, constraint)
            if grown == certain:
                break
            certain = grown
        other = next(iter(loose.values())) if loose else self._find_with_more(held, constraint)
        if other is not None:
            return Ambiguous(reading, other, frozenset(self.required))
        return self._settled(reading, constraint)

    def _parents_of_certain_groups(self, held: Collection[int], constraint: Constraint) -> set[int]:
        """Return the parents of groups of which every remaining reading holds a call.

        Which of them it is stays open, but all calls of a group have the same parent.
        """
        groups = {self.representative[call]: call for call in sorted(held) if call in self.representative}
        parents = self.problem.parents_C
        return {
            # A parent that was not captured is for the lineage to refuse, at a call that names it.
            call if parents[call] == MISSING_PARENT else parents[call]
            for group, call in groups.items()
            if parents[call] != NO_PARENT and self._find(Constraint(constraint.must, {group: 0})) is None
        }

    def group(self, call: int) -> int:
        return self.representative.get(call, call)

    def _find_with_fewer(self, call: int, held: set[int], constraint: Constraint) -> Reading | None:
        group = self.group(call)
        count = sum(self.group(other) == group for other in held & self.open_calls)
        return self._find(Constraint(constraint.must, {group: count - 1}))

    def _find_with_more(self, held: set[int], constraint: Constraint) -> Reading | None:
        """Look for a reading that adds a call: possible only where a call shows nothing."""
        for call in sorted(self.open_calls - held):
            mates = {other for other in held & self.open_calls if self.group(other) == self.group(call)}
            found = self._find(Constraint(constraint.must | mates | {call}))
            if found is not None:
                return found
        return None

    def _in_commit_order(self, reading: Reading) -> Reading:
        """Return the least reading with exactly these calls: which twin stands in was chosen, now its place is."""
        for moves in self.moves.values():
            moves.sort()
        whole = frozenset(reading.calls)
        reading = self._find(Constraint(whole)) or reading
        if not any(len({option.end for option in found}) > 1 for found in self.options.values()):
            return reading
        # With several segmentations the least call at a place may be followed by a greater one than need be.
        for place in range(len(reading.calls)):
            calls = reading.calls
            for call in sorted(set(calls[place + 1 :])):
                if call < calls[place]:
                    better = self._find(Constraint(whole, beginning=(*calls[:place], call)))
                    if better is not None:
                        reading = better
                        break
        return reading

    def _settled(self, reading: Reading, constraint: Constraint) -> Outcome:
        reading = self._in_commit_order(reading)
        whole = Constraint(frozenset(reading.calls) & self.open_calls)
        last_node, last_call, _ = reading.steps[-1]
        last_is_certain = True
        if last_node not in self.fixed:
            last_is_certain = self._ends_alike(last_call, constraint)
        if self.problem.pairs_of is not None:
            for node, call, end in reading.steps:
                if node in self.fixed or not self.pairs((node, call, end)):
                    continue
                other = self._find(Constraint(whole.must, {}, (node, call)))
                if other is not None:
                    return Ambiguous(reading, other, frozenset(self.required))
        stood_in = {
            call: tuple(other for other in sorted(self.open_calls) if other not in reading.calls)
            for call in reading.calls
            if call in self.representative
        }
        stood_in = {
            call: tuple(other for other in others if self.group(other) == self.group(call))
            for call, others in stood_in.items()
        }
        reordered = any(node not in self.fixed for node, _, _ in reading.steps)
        return Settled(
            reading,
            frozenset(self.required),
            {call: others for call, others in stood_in.items() if others},
            last_is_certain,
            reordered,
        )

    def _ends_alike(self, last_call: int, constraint: Constraint) -> bool:
        """Tell whether no remaining reading ends with another call."""
        for node, moves in self.moves.items():
            for call, end in moves:
                if end == self.goal and self.group(call) != self.group(last_call):
                    walk = Walk(self, constraint)
                    walk.ending = (node, call)
                    if walk.run() is not None:
                        return False
        return True

    def pairs(self, step: Step) -> tuple[tuple[str, str], ...]:
        return () if self.problem.pairs_of is None else self.problem.pairs_of(*step)
