"""Checks of finished rows against the captured tokens: what `verify` proves.

Invariant: each rule is checked on its own, from the deltas; the token tree is built again for lineage only. A
fault is a `Finding`, and one row's never hides another's.

Not here: files and manifests (export), whether the right calls were selected (selection), and what became of the
tokens that no row trains (conservation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from gristmill.errors import Code, ReconstructionError
from gristmill.reconstruction.credit import TokenCredit, check_placeable, credits_by_call, token_credits
from gristmill.reconstruction.drift import LENGTH_STOPS, Decode
from gristmill.reconstruction.forest import Forest, ForestCall, build_forest
from gristmill.reconstruction.row import (
    Rollout,
    Row,
    RowExtras,
    RowMode,
    Span,
    SpanRole,
    call_spans,
    row_extras,
    row_id_of,
    row_paths,
)
from gristmill.records import CallRecord, TokenDelta
from gristmill.tokens import (
    base_chain,
    chain_digest,
    logprobs_digest,
    running_digest,
)
from gristmill.tokens.digests import RunningDigest

__all__ = ["Finding", "verify_capture", "verify_rows"]


class Finding(msgspec.Struct, frozen=True):
    """Something that the capture does not prove: a code, the place, one sentence, and the facts."""

    code: Code
    where: str
    message: str
    evidence: dict[str, Any] = {}


def verify_rows(
    records: Iterable[CallRecord],
    tokens: Mapping[str, TokenDelta],
    selected: Sequence[str],
    rows: Sequence[Row],
    *,
    rollout: Rollout,
    mode: RowMode = RowMode.MERGED,
    decode: Decode | None = None,
) -> tuple[Finding, ...]:
    """Check the rows of one rollout; no finding means that every one of them is proved and none is missing.

    Args:
        records: every captured call of the attempt.
        tokens: token delta by call id.
        selected: call ids in selection order; none means that the rollout makes no rows.
        rows: in their order.
        rollout: the reward, credits, group and ids that the rows must carry.
        mode: how they were made; a tree is checked through its flattened rows.
        decode: the same as when they were made.
    """
    by_id = {record.model_call_id: record for record in records}
    findings = list(verify_capture(by_id, tokens, selected))
    try:
        forest = build_forest(by_id.values(), tokens, selected, decode=decode)
        wanted = [[call] for call in forest.calls.values()] if mode is RowMode.PER_CALL else row_paths(forest)
        for call in forest.calls.values():
            call_spans(call.record, 0, None, None)
        check_placeable(rollout.credits, by_id)
    except ReconstructionError as error:
        if rows or error.code is not Code.NOTHING_TO_TRAIN:
            findings.append(Finding(error.code, error.where, error.message, error.evidence))
        findings += [_finding(Code.ROW_UNEXPECTED, row, "of a rollout that makes no rows") for row in rows]
        return tuple(findings)
    owners: dict[str, str] = {}
    seen: set[str] = set()
    paths = {path[-1].record.model_call_id: path for path in wanted}
    for index, row in enumerate(rows):
        malformed = list(_shape(row))
        findings += malformed
        if malformed:
            continue
        leaf = row.spans[-1].call_id
        path = paths.get(leaf)
        if path is None or leaf in seen:
            findings.append(_finding(Code.ROW_UNEXPECTED, row, f"which ends with call {leaf!r}"))
            continue
        seen.add(leaf)
        findings += _check_row(forest, path, row, owners)
        findings += _metadata(forest, path, row, rollout, (index, len(wanted)))
        findings += _credits(path, row, rollout, owners)
        flat = RowMode.PER_CALL if mode is RowMode.PER_CALL else RowMode.MERGED
        if row.row_id != (expected := row_id_of(row, flat)):
            findings.append(_finding(Code.ROW_ID_DIFFERS, row, f"expected id {expected}"))
        for call in path:
            owners.setdefault(call.record.model_call_id, row.row_id)
    for leaf in paths:
        if leaf not in seen:
            message = f"expected a row that ends with call {leaf!r}, got none"
            findings.append(Finding(Code.ROW_MISSING, f"call={leaf}", message))
    return (*findings, *_once(forest, rows), *_order(paths, rows))


# ---- captured tokens ---------------------------------------------------------------------------------------


def verify_capture(
    records_by_id: Mapping[str, CallRecord], tokens: Mapping[str, TokenDelta], call_ids: Iterable[str]
) -> Iterator[Finding]:
    """Check recorded lengths, masks and digests of calls, and of their bases, against the tokens."""
    running: dict[str, RunningDigest] = {}
    for call_id in call_ids:
        try:
            links = base_chain(records_by_id, tokens, call_id, running)
        except ReconstructionError as error:
            yield Finding(Code.ROW_LINEAGE_DIFFERS, error.where, error.message)
            continue
        for record, delta in links:
            base = records_by_id[record.base_call_id] if record.base_call_id is not None else None
            digest = running_digest(running[base.model_call_id] if base else None, delta.ids_T)
            running[record.model_call_id] = digest
            yield from _check_delta(record, delta, digest.hexdigest(), base)


def _check_delta(record: CallRecord, delta: TokenDelta, sequence: str, base: CallRecord | None) -> Iterator[Finding]:
    where, call_id = f"call={record.model_call_id}", record.model_call_id
    context = record.prompt_len - record.prev_len
    if delta.mask_T[:context].any() or (delta.mask_T[context:] != 1).any():
        yield Finding(Code.ROW_MASK_DIFFERS, where, f"{call_id}: expected mask 1 exactly on its generation")
    generation_T = delta.logprobs_T[context:]
    if delta.logprobs_T[:context].any() or not np.isfinite(generation_T).all():
        message = f"{call_id}: expected finite log-probabilities on its generation and 0.0 before"
        yield Finding(Code.ROW_LOGPROBS_DIFFER, where, message)
    logprobs = logprobs_digest(generation_T)
    lengths = (record.prompt_len, record.prev_len, record.cum_len)
    chain = chain_digest(base.chain_digest if base else None, lengths, sequence, logprobs, delta.extras)
    for name, code, expected in (
        ("sequence_digest", Code.ROW_TOKENS_DIFFER, sequence),
        ("logprobs_digest", Code.ROW_LOGPROBS_DIFFER, logprobs),
        ("chain_digest", Code.ROW_LINEAGE_DIFFERS, chain),
    ):
        got = getattr(record, name)
        if got is not None and got != expected:
            message = f"{call_id}: expected {name} {expected} of its tokens, got {got}"
            yield Finding(code, where, message)


# ---- one row -----------------------------------------------------------------------------------------------


def _finding(code: Code, row: Row, message: str, **evidence: object) -> Finding:
    return Finding(code, f"row={row.row_id}", f"row {row.row_id}: {message}", evidence)


def _shape(row: Row) -> Iterator[Finding]:
    """Check that a row is a row: array types and lengths, and spans that tile it."""
    size = row.token_ids.size
    for name, array, dtype in (
        ("token_ids", row.token_ids, np.int32),
        ("loss_mask", row.loss_mask, np.uint8),
        ("logprobs", row.logprobs, np.float32),
    ):
        if array.dtype != dtype or array.shape != (size,):
            got = f"{array.dtype}{list(array.shape)}"
            yield _finding(Code.ROW_MALFORMED, row, f"expected {name} {np.dtype(dtype)}[{size}], got {got}")
    end = 0
    for number, span in enumerate(row.spans):
        if span.start != end or span.end <= span.start:
            got = f"[{span.start}, {span.end})"
            message = f"expected span {number} to begin at {end} and hold a token, got {got}"
            yield _finding(Code.ROW_SPANS_INVALID, row, message)
            return
        end = span.end
    if end != size or not row.spans:
        yield _finding(Code.ROW_SPANS_INVALID, row, f"expected spans that tile {size} tokens, got {end}")


def _check_row(forest: Forest, path: Sequence[ForestCall], row: Row, owners: Mapping[str, str]) -> Iterator[Finding]:
    yield from _tokens(forest, path, row)
    yield from _spans(path, row, owners)
    mask_T = np.zeros(row.token_ids.size, np.uint8)
    logprobs_T = np.zeros(row.token_ids.size, np.float32)
    if path[-1].record.cum_len != row.token_ids.size:
        return
    for call in path:
        if call.record.model_call_id not in owners:
            start, end = call.record.prompt_len, call.record.cum_len
            mask_T[start:end] = 1
            logprobs_T[start:end] = call.logprobs_T
    if (at := _first_difference(mask_T, row.loss_mask)) is not None:
        message = f"expected mask {mask_T[at]} at token {at}, got {row.loss_mask[at]}"
        yield _finding(Code.ROW_MASK_DIFFERS, row, message, position=at)
    if (at := _first_difference(logprobs_T, row.logprobs)) is not None:
        message = f"expected log-probability {logprobs_T[at]} at token {at}, got {row.logprobs[at]}"
        yield _finding(Code.ROW_LOGPROBS_DIFFER, row, message, position=at)


def _first_difference(expected_T: npt.NDArray[Any], got_T: npt.NDArray[Any]) -> int | None:
    differs_T = expected_T != got_T
    at = int(differs_T.argmax())
    return at if differs_T[at] else None


def _tokens(forest: Forest, path: Sequence[ForestCall], row: Row) -> Iterator[Finding]:
    """Compare the row with the stored delta of every call it is made of, each delta once."""
    leaf = path[-1].record
    if leaf.cum_len != row.token_ids.size:
        message = f"expected the {leaf.cum_len} tokens of call {leaf.model_call_id!r}, got {row.token_ids.size}"
        yield _finding(Code.ROW_TOKENS_DIFFER, row, message)
        return
    done: set[str] = set()
    for call in path:
        for record, delta in base_chain(forest.records, forest.tokens, call.record.model_call_id, done):
            done.add(record.model_call_id)
            got_T = row.token_ids[record.prev_len : record.cum_len]
            if (at := _first_difference(delta.ids_T, got_T) if delta.ids_T.size else None) is not None:
                position = record.prev_len + at
                message = (
                    f"expected id {delta.ids_T[at]} of call {record.model_call_id!r} at token {position}, "
                    f"got {got_T[at]}"
                )
                yield _finding(Code.ROW_TOKENS_DIFFER, row, message, position=position)


def _spans(path: Sequence[ForestCall], row: Row, owners: Mapping[str, str]) -> Iterator[Finding]:
    """Compare the spans with those that the path proves, field by field."""
    expected: list[Span] = []
    end = 0
    for call in path:
        owner = owners.get(call.record.model_call_id)
        expected += call_spans(call.record, end, owner, call.certificate)
        end = call.record.cum_len
    if [span.call_id for span in expected] != [span.call_id for span in row.spans]:
        wanted, got = _names(expected), _names(row.spans)
        yield _finding(Code.ROW_LINEAGE_DIFFERS, row, f"expected calls {wanted}, got {got}")
        return
    codes = {"certificate": Code.ROW_LINEAGE_DIFFERS}
    metadata = ("owner", "weight_version", "logprobs_mode", "temperature")
    codes |= dict.fromkeys(metadata, Code.ROW_METADATA_DIFFERS)
    for number, (span, got_span) in enumerate(zip(expected, row.spans, strict=True)):
        if span == got_span:
            continue
        for name in span.__struct_fields__:
            wanted, got = getattr(span, name), getattr(got_span, name)
            if wanted != got:
                code = codes.get(name, Code.ROW_SPANS_INVALID)
                yield _finding(code, row, f"span {number}: expected {name} {wanted}, got {got}", span=number)


def _names(spans: Sequence[Span]) -> str:
    names = list(dict.fromkeys(span.call_id for span in spans))
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _metadata(
    forest: Forest, path: Sequence[ForestCall], row: Row, rollout: Rollout, place: tuple[int, int]
) -> Iterator[Finding]:
    """Check what a row carries beside its tokens."""
    trained = sum(span.end - span.start for span in row.spans if span.role is SpanRole.SAMPLED)
    total = sum(call.record.cum_len - call.record.prompt_len for call in forest.calls.values())
    expected = {
        "rollout_id": rollout.rollout_id,
        "attempt": rollout.attempt,
        "group_id": rollout.group_id,
        "reward": rollout.reward,
        "advantage": rollout.advantage,
        "row_index": place[0],
        "row_count": place[1],
        "prompt_len": path[0].record.prompt_len,
        "loss_weight": trained / total,
        "truncated": any(call.record.finish_reason in LENGTH_STOPS for call in path),
        "finish_reason": path[-1].record.finish_reason,
    }
    for name, wanted in expected.items():
        got = getattr(row, name)
        if got != wanted:
            yield _finding(Code.ROW_METADATA_DIFFERS, row, f"expected {name} {wanted!r}, got {got!r}")
    if _extras_key(row.extras) != _extras_key(row_extras(forest, path)):
        yield _finding(Code.ROW_METADATA_DIFFERS, row, "expected the extras of its calls, got others")


def _credits(path: Sequence[ForestCall], row: Row, rollout: Rollout, owners: Mapping[str, str]) -> Iterator[Finding]:
    """Check that the credits of the tokens that a row trains stand in it, and no others."""
    given = credits_by_call(rollout.credits)
    expected: list[TokenCredit] = []
    for call in path:
        call_id = call.record.model_call_id
        if call_id not in owners:
            expected += token_credits(call.record, given.get(call_id, ()))
    for index, (wanted, got) in enumerate(zip_longest(expected, row.credits)):
        if wanted != got:
            message = f"expected credit {index} {_told(wanted)}, got {_told(got)}"
            yield _finding(Code.ROW_METADATA_DIFFERS, row, message, credit=index)


def _told(credit: TokenCredit | None) -> str:
    if credit is None:
        return "none"
    place = f"of tokens [{credit.start}, {credit.end}) of call {credit.call_id!r}"
    return f"{place} with reward {credit.reward} and advantage {credit.advantage}"


def _extras_key(extras: RowExtras) -> list[object]:
    arrays = [
        (item.name, item.call_id, item.start, item.values.dtype.str, item.values.shape, item.values.tobytes())
        for item in extras.arrays
    ]
    return [arrays, extras.media]


# ---- all rows ----------------------------------------------------------------------------------------------


def _once(forest: Forest, rows: Sequence[Row]) -> Iterator[Finding]:
    """Check that each generation is trained in one row, and that the masks add up to what was sampled."""
    trained: Counter[tuple[str, int]] = Counter()
    for number, row in enumerate(rows):
        for span in row.spans:
            if span.role is SpanRole.SAMPLED:
                trained[span.call_id, number] += span.end - span.start
    held = Counter(call_id for call_id, _ in trained)
    for call_id in forest.calls:
        if held[call_id] != 1:
            message = f"{call_id}: expected its generation to be trained in one row, got {held[call_id]}"
            yield Finding(Code.TOKEN_NOT_ONCE, f"call={call_id}", message)
    sampled = sum(call.record.cum_len - call.record.prompt_len for call in forest.calls.values())
    masked = sum(int(np.count_nonzero(row.loss_mask)) for row in rows)
    if sampled != masked:
        message = f"expected {sampled} trained tokens, as many as the selected calls sampled, got {masked}"
        yield Finding(Code.TOKENS_NOT_CONSERVED, "$", message, {"sampled": sampled, "trained": masked})


def _order(paths: Mapping[str, object], rows: Sequence[Row]) -> Iterator[Finding]:
    got = [row.spans[-1].call_id for row in rows if row.spans and row.spans[-1].call_id in paths]
    held = set(got)
    wanted = [leaf for leaf in paths if leaf in held]
    if len(held) == len(got) and wanted != got:
        message = f"expected rows that end with calls {wanted[:8]}, in this order, got {got[:8]}"
        yield Finding(Code.ROW_METADATA_DIFFERS, "$", message)
