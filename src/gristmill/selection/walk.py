"""One depth-first search for a reading that meets a constraint, within a budget of steps.

Invariant: calls are tried in commit order, so the first reading found is the least; every step is paid for, so the
search always ends.

Not here: which searches to make (search).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

from gristmill.selection.readings import Reading, Step

__all__ = ["Budget", "BudgetSpent", "Constraint", "Walk", "Yard"]

BUDGET: Final = 250_000


class BudgetSpent(Exception):
    """The search has used up its steps."""


class Budget:
    """Steps that all searches of one decision share."""

    def __init__(self) -> None:
        self.steps = 0

    def spend(self, steps: int = 1) -> None:
        """Pay for steps.

        Raises:
            BudgetSpent: nothing is left.
        """
        self.steps += steps
        if self.steps > BUDGET:
            raise BudgetSpent


class Constraint(msgspec.Struct, frozen=True):
    """What one search asks for: calls to hold, groups to hold fewer of, steps to avoid."""

    must: frozenset[int] = frozenset()
    at_most: Mapping[int, int] = {}
    without: tuple[int, int] | None = None
    ignore_lineage: bool = False
    beginning: tuple[int, ...] = ()
    repeats: bool = False


class Yard(Protocol):
    """What a walk moves in: the open places and their moves, what is fixed, and the lineage among open calls."""

    goal: int
    fixed: dict[int, Step]
    fixed_calls: set[int]
    open_calls: set[int]
    last_node: dict[int, int]
    one_of: list[frozenset[int]]
    open_parent: dict[int, int]
    moves: dict[int, list[tuple[int, int]]]
    budget: Budget

    def group(self, call: int) -> int:
        """Return the call that stands for a call's interchangeable group."""
        ...

    def pairs(self, step: Step) -> tuple[tuple[str, str], ...]:
        """Return the tool-call ids that a step renames: (returned, captured)."""
        ...


class _Frame(msgspec.Struct):
    node: int
    next_move: int = 0
    placed: int = -1
    blocked: list[int] = []
    pairs: list[tuple[str, str]] = []


