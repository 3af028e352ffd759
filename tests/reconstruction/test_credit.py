"""Credits of calls in rows: each on exactly the tokens that it names, in the row that trains them."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import fsum

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import Code, ReconstructionError
from gristmill.reconstruction import Row, RowMode, TokenCredit, rebuild, verify_rows
from gristmill.records import CallCredit
from tests.reconstruction.attempts import ROLLOUT, Attempt, Call, attempt, call_forests

FORKED = (
    Call("c1", [1, 2], [3, 4, 5]),
    Call("c2", [1, 2, 3, 4, 5, 6], [7, 8], parent="c1"),
    Call("c3", [1, 2, 3, 4, 5, 9], [10], parent="c1"),
)


def credit(call_id: str, start: int = 0, end: int | None = None, reward: float | None = 1.0) -> CallCredit:
    return CallCredit(model_call_id=call_id, start=start, end=end, reward=reward)


def built(
    made: Attempt, *credits: CallCredit, mode: RowMode = RowMode.MERGED, selected: list[str] | None = None
) -> tuple[Row, ...]:
    chosen = [record.model_call_id for record in made.records] if selected is None else selected
    rollout = msgspec.structs.replace(ROLLOUT, credits=credits)
    rows = rebuild(made.records, made.tokens, chosen, rollout, mode=mode).rows
    assert not verify_rows(made.records, made.tokens, chosen, rows, rollout=rollout, mode=mode)
    return rows


@pytest.mark.parametrize("mode", [RowMode.MERGED, RowMode.TREE])
def test_a_shared_call_is_credited_where_it_is_trained(mode: RowMode) -> None:
    # The second row holds the first call as context: its reward must not count twice.
    first, second = built(
        attempt(*FORKED),
        credit("c3", reward=-1.0),
        credit("c2", 1),
        credit("c1", 1, 2, 0.5),
        credit("c1", 0, 1),
        mode=mode,
    )
    assert first.credits == (
        TokenCredit("c1", 2, 3, 1.0),
        TokenCredit("c1", 3, 4, 0.5),
        TokenCredit("c2", 7, 8, 1.0),
    )
    assert second.credits == (TokenCredit("c3", 6, 7, -1.0),)


def test_every_call_is_credited_in_its_own_row() -> None:
    # per_call: indices are those of the call's own row.
    rows = built(attempt(*FORKED), credit("c1"), credit("c2"), mode=RowMode.PER_CALL)
    assert [row.credits for row in rows] == [(TokenCredit("c1", 2, 5, 1.0),), (TokenCredit("c2", 6, 8, 1.0),), ()]


def test_ids_of_rows_do_not_depend_on_credits() -> None:
    # A reward that comes late must not make another row of the same tokens.
    made = attempt(*FORKED)
    assert [row.row_id for row in built(made)] == [row.row_id for row in built(made, credit("c1"))]


def test_a_call_that_is_not_trained_may_have_a_credit() -> None:
    # A process reward model scores every call; which are trained is the policy's business.
    made = attempt(*FORKED, Call("empty", [1], []))
    made.change("c3", cum_len=0, prompt_len=0, usable=False)
    del made.tokens["c3"]
    rows = built(made, credit("c3", 5, 9), credit("empty"), credit("c1"), selected=["c1", "empty"])
    assert [row.credits for row in rows] == [(TokenCredit("c1", 2, 5, 1.0),)]


@pytest.mark.parametrize(
    ("wrong", "code", "where"),
    [
        (credit("c9"), Code.CALL_UNKNOWN, "$.credits[1].model_call_id"),
        (credit("c2", 0, 3), Code.CREDIT_INVALID, "$.credits[1]"),
        (credit("c2", 2), Code.CREDIT_INVALID, "$.credits[1]"),
        (credit("c1", 2), Code.CREDIT_INVALID, "$.credits[1]"),
        (credit("empty", 0, 1), Code.CREDIT_INVALID, "$.credits[1]"),
    ],
)
def test_what_cannot_be_placed_refuses_the_rollout(wrong: CallCredit, code: Code, where: str) -> None:
    # A reward on tokens that were never sampled is somebody's mistake; training on a part of it hides it.
    made = attempt(*FORKED, Call("empty", [1], []))
    with pytest.raises(ReconstructionError) as refused:
        built(made, credit("c1", 0, 3), wrong)
    assert (refused.value.code, refused.value.where) == (code, where)


def test_verify_finds_other_credits() -> None:
    # A changed, missing or added credit in a file is a finding of its own.
    made = attempt(*FORKED[:2])
    [row] = built(made, credit("c1"), credit("c2"))
    rollout = msgspec.structs.replace(ROLLOUT, credits=(credit("c1"), credit("c2")))
    changed = TokenCredit("c1", 2, 5, 0.0)
    for credits in ((), row.credits[:1], (changed, row.credits[1]), (*row.credits, changed)):
        odd = msgspec.structs.replace(row, credits=credits)
        found = verify_rows(made.records, made.tokens, ["c1", "c2"], [odd], rollout=rollout)
        assert {finding.code for finding in found} == {Code.ROW_METADATA_DIFFERS}
    wrong = msgspec.structs.replace(rollout, credits=(credit("c9"),))
    found = verify_rows(made.records, made.tokens, ["c1", "c2"], [row], rollout=wrong)
    assert {finding.code for finding in found} == {Code.CALL_UNKNOWN, Code.ROW_UNEXPECTED}


@given(call_forests(), st.sampled_from(list(RowMode)), st.data())
def test_every_token_has_its_credit_once(calls: list[Call], mode: RowMode, data: st.DataObject) -> None:
    # Over all rows of a rollout, each credited token carries its credit exactly once, and no other token does.
    made = attempt(*calls)
    credits: list[CallCredit] = []
    wanted: Counter[tuple[str, int]] = Counter()
    for number, record in enumerate(made.records):
        size = record.cum_len - record.prompt_len
        if size and data.draw(st.booleans()):
            start = data.draw(st.integers(0, size - 1))
            end = data.draw(st.none() | st.integers(start + 1, size))
            credits.append(credit(record.model_call_id, start, end, float(number)))
            wanted.update((record.model_call_id, at) for at in range(start, size if end is None else end))
    lengths = {record.model_call_id: record.prompt_len for record in made.records}
    if not any(record.cum_len > record.prompt_len for record in made.records):
        return
    rows = built(made, *credits, mode=mode)
    got: Counter[tuple[str, int]] = Counter()
    for row in rows:
        for placed in row.credits:
            assert row.loss_mask[placed.start : placed.end].all()
            got.update((placed.call_id, at - lengths[placed.call_id]) for at in range(placed.start, placed.end))
        assert [placed.start for placed in row.credits] == sorted(placed.start for placed in row.credits)
    assert got == wanted


@given(st.lists(call_forests(), min_size=1, max_size=4), st.sampled_from(list(RowMode)))
def test_a_rollout_counts_once_however_many_rows_it_has(rollouts: list[list[Call]], mode: RowMode) -> None:
    # Weights are shares of the rollout's trained tokens: over a batch they add up to its rollouts, not to its rows.
    weights: list[float] = []
    trained = 0
    for calls in rollouts:
        made = attempt(*calls)
        total = sum(record.cum_len - record.prompt_len for record in made.records)
        if not total:
            continue
        rows = built(made, mode=mode)
        shares = [Fraction(int(row.loss_mask.sum()), total) for row in rows]
        assert sum(shares) == 1
        assert [row.loss_weight for row in rows] == [float(share) for share in shares]
        weights += [row.loss_weight for row in rows]
        trained += 1
    assert fsum(weights) == pytest.approx(trained, abs=1e-12)
