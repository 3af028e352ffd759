"""Connections to engines: what is sent, how an answer comes back, and what every failure is called."""

from __future__ import annotations

import asyncio
import gzip
import socket
import time

import pytest

from gristmill.gateway.upstream.client import Client, Reply
from gristmill.gateway.upstream.protocol import Ask, UpstreamError, UpstreamFault
from gristmill.gateway.upstream.spec import UpstreamSettings, UpstreamSpec
from tests.gateway.upstream.wire import FakeEngine, Seen, Wire, running, until

CHAT = Ask("/v1/chat/completions", {"model": "m"}, {"x-request-id": "c-1"})
PATIENT = UpstreamSettings()
QUICK = UpstreamSettings(idle_timeout_s=0.05, connect_timeout_s=2.0)


async def well() -> bool:
    return True


async def unwell() -> bool:
    return False


async def opened(client: Client, engine: FakeEngine, ask: Ask = CHAT, key: str | None = None) -> Reply:
    return await client.open(UpstreamSpec(engine.url, api_key=key), ask, well)


async def fault_of(client: Client, engine: FakeEngine, **options: object) -> UpstreamError:
    """Send a request, read its answer, and return the error that this ends in."""
    try:
        reply = await client.open(UpstreamSpec(engine.url), CHAT, options.get("alive", well))
        body = await reply.read()
    except UpstreamError as error:
        return error
    pytest.fail(f"expected an error, got {body!r}")


def test_only_our_own_headers_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header too many can switch something on in the engine, or carry a secret to it."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", "/nonexistent")

    async def main() -> None:
        async with FakeEngine() as engine, Client(PATIENT) as client:
            engine.says(CHAT.path, {"ok": True}, set_cookie="a=b; Path=/", server="uvicorn", x_other="1")
            first = await opened(client, engine, key="sk-1")
            assert await first.read() == b'{"ok": true}'
            assert dict(first.headers) == {"content-type": "application/json", "server": "uvicorn"}
            await (await opened(client, engine)).read()
            with_key, without = engine.seen
            assert with_key.headers == {
                "host": f"127.0.0.1:{engine.port}",
                "accept": "*/*",
                "accept-encoding": "identity",
                "user-agent": "gristmill",
                "content-type": "application/json",
                "x-request-id": "c-1",
                "authorization": "Bearer sk-1",
                "content-length": "13",
            }
            assert "authorization" not in without.headers
            assert "cookie" not in without.headers

    running(main())


def test_a_large_body_arrives_whole() -> None:
    """Long contexts are megabytes; one that is cut or refused ends the rollout."""

    async def main() -> None:
        async with FakeEngine() as engine, Client(PATIENT) as client:
            engine.says(CHAT.path, {})
            text = "é" * 2_000_000
            await (await opened(client, engine, Ask(CHAT.path, {"text": text, "odd": "\ud800"}))).read()
            await (await opened(client, engine, Ask(CHAT.path, {"text": text}))).read()
            assert [seen.body["text"] == text for seen in engine.seen] == [True, True]
            assert engine.seen[0].body["odd"] == "\ud800"

    running(main())


def test_pieces_come_as_they_arrive() -> None:
    """A client sees tokens while they are sampled, not when the answer is over."""

    async def main() -> None:
        go_on = asyncio.Event()

        async def slowly(_: Seen, wire: Wire) -> None:
            await wire.stream()
            await wire.piece(b"data: 1\n\n")
            await go_on.wait()
            await wire.piece(b"data: 2\n\n")
            await wire.end()

        async with FakeEngine() as engine, Client(PATIENT) as client:
            engine.on(CHAT.path, slowly)
            reply = await opened(client, engine)
            pieces = list[bytes]()
            async for piece in reply.pieces():
                pieces.append(piece)
                go_on.set()
            assert pieces == [b"data: 1\n\n", b"data: 2\n\n"]

    running(main())


