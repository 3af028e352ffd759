"""Advantages over groups: exact, free of order and of how rollouts were shared out, and refused where they would be
invented."""

from __future__ import annotations

import pickle
import statistics
from fractions import Fraction
from math import inf, nan, nextafter, sqrt

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.credit import (
    AdvantageKind,
    AdvantageNote,
    Advantages,
    Facts,
    Groups,
    GroupTotals,
    RewardsDigest,
    facts_of,
    totals_of,
)
from gristmill.errors import Code, ConfigError, ReconstructionError
from gristmill.records import Attribution, Failure, Result

MEAN, NORM = AdvantageKind.GROUP_MEAN, AdvantageKind.GROUP_NORM


def facts(*rewards: float | None, group: str | None = "g") -> list[Facts]:
    """One rollout a reward."""
    return [Facts(f"{group}-{number}", 0, group, reward) for number, reward in enumerate(rewards)]


def advantage(groups: Groups, kind: AdvantageKind, reward: float | None, group: str | None = "g") -> float:
    return groups.advantages(kind).of(Result(reward=reward, group_id=group))


def refusal(given: Advantages, result: Result) -> tuple[Code, str]:
    with pytest.raises(ReconstructionError) as refused:
        given.of(result)
    return refused.value.code, refused.value.where


def test_the_textbook() -> None:
    # GRPO's two advantages of rewards 1, 0, 0, 1: with and without the deviation, no epsilon.
    groups = Groups.of(facts(1.0, 0.0, 0.0, 1.0))
    assert [advantage(groups, MEAN, reward) for reward in (1.0, 0.0)] == [0.5, -0.5]
    assert advantage(groups, NORM, 1.0) == sqrt(3 / 4)
    [group] = groups.statistics()
    assert (group.size, group.rewarded, group.solved, group.degenerate) == (4, 4, 2, False)
    assert (group.mean, group.std) == (0.5, sqrt(1 / 3))


@pytest.mark.parametrize("reward", [0.1, 0.7, 1.0, -3.3e-7])
@pytest.mark.parametrize("size", [1, 2, 3, 6, 7, 11])
def test_equal_rewards_are_no_signal(reward: float, size: int) -> None:
    # The sum of three times 0.1 is not three times 0.1: a mean that is rounded twice would train on its error.
    groups = Groups.of(facts(*[reward] * size))
    assert advantage(groups, MEAN, reward) == advantage(groups, NORM, reward) == 0.0
    [group] = groups.statistics()
    assert (group.degenerate, group.mean, group.std) == (True, reward, 0.0)


def test_a_reward_beside_equal_ones() -> None:
    # An attempt that does not stand for its rollout may have another reward than all that do.
    groups = Groups.of(facts(1.0, 1.0))
    assert (advantage(groups, MEAN, 0.0), advantage(groups, NORM, 0.0)) == (-1.0, 0.0)


def test_the_solved_are_above_the_threshold() -> None:
    # A reward that is scaled from -1 to 1 is not solved at 0.5.
    groups = Groups.of([*facts(0.0, 0.5, 1.0), *facts(-1.0, group="h")])
    assert [group.solved for group in groups.statistics()] == [2, 0]
    assert [group.solved for group in groups.statistics(0.5)] == [1, 0]
    assert [group.solved for group in groups.statistics(-2.0)] == [3, 1]


def test_what_does_not_count() -> None:
    # A broken sandbox and a judge that said nothing are no samples of the policy; nor are they 0.
    groups = Groups.of([*facts(1.0, 0.0, None), Facts("m", 0, "g", 0.0, True), Facts("n", 0, "g", None, True)])
    [group] = groups.statistics()
    assert (group.size, group.rewarded, group.missing, group.masked) == (5, 2, 1, 2)
    assert advantage(groups, MEAN, 1.0) == 0.5
    [bare] = Groups.of(facts(None, None)).statistics()
    assert (bare.size, bare.rewarded, bare.mean, bare.std, bare.degenerate) == (2, 0, None, None, True)


def test_a_rollout_counts_once() -> None:
    # A rollout that was started again three times is not four samples.
    again = [Facts("r", 3, "g", None), Facts("r", 0, "g", 0.0), Facts("r", 2, "g", 1.0), Facts("r", 4, "g", 9.0, True)]
    for order in (again, again[::-1]):
        groups = Groups.of([*order, *facts(0.0)])
        [group] = groups.statistics()
        assert (group.size, group.rewarded, group.mean, group.repeated) == (2, 2, 0.5, 1)
    # Where none counts, the last attempt says why.
    for last, counted in ((Facts("r", 1, "g", None), (1, 0)), (Facts("r", 1, "g", 1.0, True), (0, 1))):
        [group] = Groups.of([Facts("r", 0, "g", None, not last.masked), last]).statistics()
        assert (group.missing, group.masked) == counted


