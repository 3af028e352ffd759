"""Builds: an archive of rollouts to rows, in one process, in two, and on a Ray instance of this machine.

The floor is the bare cost of the same files: reading every table of the archive with pyarrow as it is, and writing the
same rows as Arrow tables that are in memory already, with the same options and a sync. Ours checks every claim of the
files and their digests, decodes records, selects, rebuilds, writes refusals and manifests. The start of processes, and
of Ray, is in the times: it is what a user waits for; on a large archive it is nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.lineage import SEED, paired
from gristmill.archive import ArchivedAttempt, PartitionWriter, place_of
from gristmill.captures import CapturedRollout, read_lines
from gristmill.engine import Engine, build
from gristmill.export.parquet_writer import WRITE_OPTIONS

CALLS = 8
GENERATION_T = 200
SUFFIX_T = 300
VOCABULARY = 151_669
TEMPLATES = 64
PART_BYTES = 64 * 2**20


def template(number: int) -> CapturedRollout:
    """Make one rollout: a conversation of some 4,000 tokens that was returned whole, with a retry in it."""
    random = np.random.default_rng(SEED + number)
    sequence: list[int] = []
    lines: list[dict[str, Any]] = []
    returned: list[dict[str, Any]] = []
    for turn in range(CALLS):
        suffix, generation = (
            np.minimum(random.zipf(1.3, size), VOCABULARY - 1).tolist() for size in (SUFFIX_T, GENERATION_T)
        )
        reply = {"role": "assistant", "content": f"step {turn} of {number}: " + "look at the next file, " * 30}
        sequence = sequence + suffix
        call = {
            "kind": "call",
            "rollout_id": "template",
            "model_call_id": f"call-{turn}",
            "response_id": f"resp-{turn}",
            "parent_call_id": f"call-{turn - 1}" if turn else None,
            "model": "policy",
            "finish_reason": "stop",
            "response_status": "completed",
            "output_items": [reply],
            "prompt_token_ids": sequence,
            "generation_token_ids": generation,
            "generation_log_probs": (-random.exponential(0.3, GENERATION_T)).astype(np.float32).tolist(),
        }
        lines.append(call)
        returned += [reply, {"role": "user", "content": "go on"}]
        sequence = sequence + generation
    retry = {**lines[-1], "model_call_id": "retry", "response_id": "resp-retry"}
    lines.append({**retry, "output_items": [{"role": "assistant", "content": "something else"}]})
    result = {"kind": "result", "rollout_id": "template", "result": {"response": {"output": returned}}, "reward": 1.0}
    return read_lines(json.dumps(line).encode() for line in (*lines, result)).rollouts["template", 0]


def rollouts(count: int) -> Iterator[ArchivedAttempt]:
    """Make rollouts of `TEMPLATES` contents that differ in their ids, group and reward."""
    made = [template(number) for number in range(min(count, TEMPLATES))]
    for number in range(count):
        capture, result = made[number % len(made)]
        name = f"rollout-{number:07}"
        records = tuple(
            msgspec.structs.replace(record, rollout_id=name, response_id=f"{name}-{record.response_id}")
            for record in capture.records
        )
        if result is not None:
            result = msgspec.structs.replace(result, group_id=f"group-{number // 8}", reward=float(number % 3 == 0))
        own = msgspec.structs.replace(capture, rollout_id=name, records=records)
        yield ArchivedAttempt(capture=own, result=result)


def archive(folder: Path, count: int, part_bytes: int = PART_BYTES) -> int:
    """Archive rollouts and return the size of the files in bytes."""
    with PartitionWriter(place_of(folder), "bench", part_bytes=part_bytes) as writer:
        for attempt in rollouts(count):
            writer.add(attempt)
        return sum(entry.bytes for entry in writer.finish().files)


def _bare(archived: Path, tables: list[pa.Table], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in sorted(archived.rglob("*.parquet")):
        pq.ParquetFile(path).read(use_threads=False)
    for number, table in enumerate(tables):
        with (folder / f"{number}.parquet").open("wb") as file:
            pq.write_table(table, file, **WRITE_OPTIONS)
            file.flush()
            os.fsync(file.fileno())


def run(*, quick: bool = False) -> list[dict[str, Any]]:
    """Build 8,000 rollouts of 9 calls and some 4,000 tokens (500 with `quick`); a minute."""
    count, rounds = (500, 1) if quick else (8000, 3)
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        archived_bytes = archive(folder / "runs", count, PART_BYTES // (4 if quick else 1))
        summary = build(folder / "runs", folder / "rows")
        tables = [pq.read_table(path) for path in sorted((folder / "rows").rglob("*.parquet"))]
        jobs: list[tuple[str, Callable[[], object]]] = [
            ("1 process", lambda: build(folder / "runs", folder / "rows-1", overwrite=True, jobs=1)),
            ("2 processes", lambda: build(folder / "runs", folder / "rows-2", overwrite=True, jobs=2)),
        ]
        if find_spec("ray") is not None:
            on_ray = lambda: build(folder / "runs", folder / "rows-r", engine=Engine.RAY, jobs=2)  # noqa: E731
            jobs.append(("Ray, 2 at a time, its start included", on_ray))
        results: list[dict[str, Any]] = []
        for name, job in jobs:
            work_s, floor_s = paired(
                _fresh(folder, job), lambda: _bare(folder / "runs", tables, folder / "bare"), rounds
            )
            results.append(
                {
                    "name": f"build {count:,} rollouts of 9 calls, {name}",
                    "seconds": work_s,
                    "floor_seconds": floor_s,
                    "ratio": work_s / floor_s,
                    "target": None,
                    "ok": True,
                    "rows_per_second": summary.records / work_s,
                    "calls_per_second": summary.funnel.captured_calls / work_s,
                    "megabytes_per_second": sum(table.nbytes for table in tables) / work_s / 1e6,
                    "archived_bytes": archived_bytes,
                }
            )
    return results


def _fresh(folder: Path, job: Callable[[], object]) -> Callable[[], object]:
    """Let a job find no rows: partitions that are there would be passed over."""

    def work() -> object:
        for rows in folder.glob("rows-*"):
            rows.rename(folder / f"old-{os.urandom(6).hex()}")
        return job()

    return work
