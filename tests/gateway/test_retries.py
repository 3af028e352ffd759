"""Retries: a reply that never arrived is given again; whatever else is asked twice is a call of its own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.ledger.writes import Commit
from gristmill.records import CallRecord, Delivery, Dialect
from tests.gateway.running import (
    DIALECTS,
    DONE,
    PATHS,
    Answer,
    Asked,
    HandEngine,
    Rollout,
    Running,
    Wire,
    body_of,
    engine_of,
    gateway,
    piece,
    run,
    sampled,
    saw_finish,
    spoken,
    usage,
)
from tests.gateway.test_streaming import TOOLS, arguments

TRIES = {"reply": [{"content": "First reply."}, {"content": "Second reply."}, {"content": "Third reply."}]}
MARK = {"x-stainless-retry-count": "1"}

dialects = pytest.mark.parametrize("dialect", DIALECTS)
streams = pytest.mark.parametrize("stream", [False, True])


async def undelivered(
    running: Running, rollout: Rollout, dialect: Dialect, *, stream: bool = True, **fields: Any
) -> CallRecord:
    """Make a call whose client is gone before the record is durable, and return the record."""
    before = {record.model_call_id for record in rollout.records()}
    disk = running.disk(Commit)
    body = body_of(dialect, stream=stream, **fields)
    asking = asyncio.create_task(rollout.post(PATHS[dialect], body))
    await disk.holds(1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await running.alone()
    disk.release()
    await running.idle()
    new = [record for record in rollout.records() if record.model_call_id not in before]
    assert new[0].delivery in {Delivery.PARTIAL, Delivery.ABORTED}
    return new[0]


def replayed(answer: Answer, record: CallRecord) -> bool:
    """Tell whether an answer came from a record; one that did not must have an id of its own."""
    if answer.call_id != record.model_call_id:
        assert record.response_id.encode() not in answer.raw
        return False
    assert answer.headers["x-gristmill-notes"].startswith("replayed:")
    assert record.response_id.encode() in answer.raw
    return True


@streams
@dialects
def test_a_marked_retry_gets_the_reply_that_never_arrived(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # Sampled again, the rollout would have a call whose reply nobody saw, and count its tokens twice.
    async def main() -> None:
        engine = engine_of(TRIES)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            record = await undelivered(running, rollout, dialect, stream=stream)
            answer = await rollout.ask(dialect, stream=stream, headers=MARK)
            assert replayed(answer, record)
            assert answer.streamed is stream
            assert spoken(dialect, answer) == "First reply."
            assert saw_finish(dialect, answer)
            assert len(sampled(engine)) == 1
            await running.idle()
            assert running.metric("replays_total") == 1
            [after] = rollout.records()
            assert after.delivery is Delivery.DELIVERED
            again = await rollout.ask(dialect, stream=stream, headers=MARK)
            assert not replayed(again, record)
            assert spoken(dialect, again) == "Second reply."
            await rollout.settled(2)
            assert rollout.record(again.call_id).retry_of == record.model_call_id
            rollout.sound()

    run(main())


@dialects
def test_a_body_after_a_stream_is_a_retry(tmp_path: Path, dialect: Dialect) -> None:
    # Claude Code falls back to a body after a broken stream, and its retry count stays 0.
    async def main() -> None:
        engine = engine_of(TRIES)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            record = await undelivered(running, rollout, dialect, stream=True)
            answer = await rollout.ask(dialect, headers={"x-stainless-retry-count": "0"})
            assert replayed(answer, record)
            assert spoken(dialect, answer) == "First reply."
            assert len(sampled(engine)) == 1

    run(main())


@streams
@dialects
def test_what_is_not_marked_is_a_new_call(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # A harness that samples the same question twice wants two answers.
    async def main() -> None:
        engine = engine_of(TRIES)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            record = await undelivered(running, rollout, dialect, stream=stream)
            answer = await rollout.ask(dialect, stream=stream, headers={"x-stainless-retry-count": "0"})
            assert not replayed(answer, record)
            assert spoken(dialect, answer) == "Second reply."
            last = await rollout.ask(dialect, stream=stream)
            await rollout.settled(3)
            assert rollout.record(answer.call_id).retry_of == record.model_call_id
            assert rollout.record(last.call_id).retry_of == answer.call_id
            rollout.sound()

    run(main())


@dialects
def test_a_delivered_reply_is_not_given_again(tmp_path: Path, dialect: Dialect) -> None:
    # The harness has it and asks for another one.
    async def main() -> None:
        engine = engine_of(TRIES)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            first = await rollout.ask(dialect, stream=True)
            await rollout.settled(1)
            record = rollout.record(first.call_id)
            assert record.delivery is Delivery.DELIVERED
            for stream, headers in ((True, MARK), (False, MARK), (False, {})):
                answer = await rollout.ask(dialect, stream=stream, headers=headers)
                assert not replayed(answer, record)
            await rollout.settled(4)
            assert len(sampled(engine)) == 4

    run(main())


def test_of_two_that_fit_none_is_given(tmp_path: Path) -> None:
    # Which of the two the harness asks for again cannot be known.
    async def main() -> None:
        engine = engine_of(TRIES)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            one = await undelivered(running, rollout, Dialect.CHAT)
            other = await undelivered(running, rollout, Dialect.CHAT)
            answer = await rollout.ask(Dialect.CHAT, headers=MARK)
            assert not replayed(answer, one)
            assert not replayed(answer, other)
            assert spoken(Dialect.CHAT, answer) == "Third reply."
            await rollout.settled(3)
            assert rollout.record(answer.call_id).retry_of == other.model_call_id

    run(main())


@dialects
def test_another_request_is_not_a_retry(tmp_path: Path, dialect: Dialect) -> None:
    # One character of difference is another question, and another conversation asks for itself.
    async def main() -> None:
        engine = engine_of(TRIES)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            record = await undelivered(running, rollout, dialect)
            others: list[tuple[dict[str, Any], dict[str, str]]] = [
                ({"temperature": 0.5}, {}),
                ({"model": "other"}, {}),
                ({"max_tokens": 65, "max_output_tokens": 65}, {}),
                ({"tools": TOOLS[dialect]} if dialect in TOOLS else {"stop": ["x"]}, {}),
                ({}, {"x-session-id": "another"}),
            ]
            for fields, headers in others:
                answer = await rollout.ask(dialect, headers={**MARK, **headers}, **fields)
                assert not replayed(answer, record), fields
                await running.idle()
                assert rollout.record(answer.call_id).retry_of is None, fields
            text = await rollout.ask(dialect, "Say hello!", headers=MARK)
            assert not replayed(text, record)
            stranger = await running.begin("other")
            answer = await stranger.ask(dialect, headers=MARK)
            assert not replayed(answer, record)
            assert stranger.records()[0].retry_of is None

    run(main())


@dialects
def test_bytes_do_not_make_a_request(tmp_path: Path, dialect: Dialect) -> None:
    # Codex writes its keys in another order when it tries again; others space them otherwise.
    async def main() -> None:
        engine = engine_of(TRIES)
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            fields = {"temperature": 0.7, "metadata": {"b": "ü", "a": "x"}}
            record = await undelivered(running, rollout, dialect, **fields)
            body = body_of(dialect, stream=True, **{**fields, "metadata": {"a": "x", "b": "ü"}})
            turned = dict(reversed(body.items()))
            data = json.dumps(turned, indent=1, ensure_ascii=False).replace("0.7", "7.0e-1").encode()
            answer = await rollout.post(PATHS[dialect], data, headers=MARK)
            assert replayed(answer, record)
            assert spoken(dialect, answer) == "First reply."

    run(main())


@streams
@dialects
def test_a_retry_after_a_restart(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # A gateway that restarts is exactly what makes harnesses try again.
    async def main() -> None:
        engine = engine_of(TRIES)
        async with engine.serve() as url:
            async with gateway(tmp_path, url) as running:
                rollout = await running.begin()
                record = await undelivered(running, rollout, dialect, stream=True)
            async with gateway(tmp_path, url) as running:
                rollout = running.again(rollout)
                answer = await rollout.ask(dialect, stream=stream, headers=MARK if stream else None)
                assert replayed(answer, record)
                assert spoken(dialect, answer) == "First reply."
                await running.idle()
                assert rollout.records()[0].delivery is Delivery.DELIVERED
            async with gateway(tmp_path, url) as running:
                rollout = running.again(rollout)
                again = await rollout.ask(dialect, stream=stream, headers=MARK)
                assert not replayed(again, record)
                await rollout.settled(2)
                assert rollout.record(again.call_id).retry_of == record.model_call_id
                rollout.sound()

    run(main())


def test_what_failed_is_sampled_again(tmp_path: Path) -> None:
    # A reply that the engine never finished is not one to give.
    async def main() -> None:
        broken = {"content": "one two three four", "fault": {"kind": "truncate", "after_chunks": 2}, "gap_s": 0.02}
        engine = engine_of({"reply": [broken, {"content": "Second reply."}]})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            first = await rollout.ask(Dialect.CHAT, stream=True)
            assert first.cut
            await rollout.settled(1)
            answer = await rollout.ask(Dialect.CHAT, headers=MARK)
            assert spoken(Dialect.CHAT, answer) == "Second reply."
            await rollout.settled(2)
            assert rollout.record(answer.call_id).retry_of == first.call_id

    run(main())


def test_without_the_exchange_a_retry_is_a_new_call(tmp_path: Path) -> None:
    # What was not kept cannot be given again; the harness must get an answer all the same.
    async def main() -> None:
        engine = engine_of(TRIES)
        async with engine.serve() as url, gateway(tmp_path, url, keep_exchanges=False) as running:
            rollout = await running.begin()
            record = await undelivered(running, rollout, Dialect.CHAT)
            answer = await rollout.ask(Dialect.CHAT, headers=MARK)
            assert not replayed(answer, record)
            assert spoken(Dialect.CHAT, answer) == "Second reply."
            await rollout.settled(2)

    run(main())


@streams
def test_all_choices_are_given_again(tmp_path: Path, stream: bool) -> None:
    # Half of a reply would be a different one, and the other half would stay undelivered.
    async def main() -> None:
        engine = engine_of({"content": "Choice {{choice}}."})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            record = await undelivered(running, rollout, Dialect.CHAT, stream=stream, n=2)
            answer = await rollout.ask(Dialect.CHAT, stream=stream, headers=MARK, n=2)
            assert replayed(answer, record)
            assert b"Choice 0." in answer.raw
            assert b"Choice 1." in answer.raw
            assert saw_finish(Dialect.CHAT, answer)
            await running.idle()
            assert [each.delivery for each in rollout.records()] == [Delivery.DELIVERED] * 2
            assert len(sampled(engine)) == 1

    run(main())


@pytest.mark.parametrize("dialect", TOOLS)
def test_tool_calls_are_given_again(tmp_path: Path, dialect: Dialect) -> None:
    # A harness that gets other arguments than those recorded runs something that was not sampled.
    async def main() -> None:
        call = {"name": "read", "arguments": {"path": "mill.txt"}}
        engine = engine_of({"content": "I read.", "tool_calls": [call]})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            record = await undelivered(running, rollout, dialect, tools=TOOLS[dialect])
            answer = await rollout.ask(dialect, stream=True, headers=MARK, tools=TOOLS[dialect])
            assert replayed(answer, record)
            assert json.loads(arguments(dialect, answer)) == {"path": "mill.txt"}
            assert "I read." in spoken(dialect, answer)
            assert saw_finish(dialect, answer)

    run(main())


@dialects
def test_a_retry_that_is_cut_too_can_be_asked_again(tmp_path: Path, dialect: Dialect) -> None:
    # A connection that breaks once breaks twice; whoever was never answered must not be told something else.
    async def main() -> None:
        async def play(seen: Asked, wire: Wire) -> None:
            await wire.stream()
            # More than what the system takes on the way; Responses says a text five times.
            text = "long " * (600_000 if dialect is Dialect.RESPONSES else 3_000_000)
            end = piece(seen, prompt=[1, 2]) + piece(seen, text, [5], finish="stop") + usage(2, 1) + DONE
            await wire.piece(end)
            await wire.end()

        async with HandEngine(play) as engine, gateway(tmp_path, engine.url, measured=False) as running:
            rollout = await running.begin()
            record = await undelivered(running, rollout, dialect)
            data = json.dumps(body_of(dialect, stream=True)).encode()
            head = (
                f"POST {PATHS[dialect]} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {rollout.secret}\r\n"
                f"x-stainless-retry-count: 1\r\ncontent-length: {len(data)}\r\n\r\n"
            )
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(head.encode() + data)
            assert record.model_call_id.encode() in await reader.readuntil(b"\r\n\r\n")
            writer.transport.abort()
            await running.alone()
            await running.idle()
            assert rollout.records()[0].delivery is not Delivery.DELIVERED
            answer = await rollout.ask(dialect, stream=True, headers=MARK)
            assert replayed(answer, record)
            assert len(engine.calls) == 1

    run(main())
