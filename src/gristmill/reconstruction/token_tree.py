"""The rows of a rollout as a tree of segments, for trainers with tree attention.

Invariant: every generation is one segment, owned (trained) once; context that sibling calls share is one
segment; and flattening the tree gives exactly the `merged` rows, with their spans and row ids.

Not here: attention masks and packing, which are the trainer's.
"""

from __future__ import annotations

import msgspec
import numpy as np

from gristmill.reconstruction.drift import Certificate
from gristmill.reconstruction.forest import Forest, ForestCall
from gristmill.reconstruction.row import (
    Rollout,
    Row,
    RowExtras,
    RowMode,
    RowSource,
    assemble,
    row_paths,
    row_sources,
)
from gristmill.records import CallRecord, Float32Array, Int32Array
from gristmill.tokens import common_prefix

__all__ = ["Segment", "TokenTreeRows", "TreeCall", "flatten", "tree"]


class Segment(msgspec.Struct, frozen=True):
    """Tokens [start, start + length) of the packed arrays.

    Attributes:
        parent: index of the segment before it, or -1; a parent's index is always the smaller one.
        position: how many tokens precede it on its path, so the position id of its first token.
        owned: the segment is a generation and trained; otherwise it is context.
        call_id: the call that sampled it, or None.
    """

    parent: int
    start: int
    length: int
    position: int
    owned: bool
    call_id: str | None


class TreeCall(msgspec.Struct, frozen=True, eq=False):
    """A call of the tree: its record, indexes of its token parent (or -1) and of its generation's segment."""

    record: CallRecord
    parent: int
    segment: int
    certificate: Certificate | None
    sequence_digest: str
    logprobs_digest: str


class TokenTreeRows(msgspec.Struct, frozen=True, eq=False):
    """A rollout as one tree of U distinct tokens.

    Attributes:
        rollout: what its rows carry.
        token_ids: int32[U], segment after segment.
        logprobs: float32[U], nats; 0.0 in context.
        segments: parents before children.
        calls: parents before children.
        leaves: index into `calls` of each row's last call, in the order of the merged rows.
        extras: of each merged row.
    """

    rollout: Rollout
    token_ids: Int32Array
    logprobs: Float32Array
    segments: tuple[Segment, ...]
    calls: tuple[TreeCall, ...]
    leaves: tuple[int, ...]
    extras: tuple[RowExtras, ...]


class _Node:
    """A segment under construction; a context node can still be split."""

    __slots__ = ("call", "forks", "ids_T", "parent", "position")

    def __init__(self, parent: _Node | None, position: int, ids_T: Int32Array, call: ForestCall | None) -> None:
        self.parent = parent
        self.position = position
        self.ids_T = ids_T
        self.call = call
        self.forks: dict[int, _Node] = {}


def _context(nodes: list[_Node], node: _Node, ids_T: Int32Array) -> _Node:
    """Add context behind a node, sharing what is already there; return the node at its end."""
    done = 0
    while done < ids_T.size:
        token = int(ids_T[done])
        child = node.forks.get(token)
        position = node.position + node.ids_T.size
        if child is None:
            child = node.forks[token] = _Node(node, position, ids_T[done:], None)
            nodes.append(child)
            return child
        same = common_prefix(child.ids_T, ids_T[done:])
        if same < child.ids_T.size:
            upper = node.forks[token] = _Node(node, position, child.ids_T[:same], None)
            nodes.append(upper)
            child.parent, child.position, child.ids_T = upper, position + same, child.ids_T[same:]
            upper.forks[int(child.ids_T[0])] = child
            child = upper
        node, done = child, done + same
    return node


def tree(forest: Forest, rollout: Rollout) -> TokenTreeRows:
    """Build the tree of segments over the selected calls.

    Raises:
        ReconstructionError: `tokens_unusable`, as `merged`.
    """
    paths = row_paths(forest)
    order = sorted(forest.calls.values(), key=lambda call: (call.record.cum_len, call.position))
    index = {call.record.model_call_id: at for at, call in enumerate(order)}
    root = _Node(None, 0, np.empty(0, np.int32), None)
    nodes: list[_Node] = []
    generations: list[_Node] = []
    for call in order:
        record = call.record
        start = generations[index[call.parent]] if call.parent is not None else root
        known = start.position + start.ids_T.size
        before = _context(nodes, start, forest.tree.read(call.end, known, record.prompt_len))
        ids_T = forest.tree.read(call.end, record.prompt_len, record.cum_len)
        generations.append(_Node(before, record.prompt_len, ids_T, call))
        nodes.append(generations[-1])
    nodes.sort(key=lambda node: node.position)
    numbers = {node: number for number, node in enumerate(nodes)} | {root: -1}
    rows = tuple(source.extras for source in row_sources(forest, paths))
    token_ids, logprobs, segments = _pack(nodes, numbers)
    return TokenTreeRows(
        rollout,
        token_ids,
        logprobs,
        segments,
        tuple(
            TreeCall(
                call.record,
                -1 if call.parent is None else index[call.parent],
                numbers[node],
                call.certificate,
                call.sequence_digest,
                call.logprobs_digest,
            )
            for call, node in zip(order, generations, strict=True)
        ),
        tuple(index[path[-1].record.model_call_id] for path in paths),
        rows,
    )


def _pack(nodes: list[_Node], numbers: dict[_Node, int]) -> tuple[Int32Array, Float32Array, tuple[Segment, ...]]:
    size = sum(node.ids_T.size for node in nodes)
    token_ids = np.empty(size, np.int32)
    logprobs = np.zeros(size, np.float32)
    segments: list[Segment] = []
    start = 0
    for node in nodes:
        end = start + node.ids_T.size
        token_ids[start:end] = node.ids_T
        if node.call is not None:
            logprobs[start:end] = node.call.logprobs_T
        call_id = node.call.record.model_call_id if node.call is not None else None
        parent = numbers[node.parent] if node.parent is not None else -1
        segments.append(Segment(parent, start, end - start, node.position, call_id is not None, call_id))
        start = end
    return token_ids, logprobs, tuple(segments)


class _Part(msgspec.Struct, frozen=True, eq=False):
    record: CallRecord
    certificate: Certificate | None
    logprobs_T: Float32Array
    logprobs_digest: str
    sequence_digest: str


def flatten(rows: TokenTreeRows) -> tuple[Row, ...]:
    """Return the merged rows of a tree, from its own arrays."""
    sources: list[RowSource] = []
    for leaf, extras in zip(rows.leaves, rows.extras, strict=True):
        path: list[TreeCall] = []
        at = leaf
        while at >= 0:
            path.append(rows.calls[at])
            at = rows.calls[at].parent
        pieces: list[Int32Array] = []
        number = rows.calls[leaf].segment
        while number >= 0:
            segment = rows.segments[number]
            pieces.append(rows.token_ids[segment.start : segment.start + segment.length])
            number = segment.parent
        parts = [_part(rows, call) for call in reversed(path)]
        sources.append(RowSource(parts, np.concatenate(pieces[::-1]), extras))
    return assemble(sources, rows.rollout, RowMode.MERGED)


def _part(rows: TokenTreeRows, call: TreeCall) -> _Part:
    segment = rows.segments[call.segment]
    logprobs_T = rows.logprobs[segment.start : segment.start + segment.length]
    return _Part(call.record, call.certificate, logprobs_T, call.logprobs_digest, call.sequence_digest)
