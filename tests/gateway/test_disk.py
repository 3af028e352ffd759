"""A ledger that is slow, full, busy or low, and a clock that jumps: nothing is served that is not kept."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gristmill.errors import Code
from gristmill.ledger.writes import AdmitAll, Commit
from gristmill.records import Dialect, ParentResolution
from tests.gateway.running import (
    DIALECTS,
    DONE,
    Asked,
    HandEngine,
    Running,
    Wire,
    engine_of,
    error_of,
    gateway,
    piece,
    run,
    sampled,
    saw_finish,
    spoken,
    until,
    usage,
)

HELLO = {"content": "Hello there."}
dialects = pytest.mark.parametrize("dialect", DIALECTS)
streams = pytest.mark.parametrize("stream", [False, True])


class Blocking(NamedTuple):
    """A write that keeps the ledger's writer busy until it is let go."""

    begun: threading.Event
    go: threading.Event

    def apply(self, library: Any) -> None:
        self.begun.set()
        assert self.go.wait(30)


@contextmanager
def busy_writer(running: Running) -> Generator[None]:
    """Keep the ledger's writer busy."""
    block = Blocking(threading.Event(), threading.Event())
    running.ledger.submit(block)
    assert block.begun.wait(10)
    try:
        yield
    finally:
        block.go.set()


@dialects
def test_a_slow_disk(tmp_path: Path, dialect: Dialect) -> None:
    # Whoever waits for the disk waits alone: streams that run go on, and nothing is asked of the engine unrecorded.
    async def main() -> None:
        go = asyncio.Event()

        async def play(seen: Asked, wire: Wire) -> None:
            await wire.stream()
            await wire.piece(piece(seen, prompt=[1, 2]) + piece(seen, "first ", [5]))
            await go.wait()
            end = piece(seen, "second ", [5]) + piece(seen, "", [6], finish="stop") + usage(2, 3) + DONE
            await wire.piece(end)
            await wire.end()

        async with HandEngine(play) as engine, gateway(tmp_path, engine.url, measured=False) as running:
            rollout = await running.begin()
            stream = await rollout.open(dialect)
            await stream.has("first ")
            with busy_writer(running):
                late = asyncio.create_task(rollout.ask(dialect, "late", stream=True))
                await until(lambda: running.ledger.waiting() >= 1)
                go.set()
                await stream.has("second ")
                assert not saw_finish(dialect, stream.so_far)
                assert len(engine.calls) == 1
                assert not late.done()
                assert (await running.get("/healthz")).status == 200
            assert saw_finish(dialect, await stream.whole())
            assert saw_finish(dialect, await late)
            records = await rollout.settled(2)
            assert all(record.usable for record in records)
            rollout.sound()

    run(main())


