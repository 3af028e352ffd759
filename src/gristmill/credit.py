"""Advantages over groups of rollouts, and what there is to say of a group.

    groups = Groups.of(facts_of(rollout_id, attempt, result) for each attempt)     # first pass: results only
    groups.merge(other)                                                            # what another process collected
    advantages = groups.advantages(AdvantageKind.GROUP_MEAN)
    advantages.of(result)                                       # second pass: a number, or a refusal with its code

Invariant: a rollout counts once, whatever the number of its attempts and rows; what comes out does not depend on order
or on how the rollouts were shared out: whatever is computed is exact and rounded once. Nothing is invented: a rollout
without reward or group is refused, a group of one has the advantage 0 because nothing is better or worse than it.

Not here: credits of calls (result, reconstruction), reading results (captures, ledger), files (export).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from fractions import Fraction
from hashlib import blake2b
from math import isfinite, isqrt
from typing import Final, NamedTuple, Self

import msgspec

from gristmill.errors import Code, ConfigError, ReconstructionError
from gristmill.records import Attribution, Result

__all__ = [
    "AdvantageKind",
    "AdvantageNote",
    "Advantages",
    "Baseline",
    "Facts",
    "GroupStatistics",
    "GroupTotals",
    "Groups",
    "RewardsDigest",
    "facts_of",
    "totals_of",
]


_DIGEST_BYTES: Final = 16
_MODULUS: Final = 2 ** (8 * _DIGEST_BYTES)


class AdvantageKind(StrEnum):
    """Where advantages come from.

    `given`: the result; `group_mean`: reward − mean of its group; `group_norm`: that, over the sample standard
    deviation (n − 1) of the group, and 0 where that is 0. Nothing is added to the deviation.
    """

    GIVEN = "given"
    GROUP_MEAN = "group_mean"
    GROUP_NORM = "group_norm"


class Facts(NamedTuple):
    """What counts of one attempt: its group, its reward, and whether its failure is masked."""

    rollout_id: str
    attempt: int
    group_id: str | None
    reward: float | None
    masked: bool = False

    @property
    def counts(self) -> bool:
        """Whether its reward is a sample of the policy."""
        return self.reward is not None and not self.masked


def facts_of(rollout_id: str, attempt: int, result: Result) -> Facts:
    """Return what counts of an attempt, by what its harness handed back."""
    masked = result.failure is not None and result.failure.attribution is Attribution.MASK
    return Facts(rollout_id, attempt, result.group_id, None if result.reward is None else float(result.reward), masked)


class GroupStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A group, in rollouts; size = rewarded + missing + masked.

    Attributes:
        rewarded: rollouts whose reward counts.
        missing: rollouts without a reward.
        masked: rollouts whose failure says nothing about the policy.
        solved: rewarded ones above the threshold.
        repeated: attempts with a reward beside the one that counts for their rollout.
        mean, std: of the rewards that count, std with n − 1; None where there is none, or where a deviation is larger
            than a float; std is 0.0 of a single one.
        degenerate: the rewards are all equal, or fewer than two: no rollout is better than another.
    """

    group_id: str
    size: int
    rewarded: int
    missing: int
    masked: int
    solved: int
    repeated: int
    mean: float | None
    std: float | None
    degenerate: bool


class GroupTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over groups; `solved_groups` have a solved rollout; rollouts without a group are counted beside them."""

    groups: int = 0
    rollouts: int = 0
    rewarded: int = 0
    missing: int = 0
    masked: int = 0
    solved: int = 0
    repeated: int = 0
    solved_groups: int = 0
    degenerate_groups: int = 0
    ungrouped: int = 0

    @property
    def solved_share(self) -> float | None:
        """Solved rollouts over rewarded ones."""
        return self.solved / self.rewarded if self.rewarded else None

    @property
    def degenerate_share(self) -> float | None:
        """Degenerate groups over groups."""
        return self.degenerate_groups / self.groups if self.groups else None


def totals_of(groups: Iterable[GroupStatistics], ungrouped: int = 0) -> GroupTotals:
    """Add up groups."""
    sums = dict.fromkeys(GroupTotals.__struct_fields__, 0) | {"ungrouped": ungrouped}
    for group in groups:
        sums["groups"] += 1
        sums["rollouts"] += group.size
        for name in ("rewarded", "missing", "masked", "solved", "repeated"):
            sums[name] += getattr(group, name)
        sums["solved_groups"] += group.solved > 0
        sums["degenerate_groups"] += group.degenerate
    return GroupTotals(**sums)


class Baseline(NamedTuple):
    """The rewards of a group, as fractions (numerator, denominator): a mean that is rounded is no mean any more.

    Attributes:
        mean: of the rewards.
        variance: of the rewards, with n − 1; 0 of a single one, and where no deviation was asked for.
    """

    mean: tuple[int, int]
    variance: tuple[int, int]


class AdvantageNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How advantages were made, for whoever makes them again.

    Attributes:
        kind: where they come from.
        groups: how many have a reward that counts.
        rewards, rewards_digest: how many rewards of attempts in groups count, and their `RewardsDigest`; 0 and empty
            where advantages are `given`.
    """

    kind: AdvantageKind
    groups: int = 0
    rewards: int = 0
    rewards_digest: str = ""


