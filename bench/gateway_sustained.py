"""`python -m bench.gateway_sustained [--minutes 10] [--calls-per-s 30] [--json FILE]`: load without growth.

Rollouts of three dialects are opened, talk for some turns, are finished and frozen, as a service does it, at a steady
rate that leaves room. Memory, open files, the ledger's log and the time of a call are noted every few seconds; what is
reported is how they stand after the warm-up and at the end, and the slope between. Linux only: nothing else tells of
another process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
import uvloop

from bench.gateway_stack.client import ask_one, post, request
from bench.gateway_stack.engine import MODEL
from bench.gateway_stack.process import LINUX, Gateway, Server, raise_file_limit
from gristmill.ledger import SqliteReader

__all__ = ["Report", "Sample", "run"]

TOKENS: Final = 512
TURNS: Final = 8
EVERY_s: Final = 5.0
WARM_UP: Final = 0.25
ROLLOUTS: Final = "/gristmill/v1/rollouts"
DIALECTS: Final = ("chat", "chat", "responses", "messages")


class Sample(NamedTuple):
    """How the gateway stands, `at_s` after the beginning."""

    at_s: float
    rss_bytes: int
    files: int
    log_bytes: int
    ledger_bytes: int
    calls: int
    call_p50_s: float
    call_p99_s: float
    cpu_s: float


class Report(NamedTuple):
    """What came of the run: figures after the warm-up and at the end, and the growth between.

    Attributes:
        rss_slope: MiB an hour, by least squares over the samples after the warm-up.
        captured: usable calls in the ledger, `calls` being those that were answered.
    """

    minutes: float
    rollouts: int
    calls: int
    captured: int
    first: Sample
    last: Sample
    rss_slope: float
    files_most: int
    log_most_bytes: int
    cpu_share: float


class _Load:
    """The rollouts of one run.

    Args:
        gateway: who serves them.
        per_s: calls that begin in a second.
        until: end, on the monotonic clock.
    """

    def __init__(self, gateway: Gateway, per_s: float, until: float) -> None:
        self._gateway = gateway
        self._until = until
        # A rollout makes a call a second, as fast as agents do.
        self._workers = max(1, round(per_s))
        self.rollouts = self.calls = 0
        self.times_s: list[float] = []

    async def run(self) -> None:
        """Talk until the end; rollouts that were begun are finished."""
        await asyncio.gather(*(self._work(number) for number in range(self._workers)))

    async def _work(self, number: int) -> None:
        await asyncio.sleep(number / self._workers)
        count = 0
        while time.monotonic() < self._until:
            await self._rollout(f"load-{number}-{count}", DIALECTS[number % len(DIALECTS)])
            count += 1

    async def _rollout(self, name: str, dialect: str) -> None:
        key = orjson.loads(await self._act(ROLLOUTS, {"rollout_id": name, "group_id": name}))["key"]
        for turn in range(TURNS):
            begun = time.monotonic()
            said = f"Turn {turn} of {name}. " + "Nothing new. " * 100
            sent = request(dialect, key, model=MODEL, stream=turn % 2 == 1, max_tokens=TOKENS, said=said)
            answer = await ask_one(self._gateway.port, sent)
            self.calls += 1
            self.times_s.append(answer.whole_s)
            await asyncio.sleep(max(0.0, begun + 1.0 - time.monotonic()))
        await self._act(f"{ROLLOUTS}/{name}/0/finish", {"result": {"done": name}, "reward": 1.0})
        await self._act(f"{ROLLOUTS}/{name}/0/freeze", {})
        self.rollouts += 1

    async def _act(self, path: str, body: dict[str, Any]) -> bytes:
        return (await ask_one(self._gateway.port, post(path, self._gateway.admin_key, body))).body


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sample(gateway: Gateway, load: _Load, began: float, seen: int) -> Sample:
    recent = sorted(load.times_s[seen:]) or [math.nan]
    return Sample(
        at_s=time.monotonic() - began,
        rss_bytes=gateway.status("VmRSS"),
        files=gateway.files(),
        log_bytes=_size(gateway.ledger.with_name(gateway.ledger.name + "-wal")),
        ledger_bytes=_size(gateway.ledger),
        calls=load.calls,
        call_p50_s=recent[len(recent) // 2],
        call_p99_s=recent[len(recent) * 99 // 100],
        cpu_s=gateway.cpu_s(),
    )


async def _watched(gateway: Gateway, load: _Load) -> list[Sample]:
    samples: list[Sample] = []
    began, seen = time.monotonic(), 0
    running = asyncio.ensure_future(load.run())
    while not running.done():
        await asyncio.wait({running}, timeout=EVERY_s)
        if not running.done():
            samples.append(_sample(gateway, load, began, seen))
            seen = len(load.times_s)
    await running
    return samples


def run(minutes: float, per_s: float) -> tuple[Report, Sequence[Sample]]:
    """Load a gateway for so long; return what came of it, and every sample."""
    raise_file_limit(4096)
    with tempfile.TemporaryDirectory() as folder, Server("engine", str(TOKENS)) as engine:
        with Gateway(engine.url, Path(folder) / "bench.ledger") as gateway:
            load = _Load(gateway, per_s, time.monotonic() + 60 * minutes)
            samples = uvloop.run(_watched(gateway, load))
        captured = sum(summary.usable_calls for summary in SqliteReader(gateway.ledger).summaries())
    return _report(minutes, load, captured, samples), samples


def _report(minutes: float, load: _Load, captured: int, samples: Sequence[Sample]) -> Report:
    steady = samples[int(len(samples) * WARM_UP) :]
    hours = np.array([sample.at_s / 3600 for sample in steady])
    mib = np.array([sample.rss_bytes / 2**20 for sample in steady])
    slope = float(np.polyfit(hours, mib, 1)[0]) if len(steady) > 1 else math.nan
    share = max(1, len(steady) // 4)
    first, last = (_middle(part) for part in (steady[:share], steady[-share:]))
    return Report(
        minutes=minutes,
        rollouts=load.rollouts,
        calls=load.calls,
        captured=captured,
        first=first,
        last=last,
        rss_slope=slope,
        files_most=max(sample.files for sample in steady),
        log_most_bytes=max(sample.log_bytes for sample in steady),
        cpu_share=(samples[-1].cpu_s - samples[0].cpu_s) / (samples[-1].at_s - samples[0].at_s),
    )


def _middle(samples: Sequence[Sample]) -> Sample:
    """Return the median of each figure."""
    return Sample(*(median(figures) for figures in zip(*samples, strict=True)))


def _lines(report: Report) -> list[str]:
    first, last = report.first, report.last
    mib = 2**20
    return [
        f"load       {report.minutes:g} minutes, {report.rollouts:,} rollouts, {report.calls:,} calls of {TOKENS} "
        f"tokens, {report.captured:,} captured; {report.cpu_share:.0%} of one CPU",
        f"memory     {first.rss_bytes / mib:.1f} MiB after the warm-up, {last.rss_bytes / mib:.1f} at the end; "
        f"{report.rss_slope:+.1f} MiB an hour",
        f"files      {first.files:.0f} open after the warm-up, {last.files:.0f} at the end, "
        f"{report.files_most} at most",
        f"ledger     log {first.log_bytes / mib:.1f} MiB after the warm-up, {last.log_bytes / mib:.1f} at the end, "
        f"{report.log_most_bytes / mib:.1f} at most; database {last.ledger_bytes / mib:.0f} MiB",
        f"a call     p50 {first.call_p50_s * 1e3:.1f} ms, p99 {first.call_p99_s * 1e3:.1f} ms after the warm-up; "
        f"{last.call_p50_s * 1e3:.1f} and {last.call_p99_s * 1e3:.1f} ms at the end",
    ]


def main() -> None:
    """Run it and print the report."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gateway_sustained", description=(__doc__ or "").split("\n")[2]
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--calls-per-s", type=float, default=30.0)
    parser.add_argument("--json", type=Path, help="write report and samples")
    given = parser.parse_args()
    if not LINUX:
        raise SystemExit("not measured: only Linux tells memory and files of another process")
    report, samples = run(given.minutes, given.calls_per_s)
    print("\n".join(_lines(report)))
    if given.json is not None:
        document = {**report._asdict(), "first": report.first._asdict(), "last": report.last._asdict()}
        document["samples"] = [sample._asdict() for sample in samples]
        given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
