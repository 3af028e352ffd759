"""What the gateway holds of an attempt in memory is a cache: nothing comes out otherwise when it is dropped."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from gristmill.errors import Code
from gristmill.gateway.keys import key_digest, mint_key
from gristmill.ledger import AttemptKey, AttemptSetup, SqliteLedger
from gristmill.ledger.writes import Commit
from gristmill.records import Dialect, ParentResolution, Result
from tests.gateway.running import (
    DIALECTS,
    DONE,
    Asked,
    HandEngine,
    Rollout,
    Wire,
    body_of,
    engine_of,
    error_of,
    gateway,
    piece,
    run,
    sampled,
    saw_finish,
    until,
    usage,
)


def followed(text: str, reply: str, more: str) -> list[dict[str, Any]]:
    """Return the messages of a request that goes on after one reply."""
    return [
        {"role": "user", "content": text},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": more},
    ]


def test_a_failed_commit_does_not_split_an_attempt(tmp_path: Path) -> None:
    # The calls that ran when the disk was full for a moment would be strangers to those after it.
    async def main() -> None:
        go = asyncio.Event()

        async def play(seen: Asked, wire: Wire) -> None:
            await wire.stream()
            await wire.piece(piece(seen, prompt=[1, 2]))
            if seen.body["messages"][-1]["content"] == "slow":
                await go.wait()
            await wire.piece(piece(seen, "hi", [5]) + piece(seen, "", [6], finish="stop") + usage(2, 2) + DONE)
            await wire.end()

        async with HandEngine(play) as engine, gateway(tmp_path, engine.url, measured=False) as running:
            rollout = await running.begin()
            attempts = running.gateway.attempts
            slow = await rollout.open(Dialect.CHAT, "slow")
            await until(lambda: len(engine.calls) == 1)
            running.disk(Commit).refuse(1)
            failed = await rollout.ask(Dialect.CHAT, "fails", stream=True)
            assert not saw_finish(Dialect.CHAT, failed)
            assert attempts.in_flight(rollout.key) == 1
            works = await rollout.ask(Dialect.CHAT, "works", stream=True)
            assert saw_finish(Dialect.CHAT, works)
            go.set()
            assert saw_finish(Dialect.CHAT, await slow.whole())
            after = await rollout.ask(Dialect.CHAT, stream=True, messages=followed("slow", "hi", "more"))
            await rollout.settled(3)
            record = rollout.record(after.call_id)
            assert record.parent_call_id == slow.so_far.call_id
            assert record.parent_resolution is ParentResolution.RESOLVED
            assert [lost.model_call_id for lost in rollout.capture().lost] == [failed.call_id]
            rollout.sound()

    run(main())


def test_a_finished_attempt_leaves_memory(tmp_path: Path) -> None:
    # Every rollout of a run would stay in memory, tokens and all, until the gateway has none left.
    async def main() -> None:
        async with engine_of({"content": "hi"}).serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            attempts = running.gateway.attempts
            await rollout.ask(Dialect.CHAT, "one")
            await rollout.settled(1)
            assert attempts.touched_at(rollout.key) is not None
            await attempts.close(rollout.key, drain_s=1.0)
            attempts.forget(rollout.key)
            assert attempts.touched_at(rollout.key) is None

    run(main())


def test_closing_waits_for_calls_from_before_a_failed_commit(tmp_path: Path) -> None:
    # `finish` would return while a call is still running, and its outcome come too late to count.
    async def main() -> None:
        go = asyncio.Event()

        async def play(seen: Asked, wire: Wire) -> None:
            await wire.stream()
            await wire.piece(piece(seen, prompt=[1, 2]))
            if seen.body["messages"][-1]["content"] == "slow":
                await go.wait()
            await wire.piece(piece(seen, "hi", [5]) + piece(seen, "", [6], finish="stop") + usage(2, 2) + DONE)
            await wire.end()

        async with HandEngine(play) as engine, gateway(tmp_path, engine.url, measured=False) as running:
            rollout = await running.begin()
            slow = await rollout.open(Dialect.CHAT, "slow")
            await until(lambda: len(engine.calls) == 1)
            running.disk(Commit).refuse(1)
            await rollout.ask(Dialect.CHAT, "fails", stream=True)
            closing = asyncio.create_task(running.gateway.attempts.close(rollout.key, drain_s=30.0))
            refused = await rollout.ask(Dialect.CHAT, "too late")
            assert refused.status == 409
            assert not closing.done()
            go.set()
            assert await closing == 0
            assert saw_finish(Dialect.CHAT, await slow.whole())
            [record] = await rollout.settled(1)
            assert record.usable

    run(main())


def test_a_rollout_is_not_evicted_under_a_request(tmp_path: Path) -> None:
    # A slow upload would come back to an attempt that the gateway has forgotten, and write its call beside it.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."})
        async with engine.serve() as url, gateway(tmp_path, url, max_attempts_in_memory=1) as running:
            slow, other = await running.begin("slow"), await running.begin("other")
            await running.begin("third")
            body = json.dumps(body_of(Dialect.CHAT, "first")).encode()
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {slow.secret}\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(head.encode() + body[:9])
            await until(lambda: running.metric("calls_in_flight") == 1)
            await other.ask(Dialect.CHAT)
            second = await slow.ask(Dialect.CHAT, "second")
            writer.write(body[9:])
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 200")
            after = await slow.ask(Dialect.CHAT, messages=followed("first", "Hello there.", "third"))
            records = await slow.settled(3)
            [first] = {record.model_call_id for record in records} - {second.call_id, after.call_id}
            assert slow.record(after.call_id).parent_call_id == first
            slow.sound()

    run(main())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_shutdown_aborts_what_still_runs(tmp_path: Path, dialect: Dialect) -> None:
    # A harness that is told "your rollout was finished" gives up; told "unavailable" it asks again.
    async def main() -> None:
        engine = engine_of({"content": "one two three four five six seven eight nine ten", "gap_s": 0.5})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            asking = asyncio.create_task(rollout.ask(dialect))
            stream = await rollout.open(dialect, "Say more.")
            await until(lambda: len(sampled(engine)) == 2)
            assert await running.gateway.attempts.close_all(drain_s=0.01) == 2
            answer, told = await asking, await stream.whole()
            assert answer.status == 503
            assert answer.headers["retry-after"] == "1"
            error = error_of(dialect, answer)
            assert error is not None
            assert "shut down" in error["message"]
            assert not saw_finish(dialect, answer)
            assert not saw_finish(dialect, told)
            records = await rollout.settled(2)
            assert {record.unusable_reason for record in records} == {Code.ABORTED}
            assert all("shut down" in (record.unusable_detail or "") for record in records)
            assert all(record.cum_len > record.prompt_len > 0 for record in records)
            rollout.sound()

    run(main())


# ---- restarts --------------------------------------------------------------------------------------------------------


class Said(NamedTuple):
    """One request of a tree: what it continues, and what it asks; `again` repeats another request."""

    dialect: Dialect
    after: int | None
    text: str
    stream: bool
    again: int | None


def tree(seed: int, calls: int) -> list[Said]:
    """Return a random tree of conversations, with requests that are asked twice."""
    rng = random.Random(seed)
    said: list[Said] = []
    for number in range(calls):
        dialect = rng.choice((Dialect.CHAT, Dialect.RESPONSES, Dialect.MESSAGES))
        if said and rng.random() < 0.2:
            again = rng.randrange(number)
            said.append(said[again]._replace(stream=rng.random() < 0.5, again=again))
            continue
        after = rng.randrange(number) if said and rng.random() < 0.8 else None
        said.append(
            Said(
                dialect,
                after,
                rng.choice(("go on", *(f"{word} {number}" for word in ("then", "and", "now", "but")))),
                rng.random() < 0.5,
                None,
            )
        )
    return said


def conversation(said: list[Said], number: int) -> list[dict[str, Any]]:
    """Return the messages of a request: those of what it continues, the reply to it, and its own text."""
    one = said[number]
    earlier: list[dict[str, Any]] = []
    if one.after is not None:
        earlier = conversation(said, one.after)
        earlier = [*earlier, {"role": "assistant", "content": f"Reply to {earlier[-1]['content']}."}]
    return [*earlier, {"role": "user", "content": one.text}]


async def drive(folder: Path, url: str, said: list[Said], restarts: set[int], **settings: Any) -> list[tuple[Any, ...]]:
    """Make the calls of a tree one by one, with restarts before some; return what must not depend on those."""
    rollout, number = None, 0
    names: dict[str, int] = {}
    while number < len(said):
        async with gateway(folder, url, **settings) as running:
            rollout = await running.begin() if rollout is None else running.again(rollout)
            others = [await running.begin(f"other {number}-{n}".replace(" ", "-")) for n in range(2)]
            while True:
                one = said[number]
                field = "input" if one.dialect is Dialect.RESPONSES else "messages"
                answer = await rollout.ask(one.dialect, stream=one.stream, **{field: conversation(said, number)})
                assert saw_finish(one.dialect, answer), answer
                names[answer.call_id] = number
                number += 1
                await running.idle()
                if settings:
                    for other in others:
                        await other.ask(Dialect.CHAT)
                if number == len(said) or number in restarts:
                    break
            rollout.sound()
            records = rollout.records()
    return [
        (
            names[record.model_call_id],
            None if record.parent_call_id is None else names[record.parent_call_id],
            record.parent_resolution,
            None if record.base_call_id is None else names[record.base_call_id],
            None if record.retry_of is None else names[record.retry_of],
            record.context_digest,
            record.continuation_digest,
            record.sequence_digest,
            record.chain_digest,
            record.request_digest,
            record.prev_len,
            record.cum_len,
        )
        for record in records
    ]


@pytest.mark.parametrize("seed", range(4))
def test_nothing_depends_on_restarts(tmp_path: Path, seed: int) -> None:
    # Rollouts last for hours; what a restart or a full memory changes is found by nobody.
    async def main() -> None:
        engine = engine_of({"content": "Reply to {{last}}."})
        said = tree(seed, 14)
        rng = random.Random(seed + 100)
        async with engine.serve() as url:
            ways: dict[str, tuple[set[int], dict[str, Any]]] = {
                "straight": (set(), {}),
                "restarts": ({rng.randrange(1, 14) for _ in range(3)}, {}),
                "evicted": (set(), {"max_attempts_in_memory": 1}),
            }
            found: dict[str, list[tuple[Any, ...]]] = {}
            for name, (restarts, settings) in ways.items():
                folder = tmp_path / name
                folder.mkdir()
                found[name] = await drive(folder, url, said, restarts, **settings)
            assert found["restarts"] == found["straight"]
            assert found["evicted"] == found["straight"]
            parents = [row[1] for row in found["straight"]]
            assert any(parent is not None for parent in parents)

    run(main())


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_revoked_key(tmp_path: Path, dialect: Dialect) -> None:
    # A sandbox that was not torn down goes on calling; its calls belong to nothing.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."})
        async with engine.serve() as url:
            async with gateway(tmp_path, url) as running:
                rollout = await running.begin()
                await rollout.ask(dialect)
                await rollout.settled(1)
                await running.gateway.attempts.revoke(rollout.key)
                assert (await rollout.ask(dialect)).status == 401
            async with gateway(tmp_path, url) as running:
                assert (await running.again(rollout).ask(dialect)).status == 401
                assert len(sampled(engine)) == 1

    run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.RESPONSES, Dialect.MESSAGES])
def test_closing_breaks_off_what_does_not_end(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # The reward is given for what was done by then; what the engine had sampled is kept, and never selectable.
    async def main() -> None:
        engine = engine_of({"content": "one two three four five six seven eight nine ten", "gap_s": 0.5})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            asking = asyncio.create_task(rollout.ask(dialect, stream=stream))
            await until(lambda: len(sampled(engine)) == 1)
            assert await running.gateway.attempts.close(rollout.key, drain_s=0.01) == 1
            answer = await asking
            assert not saw_finish(dialect, answer)
            if not stream:
                assert answer.status == 409
                assert error_of(dialect, answer) is not None
            [record] = await rollout.settled(1)
            assert record.unusable_reason is Code.ABORTED
            assert "finished" in (record.unusable_detail or "")
            assert running.metric("aborts_total", cause="attempt_closed") == 1
            refused = await rollout.ask(dialect)
            assert refused.status == 409
            assert len(rollout.records()) == 1
            running.gateway.attempts.reopen(rollout.key)
            again = asyncio.create_task(rollout.ask(dialect, "again"))
            await until(lambda: len(sampled(engine)) == 2)
            assert await running.gateway.attempts.close(rollout.key, drain_s=0.01) == 1
            await again
            rollout.sound()

    run(main())


def test_an_outcome_after_the_end(tmp_path: Path) -> None:
    # A reply that came after the result cannot have earned it.
    async def main() -> None:
        engine = engine_of({"content": "Hello there."})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            await rollout.ask(Dialect.CHAT)
            await rollout.settled(1)
            disk = running.disk(Commit)
            asking = asyncio.create_task(rollout.ask(Dialect.CHAT, "late"))
            await disk.holds(1)
            running.ledger.finish(rollout.key, Result(value={"reward": 1}, reward=1.0))
            disk.release()
            late = await asking
            await running.idle()
            capture = rollout.capture()
            assert [record.model_call_id for record in capture.records if record.usable][:1] != [late.call_id]
            assert late.call_id in {lost.model_call_id for lost in capture.lost}
            rollout.sound()

    run(main())


def test_a_killed_gateway(tmp_path: Path) -> None:
    # What ran when the process died has no outcome; it must count as lost, and the key go on working.
    async def main() -> None:
        engine = engine_of({"content": "one two three four five six", "gap_s": 0.5})
        quick = engine_of({"content": "Hello there."})
        async with engine.serve() as url, quick.serve() as other:
            secret, key = mint_key(), AttemptKey("r")
            with SqliteLedger(tmp_path / "calls.ledger") as ledger:
                ledger.begin(key, AttemptSetup(key_digest=key_digest(secret)))
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            command = (sys.executable, "-c", "import sys; from gristmill.cli import main; sys.exit(main())", "serve")
            flags = ("--upstream", url, "--ledger", str(tmp_path / "calls.ledger"), "--port", str(port))
            running = await asyncio.create_subprocess_exec(
                *command, *flags, "--min-free-bytes", "0", stderr=-3, stdout=-3
            )
            headers = {"authorization": f"Bearer {secret}"}
            address = f"http://127.0.0.1:{port}/v1/chat/completions"
            try:
                async with aiohttp.ClientSession(headers=headers) as client:

                    async def up() -> bool:
                        try:
                            async with client.get(f"http://127.0.0.1:{port}/healthz") as answer:
                                return answer.status == 200
                        except aiohttp.ClientError:
                            return False

                    while not await up():
                        assert running.returncode is None
                        await asyncio.sleep(0.05)
                    bodies = [body_of(Dialect.CHAT, str(n), stream=n % 2 == 0) for n in range(6)]
                    asking = [asyncio.create_task(post(client, address, body)) for body in bodies]
                    await until(lambda: len(sampled(engine)) == 6)
                    running.kill()
                    assert not any(await asyncio.gather(*asking))
            finally:
                if running.returncode is None:
                    running.kill()
                await running.wait()
            async with gateway(tmp_path, other) as after:
                rollout = after.again(Rollout(after, key, secret))
                capture = rollout.capture()
                assert capture.records == ()
                assert len(capture.lost) == 6
                assert after.ledger.lost_on_open == 6
                assert saw_finish(Dialect.CHAT, await rollout.ask(Dialect.CHAT))
                await rollout.settled(1)
                rollout.sound()

    run(main())


async def post(client: aiohttp.ClientSession, address: str, body: dict[str, Any]) -> bool:
    """Make a call; tell whether it ended well."""
    try:
        async with client.post(address, json=body) as answer:
            said = await answer.read()
            return answer.status == 200 and b'"finish_reason":"stop"' in said
    except aiohttp.ClientError:
        return False
