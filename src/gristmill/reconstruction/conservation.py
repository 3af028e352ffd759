"""Where the sampled tokens of a rollout went.

Invariant: sampled = trained + excluded by reason + unexplained, for every call and for the rollout; nothing is
estimated, masks are counted.

Not here: whether rows are right (checks), and why calls were excluded (selection).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from gristmill.errors import Code
from gristmill.reconstruction.row import Row, SpanRole
from gristmill.records import CallRecord

__all__ = ["CallTokens", "Conservation", "conservation"]


class CallTokens(msgspec.Struct, frozen=True):
    """Where the sampled tokens of one call went."""

    call_id: str
    sampled: int
    trained: int
    excluded: int
    reason: Code | None


class Conservation(msgspec.Struct, frozen=True):
    """sampled = trained + excluded by reason + unexplained, over one rollout; only 0 unexplained is right."""

    calls: tuple[CallTokens, ...]
    sampled: int
    trained: int
    excluded: dict[Code, int]
    unexplained: int


def conservation(records: Iterable[CallRecord], rows: Iterable[Row], reasons: Mapping[str, Code]) -> Conservation:
    """Account for every sampled token of a rollout.

    Args:
        records: every captured call; a call without tokens counts 0.
        rows: the rows that were made; their masks are counted.
        reasons: why calls were excluded, by call id, as the verdicts say.
    """
    trained: Counter[str] = Counter()
    for row in rows:
        for span in row.spans:
            if span.role is not SpanRole.CONTEXT:
                trained[span.call_id] += int(np.count_nonzero(row.loss_mask[span.start : span.end]))
    calls: list[CallTokens] = []
    excluded: Counter[Code] = Counter()
    unexplained = 0
    for record in records:
        call_id, sampled = record.model_call_id, record.cum_len - record.prompt_len
        left = sampled - trained[call_id]
        reason = reasons.get(call_id) if left else None
        calls.append(CallTokens(call_id, sampled, trained[call_id], left, reason))
        if reason is None or left < 0:
            unexplained += abs(left)
        else:
            excluded[reason] += left
    return Conservation(
        tuple(calls),
        sum(call.sampled for call in calls),
        sum(call.trained for call in calls),
        dict(sorted(excluded.items())),
        unexplained,
    )