def test_an_attempt_is_added_once() -> None:
    # Read twice, it would weigh twice.
    groups = Groups.of(facts(1.0))
    with pytest.raises(ConfigError) as refused:
        groups.add(facts(1.0)[0])
    assert refused.value.code is Code.ATTEMPT_DIFFERS
    with pytest.raises(ConfigError):
        groups.merge(Groups.of(facts(1.0)))


def test_nothing_is_invented() -> None:
    # Each of these would otherwise be trained with a number that nobody gave.
    for kind in (MEAN, NORM):
        made = Groups.of([*facts(1.0, 0.0), *facts(None, group="h"), *facts(1.0, group=None)]).advantages(kind)
        assert refusal(made, Result(reward=1.0)) == (Code.GROUP_MISSING, "$.group_id")
        assert refusal(made, Result(group_id="g")) == (Code.REWARD_MISSING, "$.reward")
        assert refusal(made, Result(reward=1.0, group_id="h")) == (Code.GROUP_MISSING, "$.group_id")
        assert refusal(made, Result(reward=1.0, group_id="x")) == (Code.GROUP_MISSING, "$.group_id")
    given = Groups().advantages(AdvantageKind.GIVEN)
    assert given == Advantages.given()
    assert given.of(Result(advantage=-2)) == -2.0
    assert refusal(given, Result(reward=1.0, group_id="g")) == (Code.ADVANTAGE_REQUIRED, "$.advantage")
    for odd in (nan, inf):
        assert refusal(given, Result(advantage=odd)) == (Code.CREDIT_INVALID, "$.advantage")


def test_rewards_at_the_edge_of_a_float() -> None:
    # A mean that overflows in between, or a deviation whose squares vanish, would be an infinity or a wrong 0.
    large = Groups.of(facts(1e308, 1e308, -1e308))
    assert advantage(large, MEAN, 1e308) == float(Fraction(1e308) * 2 / 3)
    tiny = Groups.of(facts(1e-200, 3e-200))
    assert advantage(tiny, NORM, 3e-200) == pytest.approx(1 / sqrt(2))
    far = Groups.of(facts(1.7e308, -1.7e308, -1.7e308, -1.7e308))
    assert refusal(far.advantages(MEAN), Result(reward=1.7e308, group_id="g")) == (Code.CREDIT_INVALID, "$.advantage")
    # A deviation that no float holds is divided by all the same.
    wide = Groups.of([*facts(1.7e308, -1.7e308), *facts(1.0, 0.0, group="h")])
    norm = wide.advantages(NORM)
    assert [norm.of(Result(reward=reward, group_id="g")) for reward in (1.7e308, -1.7e308)] == [sqrt(0.5), -sqrt(0.5)]
    assert norm.of(Result(reward=1.0, group_id="h")) == sqrt(0.5)
    beside = Groups.of(facts(0.0, 5e-324)).advantages(NORM)
    assert refusal(beside, Result(reward=1e308, group_id="g")) == (Code.CREDIT_INVALID, "$.advantage")
    for odd in (nan, inf):
        assert refusal(Groups.of(facts(odd, 1.0)).advantages(NORM), Result(reward=1.0, group_id="g"))[0] is (
            Code.GROUP_MISSING
        )
        assert refusal(norm, Result(reward=odd, group_id="g")) == (Code.CREDIT_INVALID, "$.reward")
    assert [group.std for group in wide.statistics()] == [None, statistics.stdev([1.0, 0.0])]


def test_totals() -> None:
    # What a run is looked at for first: how much is solved, and how much teaches nothing.
    groups = Groups.of(
        [*facts(1.0, 0.0), *facts(1.0, 1.0, None, group="h"), *facts(0.0, group="i"), *facts(1, group=None)]
    )
    totals = totals_of(groups.statistics(), groups.ungrouped)
    assert totals == GroupTotals(
        groups=3, rollouts=6, rewarded=5, missing=1, solved=3, solved_groups=2, degenerate_groups=2, ungrouped=1
    )
    assert (totals.solved_share, totals.degenerate_share) == (0.6, 2 / 3)
    assert (GroupTotals().solved_share, GroupTotals().degenerate_share) == (None, None)


def test_facts_of_a_result() -> None:
    # A scored failure counts, a masked one does not.
    for attribution in Attribution:
        made = facts_of("r", 2, Result(reward=1, group_id="g", failure=Failure("x", attribution)))
        assert made == Facts("r", 2, "g", 1.0, attribution is Attribution.MASK)
        assert made.counts is (attribution is Attribution.SCORE)
    assert facts_of("r", 0, Result()) == Facts("r", 0, None, None)
    assert not facts_of("r", 0, Result()).counts


_FACTS = st.lists(
    st.builds(
        Facts,
        st.sampled_from("abcde"),
        st.integers(0, 3),
        st.sampled_from(["g", "h", None]),
        st.none() | st.sampled_from([0.0, 0.1, 0.7, 1.0, -1e-9, 1e200]) | st.floats(-1e300, 1e300),
        st.booleans(),
    ),
    unique_by=lambda fact: (fact.rollout_id, fact.attempt),
    max_size=20,
)


