"""The commands of every day over a whole run: `ls` and `select` on a ledger of 100,000 rollouts, 5 small calls each.

The floor is what any such command has to do, in one process: read every attempt out of the ledger and decide about it
(`select`), and make its rows too (`ls`, which says whether they can be made). With `--jobs 2` a command has to beat the
one process where a second processor is free. Commands run as they do for a user, output and all, with standard output
going nowhere; the floor is taken before each, so that a busy machine slows both.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from gristmill.captures import CapturedRollout, read_lines
from gristmill.cli import main
from gristmill.ledger import SqliteLedger, SqliteReader
from gristmill.pipeline import run_rollout, select_rollout
from gristmill.records import Capture, Result
from gristmill.selection import select_captured_calls

ONE_PROCESS = 1.5
TWO_PROCESSES = 1.0
SUMMARIES = 0.5
CALLS = 5
GENERATION_T = 20
SUFFIX_T = 3
PROMPT_T = 40


def template() -> CapturedRollout:
    """Make one rollout: a conversation that was returned whole."""
    sequence = list(range(PROMPT_T))
    lines: list[bytes] = []
    returned: list[dict[str, Any]] = []
    for number in range(CALLS):
        reply = {"role": "assistant", "content": f"step {number}: looking at the next file and thinking about it"}
        generation = [1000 + number * GENERATION_T + place for place in range(GENERATION_T)]
        call = {
            "kind": "call",
            "rollout_id": "template",
            "model_call_id": f"call-{number}",
            "response_id": f"resp-{number}",
            "parent_call_id": f"call-{number - 1}" if number else None,
            "model": "policy",
            "finish_reason": "stop",
            "response_status": "completed",
            "output_items": [reply],
            "prompt_token_ids": sequence,
            "generation_token_ids": generation,
            "generation_log_probs": [-0.25] * GENERATION_T,
        }
        lines.append(json.dumps(call).encode())
        returned += [reply, {"role": "user", "content": "go on"}]
        sequence = sequence + generation + list(range(SUFFIX_T))
    result = {"kind": "result", "rollout_id": "template", "result": {"response": {"output": returned}}, "reward": 1.0}
    lines.append(json.dumps(result).encode())
    return read_lines(lines).rollouts["template", 0]


def rollouts(count: int) -> Iterator[tuple[Capture, Result | None]]:
    """Make rollouts that differ in their ids, group and reward."""
    capture, result = template()
    for number in range(count):
        name = f"rollout-{number:06}"
        records = tuple(
            msgspec.structs.replace(record, rollout_id=name, response_id=f"{name}-{record.response_id}")
            for record in capture.records
        )
        own = None
        if result is not None:
            own = msgspec.structs.replace(result, group_id=f"group-{number // 8}", reward=float(number % 2))
        yield msgspec.structs.replace(capture, rollout_id=name, records=records), own


def timed(*arguments: str) -> float:
    """Run a command as a user does and return the seconds it took."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        start = perf_counter()
        code = main(arguments)
        seconds = perf_counter() - start
    if code:
        raise SystemExit(f"gristmill {' '.join(arguments)}: expected exit code 0, got {code}: {said.getvalue()}")
    return seconds


def read(path: Path, work: Callable[[Capture, Result], object]) -> float:
    """Read every attempt, work on it, and return the seconds it took."""
    start = perf_counter()
    with SqliteReader(path) as ledger:
        for key in ledger.attempts():
            capture, result = ledger.read(key)
            work(capture, result or Result())
    return perf_counter() - start


def only_read(capture: Capture, result: Result) -> None:
    """Do nothing with an attempt."""


def decide(capture: Capture, result: Result) -> object:
    """Select the calls of an attempt."""
    return select_rollout(capture, result, select_captured_calls)


def rebuild(capture: Capture, result: Result) -> object:
    """Select the calls of an attempt and make their rows."""
    return run_rollout(capture, result, select_captured_calls)


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Run the benchmark over 100,000 rollouts, or 10,000 with `quick`; ten minutes, or one.

    `rollouts_per_s` stands beside the usual keys.
    """
    count = 10_000 if quick else 100_000
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as folder:
        path = Path(folder) / "run.gristmill"
        with SqliteLedger(path) as ledger:
            ledger.import_attempts(rollouts(count))
        # The first reading warms the page cache for all that follow.
        read(path, only_read)
        results: list[dict[str, Any]] = []
        for name, least, target in (
            ("ls --no-verdicts", only_read, SUMMARIES),
            ("ls --jobs 1", rebuild, ONE_PROCESS),
            ("ls --jobs 2", rebuild, TWO_PROCESSES),
            ("select --json --jobs 1", decide, ONE_PROCESS),
            ("select --json --jobs 2", decide, TWO_PROCESSES),
        ):
            command, *options = name.split()
            floor_s, work_s = read(path, least), timed(command, str(path), *options)
            results.append(
                {
                    "name": f"{name}, {count:,} rollouts of {CALLS} calls",
                    "seconds": work_s,
                    "floor_seconds": floor_s,
                    "ratio": work_s / floor_s,
                    "target": target,
                    "ok": work_s <= target * floor_s,
                    "rollouts_per_s": round(count / work_s),
                }
            )
        return results


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
