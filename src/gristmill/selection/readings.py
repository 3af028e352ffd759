"""Readings of a history, and what can be known about all of them.

A reading is a path through the candidate graph with distinct calls, none after a call that descends from it.

Not here: which calls fit where (candidates), how readings are compared (counting, search), what evidence there is
(question).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from gristmill.selection.graph import Graph

__all__ = [
    "Ambiguous",
    "Evidence",
    "NoReading",
    "Outcome",
    "Problem",
    "Reading",
    "Settled",
    "Step",
    "Undecided",
    "in_order",
]

Step = tuple[int, int, int]
"""(node, call, node behind it)"""


class Reading(msgspec.Struct, frozen=True):
    """One reading: its steps in order of the history."""

    steps: tuple[Step, ...]

    @property
    def calls(self) -> list[int]:
        """The calls in order."""
        return [call for _, call, _ in self.steps]


class Settled(msgspec.Struct, frozen=True):
    """Every remaining reading has these calls; `reading` is the least of them in commit order.

    `last_is_certain` tells whether every remaining reading ends with the same call.
    """

    reading: Reading
    required: frozenset[int]
    stood_in: Mapping[int, tuple[int, ...]]
    last_is_certain: bool
    reordered: bool


class Ambiguous(msgspec.Struct, frozen=True):
    """Two remaining readings that select different calls."""

    first: Reading
    second: Reading
    required: frozenset[int]


class NoReading(msgspec.Struct, frozen=True):
    """No reading.

    `kind` is `missing`, `contradiction` (only against the lineage), `duplicated` (only with a call twice), `renamed`
    (no one-to-one renaming of tool-call ids), or `evidence` where no reading holds the calls of `lacking`.
    """

    kind: str
    lacking: tuple[int, ...] = ()


class Undecided(msgspec.Struct, frozen=True):
    """The budget was spent."""

    steps: int


class Evidence(msgspec.Struct, frozen=True):
    """What is known beside the content.

    Attributes:
        must: groups of calls; every reading must hold exactly one of each group (choices of one response).
        identified: calls proven to belong, before any reading is known.
        ancestors: gives the closure of calls under their recorded parents; refuses a broken lineage.
    """

    must: tuple[tuple[int, ...], ...]
    identified: frozenset[int]
    ancestors: Callable[[Iterable[int]], set[int]]


class Problem(msgspec.Struct, frozen=True):
    """A graph, the calls' ids and recorded parents, and what makes calls interchangeable.

    `group_of` maps calls to the preferred call of their interchangeable group; `pairs_of` gives the tool-call ids
    that a step renames, or None where ids are compared exactly.
    """

    graph: Graph
    ids: Sequence[str]
    parents_C: Sequence[int]
    group_of: Callable[[Collection[int]], Mapping[int, int]]
    pairs_of: Callable[[int, int, int], tuple[tuple[str, str], ...]] | None = None


Outcome = Settled | Ambiguous | NoReading | Undecided


def in_order(calls: Sequence[int], parents_C: Sequence[int]) -> bool:
    """Tell whether no call stands after one that descends from it."""
    passed: set[int] = set()
    for call in calls:
        if call in passed:
            return False
        at = call
        while at >= 0 and at not in passed:
            passed.add(at)
            at = parents_C[at]
    return True