def test_connections_are_used_again_and_dropped_when_an_answer_is_not_wanted() -> None:
    """A connection a call costs time; an unread answer must reach the engine as a disconnect, so that it stops."""

    async def main() -> None:
        gone = asyncio.Event()

        async def endlessly(_: Seen, wire: Wire) -> None:
            try:
                await wire.stream()
                while True:
                    await wire.piece(b"data: more\n\n")
                    await asyncio.sleep(0)
            except ConnectionError:
                gone.set()
                raise

        async with FakeEngine() as engine, Client(PATIENT) as client:
            engine.says(CHAT.path, {})
            for _ in range(3):
                reply = await opened(client, engine)
                await reply.read()
                await reply.close()
            assert engine.connections == 1
            engine.on(CHAT.path, endlessly)
            reply = await opened(client, engine)
            async for _ in reply.pieces():
                break
            await reply.close()
            await gone.wait()

    running(main())


def test_a_caller_that_gives_up_before_the_head_disconnects() -> None:
    """A harness that hung up must not leave its generation running."""

    async def main() -> None:
        gone = asyncio.Event()

        async def never(_: Seen, wire: Wire) -> None:
            assert await wire.reader.read(1) == b""
            gone.set()

        async with FakeEngine() as engine, Client(PATIENT) as client:
            engine.on(CHAT.path, never)
            waiting = asyncio.create_task(opened(client, engine))
            await until(lambda: bool(engine.seen))
            waiting.cancel()
            await gone.wait()

    running(main())


def test_an_unreachable_engine_is_called_so() -> None:
    """What to do about it differs: start the engine, rather than look at its log."""

    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            # Bound and not listening: refused.
            engine = FakeEngine(taken.getsockname()[1])
            async with Client(QUICK) as client:
                error = await fault_of(client, engine)
                assert error.fault is UpstreamFault.UNREACHABLE
                assert "cannot connect" in error.message

    running(main())


async def _close(_: Seen, wire: Wire) -> None:
    wire.close()


async def _reset(_: Seen, wire: Wire) -> None:
    wire.reset()


async def _cut_body(_: Seen, wire: Wire) -> None:
    await wire.head(200, content_length="100")
    await wire.send(b"half")
    wire.close()


async def _cut_stream(_: Seen, wire: Wire) -> None:
    await wire.stream()
    await wire.piece(b"data: 1\n\n")
    wire.close()


