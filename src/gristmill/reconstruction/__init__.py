"""Selected calls and their tokens to verified training rows; README.md states the model and its limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gristmill.reconstruction.checks import Finding, verify_capture, verify_rows
from gristmill.reconstruction.conservation import CallTokens, Conservation, conservation
from gristmill.reconstruction.credit import TokenCredit, check_placeable
from gristmill.reconstruction.drift import Certificate, Decode, DriftCause, Relation, fork_counts
from gristmill.reconstruction.forest import Forest, ForestCall, build_forest
from gristmill.reconstruction.row import (
    Rollout,
    Row,
    RowExtras,
    RowMode,
    Span,
    SpanArray,
    SpanRole,
    merged,
    per_call,
    row_id_of,
)
from gristmill.reconstruction.token_tree import Segment, TokenTreeRows, TreeCall, flatten, tree
from gristmill.records import CallRecord, TokenDelta

__all__ = [
    "CallTokens",
    "Certificate",
    "Conservation",
    "Decode",
    "DriftCause",
    "Finding",
    "Forest",
    "ForestCall",
    "Rebuilt",
    "Relation",
    "Rollout",
    "Row",
    "RowExtras",
    "RowMode",
    "Segment",
    "Span",
    "SpanArray",
    "SpanRole",
    "TokenCredit",
    "TokenTreeRows",
    "TreeCall",
    "build_forest",
    "conservation",
    "flatten",
    "fork_counts",
    "merged",
    "per_call",
    "rebuild",
    "row_id_of",
    "tree",
    "verify_capture",
    "verify_rows",
]


class Rebuilt(msgspec.Struct, frozen=True, eq=False):
    """The rows of one rollout, the calls set aside because they sampled nothing, and how prompts relate.

    Attributes:
        rows: in order; under `tree` the flattened ones.
        tree: the segments, under `tree` only.
        empty: selected calls with an empty generation.
        forks: forks from recorded parents, counted by cause.
        context_tokens, trained_tokens: of all rows; context that several rows repeat counts each time.
    """

    rows: tuple[Row, ...]
    tree: TokenTreeRows | None
    empty: tuple[str, ...]
    forks: dict[DriftCause, int]
    context_tokens: int
    trained_tokens: int


def rebuild(
    records: Iterable[CallRecord],
    tokens: Mapping[str, TokenDelta],
    selected: Sequence[str],
    rollout: Rollout,
    *,
    mode: RowMode = RowMode.MERGED,
    decode: Decode | None = None,
) -> Rebuilt:
    """Rebuild the rows of one rollout, all of them or none.

    Args:
        records: every captured call of the attempt, in any order.
        tokens: token delta by call id.
        selected: call ids in selection order.
        rollout: ids, group, reward, advantage and credits that the rows carry.
        mode: `merged`, `per_call` or `tree`.
        decode: ids to text with special tokens, to tell retokenised text from edited text.

    Raises:
        ReconstructionError: `nothing_to_train`, `tokens_unusable`, `selection_duplicated`, `call_unknown` and
            `credit_invalid` (a credit of no captured tokens).
    """
    captured = tuple(records)
    if rollout.credits:
        check_placeable(rollout.credits, {record.model_call_id: record for record in captured})
    forest = build_forest(captured, tokens, selected, decode=decode)
    segments = tree(forest, rollout) if mode is RowMode.TREE else None
    if segments is not None:
        rows = flatten(segments)
    elif mode is RowMode.PER_CALL:
        rows = per_call(forest, rollout)
    else:
        rows = merged(forest, rollout)
    forks = fork_counts(call.certificate for call in forest.calls.values())
    trained = sum(call.record.cum_len - call.record.prompt_len for call in forest.calls.values())
    context = sum(row.token_ids.size for row in rows) - trained
    return Rebuilt(rows, segments, forest.empty, forks, context, trained)
