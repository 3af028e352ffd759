"""The gateway: what it adds to a call, to a chunk and to an event's way, against the same stack without capture.

The floor is uvicorn and aiohttp passing bytes on, `bench.gateway_stack.pass_through`; what is measured is
`gristmill serve` as it is by default, each in a process of its own, in turns, until the ratio of the two is steady. CPU
is that of the whole process, threads included, as the kernel counts it, which Linux alone tells of another process. The
engine answers from memory. A raw-socket relay stands below, and LiteLLM's proxy beside it where
`GRISTMILL_BENCH_LITELLM` names a Python that has `litellm[proxy]`.

The target of a call is for one at a time: then nothing of the stack competes for the processors. With several at once,
engine and client slow down on two processors what computes, and hardly what only passes bytes on. Chunks come at full
speed, many to a read, or alone, one to a read, where most of what is added is the reading and not the capture.

Ten minutes of load without growth are a command of their own: `python -m bench.gateway_sustained`.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import uvloop

from bench.gateway_stack.client import Answer, ask_all, request, run_load
from bench.gateway_stack.engine import MODEL, PACED
from bench.gateway_stack.process import LINUX, Gateway, LiteLLM, Process, Server, raise_file_limit
from bench.gateway_stack.stored import stored_bytes
from gristmill.ledger import SqliteReader

__all__ = ["run"]

Result = dict[str, Any]

TOKENS = 8192
CALL_RATIO, CHUNK_s = 3.5, 8e-6
AT_ONCE, STREAMS_AT_ONCE = 8, 4
DIALECTS = ("chat", "responses", "messages")
STREAMS, CHUNKS_per_s = 1000, 4
SETTLE_s = 0.03
STEADY = 0.01


class _Stack(NamedTuple):
    """What is compared, in front of one engine."""

    engine: Server
    bare: Server
    ours: Gateway
    keys: Sequence[str]
    folder: Path


@contextmanager
def _stack(rollouts: int, *pace: str) -> Iterator[_Stack]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = stack.enter_context(Server("engine", str(TOKENS), *pace))
        bare = stack.enter_context(Server("pass_through", engine.url))
        ours = stack.enter_context(Gateway(engine.url, folder / "bench.ledger"))
        yield _Stack(engine, bare, ours, list(ours.open(rollouts).values()), folder)


_Works = dict[str, Callable[[], float]]


class _Found(defaultdict[str, list[float]]):
    """Figures by what was measured."""

    def __init__(self) -> None:
        super().__init__(list)

    def add(self, more: Mapping[str, Sequence[float]]) -> None:
        """Add figures of another stack."""
        for name, values in more.items():
            self[name] += values


class _Requests:
    """Requests of one kind, each with a text of its own so that none repeats another."""

    def __init__(self, dialect: str, model: str, *, stream: bool) -> None:
        self._asked: dict[str, Any] = {"model": model, "stream": stream, "max_tokens": TOKENS}
        self._dialect = dialect
        self._made = 0

    def __call__(self, count: int, keys: Sequence[str]) -> list[bytes]:
        """Make some for rollouts in turn."""
        return [self._next(self._dialect, keys[self._made % len(keys)]) for _ in range(count)]

    def bare(self, count: int, key: str | None = None) -> list[bytes]:
        """Make some for what passes them on to the engine, as the gateway would ask it."""
        return [self._next("chat", key, ids=True) for _ in range(count)]

    def _next(self, dialect: str, key: str | None, **more: Any) -> bytes:
        self._made += 1
        return request(dialect, key, said=f"Turn {self._made}.", **self._asked, **more)


def _cpu_s(process: Process, port: int, requests: Sequence[bytes], at_once: int = 1) -> float:
    """Return the CPU of one request."""
    before = process.cpu_s()
    run_load(port, requests, at_once)
    # What happens behind an answer is part of its call.
    time.sleep(SETTLE_s)
    return (process.cpu_s() - before) / len(requests)


def _in_turns(works: Mapping[str, Callable[[], float]], least: int, most: int | None = None) -> dict[str, list[float]]:
    """Measure in turns, `floor` and `ours` among the works, until the median of their ratio is steady."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for turn in range(most or least):
        # Each comes first in half of the turns.
        for name in list(works)[:: 1 if turn % 2 else -1]:
            found[name].append(works[name]())
        if most is not None and turn + 1 >= least:
            ratios = [ours / floor for ours, floor in zip(found["ours"], found["floor"], strict=True)]
            low, middle, high = quantiles(ratios, n=4)
            if (high - low) / middle / len(ratios) ** 0.5 < STEADY:
                break
    return found


def _result(name: str, value: float, floor: float, target: float | None = None) -> Result:
    ratio = value / floor
    met = target is None or ratio <= target
    return {"name": name, "seconds": value, "floor_seconds": floor, "ratio": ratio, "target": target, "ok": met}


