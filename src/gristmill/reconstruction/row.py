"""Training rows out of the token tree.

Invariant: a row's tokens are one captured sequence; its mask is 1 exactly on the generations that it owns,
each with the log-probabilities captured with it; its spans tile it and say whose each token is. Every
generation is owned by one row. Rewards and advantages are carried, never made.

Not here: which calls share a row (forest), segments that rows share (token_tree), files and trainers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from gristmill.errors import Code, ReconstructionError
from gristmill.reconstruction.credit import TokenCredit, credits_by_call, token_credits
from gristmill.reconstruction.drift import LENGTH_STOPS, Certificate
from gristmill.reconstruction.forest import Forest, ForestCall
from gristmill.records import CallCredit, CallRecord, Float32Array, Int32Array, LogprobsMode, MediaSpan, UInt8Array
from gristmill.tokens import base_chain, logprobs_digest, sequence_digest

__all__ = [
    "ROW_ID_LEN",
    "Rollout",
    "Row",
    "RowExtras",
    "RowMode",
    "RowPart",
    "RowSource",
    "Span",
    "SpanArray",
    "SpanRole",
    "assemble",
    "call_spans",
    "merged",
    "per_call",
    "row_extras",
    "row_id_of",
    "row_paths",
    "row_sources",
]

ROW_ID_LEN: Final = 32
"""Hexadecimal digits of a row id: 128 bits of a sha256."""


class RowMode(StrEnum):
    """How selected calls become rows."""

    MERGED = "merged"
    PER_CALL = "per_call"
    TREE = "tree"


class SpanRole(StrEnum):
    """Whose tokens a span holds: nobody's, sampled and trained here, or trained in another row."""

    CONTEXT = "context"
    SAMPLED = "sampled"
    SAMPLED_ELSEWHERE = "sampled_elsewhere"


