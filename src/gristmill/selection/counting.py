"""Settling a history by counting: as many places as calls means all of them, whatever their order.

This answers almost every history, in time linear in its items. Invariant: an answer holds for every reading; where
counting cannot tell, it says None and leaves the question to the search.

Not here: histories whose readings have different places, and arrangements against the lineage (search).
"""

from __future__ import annotations

from gristmill.lineage import MISSING_PARENT, NO_PARENT
from gristmill.selection.readings import (
    Ambiguous,
    Evidence,
    NoReading,
    Outcome,
    Problem,
    Reading,
    Settled,
    Step,
    in_order,
)

__all__ = ["Counting"]


class _Class:
    """Places where the same calls fit, while every reading has the same places."""

    def __init__(self, calls: list[int]) -> None:
        self.calls = calls
        self.nodes: list[int] = []
        self.free: list[int] = []
        self.chosen: list[int] = []


class Counting:
    """Settles histories with one segmentation by counting places and calls.

    It answers None where that is not enough: several segmentations, calls that fit in several classes, renamed ids,
    or an arrangement against the lineage.
    """

    def __init__(self, problem: Problem, evidence: Evidence) -> None:
        self.problem = problem
        self.evidence = evidence
        self.ends: dict[int, int] = {}
        self.fixed: dict[int, int] = {}
        self.classes: list[_Class] = []
        self.must = {call for group in evidence.must for call in group}
        self.required: set[int] = set()

    def settle(self) -> Outcome | None:
        one_each = all(len(group) == 1 for group in self.evidence.must)
        if not one_each or self.problem.pairs_of is not None or not self._read_classes():
            return None
        taken = set(self.fixed.values())
        if len(taken) != len(self.fixed):
            return NoReading("duplicated")
        for group in self.classes:
            group.free = [call for call in group.calls if call not in taken]
            if len(group.free) < len(group.nodes):
                return NoReading("duplicated")
        if not self._disjoint(taken) or not self._can_hold_must(taken):
            return None
        slack = self._close(taken)
        if slack is None or not self._holds_must():
            return None
        return self._answer(slack)

    def _read_classes(self) -> bool:
        """Sort the places into fixed ones and classes; False where readings have different places."""
        classes: dict[int, _Class] = {}
        node, options, goal = 0, self.problem.graph.options, self.problem.graph.goal
        ends, fixed = self.ends, self.fixed
        while node != goal:
            found = options[node]
            if len(found) != 1:
                return False
            option = found[0]
            calls = option.calls
            ends[node] = option.end
            if len(calls) == 1:
                fixed[node] = calls[0]
            else:
                group = classes.get(id(calls))
                if group is None:
                    group = classes[id(calls)] = _Class(calls)
                group.nodes.append(node)
            node = option.end
        self.classes = list(classes.values())
        return True

    def _disjoint(self, taken: set[int]) -> bool:
        seen: set[int] = set()
        for group in self.classes:
            if not seen.isdisjoint(group.free):
                return False
            seen.update(group.free)
        return True

    def _can_hold_must(self, taken: set[int]) -> bool:
        """Tell whether the calls of the hard evidence have a place at all, before anything follows from them."""
        places = taken.union(*(group.free for group in self.classes))
        return self.must <= places

    def _close(self, taken: set[int]) -> list[_Class] | None:
        """Choose what the evidence forces, until nothing changes; return the classes left open.

        None where a class has more required calls than places: which of them some reading holds takes a search.
        """
        wanted = self.must
        certain = set(self.evidence.identified) | taken
        certain.update(call for group in self.classes for call in group.free if call in wanted)
        while True:
            self.required = self.evidence.ancestors(certain)
            open_classes: list[_Class] = []
            before = len(certain)
            for group in self.classes:
                need = len(group.nodes)
                if need == len(group.free):
                    group.chosen = group.free
                else:
                    group.chosen = [call for call in group.free if call in self.required or call in wanted]
                    if len(group.chosen) > need:
                        return None
                if len(group.chosen) == need:
                    certain.update(group.chosen)
                else:
                    open_classes.append(group)
                    certain.update(self._parents_of_certain_groups(group))
            if len(certain) == before:
                return open_classes

    def _parents_of_certain_groups(self, group: _Class) -> set[int]:
        """Return the parents of interchangeable calls of which every reading holds one: all have the same parent."""
        members: dict[int, list[int]] = {}
        for call, first in self.problem.group_of(group.free).items():
            members.setdefault(first, []).append(call)
        parents = self.problem.parents_C
        return {
            first if parents[first] == MISSING_PARENT else parents[first]
            for first, calls in members.items()
            if parents[first] != NO_PARENT and len(group.free) - len(calls) < len(group.nodes)
        }

    def _holds_must(self) -> bool:
        held = set(self.fixed.values())
        for group in self.classes:
            held.update(group.chosen)
        return self.must <= held

    def _answer(self, open_classes: list[_Class]) -> Outcome | None:
        differing: _Class | None = None
        for group in open_classes:
            if not self._choose_interchangeable(group):
                differing = group
        reading = self._arranged()
        if reading is None:
            return None
        if differing is None:
            last = self._last_is_certain(reading)
            if last is None:
                return None
            return Settled(reading, frozenset(self.required), self._stand_ins(), last, self._reordered())
        spare = next(call for call in differing.free if call not in differing.chosen)
        given_up = next(
            call for call in reversed(differing.chosen) if call not in self.required and call not in self.must
        )
        differing.chosen = sorted({*differing.chosen, spare} - {given_up})
        second = self._arranged()
        return None if second is None else Ambiguous(reading, second, frozenset(self.required))

    def _choose_interchangeable(self, group: _Class) -> bool:
        """Fill an open class; False where the calls to choose from are not all interchangeable."""
        spare = [call for call in group.free if call not in set(group.chosen)]
        missing = len(group.nodes) - len(group.chosen)
        representative = self.problem.group_of(group.free)
        first = representative.get(spare[0], spare[0])
        alike = all(representative.get(call, call) == first for call in spare)
        preferred = sorted(spare, key=lambda call: (call != representative.get(call, call), self.problem.ids[call]))
        filled = preferred[:missing] if alike else spare[:missing]
        group.chosen = sorted([*group.chosen, *filled])
        return alike

    def _stand_ins(self) -> dict[int, tuple[int, ...]]:
        """Return, for each selected call that has twins which are not, those twins."""
        stood_in: dict[int, tuple[int, ...]] = {}
        for group in self.classes:
            if len(group.free) == len(group.nodes):
                continue
            alike = self.problem.group_of(group.free)
            for call in group.chosen:
                others = [other for other in group.free if other not in group.chosen]
                twins = tuple(other for other in others if call in alike and alike.get(other) == alike[call])
                if twins:
                    stood_in[call] = twins
        return stood_in

    def _steps(self) -> list[Step]:
        calls = dict(self.fixed)
        for group in self.classes:
            calls.update(zip(group.nodes, group.chosen, strict=True))
        return [(node, calls[node], end) for node, end in self.ends.items()]

    def _arranged(self) -> Reading | None:
        """Put the chosen calls of each class in commit order; None where that is against the lineage."""
        steps = self._steps()
        if not in_order([call for _, call, _ in steps], self.problem.parents_C):
            return None
        return Reading(tuple(steps))

    def _reordered(self) -> bool:
        return any(len(group.nodes) > 1 for group in self.classes)

    def _last_is_certain(self, reading: Reading) -> bool | None:
        """Tell whether every reading ends alike; None where that takes a search."""
        node, last, _ = reading.steps[-1]
        group = next((group for group in self.classes if group.nodes[-1] == node), None)
        if group is None or len(group.chosen) == 1:
            return True
        selected = set(reading.calls)
        continued: set[int] = set()
        for call in selected:
            parent = self.problem.parents_C[call]
            while parent >= 0 and parent not in continued:
                continued.add(parent)
                parent = self.problem.parents_C[parent]
        alike = self.problem.group_of(group.chosen)
        for other in group.chosen:
            if other in continued or alike.get(other, other) == alike.get(last, last):
                continue
            group.chosen = [*(call for call in group.chosen if call != other), other]
            swapped = self._arranged()
            group.chosen = sorted(group.chosen)
            return False if swapped is not None else None
        return True
