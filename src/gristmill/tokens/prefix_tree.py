"""Token sequences that share what they have in common.

Invariant: two sequences have the same `Place` exactly if they are equal, and what they share is stored once.
It is a radix tree whose long paths are single buffers: a sequence that continues another is appended to its
buffer, so a chain of calls is one lane, and comparing a prompt with it is one pass over memory.

Places and lanes refer to each other by number, so that a tree is freed at once and costs the collector little.

Not here: what a sequence means. Nothing is ever removed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np

from gristmill.records import Int32Array
from gristmill.tokens.digests import RunningDigest

__all__ = ["Lane", "Place", "PrefixTree", "common_prefix"]

_FIRST_STEP_T: Final = 4096
_STEP_T: Final = 65536  # ids compared at once: the result still fits the first-level cache
_ROOM_T: Final = 64  # a branch is seldom left as it began: its generation follows at once
_SIDE_T: Final = 16384  # tokens that may be moved aside to keep the newest path in one piece
_SIDE_POINTS: Final = 16  # places and fork depths that may be moved with them

_NO_LANE: Final = -1
_NO_FORKS: Final[Mapping[int, Any]] = MappingProxyType({})
_NO_IDS: Final[Int32Array] = np.empty(0, np.int32)


class Place(msgspec.Struct, eq=False, gc=False):
    """The end of a token sequence in a `PrefixTree`; `calls` are those whose whole sequence ends here."""

    lane: int
    depth: int
    calls: tuple[str, ...] = ()
    digest: RunningDigest | None = None


class Lane(msgspec.Struct, eq=False, gc=False):
    """A run of tokens in one buffer, from the depth `start` at which it leaves its parent lane to `end`.

    `places` are the ends of sequences on it, at the ascending `depths`; `forks` are the lanes that leave it, by depth
    and first token, at the ascending `fork_depths`.
    """

    parent: int
    start: int
    end: int
    ids_T: Int32Array
    depths: list[int]
    places: list[Place]
    # Most lanes are never left: one empty mapping serves them all.
    forks: Mapping[int, dict[int, int]] = _NO_FORKS
    fork_depths: Sequence[int] = ()

    def ids(self, start: int, stop: int) -> Int32Array:
        """View the ids between two depths; the view dies with the next change of the tree."""
        return self.ids_T[start - self.start : stop - self.start]

    def append(self, ids_T: Int32Array) -> None:
        """Put int32[T] ids at the end."""
        old = self.end - self.start
        size = old + ids_T.size
        if size > self.ids_T.size:
            grown = np.empty(2 * size if old else size + _ROOM_T, np.int32)
            if old:
                grown[:old] = self.ids_T[:old]
            self.ids_T = grown
        self.ids_T[old:size] = ids_T
        self.end = self.start + size

    def add_fork(self, depth: int, token: int, lane: int) -> None:
        """Let a lane leave this one at a depth, with the token it begins with."""
        siblings = self.forks.get(depth)
        if siblings is not None:
            siblings[token] = lane
        elif isinstance(self.forks, dict) and isinstance(self.fork_depths, list):
            insort(self.fork_depths, depth)
            self.forks[depth] = {token: lane}
        else:
            self.forks, self.fork_depths = {depth: {token: lane}}, [depth]

    def points_behind(self, depth: int) -> int:
        """Count the places and fork depths behind a depth."""
        places = len(self.depths) - bisect_right(self.depths, depth)
        return places + len(self.fork_depths) - bisect_right(self.fork_depths, depth)


class PrefixTree:
    """The sequences; memory is the number of distinct tokens.

    Args:
        room: tokens that the longest path will hold, where that is known; saves growing.
    """

    def __init__(self, room: int = 0) -> None:
        self.lanes: list[Lane] = []
        self.root = Place(self._lane(_NO_LANE, 0, np.empty(room, np.int32)), 0)

    def insert(self, start: Place, *pieces_T: Int32Array) -> Place:
        """Add a place's sequence with int32[T] pieces after it; return its end, one for equal sequences."""
        number, depth = start.lane, start.depth
        for ids_T in pieces_T:
            number, depth = self._follow(number, depth, ids_T)
        lane = self.lanes[number]
        depths = lane.depths
        at = bisect_left(depths, depth)
        if at < len(depths) and depths[at] == depth:
            return lane.places[at]
        place = Place(number, depth)
        depths.insert(at, depth)
        lane.places.insert(at, place)
        return place

    def _lane(self, parent: int, start: int, ids_T: Int32Array = _NO_IDS) -> int:
        self.lanes.append(Lane(parent, start, start, ids_T, [], []))
        return len(self.lanes) - 1

    def _follow(self, number: int, depth: int, ids_T: Int32Array) -> tuple[int, int]:
        done, total = 0, ids_T.size
        while done < total:
            lane = self.lanes[number]
            end = lane.end
            if depth < end:
                same = common_prefix(lane.ids(depth, min(end, depth + total - done)), ids_T[done:])
                depth += same
                done += same
                if done == total:
                    break
            if depth == end:
                lane.append(ids_T[done:])
                return number, depth + total - done
            token = int(ids_T[done])
            child = lane.forks.get(depth, _NO_FORKS).get(token)
            number = child if child is not None else self._branch(number, depth, token, total - done)
        return number, depth

    def _branch(self, number: int, depth: int, token: int, ahead: int) -> int:
        """Return the lane, empty from here on, on which a sequence that leaves a lane at a depth goes on.

        The newest path keeps the long buffer where little has to move aside: a template that drops reasoning
        makes every turn leave the one before just before its end, and many short lanes would be slow to follow.
        """
        lane = self.lanes[number]
        first = depth not in lane.forks
        if first and lane.end - depth <= max(_SIDE_T, ahead) and lane.points_behind(depth) <= _SIDE_POINTS:
            self._cut(number, depth)
            return number
        branch = self._lane(number, depth)
        lane.add_fork(depth, token, branch)
        return branch

    def _cut(self, number: int, depth: int) -> None:
        """Move what lies behind a depth of a lane, places and forks with it, to a lane of its own."""
        side_number = self._lane(number, depth)
        lane, side = self.lanes[number], self.lanes[side_number]
        side.append(lane.ids(depth, lane.end))
        place = bisect_right(lane.depths, depth)
        side.depths, side.places = lane.depths[place:], lane.places[place:]
        del lane.depths[place:], lane.places[place:]
        for moved in side.places:
            moved.lane = side_number
        forks = lane.forks
        lane.forks, lane.fork_depths = _NO_FORKS, ()
        for fork_depth, siblings in forks.items():
            holder_number, holder = (side_number, side) if fork_depth > depth else (number, lane)
            for token, child in siblings.items():
                self.lanes[child].parent = holder_number
                holder.add_fork(fork_depth, token, child)
        lane.end = depth
        lane.add_fork(depth, int(side.ids_T[0]), side_number)

    def longest(self, end: Place, limit: int) -> Place | None:
        """Return the deepest place at or above `limit` tokens on the path to `end`, or None."""
        number = end.lane
        while number != _NO_LANE:
            lane = self.lanes[number]
            at = bisect_right(lane.depths, limit)
            if at:
                return lane.places[at - 1]
            limit = min(limit, lane.start)
            number = lane.parent
        return None

    def shared_len(self, one: Place, other: Place) -> int:
        """Return how many tokens two sequences have in common from their beginning."""
        number, depth = one.lane, one.depth
        other_number, other_depth = other.lane, other.depth
        while number != other_number:
            lane, other_lane = self.lanes[number], self.lanes[other_number]
            # The lane that begins deeper is left; the root lane, which others may leave at depth 0, never.
            if lane.parent != _NO_LANE and (other_lane.parent == _NO_LANE or lane.start >= other_lane.start):
                number, depth = lane.parent, lane.start
            else:
                other_number, other_depth = other_lane.parent, other_lane.start
        return min(depth, other_depth)

    def read(self, end: Place, start: int, stop: int) -> Int32Array:
        """Copy the ids [start, stop) of the sequence that ends at a place."""
        out_T = np.empty(stop - start, np.int32)
        number = end.lane
        while start < stop:
            lane = self.lanes[number]
            first = max(start, lane.start)
            if first < stop:
                out_T[first - start : stop - start] = lane.ids(first, stop)
                stop = first
            number = lane.parent
        return out_T


def common_prefix(one_T: Int32Array, other_T: Int32Array) -> int:
    """Return the length of the common beginning; a short first step finds an early difference cheaply."""
    size = min(one_T.size, other_T.size)
    at, step = 0, _FIRST_STEP_T
    while at < size:
        stop = min(size, at + step)
        differs_T = one_T[at:stop] != other_T[at:stop]
        first = int(differs_T.argmax())
        if differs_T[first]:
            return at + first
        at, step = stop, _STEP_T
    return size
