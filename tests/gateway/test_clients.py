"""Clients that go away, or do not read: what was sampled is kept, and nothing piles up."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gristmill.errors import Code
from gristmill.ledger.writes import Commit
from gristmill.records import Delivery, Dialect
from tests.gateway.running import (
    DIALECTS,
    DONE,
    PATHS,
    Asked,
    HandEngine,
    Wire,
    body_of,
    engine_of,
    gateway,
    piece,
    run,
    sampled,
    saw_finish,
    until,
    usage,
)

LONG = "one two three four five six seven eight nine ten eleven twelve"
dialects = pytest.mark.parametrize("dialect", DIALECTS)
streams = pytest.mark.parametrize("stream", [False, True])


@streams
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_client_that_goes_away(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # What was sampled for it costs as much as anything else, and the engine must not go on for nobody.
    async def main() -> None:
        engine = engine_of({"content": LONG, "gap_s": 0.3})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            if stream:
                open_stream = await rollout.open(dialect)
                await open_stream.has("one")
                await open_stream.drop()
            else:
                asking = asyncio.create_task(rollout.ask(dialect))
                await until(lambda: len(sampled(engine)) == 1)
                asking.cancel()
            [record] = await rollout.settled(1)
            await until(lambda: sampled(engine)[0].ended is not None)
            assert sampled(engine)[0].ended == "aborted"
            assert record.unusable_reason is Code.ABORTED
            assert "client closed" in (record.unusable_detail or "")
            assert record.cum_len > record.prompt_len > 0
            assert len(rollout.capture().tokens[record.model_call_id].ids_T) == record.cum_len
            assert record.delivery in {Delivery.PARTIAL, Delivery.ABORTED}
            assert running.metric("aborts_total", cause="client_gone") == 1
            assert running.metric("calls_unusable_total", reason="aborted") == 1
            rollout.sound()

    run(main())


@streams
@dialects
def test_a_client_that_goes_away_from_an_engine_without_abort(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # The record must say that tokens are missing, or that they are those that had come.
    async def main() -> None:
        engine = engine_of({"content": LONG, "gap_s": 0.3}, scale_out=False)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            if stream:
                open_stream = await rollout.open(dialect)
                await open_stream.has("one")
                await open_stream.drop()
            else:
                asking = asyncio.create_task(rollout.ask(dialect))
                await until(lambda: len(sampled(engine)) == 1)
                asking.cancel()
            [record] = await rollout.settled(1)
            await until(lambda: sampled(engine)[0].ended is not None)
            assert sampled(engine)[0].ended not in {"aborted", "complete"}
            assert record.unusable_reason is Code.ABORTED
            if stream:
                assert record.cum_len > record.prompt_len
            else:
                assert Code.TOKEN_IDS_MISSING in (record.unusable_detail or "")
            rollout.sound()

    run(main())


@streams
@dialects
def test_a_client_that_goes_away_before_anything_comes(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # An engine that queues says nothing for minutes; the call must not wait for it, and must not be lost.
    async def main() -> None:
        async def play(seen: Asked, wire: Wire) -> None:
            await wire.reader.read()

        settings = {"measured": False, "abort_wait_s": 0.2}
        async with HandEngine(play) as engine, gateway(tmp_path, engine.url, **settings) as running:
            rollout = await running.begin()
            asking = asyncio.create_task(rollout.ask(dialect, stream=stream))
            await until(lambda: len(engine.calls) == 1)
            asking.cancel()
            [record] = await rollout.settled(1)
            assert record.unusable_reason is Code.ABORTED
            assert Code.TOKEN_IDS_MISSING in (record.unusable_detail or "")
            assert record.delivery is Delivery.ABORTED
            assert rollout.capture().lost == ()
            assert running.metric("calls_in_flight") == 0

    run(main())


@dialects
def test_a_client_that_goes_away_in_its_request(tmp_path: Path, dialect: Dialect) -> None:
    # Half a request asks for nothing; it must neither be sent on nor count as a call that was lost.
    async def main() -> None:
        engine = engine_of({"content": LONG})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            body = json.dumps(body_of(dialect)).encode()
            head = (
                f"POST {PATHS[dialect]} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {rollout.secret}\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            _, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(head.encode() + body[:-1])
            await until(lambda: running.metric("calls_in_flight") == 1)
            writer.close()
            await until(lambda: running.metric("requests_refused_total", code="client_gone") == 1)
            assert running.metric("calls_in_flight") == 0
            assert sampled(engine) == []
            assert rollout.capture().records == rollout.capture().lost == ()

    run(main())


@streams
@dialects
def test_a_client_that_goes_away_while_the_record_is_written(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # The call is complete: it is stored as such, only its delivery is not.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            disk = running.disk(Commit)
            asking = asyncio.create_task(rollout.ask(dialect, stream=stream))
            await disk.holds(1)
            asking.cancel()
            await running.alone()
            disk.release()
            [record] = await rollout.settled(1)
            assert record.usable
            assert record.finish_reason == "stop"
            assert record.delivery in {Delivery.PARTIAL, Delivery.ABORTED}
            assert running.metric("deliveries_total", state=str(record.delivery)) == 1
            rollout.sound()

    run(main())


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.MESSAGES])
def test_a_client_that_does_not_read(tmp_path: Path, dialect: Dialect) -> None:
    # Agents are stopped under debuggers; what they do not read must wait in the engine, not here.
    sent = 0
    pieces, size = 600, 64 * 1024

    async def main() -> None:
        async def play(seen: Asked, wire: Wire) -> None:
            nonlocal sent
            await wire.stream()
            await wire.piece(piece(seen, prompt=[1, 2]))
            filling = b": " + b"x" * size + b"\n\n"
            for number in range(pieces):
                await wire.piece(piece(seen, "y" * size, [number]) + filling)
                sent = number + 1
            await wire.piece(piece(seen, "", [7], finish="stop") + usage(2, pieces + 1) + DONE)
            await wire.end()

        async with HandEngine(play) as engine, gateway(tmp_path, engine.url, measured=False) as running:
            rollout = await running.begin()
            body = json.dumps(body_of(dialect, stream=True)).encode()
            head = (
                f"POST {PATHS[dialect]} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {rollout.secret}\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1024)
            writer.write(head.encode() + body)
            await until(lambda: running.buffered() > 0)
            most, before, same = 0, -1, 0
            while same < 40:
                most = max(most, running.buffered())
                same = same + 1 if sent == before else 0
                before = sent
                await asyncio.sleep(0.01)
            # Two pieces of the engine's and what the server keeps before it makes its application wait.
            assert most < 1024 * 1024, most
            assert sent < pieces, "the engine was never made to wait"
            got = bytearray()
            while data := await reader.read(1 << 20):
                got += data
            writer.close()
            assert got.count(b"y" * size) >= pieces
            [record] = await rollout.settled(1)
            assert record.usable
            assert record.cum_len - record.prompt_len == pieces + 1
            assert record.delivery is Delivery.DELIVERED

    run(main())


def test_a_client_that_never_reads_is_given_up(tmp_path: Path) -> None:
    # When it goes away at last, the call ends at once.
    async def main() -> None:
        async def play(seen: Asked, wire: Wire) -> None:
            await wire.stream()
            await wire.piece(piece(seen, prompt=[1, 2]))
            while True:
                await wire.piece(piece(seen, "y" * 65536, [5]))

        async with (
            HandEngine(play) as engine,
            gateway(tmp_path, engine.url, measured=False, abort_wait_s=0.2) as running,
        ):
            rollout = await running.begin()
            body = json.dumps(body_of(Dialect.CHAT, stream=True)).encode()
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {rollout.secret}\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            _, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1024)
            writer.write(head.encode() + body)
            await until(lambda: running.buffered() > 0)
            writer.transport.abort()
            [record] = await rollout.settled(1)
            assert record.unusable_reason is Code.ABORTED
            assert record.cum_len > record.prompt_len
            after = await rollout.open(Dialect.CHAT, "Go on")
            await after.has("yyy")
            await after.drop()
            await rollout.settled(2)

    run(main())


@dialects
def test_many_clients_go_away_at_once(tmp_path: Path, dialect: Dialect) -> None:
    # A harness that is killed drops all its connections together.
    async def main() -> None:
        engine = engine_of({"content": LONG, "gap_s": 0.3}, scale_out=False)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            opened = await asyncio.gather(*(rollout.open(dialect, f"number {n}") for n in range(20)))
            await asyncio.gather(*(stream.drop() for stream in opened))
            records = await rollout.settled(20)
            assert {record.unusable_reason for record in records} == {Code.ABORTED}
            assert rollout.capture().lost == ()
            stream = await rollout.open(dialect)
            await stream.has("one")
            assert not saw_finish(dialect, stream.so_far)
            await stream.drop()
            await rollout.settled(21)
            rollout.sound()

    run(main())
