"""Token lineage: storing calls against verified bases, and the token tree over them.

Whole prompts are compared byte by byte with what is known, so the floor is a memcmp of the prompts. Calls that a
store holds as deltas cost their new tokens only; those have a limit in seconds, reported as a ratio like the others.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from gristmill.reconstruction import build_forest
from gristmill.records import CallRecord, Int32Array, TokenDelta
from gristmill.tokens import TokenBook

SEED = 20
VOCABULARY = 151_669
LIMIT_s = 0.150
RATIO = 5.0

Calls = list[tuple[str, Int32Array, Int32Array]]


def conversation(calls: int, new_T: int) -> Calls:
    """Make calls of which each continues the one before with `new_T` tokens, 40 % of them sampled."""
    ids_T = np.random.default_rng(SEED).integers(0, VOCABULARY, calls * new_T, dtype=np.int32)
    cut = new_T * 6 // 10
    return [(f"c{n}", ids_T[: n * new_T + cut], ids_T[n * new_T + cut : (n + 1) * new_T]) for n in range(calls)]


def unrelated(calls: int, system_T: int = 1000) -> Calls:
    """Make calls that share nothing but a system prompt."""
    ids_T = np.random.default_rng(SEED).integers(0, VOCABULARY, system_T + calls * 100, dtype=np.int32)
    made: Calls = []
    for n in range(calls):
        at = system_T + n * 100
        made.append((f"c{n}", np.concatenate([ids_T[:system_T], ids_T[at : at + 60]]), ids_T[at + 60 : at + 100]))
    return made


def logprobs_of(size: int) -> Any:
    """Some log-probabilities."""
    return np.linspace(-3.0, -0.01, size, dtype=np.float32)


def stored(calls: Calls, *, chained: bool) -> tuple[list[CallRecord], dict[str, TokenDelta]]:
    """Store calls and return their records and deltas."""
    book = TokenBook()
    records: list[CallRecord] = []
    tokens: dict[str, TokenDelta] = {}
    known = 0
    for n, (call_id, prompt_T, generation_T) in enumerate(calls):
        parent = f"c{n - 1}" if chained and n else None
        logprobs_T = logprobs_of(generation_T.size)
        if parent is None:
            one = book.add(call_id, prompt_T, generation_T, logprobs_T)
        else:
            one = book.extend(call_id, parent, prompt_T[known:], generation_T, logprobs_T, parent=parent)
        known = one.cum_len
        fields = {name: getattr(one, name) for name in one.__struct_fields__ if name != "delta"}
        records.append(
            CallRecord(model_call_id=call_id, response_id=call_id, parent_call_id=parent, usable=True, **fields)
        )
        tokens[call_id] = one.delta
    return records, tokens


def paired(work: Callable[[], object], floor: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the medians of alternating runs, in seconds."""
    work_s: list[float] = []
    floor_s: list[float] = []
    for _ in range(rounds):
        for job, times in ((floor, floor_s), (work, work_s)):
            start = perf_counter()
            job()
            times.append(perf_counter() - start)
    return median(work_s), median(floor_s)


def result(name: str, times_s: tuple[float, float], *, ratio: float | None = None) -> dict[str, Any]:
    """Report one benchmark; the target is a ratio to the floor, by default the one of the limit in seconds."""
    work_s, floor_s = times_s
    target = LIMIT_s / floor_s if ratio is None else ratio
    return {
        "name": name,
        "seconds": work_s,
        "floor_seconds": floor_s,
        "ratio": work_s / floor_s,
        "target": target,
        "ok": work_s / floor_s <= target,
    }


def whole_prompts(calls: Calls, rounds: int, name: str, ratio: float | None = RATIO) -> dict[str, Any]:
    """Add whole prompts to a book; the floor compares each prompt once with an equal copy."""
    added = [(call_id, p_T.copy(), g_T, logprobs_of(g_T.size)) for call_id, p_T, g_T in calls]
    prompts = [(p_T.tobytes(), p_T.tobytes()) for _, p_T, _ in calls]

    def work() -> None:
        book = TokenBook()
        for call_id, prompt_T, generation_T, logprobs_T in added:
            book.add(call_id, prompt_T, generation_T, logprobs_T)

    return result(name, paired(work, lambda: [one == other for one, other in prompts], rounds), ratio=ratio)


def deltas(calls: Calls, rounds: int, name: str) -> dict[str, Any]:
    """Add a chain by its new tokens; the floor compares the new tokens with an equal copy."""
    new: list[tuple[str, Int32Array, Int32Array, Any]] = []
    known = 0
    for call_id, prompt_T, generation_T in calls:
        new.append((call_id, prompt_T[known:], generation_T, logprobs_of(generation_T.size)))
        known = prompt_T.size + generation_T.size
    copies = [(suffix_T.tobytes(), suffix_T.tobytes()) for _, suffix_T, _, _ in new]

    def work() -> None:
        book = TokenBook()
        before = None
        for call_id, suffix_T, generation_T, logprobs_T in new:
            if before is None:
                book.add(call_id, suffix_T, generation_T, logprobs_T)
            else:
                book.extend(call_id, before, suffix_T, generation_T, logprobs_T, parent=before)
            before = call_id

    return result(name, paired(work, lambda: [one == other for one, other in copies], rounds))


def token_tree(calls: Calls, rounds: int, name: str, *, chained: bool) -> dict[str, Any]:
    """Build the token tree over all calls from their deltas; the floor compares the deltas with equal copies."""
    records, tokens = stored(calls, chained=chained)
    selected = [record.model_call_id for record in records]
    copies = [(delta.ids_T.tobytes(), delta.ids_T.tobytes()) for delta in tokens.values()]

    def floor() -> object:
        return [one == other for one, other in copies]

    return result(name, paired(lambda: build_forest(records, tokens, selected), floor, rounds))


def run() -> list[dict[str, Any]]:
    """Run all of them; some seconds."""
    chain, star = conversation(10_000, 100), unrelated(10_000)
    return [
        whole_prompts(conversation(100, 1000), 21, "store 100 calls, 100k tokens, whole prompts"),
        whole_prompts(conversation(1000, 100), 9, "store 1,000 calls, 100k tokens, whole prompts"),
        deltas(chain, 5, "store 10,000 calls of one chain, 150 ms"),
        whole_prompts(star, 5, "store 10,000 calls on one system prompt, 150 ms", None),
        token_tree(chain, 5, "token tree, 10,000 calls of one chain, 150 ms", chained=True),
        token_tree(star, 5, "token tree, 10,000 calls on one system prompt, 150 ms", chained=False),
    ]
