"""When a client is told what: events as they come, the finish not before the record is durable."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import Code
from gristmill.ledger.writes import AdmitAll, Commit
from gristmill.records import Dialect, ItemKind
from tests.gateway.running import (
    DIALECTS,
    DONE,
    Answer,
    Asked,
    HandEngine,
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

dialects = pytest.mark.parametrize("dialect", DIALECTS)
streams = pytest.mark.parametrize("stream", [False, True])
TOOL = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS: dict[Dialect, Any] = {
    Dialect.CHAT: [{"type": "function", "function": {"name": "read", "parameters": TOOL}}],
    Dialect.RESPONSES: [{"type": "function", "name": "read", "parameters": TOOL}],
    Dialect.MESSAGES: [{"name": "read", "input_schema": TOOL}],
}


@dialects
def test_an_event_is_passed_on_before_the_next_is_there(tmp_path: Path, dialect: Dialect) -> None:
    # A user who watches an agent type would see nothing until the reply is complete.
    async def main() -> None:
        seen_by_client = asyncio.Event()

        async def play(seen: Asked, wire: Wire) -> None:
            await wire.stream()
            await wire.piece(piece(seen, prompt=[1, 2]))
            await wire.piece(piece(seen, "first ", [5]))
            await seen_by_client.wait()
            await wire.piece(piece(seen, "second", [6], finish="stop") + usage(2, 2) + DONE)
            await wire.end()

        async with HandEngine(play) as engine, gateway(tmp_path, engine.url, measured=False) as running:
            rollout = await running.begin()
            stream = await rollout.open(dialect)
            await stream.has("first ")
            seen_by_client.set()
            answer = await stream.whole()
            assert spoken(dialect, answer) == "first second"
            assert saw_finish(dialect, answer)

    run(main())


@dialects
def test_no_finish_before_the_record(tmp_path: Path, dialect: Dialect) -> None:
    # A harness that was told "done" runs a tool; if the record then is not written, the rollout trains on a gap.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            disk = running.disk(Commit)
            stream = await rollout.open(dialect)
            await disk.holds(1)
            await until(lambda: spoken(dialect, stream.so_far) == "Hello there.")
            assert not saw_finish(dialect, stream.so_far)
            assert not stream.ended
            assert rollout.records() == ()
            disk.release()
            answer = await stream.whole()
            assert len(rollout.records()) == 1
            assert saw_finish(dialect, answer)
            assert spoken(dialect, answer) == "Hello there."

    run(main())


@dialects
def test_no_body_before_the_record(tmp_path: Path, dialect: Dialect) -> None:
    # The same for a client that does not stream: no byte of the answer may be sent.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            disk = running.disk(Commit)
            asking = asyncio.create_task(rollout.ask(dialect))
            await disk.holds(1)
            assert not asking.done()
            disk.release()
            answer = await asking
            assert saw_finish(dialect, answer)
            assert len(rollout.records()) == 1

    run(main())


@pytest.mark.parametrize("dialect", TOOLS)
def test_no_tool_call_ends_before_the_record(tmp_path: Path, dialect: Dialect) -> None:
    # Some harnesses run a tool as soon as its call is complete, without waiting for the reply's end.
    ends = {
        Dialect.CHAT: 'tool_calls"}',
        Dialect.RESPONSES: "response.output_item.done",
        Dialect.MESSAGES: "content_block_stop",
    }

    async def main() -> None:
        engine = engine_of({"tool_calls": [{"name": "read", "arguments": {"path": "mill.txt"}}]})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            disk = running.disk(Commit)
            stream = await rollout.open(dialect, tools=TOOLS[dialect])
            await disk.holds(1)
            await stream.has("read")
            assert ends[dialect].encode() not in stream.so_far.raw
            assert not saw_finish(dialect, stream.so_far)
            disk.release()
            answer = await stream.whole()
            assert saw_finish(dialect, answer)
            record = rollout.records()[0]
            assert record.output_items[-1].kind is ItemKind.TOOL_CALL
            assert json.loads(arguments(dialect, answer)) == {"path": "mill.txt"}

    run(main())


def arguments(dialect: Dialect, answer: Answer) -> str:
    """Return the arguments of the call that a stream holds."""
    said: list[str] = []
    for event in answer.events:
        match dialect:
            case Dialect.RESPONSES:
                said.append(event["delta"] if event["type"] == "response.function_call_arguments.delta" else "")
            case Dialect.MESSAGES:
                said.append(event.get("delta", {}).get("partial_json", ""))
            case _:
                deltas = [choice["delta"] for choice in event["choices"]]
                said.extend(
                    call["function"].get("arguments", "") for delta in deltas for call in delta.get("tool_calls") or []
                )
    return "".join(said)


def finishes(answer: Answer) -> list[int]:
    """Return which choices were finished, in order."""
    choices = [choice for event in answer.events for choice in event.get("choices", [])]
    return [choice["index"] for choice in choices if choice.get("finish_reason")]


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.COMPLETIONS])
def test_of_two_choices_only_the_last_finish_is_held(tmp_path: Path, dialect: Dialect) -> None:
    # Holding the first finish would make a client wait for nothing; passing the last would tell it too early.
    async def main() -> None:
        go = asyncio.Event()

        async def play(seen: Asked, wire: Wire) -> None:
            await wire.stream()
            for index in (0, 1):
                await wire.piece(piece(seen, prompt=[1, 2], index=index))
                await wire.piece(piece(seen, f"choice {index}", [5], index=index))
            await wire.piece(piece(seen, "", [9], index=1, finish="stop"))
            await go.wait()
            await wire.piece(piece(seen, "", [9], index=0, finish="length") + usage(2, 4) + DONE)
            await wire.end()

        async with HandEngine(play) as engine, gateway(tmp_path, engine.url, measured=False) as running:
            rollout = await running.begin()
            disk = running.disk(Commit)
            stream = await rollout.open(dialect, n=2)
            await until(lambda: finishes(stream.so_far) == [1])
            go.set()
            await disk.holds(1)
            assert finishes(stream.so_far) == [1]
            disk.release()
            answer = await stream.whole()
            assert finishes(answer) == [1, 0]
            records = await rollout.settled(2)
            assert [record.choice_index for record in records] == [0, 1]
            assert [record.finish_reason for record in records] == ["length", "stop"]
            assert all(record.usable for record in records)
            rollout.sound()

    run(main())


@streams
@dialects
def test_a_reply_that_cannot_be_kept_is_withheld(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # A reply that the harness acts on but the ledger does not have makes the rollout's reward a lie.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            disk = running.disk(Commit)
            disk.refuse(1)
            answer = await rollout.ask(dialect, stream=stream)
            assert answer.status == (200 if stream else 503)
            assert not saw_finish(dialect, answer)
            error = error_of(dialect, answer)
            if stream and dialect is not Dialect.RESPONSES:
                # Every harness asks again after a broken stream; some take an error event for the end of all.
                assert answer.cut
                assert error is None
            else:
                assert error is not None
                assert "durable" in error["message"]
            if not stream:
                assert error is not None
                assert answer.headers["retry-after"] == "1"
                assert error["code"] == Code.NOT_DURABLE
            await running.idle()
            capture = rollout.capture()
            assert capture.records == ()
            assert [lost.model_call_id for lost in capture.lost] == [answer.call_id]
            assert running.metric("calls_total", dialect=str(dialect), outcome="not_durable") == 1
            after = await rollout.ask(dialect, "Go on", stream=stream)
            assert saw_finish(dialect, after)
            await rollout.settled(1)
            rollout.sound()

    run(main())


@streams
@dialects
def test_a_call_that_cannot_be_admitted_never_reaches_the_engine(
    tmp_path: Path, dialect: Dialect, stream: bool
) -> None:
    # A call that was served without an intent would be missing from the rollout without a trace.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            disk = running.disk(AdmitAll)
            disk.refuse(1)
            answer = await rollout.ask(dialect, stream=stream)
            assert answer.status == 503
            assert answer.headers["retry-after"] == "1"
            assert error_of(dialect, answer) is not None
            assert sampled(engine) == []
            assert rollout.capture().records == rollout.capture().lost == ()
            after = await rollout.ask(dialect, stream=stream)
            assert saw_finish(dialect, after)
            await rollout.settled(1)

    run(main())


@dialects
def test_the_end_is_done_not_the_connection(tmp_path: Path, dialect: Dialect) -> None:
    # A proxy that keeps its connection open after the last event would make every call hang.
    async def main() -> None:
        over = asyncio.Event()

        async def play(seen: Asked, wire: Wire) -> None:
            await wire.stream()
            await wire.piece(piece(seen, prompt=[1, 2]) + piece(seen, "hi", [5], finish="stop") + usage(2, 1) + DONE)
            await over.wait()
            await wire.end()

        async with HandEngine(play) as engine, gateway(tmp_path, engine.url, measured=False) as running:
            rollout = await running.begin()
            stream = await rollout.open(dialect)
            answer = await stream.whole()
            over.set()
            assert saw_finish(dialect, answer)
            [record] = await rollout.settled(1)
            assert record.usable

    run(main())


@dialects
def test_what_comes_after_the_end_is_ignored(tmp_path: Path, dialect: Dialect) -> None:
    # An engine that goes on after its own end would otherwise add to a reply that is complete.
    async def main() -> None:
        async def play(seen: Asked, wire: Wire) -> None:
            await wire.stream()
            end = piece(seen, "hi", [5], finish="stop") + usage(2, 1) + DONE
            await wire.piece(piece(seen, prompt=[1, 2]) + end + piece(seen, "more", [6]) + DONE)
            await wire.end()

        async with HandEngine(play) as engine, gateway(tmp_path, engine.url, measured=False) as running:
            rollout = await running.begin()
            answer = await rollout.ask(dialect, stream=True)
            assert spoken(dialect, answer) == "hi"
            [record] = await rollout.settled(1)
            assert record.usable
            assert record.cum_len - record.prompt_len == 1

    run(main())


@dialects
def test_events_that_are_cut_anywhere(tmp_path: Path, dialect: Dialect) -> None:
    # Networks cut where they like: in a line, in a character, between two events.
    async def main() -> None:
        async def play(seen: Asked, wire: Wire) -> None:
            await wire.stream()
            whole = piece(seen, prompt=[1, 2]) + piece(seen, "Mühle → ", [5]) + b": a comment\n\n"
            whole = (whole + piece(seen, "läuft", [6], finish="stop") + usage(2, 2) + DONE).replace(b"\n", b"\r\n")
            for at in range(0, len(whole), 7):
                await wire.piece(whole[at : at + 7])
            await wire.end()

        async with HandEngine(play) as engine, gateway(tmp_path, engine.url, measured=False) as running:
            rollout = await running.begin()
            answer = await rollout.ask(dialect, stream=True)
            assert spoken(dialect, answer) == "Mühle → läuft"
            [record] = await rollout.settled(1)
            assert record.usable

    run(main())