async def _no_http(_: Seen, wire: Wire) -> None:
    await wire.send(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")
    wire.close()


async def _redirect(_: Seen, wire: Wire) -> None:
    await wire.json({}, 307, location="http://127.0.0.1:1/elsewhere")


async def _zipped(_: Seen, wire: Wire) -> None:
    body = gzip.compress(b"{}")
    await wire.head(200, content_length=str(len(body)), content_encoding="gzip")
    await wire.send(body)


@pytest.mark.parametrize(
    ("handler", "fault"),
    [
        (_close, UpstreamFault.RESET),
        (_reset, UpstreamFault.RESET),
        (_cut_body, UpstreamFault.RESET),
        (_cut_stream, UpstreamFault.RESET),
        (_no_http, UpstreamFault.PROTOCOL),
        (_redirect, UpstreamFault.PROTOCOL),
        (_zipped, UpstreamFault.PROTOCOL),
    ],
)
def test_every_failure_has_its_name(handler: object, fault: UpstreamFault) -> None:
    """An answer that broke off must never be taken for a whole one, nor a redirect lead a key elsewhere."""

    async def main() -> None:
        async with FakeEngine() as engine, Client(PATIENT) as client:
            engine.on(CHAT.path, handler)
            error = await fault_of(client, engine)
            assert error.fault is fault, error.message
            assert len(engine.seen) == 1, "a request that may have sampled was sent again"

    running(main())


def test_a_request_into_a_connection_that_closes_is_not_sent_again() -> None:
    """The engine may have begun to sample it: whether to try again is for the harness to say, which knows it did."""

    async def main() -> None:
        async def second_closes(_: Seen, wire: Wire) -> None:
            if len(engine.seen) == 1:
                await wire.json({})
            else:
                wire.close()

        async with FakeEngine() as engine, Client(PATIENT) as client:
            engine.on(CHAT.path, second_closes)
            await (await opened(client, engine)).read()
            error = await fault_of(client, engine)
            assert error.fault is UpstreamFault.RESET
            assert [seen.connection for seen in engine.seen] == [1, 1]

    running(main())


def test_what_came_before_a_break_is_handed_out() -> None:
    """The tokens of a cut stream were sampled; they are recorded as far as they came."""

    async def main() -> None:
        cut = asyncio.Event()

        async def later(_: Seen, wire: Wire) -> None:
            await wire.stream()
            await wire.piece(b"data: 1\n\n")
            await cut.wait()
            wire.close()

        async with FakeEngine() as engine, Client(PATIENT) as client:
            engine.on(CHAT.path, later)
            reply = await opened(client, engine)
            pieces = reply.pieces()
            assert await anext(pieces) == b"data: 1\n\n"
            cut.set()
            with pytest.raises(UpstreamError) as caught:
                await anext(pieces)
            assert caught.value.fault is UpstreamFault.RESET

    running(main())


@pytest.mark.parametrize("reset", [False, True])
def test_what_came_in_the_same_moment_as_a_break_is_handed_out(reset: bool) -> None:
    """A killed engine sends its last tokens and its end at once; whoever reads a moment later must get both."""

    async def main() -> None:
        async def at_once(_: Seen, wire: Wire) -> None:
            await wire.stream()
            for number in range(3):
                await wire.piece(f"data: {number}\n\n".encode())
            await until(lambda: received(reply) == 27)
            if reset:
                wire.reset()
            else:
                wire.close()

        def received(reply: Reply | None) -> int:
            return 0 if reply is None else reply._content.total_bytes

        reply: Reply | None = None
        async with FakeEngine() as engine, Client(PATIENT) as client:
            engine.on(CHAT.path, at_once)
            reply = await opened(client, engine)
            await until(lambda: reply._content.exception() is not None)
            pieces = reply.pieces()
            assert await anext(pieces) == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
            with pytest.raises(UpstreamError) as caught:
                await anext(pieces)
            assert caught.value.fault is UpstreamFault.RESET

    running(main())


def test_a_silent_engine_that_is_well_is_waited_for() -> None:
    """A paused engine sends nothing for minutes, and goes on when the weights are in."""

    async def main() -> None:
        asked = 0

        async def alive() -> bool:
            nonlocal asked
            asked += 1
            return True

        async def paused(_: Seen, wire: Wire) -> None:
            await until(lambda: asked >= 2)
            await wire.stream()
            await wire.piece(b"data: 1\n\n")
            await until(lambda: asked >= 4)
            await wire.piece(b"data: 2\n\n")
            await wire.end()

        async with FakeEngine() as engine, Client(QUICK) as client:
            engine.on(CHAT.path, paused)
            reply = await client.open(UpstreamSpec(engine.url), CHAT, alive)
            assert await reply.read() == b"data: 1\n\ndata: 2\n\n"

    running(main())


@pytest.mark.parametrize("begun", [False, True])
def test_a_silent_engine_that_is_not_well_is_given_up(begun: bool) -> None:
    """vLLM after SIGTERM sends neither an error nor an end: without this a harness waits for ever."""

    async def main() -> None:
        async def silent(_: Seen, wire: Wire) -> None:
            if begun:
                await wire.stream()
                await wire.piece(b"data: 1\n\n")
            await asyncio.Event().wait()

        async with FakeEngine() as engine, Client(QUICK) as client:
            engine.on(CHAT.path, silent)
            error = await fault_of(client, engine, alive=unwell)
            assert error.fault is UpstreamFault.SILENT

    running(main())


def test_bytes_that_come_during_the_check_count() -> None:
    """An engine that answers at last must not be given up because its health check was slower."""

    async def main() -> None:
        checking = asyncio.Event()

        async def alive() -> bool:
            checking.set()
            await until(lambda: sent)
            return False

        sent = False

        async def late(_: Seen, wire: Wire) -> None:
            nonlocal sent
            await wire.stream()
            await wire.piece(b"data: 1\n\n")
            await checking.wait()
            await wire.piece(b"data: 2\n\n")
            await wire.end()
            sent = True
            await asyncio.sleep(0)

        async with FakeEngine() as engine, Client(QUICK) as client:
            engine.on(CHAT.path, late)
            reply = await client.open(UpstreamSpec(engine.url), CHAT, alive)
            assert await reply.read() == b"data: 1\n\ndata: 2\n\n"

    running(main())


def test_a_slow_reader_is_no_silent_engine() -> None:
    """A client that reads slowly would otherwise lose its call, and the engine its good name."""

    async def main() -> None:
        async def two(_: Seen, wire: Wire) -> None:
            await wire.stream()
            await wire.piece(b"data: 1\n\n")
            await wire.piece(b"data: 2\n\n")
            await wire.end()

        async with FakeEngine() as engine, Client(QUICK) as client:
            engine.on(CHAT.path, two)
            reply = await client.open(UpstreamSpec(engine.url), CHAT, unwell)
            got = b""
            async for piece in reply.pieces():
                got += piece
                await asyncio.sleep(3 * QUICK.idle_timeout_s)
            assert got == b"data: 1\n\ndata: 2\n\n"

    running(main())


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_without_end_is_stopped(streamed: bool) -> None:
    """One broken engine must not take the memory of all rollouts."""

    async def main() -> None:
        async def endless(_: Seen, wire: Wire) -> None:
            if streamed:
                await wire.stream()
            else:
                await wire.head(200, content_length="1000000000")
            while True:
                await (wire.piece if streamed else wire.send)(b"x" * 1000)

        settings = UpstreamSettings(reply_limit_bytes=100_000)
        async with FakeEngine() as engine, Client(settings) as client:
            engine.on(CHAT.path, endless)
            error = await fault_of(client, engine)
            assert error.fault is UpstreamFault.OVERSIZED
            assert "100,000" in error.message

    running(main())


def test_an_idle_connection_is_closed_before_the_engine_does_it() -> None:
    """uvicorn closes after 5 s: a request sent into a closing connection fails though the engine is well."""

    async def main() -> None:
        settings = UpstreamSettings(keepalive_s=0.05)
        async with FakeEngine() as engine, Client(settings) as client:
            engine.says(CHAT.path, {})
            await (await opened(client, engine)).read()
            deadline = time.monotonic() + 0.15
            await until(lambda: time.monotonic() > deadline)
            await (await opened(client, engine)).read()
            assert [seen.connection for seen in engine.seen] == [1, 2]

    running(main())


def test_a_connection_that_the_engine_closed_is_not_used_again() -> None:
    """An engine that restarts closes every idle connection; the next call must open a new one, not fail."""

    async def main() -> None:
        async def once(_: Seen, wire: Wire) -> None:
            await wire.json({})
            wire.close()

        async with FakeEngine() as engine, Client(PATIENT) as client:
            engine.on(CHAT.path, once)
            for number in range(1, 4):
                await (await opened(client, engine)).read()
                assert engine.connections == number
                idle = [one for kept in client._session.connector._conns.values() for one, _ in kept]
                await until(lambda idle=idle: not any(one.is_connected() for one in idle))

    running(main())


def test_answers_of_small_requests_come_within_their_time() -> None:
    """A health check that hangs would itself be the silence it is meant to find."""

    async def main() -> None:
        async def hangs(_: Seen, wire: Wire) -> None:
            await asyncio.Event().wait()

        async with FakeEngine() as engine, Client(PATIENT) as client:
            engine.on("/health", hangs)
            engine.says("/version", {"version": "1"})
            spec = UpstreamSpec(engine.url)
            with pytest.raises(UpstreamError) as caught:
                await client.answer(spec, Ask("/health", method="GET"), 0.05)
            assert caught.value.fault is UpstreamFault.SILENT
            answer = await client.answer(spec, Ask("/version", method="GET"), 5.0)
            assert (answer.status, answer.body) == (200, b'{"version": "1"}')
            assert engine.seen[-1].method == "GET"

    running(main())
