"""The calls of one attempt as a tree, in the order in which people read it.

Invariant: every captured call stands in the tree once. A conversation goes straight down; what leaves it (a retry, a
branch, a sub-agent) stands one level deeper, before the call that the conversation goes on with.

Not here: what is said of a call (show).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gristmill.cli.kinds import main_children
from gristmill.lineage import Forest
from gristmill.records import CallRecord

__all__ = ["Placed", "placed_calls"]


class Placed(NamedTuple):
    """A call by its position in commit order, and how deep it stands."""

    position: int
    depth: int


def placed_calls(records: Sequence[CallRecord], selected: set[str]) -> Iterator[Placed]:
    """Give the calls as they stand in the tree.

    Calls whose recorded parent was not captured, or whose parents form a cycle, begin at the left, as roots do.
    """
    forest = Forest(records)
    children = {parent: [child for child in found if child != parent] for parent, found in forest.children().items()}
    main = main_children(children, {at for at, record in enumerate(records) if record.model_call_id in selected})
    placed: set[int] = set()
    roots = [at for at, parent in enumerate(forest.parents_C) if parent < 0]
    for root in (*roots, *range(len(records))):
        # Behind the roots only cycles are left.
        waiting = [Placed(root, 0)]
        while waiting:
            call = waiting.pop()
            if call.position in placed:
                continue
            placed.add(call.position)
            yield call
            going_on = main.get(call.position)
            found = children.get(call.position, [])
            if going_on is not None:
                waiting.append(Placed(going_on, call.depth))
            waiting += [Placed(child, call.depth + 1) for child in reversed(found) if child != going_on]
