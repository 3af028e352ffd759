"""Context that stands in more than one row of a rollout.

Invariant: tokens count as repeated up to the last call of a row that an earlier row trains, or where a prompt that
forked stands for the sequence of its parent, which another row holds. Nothing counts twice in one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gristmill.cli.certificates import paid_again
from gristmill.reconstruction import Row, SpanRole
from gristmill.records import CallRecord

__all__ = ["repeated_tokens"]


def repeated_tokens(rows: Sequence[Row], records: Mapping[str, CallRecord]) -> int:
    """Count the context tokens that other rows of a rollout hold as well.

    Args:
        rows: of one rollout, in order.
        records: of the attempt, by call id.
    """
    held = {span.call_id for row in rows for span in row.spans}
    return sum(_of_row(row, records, held) for row in rows)


def _of_row(row: Row, records: Mapping[str, CallRecord], held: set[str]) -> int:
    lent = max((span.end for span in row.spans if span.role is SpanRole.SAMPLED_ELSEWHERE), default=0)
    first = row.spans[0]
    if first.certificate is None or first.certificate.parent_call_id not in held:
        return lent
    return max(lent, paid_again(first.certificate, records, first.call_id))