class Walk:
    """One depth-first search for a reading, calls tried in commit order."""

    def __init__(self, search: Yard, constraint: Constraint) -> None:
        self.search = search
        self.constraint = constraint
        self.ending: tuple[int, int] | None = None
        self.used: set[int] = set()
        self.blocked: set[int] = set()
        self.steps: list[Step] = []
        self.counts: dict[int, int] = {}
        self.forward: dict[str, str] = {}
        self.backward: dict[str, str] = {}
        # From the same place with the same calls used, the search goes the same way: once in vain is enough.
        self.dead: set[tuple[int, frozenset[int], frozenset[tuple[str, str]]]] = set()
        held = constraint.must.union(*search.one_of)
        self.deadlines = sorted(search.last_node[call] for call in held if call in search.last_node)

    def run(self) -> Reading | None:
        """Return the first reading that meets the constraint, None if there is none.

        Raises:
            BudgetSpent: the budget ended before the search did.
        """
        search = self.search
        must = self.constraint.must
        if any(len(group & search.fixed_calls) > 1 for group in search.one_of):
            return None
        if not self._add_fixed_pairs():
            return None
        frames = [_Frame(self._skip_fixed(0))]
        if not self._begins_right():
            return None
        while frames:
            frame = frames[-1]
            if frame.node == search.goal:
                if self._complete(must):
                    return Reading(tuple(self.steps))
                self._undo(frames)
                continue
            self._take_back(frame)
            if not self._advance(frame, frames):
                self._undo(frames)
        return None

    def _begins_right(self) -> bool:
        return all(step[1] == call for step, call in zip(self.steps, self.constraint.beginning, strict=False))

    def _complete(self, must: frozenset[int]) -> bool:
        fixed = self.search.fixed_calls
        return all(call in self.used or call in fixed for call in must) and all(
            any(call in self.used or call in fixed for call in group) for group in self.search.one_of
        )

    def _second_choice(self, call: int) -> bool:
        """Tell whether another call of a group that may be held once is held already."""
        return any(
            call in group and not (group.isdisjoint(self.used) and group.isdisjoint(self.search.fixed_calls))
            for group in self.search.one_of
        )

    def _add_fixed_pairs(self) -> bool:
        for step in self.search.fixed.values():
            for returned, captured in self.search.pairs(step):
                if self.forward.setdefault(returned, captured) != captured:
                    return False
                if self.backward.setdefault(captured, returned) != returned:
                    return False
        return True

    def _skip_fixed(self, node: int) -> int:
        fixed = self.search.fixed
        while node in fixed:
            step = fixed[node]
            self.steps.append(step)
            node = step[2]
        return node

    def _state(self, node: int) -> tuple[int, frozenset[int], frozenset[tuple[str, str]]]:
        return node, frozenset(self.used), frozenset(self.forward.items())

    def _undo(self, frames: list[_Frame]) -> None:
        self.dead.add(self._state(frames.pop().node))
        if frames:
            frame = frames[-1]
            while self.steps and self.steps[-1][0] != frame.node:
                self.steps.pop()
        else:
            self.steps.clear()

    def _take_back(self, frame: _Frame) -> None:
        if frame.placed < 0:
            return
        self.steps.pop()
        self.used.discard(frame.placed)
        self.blocked.difference_update(frame.blocked)
        group = self.search.group(frame.placed)
        self.counts[group] -= 1
        for returned, captured in frame.pairs:
            del self.forward[returned]
            del self.backward[captured]
        frame.placed, frame.blocked, frame.pairs = -1, [], []

    def _advance(self, frame: _Frame, frames: list[_Frame]) -> bool:
        """Place the next call that fits at this frame's node; False where none is left."""
        search = self.search
        moves = search.moves[frame.node]
        if not self._deadlines_met(frame.node):
            return False
        while frame.next_move < len(moves):
            call, end = moves[frame.next_move]
            frame.next_move += 1
            search.budget.spend()
            if self._place(frame, call, end):
                following = self._skip_fixed(end)
                if self._begins_right() and self._state(following) not in self.dead:
                    frames.append(_Frame(following))
                    return True
                while self.steps[-1][0] != frame.node:
                    self.steps.pop()
                self._take_back(frame)
        return False

    def _deadlines_met(self, node: int) -> bool:
        """Tell whether every call that must be held and cannot stand here or later is held already."""
        if not self.deadlines or self.deadlines[0] >= node:
            return True
        last, fixed = self.search.last_node, self.search.fixed_calls

        def in_time(call: int) -> bool:
            return call in self.used or call in fixed or last.get(call, -1) >= node

        return all(map(in_time, self.constraint.must)) and all(any(map(in_time, group)) for group in self.search.one_of)

    def _place(self, frame: _Frame, call: int, end: int) -> bool:
        node = frame.node
        if call in self.used or self.constraint.without == (node, call) or self._second_choice(call):
            return False
        if self.ending is not None and (end == self.search.goal) != (self.ending == (node, call)):
            return False
        group = self.search.group(call)
        if self.counts.get(group, 0) >= self.constraint.at_most.get(group, len(self.search.moves)):
            return False
        newly: list[int] = []
        if not self.constraint.ignore_lineage:
            if call in self.blocked:
                return False
            parent = self.search.open_parent.get(call)
            while (
                parent is not None
                and parent not in self.blocked
                and parent != call
                and len(newly) < len(self.search.open_calls)
            ):
                if parent in self.constraint.must and parent not in self.used:
                    self.blocked.difference_update(newly)
                    return False
                newly.append(parent)
                self.blocked.add(parent)
                parent = self.search.open_parent.get(parent)
        pairs = self._add_pairs((node, call, end))
        if pairs is None:
            self.blocked.difference_update(newly)
            return False
        frame.placed, frame.blocked, frame.pairs = call, newly, pairs
        if not self.constraint.repeats:
            self.used.add(call)
        self.counts[group] = self.counts.get(group, 0) + 1
        self.steps.append((node, call, end))
        return True

    def _add_pairs(self, step: Step) -> list[tuple[str, str]] | None:
        added: list[tuple[str, str]] = []
        for returned, captured in self.search.pairs(step):
            known = self.forward.get(returned)
            if known is None and captured not in self.backward:
                self.forward[returned], self.backward[captured] = captured, returned
                added.append((returned, captured))
            elif known != captured:
                for first, second in added:
                    del self.forward[first]
                    del self.backward[second]
                return None
        return added