class RewardsDigest:
    """The digest of rewards that count, with their attempts and groups, in any order.

    Digests of single rewards are added up: what several processes saw can be added up, too.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0

    def add(self, facts: Facts) -> None:
        """Add an attempt; one whose reward does not count, or that has no group, changes nothing."""
        if facts.counts and facts.group_id is not None:
            self.count += 1
            self._sum = (self._sum + _digest(facts)) % _MODULUS

    def merge(self, other: RewardsDigest) -> None:
        """Add what another process saw."""
        self.count += other.count
        self._sum = (self._sum + other._sum) % _MODULUS

    def hexdigest(self) -> str:
        """Return 32 hexadecimal digits."""
        return f"{self._sum:0{2 * _DIGEST_BYTES}x}"


def _digest(facts: Facts) -> int:
    group_id, rollout_id = facts.group_id or "", facts.rollout_id
    # A ledger keeps no sign of a nought.
    number = ((facts.reward or 0.0) + 0.0).hex()
    text = f"{len(group_id)}:{group_id}{len(rollout_id)}:{rollout_id}{facts.attempt}:{number}"
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=_DIGEST_BYTES).digest(), "big")


class Advantages(msgspec.Struct, frozen=True):
    """The advantages of rollouts, one at a time; small enough to be sent to other processes, by group."""

    note: AdvantageNote
    groups: Mapping[str, Baseline] = {}

    @classmethod
    def given(cls) -> Advantages:
        """Return advantages as results hold them."""
        return cls(AdvantageNote(AdvantageKind.GIVEN))

    def of(self, result: Result) -> float:
        """Return the advantage of a rollout.

        Args:
            result: what its harness handed back; its failure is not looked at.

        Raises:
            ReconstructionError: `advantage_required` (none was given), `reward_missing`, `group_missing` (the rollout
                has no group, or its group no reward that counts), `credit_invalid` (the number is not finite).
        """
        if self.note.kind is AdvantageKind.GIVEN:
            if result.advantage is None:
                message = "expected the result to hold an advantage, got none"
                raise ReconstructionError(Code.ADVANTAGE_REQUIRED, message, where="$.advantage")
            return _finite(float(result.advantage))
        if result.group_id is None:
            message = f"expected a group, to compute {self.note.kind} over, got none"
            raise ReconstructionError(Code.GROUP_MISSING, message, where="$.group_id")
        if result.reward is None:
            message = f"expected a reward, to compute {self.note.kind} of, got none"
            raise ReconstructionError(Code.REWARD_MISSING, message, where="$.reward")
        reward = _finite(float(result.reward), "reward")
        baseline = self.groups.get(result.group_id)
        if baseline is None:
            message = f"expected rewards that count in group {result.group_id!r}, all of them finite, got none"
            raise ReconstructionError(Code.GROUP_MISSING, message, where="$.group_id")
        try:
            over = Fraction(reward) - Fraction(*baseline.mean)
            if self.note.kind is AdvantageKind.GROUP_NORM:
                return _over_deviation(over, Fraction(*baseline.variance))
            return float(over)
        except OverflowError as error:
            message = f"expected an advantage that a float can hold, got a larger one of the reward {reward}"
            raise ReconstructionError(Code.CREDIT_INVALID, message, where="$.advantage") from error


def _finite(value: float, what: str = "advantage") -> float:
    if not isfinite(value):
        message = f"expected a finite {what}, got {value}"
        raise ReconstructionError(Code.CREDIT_INVALID, message, where=f"$.{what}")
    return value


def _over_deviation(over: Fraction, variance: Fraction) -> float:
    """Divide a difference by a deviation, rounded once: it is the root of a fraction that is known exactly."""
    if not variance or not over:
        return 0.0
    square = over * over / variance
    # 64 bits of the root at least, where a float has 53. It lies on this whole number or between it and the next: half
    # of one more keeps it off what would be a tie.
    shift = max(64 - (square.numerator.bit_length() - square.denominator.bit_length()) // 2, 0)
    scaled, rest = divmod(square.numerator << 2 * shift, square.denominator)
    root = isqrt(scaled)
    magnitude = (2 * root + (rest > 0 or root * root < scaled)) / (1 << shift + 1)
    return magnitude if over > 0 else -magnitude


_Counted = tuple[int, float | None, bool]
"""Of the attempt that stands for its rollout so far: number, reward, whether its failure is masked."""


class Groups:
    """Collects the rewards of groups, some 200 bytes of memory a rollout until its baselines are made.

    Of a rollout with several attempts the highest-numbered one whose reward counts stands for it in its group.
    """

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, _Counted]] = {}
        self._repeated: dict[str, int] = {}
        self._ungrouped: set[str] = set()
        self._seen = RewardsDigest()

    @classmethod
    def of(cls, facts: Iterable[Facts]) -> Self:
        """Collect attempts; `ConfigError` as `add`."""
        groups = cls()
        for each in facts:
            groups.add(each)
        return groups

    def add(self, facts: Facts) -> None:
        """Add an attempt, once.

        Raises:
            ConfigError: `attempt_differs`, it was added before.
        """
        if facts.group_id is None:
            self._ungrouped.add(facts.rollout_id)
            return
        self._add(facts.group_id, facts.rollout_id, (facts.attempt, facts.reward, facts.masked))
        self._seen.add(facts)

    def _add(self, group_id: str, rollout_id: str, given: _Counted) -> None:
        group = self._groups.setdefault(group_id, {})
        before = group.get(rollout_id)
        if before is None:
            group[rollout_id] = given
            return
        if before[0] == given[0]:
            message = f"expected each attempt once, attempt {given[0]} of rollout {rollout_id!r} came twice"
            raise ConfigError(message, code=Code.ATTEMPT_DIFFERS, where=rollout_id)
        if _counts(before) and _counts(given):
            self._repeated[group_id] = self._repeated.get(group_id, 0) + 1
        if (_counts(given), given[0]) > (_counts(before), before[0]):
            group[rollout_id] = given

    def merge(self, other: Groups) -> None:
        """Add what another process collected of other attempts; `ConfigError` as `add`, as far as it can be told."""
        for group_id, rollouts in other._groups.items():
            for rollout_id, counted in rollouts.items():
                self._add(group_id, rollout_id, counted)
        for group_id, count in other._repeated.items():
            self._repeated[group_id] = self._repeated.get(group_id, 0) + count
        self._ungrouped |= other._ungrouped
        self._seen.merge(other._seen)

    @property
    def ungrouped(self) -> int:
        """How many rollouts have an attempt without a group."""
        return len(self._ungrouped)

    def statistics(self, solved_above: float = 0.0) -> Iterator[GroupStatistics]:
        """Give the groups in the order of their ids.

        Args:
            solved_above: a rollout is solved by a reward above this.
        """
        for group_id in sorted(self._groups):
            rollouts = self._groups[group_id]
            rewards = _rewards(rollouts)
            masked = sum(counted[2] for counted in rollouts.values())
            yield GroupStatistics(
                group_id=group_id,
                size=len(rollouts),
                rewarded=len(rewards),
                missing=len(rollouts) - len(rewards) - masked,
                masked=masked,
                solved=sum(reward > solved_above for reward in rewards),
                repeated=self._repeated.get(group_id, 0),
                mean=statistics.mean(rewards) if rewards else None,
                std=_deviation(rewards) if rewards else None,
                degenerate=len(set(rewards)) < 2,
            )

    def advantages(self, kind: AdvantageKind) -> Advantages:
        """Compute the baselines of all groups."""
        if kind is AdvantageKind.GIVEN:
            return Advantages.given()
        baselines: dict[str, Baseline] = {}
        for group_id, rollouts in self._groups.items():
            rewards = _rewards(rollouts)
            if rewards and all(map(isfinite, rewards)):
                baselines[group_id] = _baseline(rewards, deviation=kind is AdvantageKind.GROUP_NORM)
        note = AdvantageNote(kind, len(baselines), self._seen.count, self._seen.hexdigest())
        return Advantages(note, baselines)


def _counts(counted: _Counted) -> bool:
    return counted[1] is not None and not counted[2]


def _rewards(rollouts: Mapping[str, _Counted]) -> list[float]:
    return [reward for _, reward, masked in rollouts.values() if reward is not None and not masked]


def _baseline(rewards: list[float], *, deviation: bool) -> Baseline:
    mean = sum(map(Fraction, rewards), Fraction()) / len(rewards)
    squares = ((Fraction(reward) - mean) ** 2 for reward in rewards) if deviation else ()
    return Baseline(mean.as_integer_ratio(), (sum(squares, Fraction()) / max(len(rewards) - 1, 1)).as_integer_ratio())


def _deviation(rewards: list[float]) -> float | None:
    """Return the sample standard deviation, rounded once; 0.0 of a single reward, None where no float is so large."""
    if len(rewards) < 2:
        return 0.0
    try:
        return statistics.stdev(rewards)
    except OverflowError:
        return None
