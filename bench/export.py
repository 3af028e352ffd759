"""Export: prepared rows to files, and back.

The floor of Parquet is a bare pyarrow write of the three token arrays alone, joined beforehand, with the same options,
row groups and sync. Ours joins them, writes spans, certificates and every other field too, digests the files and
counts the funnel. JSON lines and reading are measured against that same write; they have no target.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.lineage import SEED, Calls, paired, stored
from gristmill.export import open_export
from gristmill.export.parquet_reader import read_parquet_rows
from gristmill.export.parquet_rows import ARRAYS, SCHEMA
from gristmill.export.parquet_writer import ROW_GROUP_BYTES, WRITE_OPTIONS
from gristmill.pipeline import RebuiltRollout
from gristmill.reconstruction import Rollout, Row, RowMode, rebuild
from gristmill.records import Capture, Result
from gristmill.selection import Selection

TARGET = 1 / 0.60
VOCABULARY = 151_669

Attempts = list[tuple[Capture, RebuiltRollout]]


def _attempt(number: int, calls: int, new_T: int) -> tuple[Capture, RebuiltRollout]:
    """Make a rollout of one conversation: ids as unevenly frequent as in text, log-probabilities mostly near 0."""
    random = np.random.default_rng(SEED + number)
    ids_T = np.minimum(random.zipf(1.3, calls * new_T), VOCABULARY - 1).astype(np.int32)
    cut = new_T * 6 // 10
    made: Calls = [
        (f"call-{number:05d}-{n:03d}", ids_T[: n * new_T + cut], ids_T[n * new_T + cut : (n + 1) * new_T])
        for n in range(calls)
    ]
    records, tokens = stored([(f"c{n}", p_T, g_T) for n, (_, p_T, g_T) in enumerate(made)], chained=True)
    rollout_id = f"rollout-{number:05d}"
    names = tuple(record.model_call_id for record in records)
    rebuilt = rebuild(records, tokens, names, Rollout(rollout_id=rollout_id, reward=1.0, group_id="g"))
    rows = tuple(
        msgspec.structs.replace(
            row, logprobs=(-random.exponential(0.3, row.logprobs.size) * row.loss_mask).astype(np.float32)
        )
        for row in rebuilt.rows
    )
    selection = Selection(
        rollout_id=rollout_id,
        attempt=0,
        policy="returned_history",
        calls=names,
        terminal_call_id=names[-1],
        terminal_response_id=names[-1],
        verdicts=(),
    )
    capture = Capture(rollout_id=rollout_id, records=tuple(records))
    return capture, RebuiltRollout(selection, msgspec.structs.replace(rebuilt, rows=rows), RowMode.MERGED)


def _tables(rows: list[Row]) -> list[Any]:
    """Join the token arrays of rows, a table a row group of the same size as ours."""
    schema = pa.schema([SCHEMA.field(name) for name, _ in ARRAYS])
    tables: list[Any] = []
    group: list[Row] = []
    for row in [*rows, None]:
        if group and (row is None or sum(held.token_ids.size * 9 for held in group) > ROW_GROUP_BYTES):
            offsets = pa.array(np.cumsum([0, *(held.token_ids.size for held in group)]).astype(np.int32))
            columns = [
                pa.ListArray.from_arrays(
                    offsets, pa.array(np.concatenate([getattr(held, name) for held in group])), type=field.type
                )
                for (name, _), field in zip(ARRAYS, schema, strict=True)
            ]
            tables.append(pa.Table.from_arrays(columns, schema=schema))
            group = []
        if row is not None:
            group.append(row)
    return tables


def _bare(tables: list[Any], path: Path) -> None:
    columns = [name for name, _ in ARRAYS]
    options = {
        **WRITE_OPTIONS,
        "use_dictionary": [name for name in WRITE_OPTIONS["use_dictionary"] if name.split(".")[0] in columns],
        "write_statistics": False,
    }
    with path.open("wb") as file:
        with pq.ParquetWriter(file, tables[0].schema, **options) as writer:
            for table in tables:
                writer.write_table(table, row_group_size=table.num_rows)
        file.flush()
        os.fsync(file.fileno())


def _export(name: str, attempts: Attempts, folder: Path) -> None:
    with open_export(name, folder, policy="returned_history", options={}, overwrite=True) as writer:
        for capture, outcome in attempts:
            writer.add(capture, Result(), outcome)
        writer.finish()


def run(*, quick: bool = False) -> list[dict[str, Any]]:
    """Write and read rows of two shapes; some ten seconds."""
    rounds = 3 if quick else 9
    shapes = (("40 turns, 40k tokens", 120, 40, 1000), ("8 turns, 4k tokens", 1200, 8, 500))
    results: list[dict[str, Any]] = []
    for shape, rollouts, calls, new_T in shapes:
        attempts = [_attempt(number, calls, new_T) for number in range(rollouts // (4 if quick else 1))]
        tables = _tables([row for _, outcome in attempts for row in outcome.rows])
        tokens = sum(row.token_ids.size for _, outcome in attempts for row in outcome.rows)
        with tempfile.TemporaryDirectory() as held:
            results += _measured(shape, attempts, tables, Path(held), rounds)
        results[-3]["megabytes_per_second"] = tokens * 9 / results[-3]["seconds"] / 1e6
    return results


def _measured(shape: str, attempts: Attempts, tables: list[Any], folder: Path, rounds: int) -> list[dict[str, Any]]:
    jobs: tuple[tuple[str, Callable[[], object], float | None], ...] = (
        ("parquet", lambda: _export("parquet", attempts, folder / "parquet"), TARGET),
        ("jsonl", lambda: _export("jsonl", attempts, folder / "jsonl"), None),
        ("parquet read back as rows", lambda: _read(folder / "parquet"), None),
    )
    results: list[dict[str, Any]] = []
    for name, job, target in jobs:
        work_s, floor_s = paired(job, lambda: _bare(tables, folder / "bare.parquet"), 1 if name == "jsonl" else rounds)
        results.append(
            {
                "name": f"{name}, {shape}",
                "seconds": work_s,
                "floor_seconds": floor_s,
                "ratio": work_s / floor_s,
                "target": target,
                "ok": target is None or work_s / floor_s <= target,
            }
        )
    return results


def _read(folder: Path) -> int:
    return sum(row.token_ids.size for path in folder.glob("*.parquet") for row in read_parquet_rows(path))