class Span(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Tokens [start, end) of a row.

    Attributes:
        call_id: the call that sampled them or, of context, the call whose prompt brought them into this row.
        owner: of `sampled_elsewhere`, the id of the row that trains them.
        weight_version, logprobs_mode, temperature: of sampled tokens, as far as recorded.
        certificate: of the call, on its first span in the row; how its prompt relates to its recorded parent.
    """

    call_id: str
    start: int
    end: int
    role: SpanRole
    owner: str | None = None
    weight_version: str | None = None
    logprobs_mode: LogprobsMode | None = None
    temperature: float | None = None
    certificate: Certificate | None = None


class SpanArray(msgspec.Struct, frozen=True, eq=False):
    """An extra array of a call's delta, which begins at token `start` of the row; its axes are the capture's."""

    name: str
    call_id: str
    start: int
    values: npt.NDArray[Any]


class RowExtras(msgspec.Struct, frozen=True, eq=False):
    """What goes with a row beside its tokens: arrays of its deltas, and the media in its last prompt."""

    arrays: tuple[SpanArray, ...] = ()
    media: tuple[MediaSpan, ...] = ()


_NO_EXTRAS: Final = RowExtras()


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a rollout that its rows carry; a missing reward or advantage stays missing.

    `credits` are of captured calls and of tokens that they sampled (`credit.check_placeable`).
    """

    rollout_id: str
    attempt: int = 0
    group_id: str | None = None
    reward: float | None = None
    advantage: float | None = None
    credits: tuple[CallCredit, ...] = ()


class Row(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One training sequence of T tokens.

    Attributes:
        row_id: digest of rollout id, attempt, mode, ids, mask, log-probabilities and spans (`row_id_of`).
        row_index, row_count: its place among the rows of the rollout.
        token_ids: int32[T].
        loss_mask: uint8[T], 1 = sampled by the policy and trained here.
        logprobs: float32[T], nats; 0.0 where the mask is 0.
        prompt_len: prompt length of the first selected call of the row; everything after is response.
        spans: tile [0, T).
        reward, advantage: the rollout's, or None.
        loss_weight: trained tokens of this row over those of the rollout.
        truncated: a call of the row stopped at its length.
        finish_reason: of the last call.
        extras: arrays and media, each with its place in the row.
        credits: of tokens that this row trains, in their order.
    """

    row_id: str
    rollout_id: str
    attempt: int
    group_id: str | None
    row_index: int
    row_count: int
    token_ids: Int32Array
    loss_mask: UInt8Array
    logprobs: Float32Array
    prompt_len: int
    spans: tuple[Span, ...]
    reward: float | None
    advantage: float | None
    loss_weight: float
    truncated: bool
    finish_reason: str | None
    extras: RowExtras = _NO_EXTRAS
    credits: tuple[TokenCredit, ...] = ()


def row_id_of(row: Row, mode: RowMode) -> str:
    """Compute the id of a row from rollout id, attempt, mode, ids, mask, log-probabilities and spans."""
    digests: list[str] = []
    start = 0
    for index, span in enumerate(row.spans):
        previous = row.spans[index - 1] if index else span
        if span.role is SpanRole.SAMPLED:
            if previous is span or previous.role is not span.role or previous.call_id != span.call_id:
                start = span.start
            following = row.spans[index + 1] if index + 1 < len(row.spans) else None
            if following is None or following.role is not span.role or following.call_id != span.call_id:
                digests.append(logprobs_digest(row.logprobs[start : span.end]))
    rollout = (row.rollout_id, row.attempt)
    return _row_id(rollout, mode, sequence_digest(row.token_ids), row.loss_mask, digests, row.spans)


def _row_id(
    rollout: tuple[str, int],
    mode: RowMode,
    sequence: str,
    mask_T: UInt8Array,
    logprobs: Sequence[str],
    spans: Sequence[Span],
) -> str:
    """Digest a row by the digests of its parts; log-probabilities outside the mask are 0.0 by definition."""
    head = ("gristmill-row-1", *rollout, mode, sequence, mask_T.size, logprobs, spans)
    digest = sha256(msgspec.json.encode(head))
    digest.update(np.packbits(mask_T).data)
    return digest.hexdigest()[:ROW_ID_LEN]


def row_paths(forest: Forest) -> list[list[ForestCall]]:
    """Return the root-to-leaf paths in row order: by selection position of first call, then of the leaf."""
    paths = [forest.path(leaf) for leaf in forest.leaves()]
    paths.sort(key=lambda path: (path[0].position, path[-1].position))
    return paths


def merged(forest: Forest, rollout: Rollout) -> tuple[Row, ...]:
    """Build one row per root-to-leaf path; a call in several of them is trained in the first.

    Raises:
        ReconstructionError: `tokens_unusable` where recorded weight versions contradict the generation.
    """
    return assemble(row_sources(forest, row_paths(forest)), rollout, RowMode.MERGED)


def per_call(forest: Forest, rollout: Rollout) -> tuple[Row, ...]:
    """Build one row per selected call: its complete prompt, then its generation.

    Raises:
        ReconstructionError: `tokens_unusable` where recorded weight versions contradict the generation.
    """
    return assemble(row_sources(forest, [[call] for call in forest.calls.values()]), rollout, RowMode.PER_CALL)


class RowPart(Protocol):
    """What a row needs of one of its calls; a `ForestCall` is one."""

    @property
    def record(self) -> CallRecord: ...
    @property
    def certificate(self) -> Certificate | None: ...
    @property
    def logprobs_T(self) -> Float32Array: ...
    @property
    def logprobs_digest(self) -> str: ...
    @property
    def sequence_digest(self) -> str: ...


class RowSource(msgspec.Struct, frozen=True, eq=False):
    """The calls of a row, first to last, the last one's whole sequence int32[T], and the extras."""

    parts: Sequence[RowPart]
    token_ids: Int32Array
    extras: RowExtras


def row_sources(forest: Forest, paths: Iterable[Sequence[ForestCall]]) -> list[RowSource]:
    """Read the tokens and extras of paths of the forest."""
    carried = any(delta.extras for delta in forest.tokens.values()) or any(
        call.record.media for call in forest.calls.values()
    )
    return [
        RowSource(
            path,
            forest.tree.read(path[-1].end, 0, path[-1].record.cum_len),
            row_extras(forest, path) if carried else _NO_EXTRAS,
        )
        for path in paths
    ]


def assemble(sources: Sequence[RowSource], rollout: Rollout, mode: RowMode) -> tuple[Row, ...]:
    """Make the rows of a rollout, in the given order; a call is trained in the first row that holds it.

    Raises:
        ReconstructionError: `tokens_unusable` where recorded weight versions contradict the generation.
    """
    sampled = {part.record.model_call_id: part.record for source in sources for part in source.parts}
    total = sum(record.cum_len - record.prompt_len for record in sampled.values())
    owners: dict[str, str] = {}
    given = credits_by_call(rollout.credits)
    rows: list[Row] = []
    for index, source in enumerate(sources):
        row = _row(source, rollout, mode, owners, given, (index, len(sources), total))
        for part in source.parts:
            owners.setdefault(part.record.model_call_id, row.row_id)
        rows.append(row)
    return tuple(rows)


def _row(
    source: RowSource,
    rollout: Rollout,
    mode: RowMode,
    owners: Mapping[str, str],
    given: Mapping[str, Sequence[CallCredit]],
    counts: tuple[int, int, int],
) -> Row:
    """Make one row; `owners` maps the calls trained in earlier rows to those rows, `given` calls to their credits."""
    index, row_count, total = counts
    leaf = source.parts[-1]
    size = leaf.record.cum_len
    mask_T = np.zeros(size, np.uint8)
    logprobs_T = np.zeros(size, np.float32)
    spans: list[Span] = []
    digests: list[str] = []
    credits: list[TokenCredit] = []
    end = trained = 0
    for part in source.parts:
        record = part.record
        owner = owners.get(record.model_call_id)
        spans += call_spans(record, end, owner, part.certificate)
        start, end = record.prompt_len, record.cum_len
        if owner is None:
            mask_T[start:end] = 1
            logprobs_T[start:end] = part.logprobs_T
            digests.append(part.logprobs_digest)
            trained += end - start
            credits += token_credits(record, given.get(record.model_call_id, ()))
    key = (rollout.rollout_id, rollout.attempt)
    return Row(
        row_id=_row_id(key, mode, leaf.sequence_digest, mask_T, digests, spans),
        rollout_id=rollout.rollout_id,
        attempt=rollout.attempt,
        group_id=rollout.group_id,
        row_index=index,
        row_count=row_count,
        token_ids=source.token_ids,
        loss_mask=mask_T,
        logprobs=logprobs_T,
        prompt_len=source.parts[0].record.prompt_len,
        spans=tuple(spans),
        reward=rollout.reward,
        advantage=rollout.advantage,
        loss_weight=trained / total,
        truncated=any(part.record.finish_reason in LENGTH_STOPS for part in source.parts),
        finish_reason=leaf.record.finish_reason,
        extras=source.extras,
        credits=tuple(credits),
    )


def call_spans(record: CallRecord, start: int, owner: str | None, certificate: Certificate | None) -> list[Span]:
    """Return the spans of one call in a row whose earlier calls end at token `start`.

    Args:
        record: the call.
        start: where its part of the row begins.
        owner: id of the row that trains it, or None for this row.
        certificate: of the call; stands on its first span.

    Raises:
        ReconstructionError: `tokens_unusable` where recorded weight versions are out of order or bounds.
    """
    call_id, prompt_len = record.model_call_id, record.prompt_len
    spans: list[Span] = []
    if start < prompt_len:
        spans.append(Span(call_id, start, prompt_len, SpanRole.CONTEXT, certificate=certificate))
        certificate = None
    role = SpanRole.SAMPLED if owner is None else SpanRole.SAMPLED_ELSEWHERE
    mode = record.sampling.logprobs_mode
    temperature = record.sampling.temperature
    if temperature is not None:
        temperature = float(temperature)
    for version, first, last in _weight_pieces(record):
        at = prompt_len + first
        end = prompt_len + last
        spans.append(Span(call_id, at, end, role, owner, version, mode, temperature, certificate))
        certificate = None
    return spans


def _weight_pieces(record: CallRecord) -> Iterable[tuple[str | None, int, int]]:
    """Cut the generation at its weight-version boundaries; tokens without a recorded version have None."""
    size = record.cum_len - record.prompt_len
    if not record.weight_versions:
        return ((None, 0, size),)
    pieces: list[tuple[str | None, int, int]] = []
    end = 0
    for span in record.weight_versions:
        if not end <= span.start <= span.end <= size:
            where = f"call={record.model_call_id}"
            got = f"[{span.start}, {span.end}) after {end}"
            message = f"{record.model_call_id}: expected weight versions in order within {size} tokens, got {got}"
            raise ReconstructionError(Code.TOKENS_UNUSABLE, message, where=where)
        if end < span.start:
            pieces.append((None, end, span.start))
        if span.start < span.end:
            pieces.append((span.version, span.start, span.end))
        end = span.end
    if end < size:
        pieces.append((None, end, size))
    return pieces


def row_extras(forest: Forest, path: Sequence[ForestCall]) -> RowExtras:
    """Collect the arrays of the deltas that make up a row, and the media of its last prompt."""
    leaf = path[-1].record
    media = tuple(sorted(leaf.media, key=lambda span: (span.offset, span.length, span.digest)))
    links = base_chain(forest.records, forest.tokens, leaf.model_call_id)
    members = {call.record.model_call_id: (call.record, call.delta) for call in path}
    members |= {record.model_call_id: (record, delta) for record, delta in links}
    arrays = [
        SpanArray(name, call_id, record.prev_len, delta.extras[name])
        for call_id, (record, delta) in members.items()
        for name in sorted(delta.extras)
    ]
    arrays.sort(key=lambda array: (array.start, array.call_id, array.name))
    return RowExtras(tuple(arrays), media)