def _unmeasured(name: str, why: str) -> Result:
    zero = {"seconds": 0.0, "floor_seconds": 0.0, "ratio": 0.0}
    return {"name": f"{name}: not measured, {why}", **zero, "target": None, "ok": True}


def _cpu_result(name: str, found: Mapping[str, list[float]], target: float | None = None, key: str = "ours") -> Result:
    """Report CPU against the floor; the ratio is the median over the turns, which a drift of both leaves alone."""
    floor = median(found["floor"])
    ratio = median(mine / below for mine, below in zip(found[key], found["floor"], strict=True))
    return _result(name, ratio * floor, floor, target)


# ---- a whole body ----------------------------------------------------------------------------------------------------


def _bodies(quick: bool) -> Iterator[Result]:
    made = _Requests("chat", MODEL, stream=False)
    alone, many, time_s, litellm = _Found(), _Found(), _Found(), _Found()
    size = 0
    # How a process's memory came to lie shows in every call that it serves, so that several of each are measured; and
    # what it served before shows in that, so that those of one call at a time serve nothing else.
    for number in range(3 if quick else 7):
        with _stack(64) as stack, Server("relay", str(stack.engine.port)) as relay:
            alone.add(_in_turns(_body_works(stack, made, 1, relay), 4 if quick else 8))
            time_s.add(_in_turns(_body_times(stack, made), 8 if quick else 16))
            if not number:
                size = run_load(stack.engine.port, made.bare(1), 1)[0].bytes
                litellm.add({"ours": _litellm(stack, made), "floor": alone["floor"]})
        with _stack(64) as stack:
            many.add(_in_turns(_body_works(stack, made, AT_ONCE), 4 if quick else 8))
    name = f"CPU of a call, {TOKENS:,} tokens, {size / 1000:.0f} kB body"
    yield _cpu_result(f"{name}, one at a time", alone, CALL_RATIO)
    yield _cpu_result(f"{name}, {AT_ONCE} at once", many)
    yield _cpu_result("CPU of a call, the same by a raw-socket relay", alone, key="relay")
    name = "CPU of a call, the same by LiteLLM's proxy"
    if litellm["ours"]:
        yield _result(name, *(median(litellm[key]) for key in ("ours", "floor")))
    else:
        yield _unmeasured(name, "GRISTMILL_BENCH_LITELLM is not set")
    yield _result(
        f"time of a call, {size / 1000:.0f} kB body, alone", *(median(time_s[key]) for key in ("ours", "floor"))
    )


def _body_works(stack: _Stack, made: _Requests, at_once: int, relay: Server | None = None) -> _Works:
    calls = 32
    works: _Works = {
        "floor": lambda: _cpu_s(stack.bare, stack.bare.port, made.bare(calls), at_once),
        "ours": lambda: _cpu_s(stack.ours, stack.ours.port, made(calls, stack.keys), at_once),
    }
    if relay is not None:
        works["relay"] = lambda: _cpu_s(relay, relay.port, made.bare(calls), at_once)
    return works


def _body_times(stack: _Stack, made: _Requests) -> _Works:
    return {
        "floor": lambda: run_load(stack.bare.port, made.bare(1), 1)[0].whole_s,
        "ours": lambda: run_load(stack.ours.port, made(1, stack.keys), 1)[0].whole_s,
    }


def _litellm(stack: _Stack, made: _Requests) -> list[float]:
    """Return the CPU of a call of LiteLLM's proxy, several times; none where there is no proxy."""
    python = os.environ.get("GRISTMILL_BENCH_LITELLM")
    if not python:
        return []
    with LiteLLM(python, stack.engine.url, MODEL, stack.folder) as proxy:
        run_load(proxy.port, made.bare(2, proxy.key), 1)
        return [_cpu_s(proxy, proxy.port, made.bare(4, proxy.key)) for _ in range(3)]


# ---- chunks ----------------------------------------------------------------------------------------------------------


def _chunks(quick: bool) -> Iterator[Result]:
    calls = STREAMS_AT_ONCE
    with _stack(64) as stack:
        for dialect in DIALECTS:
            first = dialect == "chat"
            made = _Requests(dialect, MODEL, stream=True)
            works = {
                "floor": lambda made=made: _cpu_s(stack.bare, stack.bare.port, made.bare(calls), calls),
                "ours": lambda made=made: _cpu_s(stack.ours, stack.ours.port, made(calls, stack.keys), calls),
            }
            least, most = (7, 9) if first else (4, 4)
            found = _in_turns(works, least, most) if quick else _in_turns(works, 15, 60 if first else 20)
            pairs = zip(found["ours"], found["floor"], strict=True)
            added_s = median((ours - floor) / TOKENS for ours, floor in pairs)
            floor_s = median(found["floor"]) / TOKENS
            target = CHUNK_s / floor_s if first else None
            limit = f", {CHUNK_s * 1e6:g} µs" if first else ""
            yield _result(f"CPU added to a chunk, {dialect}, {TOKENS:,} at full speed{limit}", added_s, floor_s, target)


