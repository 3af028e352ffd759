"""What a harness hands back: what is no credit is refused before anything is built on it."""

from __future__ import annotations

from math import inf, nan

import pytest

from gristmill.errors import Code, ReconstructionError
from gristmill.records import CallCredit, Result
from gristmill.result import check_credit


def credit(start: int = 0, end: int | None = None, call_id: str = "c1", reward: float | None = 1.0) -> CallCredit:
    return CallCredit(model_call_id=call_id, start=start, end=end, reward=reward)


@pytest.mark.parametrize(
    "given",
    [
        Result(),
        Result(reward=1.0, advantage=-0.5, credits=(credit(),)),
        Result(credits=(credit(4), credit(0, 2), credit(2, 4))),
        Result(credits=(credit(), credit(call_id="c2"))),
        Result(credits=(CallCredit(model_call_id="c1", advantage=0.0),)),
    ],
)
def test_what_may_be_given(given: Result) -> None:
    # Spans that touch, in any order, and equal spans of two calls are no overlap.
    check_credit(given)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        (Result(reward=nan), "$.reward"),
        (Result(advantage=inf), "$.advantage"),
        (Result(credits=(credit(reward=-inf),)), "$.credits[0].reward"),
        (Result(credits=(credit(), CallCredit(model_call_id="c2", advantage=nan))), "$.credits[1].advantage"),
        (Result(credits=(credit(reward=None),)), "$.credits[0]"),
        (Result(credits=(credit(-1, 2),)), "$.credits[0]"),
        (Result(credits=(credit(2, 2),)), "$.credits[0]"),
        (Result(credits=(credit(3), credit(0, 4))), "$.credits[0]"),
        (Result(credits=(credit(), credit(5, 6))), "$.credits[1]"),
        (Result(credits=(credit(0, 2), credit(1, 3))), "$.credits[1]"),
    ],
)
def test_what_may_not_be_given(given: Result, where: str) -> None:
    # A number that no trainer can use, and two values for one token, would end up in a loss.
    with pytest.raises(ReconstructionError) as refused:
        check_credit(given)
    assert (refused.value.code, refused.value.where) == (Code.CREDIT_INVALID, where)
