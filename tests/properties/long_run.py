"""The long agreement run: `python -m tests.properties.long_run [--cases 20000] [--seed N]`.

Prints how many generated histories were selected and refused. With a disagreement it ends with 1 and prints one, made
as small as it gets, as JSON.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tests.properties.agreement import check, options_for
from tests.properties.oracle import TooManyReadings
from tests.strategies.draws import RandomDraws
from tests.strategies.histories import Case, draw_case

CHUNK = 250


def cases(seed: int, number: int) -> Iterator[Case]:
    """Generate cases: one third faithful, the others broken."""
    for index in range(number):
        draws = RandomDraws(random.Random(f"{seed}-{index}"))
        yield draw_case(draws, (0, 1, 2)[index % 3])


def run_chunk(job: tuple[int, int]) -> tuple[collections.Counter[str], list[tuple[str, Case]]]:
    """Check one chunk of cases; return the tally and the disagreements."""
    tally: collections.Counter[str] = collections.Counter()
    wrong: list[tuple[str, Case]] = []
    for index, case in enumerate(cases(*job)):
        try:
            outcome, problem = check(case, options_for(index))
        except TooManyReadings:
            tally["too large for the oracle"] += 1
            continue
        tally[outcome] += 1
        if problem:
            tally["disagreements"] += 1
            wrong.append((problem, case))
    return tally, wrong


def reduced(case: Case) -> Case:
    """Take calls, items and keys away while the policy and the oracle still disagree."""
    while True:
        for smaller in _smaller(case):
            try:
                _, problem = check(smaller)
            except (TooManyReadings, AttributeError, TypeError):
                continue
            if problem:
                case = smaller
                break
        else:
            return case


def _smaller(case: Case) -> Iterator[Case]:
    unknown = replace(case, clean=False)
    for index in range(len(case.records)):
        yield replace(unknown, records=case.records[:index] + case.records[index + 1 :])
    for result in _without_one(case.result):
        yield replace(unknown, result=result)


def _without_one(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, member in value.items():
            yield {other: kept for other, kept in value.items() if other != key}
            yield from ({**value, key: smaller} for smaller in _without_one(member))
    elif isinstance(value, list):
        for index, member in enumerate(value):
            yield [*value[:index], *value[index + 1 :]]
            yield from ([*value[:index], smaller, *value[index + 1 :]] for smaller in _without_one(member))


def as_json(case: Case) -> dict[str, Any]:
    """Show a case so that it can be read and run again."""
    records = [msgspec.to_builtins(record) for record in case.records]
    return {"records": records, "result": case.result, "truth": case.truth, "notes": case.notes}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    jobs = [
        (given.seed * 1_000_003 + number, min(CHUNK, given.cases - number * CHUNK))
        for number in range(-(-given.cases // CHUNK))
    ]
    tally: collections.Counter[str] = collections.Counter()
    wrong: list[tuple[str, Case]] = []
    with multiprocessing.Pool(given.processes) as pool:
        for counted, disagreements in pool.imap_unordered(run_chunk, jobs):
            tally += counted
            wrong.extend(disagreements)
    print(f"cases {given.cases}, {time.perf_counter() - started:.0f} s")
    for name, count in sorted(tally.items(), key=lambda pair: -pair[1]):
        print(f"  {count:7d}  {name}")
    print(f"disagreements = {len(wrong)}")
    if not wrong:
        return 0
    problem, case = min(wrong, key=lambda pair: len(str(pair[1])))
    small = reduced(case)
    print(check(small)[1] or problem)
    print(msgspec.json.encode(as_json(small)).decode())
    return 1


if __name__ == "__main__":
    sys.exit(main())
