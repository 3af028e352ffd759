"""`python -m bench.scale [--rollouts N] [--json FILE]`: 100,000 rollouts end to end, with memory over time.

Each stage is a process of its own: rollouts are made and archived, then built by `gristmill build` with two processes.
While a stage runs, the resident memory of it and all its children is sampled; what counts is its peak, and its slope
over the second half of the stage, when everything is loaded that a stage needs. It takes some minutes and some
gigabytes of disk, so it is no part of `make bench`; its numbers go into the same file, under `scale`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import click
import numpy as np

from bench.build import CALLS, GENERATION_T, SUFFIX_T, archive

__all__ = ["command"]

SAMPLE_s = 0.25


def _tree_bytes(root: int) -> int:
    """Add up the resident memory of a process and its descendants; pages that they share count in each."""
    parents: dict[int, int] = {}
    resident: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                told = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                # It has ended between being listed and being looked at.
                continue
            parents[int(entry.name)], resident[int(entry.name)] = int(told[1]), int(told[21]) * 4096
    total = 0
    for process, size in resident.items():
        above = process
        while above not in {0, 1, root}:
            above = parents.get(above, 0)
        total += size if above == root else 0
    return total


def _stage(name: str, command: list[str]) -> dict[str, Any]:
    click.echo(f"{name} …", err=True)
    begun = perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    samples: list[tuple[float, int]] = []
    while process.poll() is None:
        samples.append((perf_counter() - begun, _tree_bytes(process.pid)))
        sleep(SAMPLE_s)
    seconds = perf_counter() - begun
    if process.returncode:
        raise SystemExit(f"{name} ended with {process.returncode}")
    half = [(at, size) for at, size in samples if seconds / 2 <= at <= seconds * 0.95] or samples
    times, sizes = np.array(half, float).T
    slope = float(np.polyfit(times, sizes, 1)[0]) if len(half) > 1 else 0.0
    return {
        "name": name,
        "seconds": seconds,
        "peak_bytes": max(size for _, size in samples),
        "median_bytes": float(np.median(sizes)),
        "growth_bytes": slope * seconds / 2,
        "samples_bytes": [size for _, size in samples[:: max(1, len(samples) // 40)]],
    }


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@click.command("scale")
@click.option("--rollouts", default=100_000, show_default=True, help="How many.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Put the numbers in a file.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Where the files go; /tmp by default.")
@click.option("--archive-into", "archive_into", type=click.Path(path_type=Path), hidden=True)
def command(rollouts: int, json_file: Path | None, folder: Path | None, archive_into: Path | None) -> None:
    """Archive and build many rollouts."""
    if archive_into is not None:
        archive(archive_into, rollouts)
        return
    with tempfile.TemporaryDirectory(dir=folder) as held:
        runs, rows = Path(held) / "runs", Path(held) / "rows"
        own = [sys.executable, "-m", "bench.scale", "--rollouts", str(rollouts), "--archive-into", str(runs)]
        program = [sys.executable, "-c", "import sys; from gristmill.cli import main; sys.exit(main())"]
        stages = [
            _stage("archive", own),
            _stage("build, 2 processes", [*program, "build", str(runs), str(rows), "--jobs", "2"]),
        ]
        summary = json.loads((rows / "summary.json").read_bytes())
        found: dict[str, Any] = {
            "rollouts": rollouts,
            "calls": summary["funnel"]["captured_calls"],
            "trained_tokens": summary["funnel"]["trained_tokens"],
            "row_tokens": rollouts * CALLS * (GENERATION_T + SUFFIX_T),
            "partitions": summary["partitions"],
            "archive_bytes": _size(runs),
            "rows_bytes": _size(rows),
            "stages": stages,
        }
    for stage in stages:
        told = f"{stage['seconds']:.0f} s, {found['calls'] / stage['seconds']:,.0f} calls/s"
        memory = f"peak {stage['peak_bytes'] / 1e6:,.0f} MB, {stage['growth_bytes'] / 1e6:+,.1f} MB in the second half"
        click.echo(f"{stage['name']}: {told}, {memory}")
    if json_file is not None:
        document = json.loads(json_file.read_text(encoding="utf-8")) if json_file.exists() else {}
        json_file.write_text(json.dumps({**document, "scale": found}, indent=2) + "\n", encoding="utf-8")
        click.echo(f"written: {json_file}", err=True)


if __name__ == "__main__":
    command()
