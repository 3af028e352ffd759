"""Credits of calls as credits of the tokens of a row.

Invariant: a credit is placed on the sampled tokens that it names and on no others, in exactly the row that trains
them; what names no captured token is refused, never moved, cut or dropped.

Not here: what a credit is (result), and advantages over groups (credit).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gristmill.errors import Code, ReconstructionError
from gristmill.records import CallCredit, CallRecord
from gristmill.result import check_credits

__all__ = ["TokenCredit", "check_placeable", "credits_by_call", "token_credits"]


class TokenCredit(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """What the tokens [start, end) of a row, sampled by one call and trained here, were worth."""

    call_id: str
    start: int
    end: int
    reward: float | None = None
    advantage: float | None = None


def check_placeable(given: Sequence[CallCredit], records: Mapping[str, CallRecord]) -> None:
    """Refuse credits that do not name sampled tokens of captured calls.

    A captured call that is not trained may have credits: its verdict says why it is not.

    Args:
        given: credits, as handed back.
        records: every captured call of the attempt, by call id.

    Raises:
        ReconstructionError: `call_unknown`, `credit_invalid`.
    """
    check_credits(given)
    for index, credit in enumerate(given):
        where = f"$.credits[{index}]"
        record = records.get(credit.model_call_id)
        if record is None:
            message = f"expected a credit of a captured call, got one of {credit.model_call_id!r}"
            raise ReconstructionError(Code.CALL_UNKNOWN, message, where=f"{where}.model_call_id")
        size = record.cum_len - record.prompt_len
        whole = credit.start == 0 and credit.end is None
        # Of a call without tokens nothing can be trained, so that a span of it is of no consequence.
        if record.cum_len and not whole and (credit.start >= size or (credit.end or 0) > size):
            end = "end" if credit.end is None else credit.end
            message = (
                f"expected a span of the {size} tokens that call {credit.model_call_id} sampled, "
                f"got [{credit.start}, {end})"
            )
            raise ReconstructionError(Code.CREDIT_INVALID, message, where=where)


def credits_by_call(given: Sequence[CallCredit]) -> Mapping[str, Sequence[CallCredit]]:
    """Return the credits of each call, in the order of their tokens."""
    by_call: dict[str, list[CallCredit]] = {}
    for credit in sorted(given, key=lambda credit: credit.start):
        by_call.setdefault(credit.model_call_id, []).append(credit)
    return by_call


def token_credits(record: CallRecord, given: Sequence[CallCredit]) -> list[TokenCredit]:
    """Place the credits of one call, in the order of their tokens, in a row that trains it."""
    return [
        TokenCredit(
            record.model_call_id,
            record.prompt_len + credit.start,
            record.cum_len if credit.end is None else record.prompt_len + credit.end,
            None if credit.reward is None else float(credit.reward),
            None if credit.advantage is None else float(credit.advantage),
        )
        for credit in given
    ]
