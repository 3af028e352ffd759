"""The graph whose paths are the ways to read a history, before calls are compared.

A node is a place before an item (with references: also how many were used). An option at a node is a set of calls with
equal content that all end at the same later node. Invariant: every option of a graph lies on a path to the goal.

Not here: which calls fit where (candidates); distinctness, order and evidence (readings).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import msgspec

__all__ = ["Graph", "Option", "build_graph", "cut_nodes"]


class Option(msgspec.Struct, gc=False):
    """Calls of equal content that can stand at a node, and the node behind them.

    `calls` is in commit order; the list is shared between all nodes where exactly the same calls fit.
    """

    end: int
    calls: list[int]


class Graph(msgspec.Struct):
    """All options that lie on some path from start to goal, ignoring that calls are used once.

    Attributes:
        width: a node is `references used * width + item index`.
        options: by node, ascending; empty where no path exists.
        furthest: the last node that the items before it can be explained up to.
    """

    width: int
    goal: int
    options: dict[int, list[Option]]
    furthest: int

    def item(self, node: int) -> int:
        """Return the item index of a node."""
        return node % self.width


OptionsAt = Callable[[int], list[Option]]


def build_graph(count: int, options_at: OptionsAt, references: Sequence[Sequence[int]] | None) -> Graph:
    """Build the graph of a history.

    Args:
        count: number of authored items.
        options_at: gives the options at an item, nothing used yet.
        references: the calls that each reference names, in order; None where there are no references.
    """
    width = count + 1
    goal = count if references is None else len(references) * width + count
    options: dict[int, list[Option]] = {}
    if references is None:
        # As long as every place has one option there is one path, and nothing to prune.
        node = 0
        while node != count:
            found = options_at(node)
            if len(found) != 1:
                break
            options[node] = found
            node = found[0].end
        else:
            return Graph(width, goal, options, goal)
    return _whole_graph(width, goal, options_at, references)


def _whole_graph(width: int, goal: int, options_at: OptionsAt, references: Sequence[Sequence[int]] | None) -> Graph:
    options: dict[int, list[Option]] = {}
    reached = {0}
    frontier = [0]
    while frontier:
        node = frontier.pop()
        found = _options_of(node, width, options_at, references)
        if found:
            options[node] = found
        for option in found:
            if option.end not in reached:
                reached.add(option.end)
                frontier.append(option.end)
    if goal in reached:
        return Graph(width, goal, _pruned(options, goal), goal)
    return Graph(width, goal, {}, max(reached, key=lambda node: (node % width, node)))


def _options_of(
    node: int, width: int, options_at: OptionsAt, references: Sequence[Sequence[int]] | None
) -> list[Option]:
    index = node % width
    if index == width - 1:
        return []
    if references is None:
        return options_at(index)
    used = node // width
    if used == len(references):
        return []
    wanted = references[used]
    kept: list[Option] = []
    for option in options_at(index):
        if len(wanted) == 1:
            call = wanted[0]
            place = bisect_left(option.calls, call)
            calls = [call] if place < len(option.calls) and option.calls[place] == call else []
        else:
            calls = [call for call in option.calls if call in wanted]
        if calls:
            kept.append(Option((used + 1) * width + option.end, calls))
    return kept


def _pruned(options: dict[int, list[Option]], goal: int) -> dict[int, list[Option]]:
    """Keep what leads to the goal, by node ascending; every option leads to a later node."""
    alive = {goal}
    for node in sorted(options, reverse=True):
        kept = [option for option in options[node] if option.end in alive]
        if kept:
            options[node] = kept
            alive.add(node)
        else:
            del options[node]
    return {node: options[node] for node in sorted(options)}


def cut_nodes(options: dict[int, list[Option]], goal: int) -> Iterable[int]:
    """Yield the nodes, goal included, that every path passes."""
    reach = 0
    for node, found in options.items():
        if reach <= node:
            yield node
        for option in found:
            reach = max(reach, option.end)
    yield goal