@given(_FACTS, st.randoms(use_true_random=False), st.integers(1, 4))
def test_neither_order_nor_sharing_out_matters(given_facts: list[Facts], random: object, parts: int) -> None:
    # Two builds of one run on other numbers of processes must give the same bytes.
    whole = Groups.of(given_facts)
    shuffled = list(given_facts)
    random.shuffle(shuffled)  # pyright: ignore[reportAttributeAccessIssue]
    merged = Groups()
    for part in range(parts):
        merged.merge(pickle.loads(pickle.dumps(Groups.of(shuffled[part::parts]))))
    assert list(whole.statistics()) == list(merged.statistics())
    assert whole.ungrouped == merged.ungrouped
    for kind in (MEAN, NORM):
        one, other = whole.advantages(kind), merged.advantages(kind)
        assert (one.note, dict(one.groups)) == (other.note, dict(other.groups))
        assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize(
    ("rewards", "mean", "norm"),
    [
        ((1.0, 1.0 + 2.0**-52), 2.0**-53, sqrt(0.5)),
        ((1e16, 1e16 + 2), 1.0, sqrt(0.5)),
        ((0.0, 5e-324), 0.0, sqrt(0.5)),
        ((0.3, 0.1 + 0.2), 2.0**-55, sqrt(0.5)),
    ],
)
def test_rewards_a_float_apart(rewards: tuple[float, float], mean: float, norm: float) -> None:
    # Noise of a judge that a rounded mean would give to one of two rollouts alone: the group would push one way.
    groups = Groups.of(facts(*rewards))
    assert [advantage(groups, MEAN, reward) for reward in rewards] == [-mean, mean]
    assert [advantage(groups, NORM, reward) for reward in rewards] == [-norm, norm]


def test_baselines_go_to_other_machines_as_json() -> None:
    # Ray is sent a task as JSON; numerators of such rewards have more bits than any integer type of a wire format.
    made = Groups.of(facts(1.7e308, 5e-324, -3.0)).advantages(NORM)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Advantages) == made


def nearest(value: float, square: Fraction) -> bool:
    """Whether no float is nearer to the root of a fraction than a value."""
    below, above = (Fraction(value) + Fraction(nextafter(value, end)) for end in (0.0, inf))
    return (below / 2) ** 2 <= square <= (above / 2) ** 2


@given(st.lists(st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0]), min_size=2, max_size=12))
def test_advantages_are_those_of_exact_arithmetic(rewards: list[float]) -> None:
    # One rounding, at the end: as near as a float gets.
    groups = Groups.of(facts(*rewards))
    mean = sum(map(Fraction, rewards)) / len(rewards)
    variance = sum((Fraction(reward) - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    for reward in rewards:
        over = Fraction(reward) - mean
        assert advantage(groups, MEAN, reward) == float(over)
        if variance:
            normed = advantage(groups, NORM, reward)
            assert (normed > 0) is (over > 0)
            assert nearest(abs(normed), over * over / variance)
    [group] = groups.statistics()
    assert group.std == pytest.approx(sqrt(variance), rel=1e-15)


def test_what_was_read_again_is_known_by_its_digest() -> None:
    # A second pass sees the attempts one by one, in several processes, and keeps none of them.
    seen, other = RewardsDigest(), RewardsDigest()
    for number, each in enumerate([*facts(1.0, 0.0, None), Facts("m", 0, "g", 1.0, True), *facts(1.0, group=None)]):
        (seen if number % 2 else other).add(each)
    seen.merge(other)
    note = Groups.of(facts(1.0, 0.0)).advantages(MEAN).note
    assert (seen.count, seen.hexdigest()) == (note.rewards, note.rewards_digest)


def test_the_digest_is_of_what_counts() -> None:
    # `verify` tells by it whether it has the rewards that the advantages were made of.
    base = facts(1.0, 0.0)
    same = [
        [*base, Facts("x", 0, "g", None)],
        [*base, Facts("x", 0, "g", 1.0, True)],
        base[::-1],
        [*base, Facts("x", 0, None, 1.0)],
    ]
    others = [
        base[:1],
        facts(1.0, -1.0),
        [base[0]._replace(attempt=1), base[1]],
        facts(1.0, 0.0, group="h"),
        [*base, Facts("\ud800", 0, "g", 1.0)],
    ]
    note = Groups.of(base).advantages(MEAN).note
    assert note == AdvantageNote(MEAN, 1, 2, note.rewards_digest)
    assert all(Groups.of(each).advantages(MEAN).note == note for each in same)
    digests = {Groups.of(each).advantages(MEAN).note.rewards_digest for each in others}
    assert len(digests | {note.rewards_digest}) == len(others) + 1
    # A ledger gives -0.0 back as 0.0.
    assert Groups.of(facts(1.0, -0.0)).advantages(MEAN).note == note