# ---- time ------------------------------------------------------------------------------------------------------------


def _latency(quick: bool) -> Iterator[Result]:
    chunks, pause_s = 5, 0.02
    with _stack(16, str(chunks), str(pause_s)) as stack:
        for dialect in DIALECTS:
            made = _Requests(dialect, PACED, stream=True)
            floor, ours = list[Answer](), list[Answer]()
            for _ in range(8 if quick else 40):
                floor += run_load(stack.bare.port, made.bare(1), 1)
                ours += run_load(stack.ours.port, made(1, stack.keys), 1)
            both = (ours, floor)
            name = f"{dialect}: from request to first event, the engine's {pause_s * 1e3:.0f} ms left out"
            yield _result(name, *(median(one.came_at[0] - one.began_at - pause_s for one in some) for some in both))
            in_time = sum(_each_in_time(answer, chunks) for answer in ours)
            name = f"{dialect}: an event's way; passed on before the next was there in {in_time} of {len(ours)} calls"
            way_s = (median(delay for one in some for delay in one.delays_s()[:chunks]) for some in both)
            yield _result(name, *way_s) | {"ok": in_time == len(ours)}
            name = f"{dialect}: time of a streamed call, {chunks} chunks {pause_s * 1e3:.0f} ms apart"
            yield _result(name, *(median(one.whole_s for one in some) for some in both))


def _each_in_time(answer: Answer, chunks: int) -> bool:
    """Tell whether each event arrived before the one after it was sent; what ends a reply waits for the record."""
    came, sent = answer.came_at[: chunks - 1], answer.sent_at[1:chunks]
    return len(came) == chunks - 1 and all(one < other for one, other in zip(came, sent, strict=True))


# ---- many at once ----------------------------------------------------------------------------------------------------


class _Crowd(NamedTuple):
    """Many streams, while all were open: delays of events in order of length, CPU of a chunk, and whether they were."""

    delays_s: list[float]
    cpu_s: float
    all_open: bool


def _crowd(process: Process, port: int, requests: Sequence[bytes]) -> _Crowd:
    together = uvloop.run(ask_all(port, requests, process.cpu_s))
    delays_s = together.delays_s()
    cpu_s = (together.ended - together.opened) / max(1, len(delays_s))
    return _Crowd(delays_s, cpu_s, together.all_open and bool(delays_s))


def _streams(quick: bool) -> Iterator[Result]:
    seconds, rounds = (9, 1) if quick else (30, 2)
    needed = 2 * STREAMS + 200
    allowed = raise_file_limit(2 * needed)
    if allowed < needed:
        yield _unmeasured(f"{STREAMS:,} streams at once", f"{needed} open files are needed and {allowed} allowed")
        return
    made = _Requests("chat", PACED, stream=True)
    floor, ours = list[_Crowd](), list[_Crowd]()
    with _stack(STREAMS, str(seconds * CHUNKS_per_s), str(1 / CHUNKS_per_s)) as stack:
        for _ in range(rounds):
            floor.append(_crowd(stack.bare, stack.bare.port, made.bare(STREAMS)))
            ours.append(_crowd(stack.ours, stack.ours.port, made(STREAMS, stack.keys)))
        captured = sum(one.usable_calls for one in SqliteReader(stack.ours.ledger).summaries())
        memory = [one.status("VmHWM") if LINUX else 0 for one in (stack.ours, stack.bare)]
    kept = captured == rounds * STREAMS and all(one.all_open for one in (*floor, *ours))
    share = f"{captured:,} of {rounds * STREAMS:,} captured"
    for percent in (50, 99):
        way_s = (median(_percentile(one.delays_s, percent) for one in some) for some in (ours, floor))
        name = f"{STREAMS:,} streams at once, {CHUNKS_per_s} chunks/s each, {share}: an event's way, p{percent}"
        yield _result(name, *way_s) | {"ok": kept}
    if not LINUX:
        name = f"CPU and memory of {STREAMS:,} streams at once"
        yield _unmeasured(name, f"{platform.system()} does not tell them of another process")
        return
    cpu_s = [median(one.cpu_s for one in some) for some in (ours, floor)]
    name = f"CPU added to a chunk that comes alone, {STREAMS:,} streams at once"
    yield _result(name, cpu_s[0] - cpu_s[1], cpu_s[1])
    yield _result(f"bytes of memory at most, {STREAMS:,} streams at once", *memory)


def _percentile(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


# ---- all -------------------------------------------------------------------------------------------------------------


def run(quick: bool = False) -> Iterator[Result]:
    """Yield one result per measurement; about a minute if quick, else some minutes."""
    if LINUX:
        yield from _bodies(quick)
        yield from _chunks(quick)
    else:
        yield _unmeasured("CPU of calls and chunks", f"{platform.system()} does not tell it of another process")
    yield from _latency(quick)
    yield from _streams(quick)
    yield from stored_bytes()
