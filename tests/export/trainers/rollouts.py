"""Generated rollouts with forks, retries and shared prefixes, rebuilt, as sources of projections."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

from gristmill.export.trainers import Source
from gristmill.reconstruction import Rollout, Row, RowMode, rebuild
from gristmill.records import Capture, Result, Sampling, WeightSpan
from tests.reconstruction.attempts import Call, attempt

__all__ = ["AT_ONE", "generated", "plain", "source_of"]

AT_ONE = Sampling(temperature=1.0)


def source_of(
    calls: Sequence[Call],
    *,
    rollout_id: str = "r1",
    mode: RowMode = RowMode.MERGED,
    reward: float | None = 1.0,
    advantage: float | None = 0.5,
    group_id: str | None = "g1",
) -> Source:
    """Rebuild all calls of one model; the rows of a rollout with a reward and an advantage, sampled at 1."""
    made = attempt(*(msgspec.structs.replace(call, fields={"sampling": AT_ONE, **call.fields}) for call in calls))
    selected = [record.model_call_id for record in made.records if record.model in {None, "m"}]
    rollout = Rollout(rollout_id=rollout_id, attempt=0, group_id=group_id, reward=reward, advantage=advantage)
    rebuilt = rebuild(made.records, made.tokens, selected, rollout, mode=mode)
    rows: tuple[Row, ...] = rebuilt.rows
    capture = Capture(rollout_id=rollout_id, records=tuple(made.records), tokens=made.tokens)
    return Source(rows, capture, Result(reward=reward, group_id=group_id))


def generated(seed: int, count: int) -> Iterator[Source]:
    """Give rollouts of one to nine calls over a small alphabet, so that shared prefixes and forks are common."""
    choose = random.Random(seed)
    modes = tuple(RowMode)
    for number in range(count):
        calls = _calls(choose)
        if any(call.generation for call in calls):
            yield source_of(calls, rollout_id=f"r{number}", mode=choose.choice(modes), reward=choose.choice([0.0, 1.0]))


def _calls(choose: random.Random) -> list[Call]:
    def ids(low: int) -> list[int]:
        return [choose.randrange(3) for _ in range(choose.randint(low, 4))]

    calls: list[Call] = []
    for number in range(choose.randint(1, 9)):
        prompt = ids(1)
        parent = None
        if calls and choose.random() < 0.75:
            before = choose.choice(calls)
            known = [*before.prompt, *before.generation]
            prompt = known[: max(1, len(known) - choose.choice([0, 0, 0, 1, 2]))] + ids(0)
            parent = before.call_id
        generation = ids(0)
        logprobs = [-choose.random() * 5 for _ in generation]
        size = len(generation)
        versions = (WeightSpan("v1", 0, size // 2), WeightSpan("v2", size // 2, size)) if size > 1 else ()
        fields = {"model": "m", "weight_versions": versions}
        calls.append(Call(f"c{number}", prompt, generation, logprobs=logprobs, parent=parent, fields=fields))
    return calls


def plain(source: Source) -> Source:
    """Only the rows, as whoever reads a folder of rows has them."""
    return msgspec.structs.replace(source, capture=None, result=None)
