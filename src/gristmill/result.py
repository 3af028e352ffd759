"""What a harness hands back of a rollout: its history, what it was worth, and whom a failure is to be blamed on.

Invariant: everything here was given. A missing reward or advantage stays missing, a failure that nobody attributed is
none, and `check_credit` refuses what could not be placed on tokens without a guess.

Not here: reading and writing it (captures, ledger), placing credits in rows (reconstruction), groups (credit).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from math import isfinite
from typing import Any

import msgspec

from gristmill.errors import Code, ReconstructionError

__all__ = ["Attribution", "CallCredit", "Failure", "Result", "check_credit", "check_credits"]


class Attribution(StrEnum):
    """Whom a failure is to be blamed on.

    `mask`: not the policy, so that nothing of the rollout is trained; `score`: the policy, trained as rewarded.
    """

    MASK = "mask"
    SCORE = "score"


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rollout that failed, in a word or a sentence, and whether that says something about the policy."""

    reason: str
    attribution: Attribution


class CallCredit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the sampled tokens [start, end) of one call were worth.

    Attributes:
        model_call_id: the call.
        start, end: token indices in the call's generation; `end` None is the end of the generation.
        reward, advantage: finite numbers; at least one of them is given.
    """

    model_call_id: str
    start: int = 0
    end: int | None = None
    reward: float | None = None
    advantage: float | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the harness handed back.

    Attributes:
        value: the returned history, in any of the formats that policies read.
        reward: of the rollout; None is a missing one, not 0.
        group_id: the rollouts whose rewards are compared with each other, as a rule those of one task.
        metadata: JSON, for people.
        advantage: of the rollout, as given.
        credits: of calls, or of spans of their tokens, beside the rollout's.
        failure: that the rollout failed, and how that counts.
    """

    value: Any = None
    reward: float | None = None
    group_id: str | None = None
    metadata: Mapping[str, Any] = {}
    advantage: float | None = None
    credits: tuple[CallCredit, ...] = ()
    failure: Failure | None = None


def check_credit(result: Result) -> None:
    """Refuse numbers that are not finite, and credits that say nothing, hold no token or overlap.

    Raises:
        ReconstructionError: `credit_invalid`; `where` is the JSON path.
    """
    _check_numbers(result, "$")
    check_credits(result.credits)


def check_credits(given: Sequence[CallCredit]) -> None:
    """Refuse credits that say nothing, hold no token or overlap; `ReconstructionError` as `check_credit`."""
    for index, credit in enumerate(given):
        where = f"$.credits[{index}]"
        _check_numbers(credit, where)
        if credit.reward is None and credit.advantage is None:
            raise _invalid("expected a reward or an advantage, got neither", where)
        if credit.start < 0 or (credit.end is not None and credit.end <= credit.start):
            raise _invalid(f"expected 0 <= start < end, got {_span(credit)}", where)
    order = sorted(range(len(given)), key=lambda index: (given[index].model_call_id, given[index].start))
    for before, after in pairwise(order):
        first, second = given[before], given[after]
        if first.model_call_id == second.model_call_id and (first.end is None or second.start < first.end):
            message = f"expected credits of call {first.model_call_id} that do not overlap, got {_span(first)} and "
            raise _invalid(message + _span(second), f"$.credits[{after}]")


def _check_numbers(holder: Result | CallCredit, where: str) -> None:
    for name in ("reward", "advantage"):
        number = getattr(holder, name)
        if number is not None and not isfinite(number):
            raise _invalid(f"expected a finite {name}, got {number}", f"{where}.{name}")


def _span(credit: CallCredit) -> str:
    return f"[{credit.start}, {'end' if credit.end is None else credit.end})"


def _invalid(message: str, where: str) -> ReconstructionError:
    return ReconstructionError(Code.CREDIT_INVALID, message, where=where)
