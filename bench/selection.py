"""Selecting by returned history: N calls of 1–3 items in one envelope and in N, and equal texts told apart by item ids.

The floor is the least that any comparison by content costs: one fingerprint of every returned item that a model made,
in the same run. Time is CPU time and ratios are medians of paired rounds, so that a busy machine slows both sides; the
garbage collector rests while either side is timed.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

from gristmill.fingerprint import fingerprint, output_items
from gristmill.records import CallRecord
from gristmill.selection import select_captured_calls

TARGET = 2.5
SIZES = (10, 100, 1_000, 10_000, 100_000)
EQUAL = (400, 4_000)
TEXT_CHARS = 219
ARGUMENT_CHARS = 75

Wire = dict[str, Any]
Case = tuple[list[CallRecord], Wire, list[Wire]]
"""Captured calls, the result, and the returned items that a model made."""


def text_item(number: int, *, equal: bool = False) -> Wire:
    """Make a message of one text of 219 bytes."""
    start = "" if equal else f"step {number}: "
    text = start + "the quick brown fox jumps over the lazy dog and finds nothing there; " * 4
    part = {"type": "output_text", "text": text[:TEXT_CHARS], "annotations": []}
    return {"type": "message", "role": "assistant", "id": f"msg_{number}", "content": [part]}


def tool_item(number: int) -> Wire:
    """Make a function call whose arguments have about 75 bytes."""
    path = f"/repo/src/package/module_{number}.py"
    arguments = json.dumps({"path": path, "first": number % 100, "count": 40, "note": ""})
    arguments = arguments[:-2] + "x" * max(0, ARGUMENT_CHARS - len(arguments)) + '"}'
    return {
        "type": "function_call",
        "id": f"fc_{number}",
        "call_id": f"call_{number}",
        "name": "read_file",
        "arguments": arguments,
    }


def reasoning_item(number: int) -> Wire:
    """Make a reasoning item of some 120 bytes."""
    text = f"({number}) the file is the wrong one; look at the other one first, then come back and change both of them"
    return {"type": "reasoning", "id": f"rs_{number}", "summary": [{"type": "summary_text", "text": text}]}


def reply(number: int) -> list[Wire]:
    """Make a reply of one to three items; one call in five thinks, two in three call a tool."""
    items = [reasoning_item(number)] if number % 5 == 0 else []
    if number % 3 != 1:
        items.append(text_item(number))
    if number % 3 != 0:
        items.append(tool_item(number))
    return items


def case(replies: list[list[Wire]], *, envelopes: bool) -> Case:
    """Make a chain of calls that were all returned, with a tool result after each."""
    records = [
        CallRecord(
            model_call_id=f"call-{number}",
            response_id=f"resp-{number}",
            parent_call_id=f"call-{number - 1}" if number else None,
            output_items=output_items(items),
            response_status="completed",
        )
        for number, items in enumerate(replies)
    ]
    returned: list[Wire] = []
    history: list[list[Wire]] = []
    for number, items in enumerate(replies):
        kept = json.loads(json.dumps(items))  # what comes back was decoded anew: no object is shared
        result = {"type": "function_call_output", "call_id": f"call_{number}", "output": "ok"}
        returned.extend(kept)
        history.append([*kept, result])
    if envelopes:
        bodies = [{"id": f"resp-{number}", "output": items} for number, items in enumerate(history)]
        return records, {"responses": bodies}, returned
    flat = [item for items in history for item in items]
    return records, {"response": {"id": f"resp-{len(replies) - 1}", "output": flat}}, returned


def paired(job: Callable[[], object], floor: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Time both in turns; return the median seconds of each and the median of the rounds' ratios."""
    times: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        gc.collect()
        gc.disable()
        try:
            start = process_time()
            floor()
            middle = process_time()
            job()
            end = process_time()
        finally:
            gc.enable()
        if number:  # the first round warms up
            times.append((end - middle, middle - start))
    ratio = median(seconds / floor_seconds for seconds, floor_seconds in times)
    return median(pair[0] for pair in times), median(pair[1] for pair in times), ratio


def measure(name: str, made: Case, rounds: int) -> dict[str, Any]:
    """Measure one case, and check that it selects what it should."""
    records, result, returned = made
    selected, _ = select_captured_calls(records, result)
    if list(selected) != records:
        raise SystemExit(f"{name}: expected all {len(records)} calls to be selected, got {len(selected)}")

    def floor() -> None:
        for item in returned:
            fingerprint(item)

    # Small cases are repeated inside a round, so that a round is long enough to be timed.
    repeat = max(1, 400 // len(records))

    def repeated(job: Callable[[], object]) -> Callable[[], None]:
        def run_all() -> None:
            for _ in range(repeat):
                job()

        return run_all

    seconds, floor_seconds, ratio = paired(
        repeated(lambda: select_captured_calls(records, result)), repeated(floor), rounds
    )
    return {
        "name": name,
        "seconds": seconds / repeat,
        "floor_seconds": floor_seconds / repeat,
        "ratio": ratio,
        "target": TARGET,
        "ok": ratio <= TARGET,
    }


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Run the benchmark; `quick` leaves the largest size out and takes fewer rounds."""
    rows: list[dict[str, Any]] = []
    for size in SIZES[:-1] if quick else SIZES:
        rounds = 3 if quick else 5 if size >= 100_000 else 15
        replies = [reply(number) for number in range(size)]
        rows.append(measure(f"select {size:,} calls, one envelope", case(replies, envelopes=False), rounds))
        rows.append(measure(f"select {size:,} calls, {size:,} envelopes", case(replies, envelopes=True), rounds))
    for size in EQUAL:
        replies = [[text_item(number, equal=True)] for number in range(size)]
        made = case(replies, envelopes=False)
        rows.append(measure(f"select {size:,} calls of equal text told apart by item ids", made, 3 if quick else 15))
    return rows


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
