"""Stored deltas back to whole token sequences.

Invariant: a sequence is returned only if every record and delta on the way agrees on every length; a missing
base, a cycle or a contradiction refuses with the call's id. Digests are compared by reconstruction.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np

from gristmill.errors import Code, ReconstructionError
from gristmill.records import CallRecord, Int32Array, TokenDelta

__all__ = ["base_chain", "checked_delta", "expand"]


def checked_delta(
    records_by_id: Mapping[str, CallRecord], tokens: Mapping[str, TokenDelta], call_id: str
) -> tuple[CallRecord, TokenDelta]:
    """Return the record and the delta of a call, if they and the base agree on every length.

    Raises:
        ReconstructionError: `tokens_unusable`, where `call=ID`: no record, tokens or base, or lengths differ.
    """
    record, delta = records_by_id.get(call_id), tokens.get(call_id)
    if record is None or delta is None:
        raise _unusable(call_id, f"expected captured tokens, got no {'delta' if record else 'record'}")
    size = record.delta_len
    shapes = (delta.ids_T.shape, delta.mask_T.shape, delta.logprobs_T.shape)
    if shapes != ((size,), (size,), (size,)):
        raise _unusable(call_id, f"expected arrays of delta_len {size}, got shapes {shapes}")
    base_len = 0
    if record.base_call_id is not None:
        base = records_by_id.get(record.base_call_id)
        if base is None:
            raise _unusable(call_id, f"expected its base {record.base_call_id!r}, got no such record")
        base_len = base.cum_len
    prev_len, prompt_len, cum_len = record.prev_len, record.prompt_len, record.cum_len
    if prev_len != base_len or not prev_len <= prompt_len <= cum_len or cum_len != prev_len + size:
        got = f"prev_len {prev_len}, prompt_len {prompt_len}, cum_len {cum_len}, delta_len {size}"
        raise _unusable(call_id, f"expected lengths that follow a base of {base_len} tokens, got {got}")
    return record, delta


def base_chain(
    records_by_id: Mapping[str, CallRecord],
    tokens: Mapping[str, TokenDelta],
    call_id: str,
    known: Container[str] = frozenset(),
) -> list[tuple[CallRecord, TokenDelta]]:
    """Return the checked deltas of a call's sequence, first tokens first, behind the last known call.

    Raises:
        ReconstructionError: `tokens_unusable`, where `call=ID`: as `checked_delta`, or bases form a cycle.
    """
    links: list[tuple[CallRecord, TokenDelta]] = []
    seen: set[str] = set()
    at: str | None = call_id
    while at is not None and at not in known:
        if at in seen:
            raise _unusable(at, "expected bases that end, got a cycle")
        seen.add(at)
        record, delta = checked_delta(records_by_id, tokens, at)
        links.append((record, delta))
        at = record.base_call_id
    links.reverse()
    return links


def expand(records_by_id: Mapping[str, CallRecord], tokens: Mapping[str, TokenDelta], call_id: str) -> Int32Array:
    """Return the whole sequence of a call, int32[cum_len], by following its bases.

    To expand many calls that share bases, insert their deltas into one `PrefixTree`.

    Raises:
        ReconstructionError: `tokens_unusable`, where `call=ID`: as `checked_delta`, or bases form a cycle.
    """
    pieces = [delta.ids_T for _, delta in base_chain(records_by_id, tokens, call_id)]
    return np.concatenate(pieces, dtype=np.int32)


def _unusable(call_id: str, message: str) -> ReconstructionError:
    return ReconstructionError(Code.TOKENS_UNUSABLE, f"{call_id}: {message}", where=f"call={call_id}")