@streams
@dialects
def test_a_writer_that_is_behind(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # More calls than the disk takes must be told to come again, not pile up.
    async def main() -> None:
        engine = engine_of(HELLO)
        async with engine.serve() as url, gateway(tmp_path, url, most_waiting=3) as running:
            rollout = await running.begin()
            with busy_writer(running):
                asking = [asyncio.create_task(rollout.ask(dialect, str(n), stream=stream)) for n in range(12)]
                await until(lambda: sum(task.done() for task in asking) >= 9)
                for task in asking:
                    if task.done():
                        answer = task.result()
                        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                        assert error_of(dialect, answer) is not None
                assert sampled(engine) == []
                assert running.metric("requests_refused_total", code="ledger_busy") >= 9
            answers = await asyncio.gather(*asking)
            good = [answer for answer in answers if answer.status == 200]
            assert len(good) <= 3
            await running.idle()
            stored = {record.model_call_id for record in rollout.records()}
            assert {answer.call_id for answer in good if saw_finish(dialect, answer)} <= stored
            assert saw_finish(dialect, await rollout.ask(dialect, "after", stream=stream))
            rollout.sound()

    run(main())


@contextmanager
def no_file_grows() -> Generator[None]:
    """Let every write that makes a file larger fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@streams
def test_a_full_disk(tmp_path: Path, stream: bool) -> None:
    # Space comes back; until then no call may be served, and afterwards the ledger must be as sound as before.
    async def main() -> None:
        engine = engine_of(HELLO)
        async with engine.serve() as url, gateway(tmp_path, url, log_level="error") as running:
            rollout = await running.begin()
            assert saw_finish(Dialect.CHAT, await rollout.ask(Dialect.CHAT, "before", stream=stream))
            await rollout.settled(1)
            disk = running.disk(Commit)
            waiting = asyncio.create_task(rollout.ask(Dialect.CHAT, "in between", stream=stream))
            await disk.holds(1)
            with no_file_grows():
                disk.release()
                held = await waiting
                refused = await rollout.ask(Dialect.CHAT, "x" * 200_000, stream=stream)
            assert not saw_finish(Dialect.CHAT, held)
            assert refused.status == 503
            assert len(sampled(engine)) == 2
            after = await rollout.ask(Dialect.CHAT, "after", stream=stream)
            assert saw_finish(Dialect.CHAT, after)
            await running.idle()
            assert {record.model_call_id for record in rollout.records()} >= {after.call_id}
            assert [lost.model_call_id for lost in rollout.capture().lost] == [held.call_id]
            rollout.sound()
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = running.again(rollout)
            assert len(rollout.records()) == 2
            rollout.sound()

    run(main())


@dialects
def test_a_disk_that_runs_low(tmp_path: Path, dialect: Dialect) -> None:
    # The last gigabyte is for calls that run; new ones come again when there is room.
    async def main() -> None:
        go = asyncio.Event()

        async def play(seen: Asked, wire: Wire) -> None:
            await wire.stream()
            await wire.piece(piece(seen, prompt=[1, 2]) + piece(seen, "hi", [5]))
            if seen is engine.calls[0]:
                await go.wait()
            await wire.piece(piece(seen, "", [6], finish="stop") + usage(2, 2) + DONE)
            await wire.end()

        async with (
            HandEngine(play) as engine,
            gateway(tmp_path, engine.url, measured=False, min_free_bytes=9) as running,
        ):
            rollout = await running.begin()
            stream = await rollout.open(dialect)
            await stream.has("hi")
            free = running.ledger.free_bytes
            setattr(running.ledger, "free_bytes", lambda: 8)  # noqa: B010  a disk that others fill
            refused = await rollout.ask(dialect, stream=True)
            while refused.status == 200:
                refused = await rollout.ask(dialect, stream=True)
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert error_of(dialect, refused) is not None
            assert Code.DISK_LOW in refused.raw.decode()
            assert running.metric("requests_refused_total", code="disk_low") == 1
            assert running.metric("ledger_free_bytes") == 8
            go.set()
            assert saw_finish(dialect, await stream.whole())
            setattr(running.ledger, "free_bytes", free)  # noqa: B010  a disk that fills in between
            while (answer := await rollout.ask(dialect, stream=True)).status == 503:
                await asyncio.sleep(0.05)
            assert saw_finish(dialect, answer)
            await running.idle()
            assert all(record.usable for record in rollout.records())
            rollout.sound()

    run(main())


def test_a_clock_that_jumps_back(tmp_path: Path) -> None:
    # Machines set their clocks; order and lineage must not hang on them.
    now = [2e9]

    async def main() -> None:
        engine = engine_of({"content": "Reply to {{user}}."})
        async with engine.serve() as url:
            async with gateway(tmp_path, url, clock=lambda: now[0]) as running:
                rollout = await running.begin()
                messages: list[Any] = []
                ids: list[str] = []
                for number in range(4):
                    now[0] -= 5000
                    messages.append({"role": "user", "content": f"q{number}"})
                    answer = await rollout.ask(Dialect.CHAT, messages=messages)
                    ids.append(answer.call_id)
                    messages.append({"role": "assistant", "content": spoken(Dialect.CHAT, answer)})
                records = await rollout.settled(4)
            now[0] -= 1e9
            async with gateway(tmp_path, url, clock=lambda: now[0]) as running:
                rollout = running.again(rollout)
                messages.append({"role": "user", "content": "last"})
                answer = await rollout.ask(Dialect.CHAT, messages=messages)
                ids.append(answer.call_id)
                records = await rollout.settled(5)
                assert [record.model_call_id for record in records] == ids
                assert [record.parent_call_id for record in records] == [None, *ids[:-1]]
                assert records[-1].parent_resolution is ParentResolution.RESOLVED
                rollout.sound()

    run(main())


def test_a_commit_that_fails_while_others_are_admitted(tmp_path: Path) -> None:
    # A moment of a full disk costs the calls of that moment, and none of those around it.
    async def main() -> None:
        engine = engine_of(HELLO)
        async with engine.serve() as url, gateway(tmp_path, url, log_level="error") as running:
            rollout = await running.begin()
            running.disk(Commit, AdmitAll).refuse(7)
            answers = await asyncio.gather(*(rollout.ask(Dialect.CHAT, str(n), stream=n % 2 == 0) for n in range(20)))
            await running.idle()
            told = {answer.call_id for answer in answers if saw_finish(Dialect.CHAT, answer)}
            capture = rollout.capture()
            assert told == {record.model_call_id for record in capture.records}
            withheld = [answer for answer in answers if not saw_finish(Dialect.CHAT, answer)]
            assert len(withheld) == 7
            lost = {call.model_call_id for call in capture.lost}
            assert lost == {answer.call_id for answer in withheld if "x-gristmill-call-id" in answer.headers}
            rollout.sound()

    run(main())
