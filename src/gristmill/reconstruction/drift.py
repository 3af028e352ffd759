"""How the context of a call relates to the tokens of the call that it continues.

Invariant: a cause is named only if the records, the tokens or a tokenizer prove it; else it is `unknown`. A
certificate compares with the *recorded* parent, selected or not, and never decides what is trained.

Not here: who the recorded parent is (lineage), and which calls share a row (forest).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np

from gristmill.records import CallRecord, Int32Array, ItemKind, ParentResolution, PurposeLabel
from gristmill.tokens import Place, PrefixTree

__all__ = [
    "LENGTH_STOPS",
    "WINDOW_T",
    "Certificate",
    "Decode",
    "DriftCause",
    "Relation",
    "certify",
    "conflict",
    "fork_counts",
]

WINDOW_T: Final = 16
"""Ids shown on either side of the first difference."""

LENGTH_STOPS: Final = frozenset({"length", "max_tokens", "max_output_tokens"})
"""Finish reasons of a reply that was cut at its length."""

Decode = Callable[[Sequence[int]], str]
"""Ids to text, special tokens included; a certificate says `retokenised` only with one at hand."""


class Relation(StrEnum):
    """What a certificate says."""

    EXACT = "exact"
    FORKED = "forked"
    UNKNOWN = "unknown"


class DriftCause(StrEnum):
    """Why a prompt does not extend the tokens of the call it continues."""

    REASONING_DROPPED = "reasoning_dropped"
    ARGUMENTS_REWRITTEN = "arguments_rewritten"
    TEXT_EDITED = "text_edited"
    RETOKENISED = "retokenised"
    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    MEDIA_CHANGED = "media_changed"
    MODEL_CHANGED = "model_changed"
    COMPACTED = "compacted"
    TRUNCATED = "truncated"
    UNKNOWN = "unknown"


class Certificate(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """How a call's prompt relates to the whole sequence of its recorded parent.

    Attributes:
        relation: `exact` (the prompt begins with it, under the same model and media), `forked`, or `unknown`
            where no tokens of the parent were captured.
        parent_call_id: the recorded parent.
        position: of a fork, the first place where ids or media differ; None where only the model differs.
        parent_ids, call_ids: the ids within 16 of `position` in the parent's sequence and in the prompt.
        cause: of a fork.
    """

    relation: Relation
    parent_call_id: str
    position: int | None = None
    parent_ids: tuple[int, ...] = ()
    call_ids: tuple[int, ...] = ()
    cause: DriftCause | None = None


def _media_before(record: CallRecord, stop: int) -> list[tuple[int, int, str]]:
    return sorted((span.offset, span.length, span.digest) for span in record.media if span.offset < stop)


def _first_media_difference(one: Sequence[tuple[int, int, str]], other: Sequence[tuple[int, int, str]]) -> int | None:
    if one == other:
        return None
    for left, right in zip(one, other, strict=False):
        if left != right:
            return min(left[0], right[0])
    longer = max(one, other, key=len)
    return longer[min(len(one), len(other))][0]


def conflict(parent: CallRecord, call: CallRecord) -> DriftCause | None:
    """Return why a call may not share a row with one whose sequence its prompt begins with, or None."""
    if (parent.model, parent.tokenizer, parent.adapter) != (call.model, call.tokenizer, call.adapter):
        return DriftCause.MODEL_CHANGED
    if (parent.media or call.media) and _media_before(parent, parent.cum_len) != _media_before(call, parent.cum_len):
        return DriftCause.MEDIA_CHANGED
    return None


def certify(
    tree: PrefixTree,
    parent: CallRecord,
    parent_end: Place,
    call: CallRecord,
    call_end: Place,
    decode: Decode | None = None,
) -> Certificate:
    """Compare a call's prompt with the whole sequence of its recorded parent.

    Args:
        tree: holds both sequences.
        parent, call: the two records.
        parent_end, call_end: where their whole sequences end.
        decode: ids to text, special tokens included; without it no fork is called `retokenised`.
    """
    shared = min(tree.shared_len(parent_end, call_end), call.prompt_len)
    if shared == parent.cum_len:
        cause = conflict(parent, call)
        if cause is None:
            return Certificate(Relation.EXACT, parent.model_call_id)
        position = _first_media_difference(_media_before(parent, parent.cum_len), _media_before(call, parent.cum_len))
        if cause is DriftCause.MODEL_CHANGED or position is None:
            return Certificate(Relation.FORKED, parent.model_call_id, cause=cause)
    else:
        position = shared
        cause = _cause(tree, parent, parent_end, call, call_end, shared, decode)
    low, high = max(0, position - WINDOW_T), position + WINDOW_T
    return Certificate(
        Relation.FORKED,
        parent.model_call_id,
        position,
        tuple(tree.read(parent_end, low, min(high, parent.cum_len)).tolist()),
        tuple(tree.read(call_end, low, min(high, call.prompt_len)).tolist()),
        cause,
    )


def _cause(
    tree: PrefixTree,
    parent: CallRecord,
    parent_end: Place,
    call: CallRecord,
    call_end: Place,
    shared: int,
    decode: Decode | None,
) -> DriftCause:
    if (parent.model, parent.tokenizer, parent.adapter) != (call.model, call.tokenizer, call.adapter):
        return DriftCause.MODEL_CHANGED
    # Media behind the fork stand elsewhere because of it; those up to it are evidence.
    if _media_before(parent, shared + 1) != _media_before(call, shared + 1):
        return DriftCause.MEDIA_CHANGED
    if _differ(parent.system_digest, call.system_digest):
        return DriftCause.SYSTEM_CHANGED
    if _differ(parent.tools_digest, call.tools_digest):
        return DriftCause.TOOLS_CHANGED
    if PurposeLabel.COMPACTION in (parent.purpose.label, call.purpose.label):
        return DriftCause.COMPACTED
    parent_T = tree.read(parent_end, 0, parent.cum_len)
    prompt_T = tree.read(call_end, 0, call.prompt_len)
    if decode is not None and _same_text(parent_T, prompt_T, decode):
        return DriftCause.RETOKENISED
    if _reasoning_dropped(parent, parent_T, call, prompt_T, shared):
        return DriftCause.REASONING_DROPPED
    if shared >= parent.prompt_len and parent.finish_reason in LENGTH_STOPS:
        return DriftCause.TRUNCATED
    return DriftCause.UNKNOWN


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def _same_text(parent_T: Int32Array, prompt_T: Int32Array, decode: Decode) -> bool:
    text = decode(parent_T.tolist())
    # A replacement character stands for bytes that may differ.
    return bool(text) and "\ufffd" not in text and decode(prompt_T.tolist()).startswith(text)


def _reasoning_dropped(
    parent: CallRecord, parent_T: Int32Array, call: CallRecord, prompt_T: Int32Array, shared: int
) -> bool:
    """Say whether the prompt is proved to continue the parent's reply without its reasoning.

    Either the request's conversation has the digest of the parent's reply without reasoning; or the recorded
    link proves that the reply is continued, and the prompt is the parent's ids with one run of them, ending
    inside the generation, left out: nothing but the reasoning can be missing then.
    """
    if not any(item.kind is ItemKind.REASONING for item in parent.output_items):
        return False
    if call.context_digest is not None and call.context_digest == parent.continuation_digest_bare:
        return call.context_digest != parent.continuation_digest
    if call.parent_resolution is not ParentResolution.RESOLVED or shared >= call.prompt_len:
        return False
    first = max(shared + 1, parent.prompt_len + 1)
    resumes_T = np.flatnonzero(parent_T[first:] == prompt_T[shared]) + first
    for at in resumes_T.tolist():
        rest_T = parent_T[at:]
        if np.array_equal(rest_T, prompt_T[shared : shared + rest_T.size]):
            return True
    return False


def fork_counts(certificates: Iterable[Certificate | None]) -> dict[DriftCause, int]:
    """Count the forks by cause, in the order of the causes; exact and missing certificates do not count."""
    causes = [certificate.cause for certificate in certificates if certificate is not None]
    return {cause: count for cause in DriftCause if (count := causes.count(cause))}
