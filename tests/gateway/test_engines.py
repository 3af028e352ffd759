"""Engines that fall silent, stop, abort, repeat themselves or say too much."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import zstandard

from gristmill.errors import Code
from gristmill.records import Dialect
from tests.gateway.running import (
    DIALECTS,
    DONE,
    PATHS,
    Answer,
    Asked,
    HandEngine,
    Wire,
    body_of,
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


def torn(dialect: Dialect, answer: Answer) -> bool:
    """Tell whether a stream ended as a broken one does in its dialect, and not otherwise."""
    assert not saw_finish(dialect, answer)
    if dialect is Dialect.RESPONSES:
        return error_of(dialect, answer) is not None and not answer.cut
    return answer.cut and error_of(dialect, answer) is None


@streams
@dialects
def test_an_engine_that_falls_silent(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # vLLM that is being stopped neither answers nor closes: a harness would wait for hours.
    async def main() -> None:
        async def play(seen: Asked, wire: Wire) -> None:
            engine.healthy = False
            if stream:
                await wire.stream()
                await wire.piece(piece(seen, prompt=[1, 2]) + piece(seen, "hi", [5]))
            await wire.reader.read()

        engine = HandEngine(play)
        settings = {"measured": False, "idle_timeout_s": 0.2, "health_timeout_s": 0.5}
        async with engine, gateway(tmp_path, engine.url, **settings) as running:
            rollout = await running.begin()
            answer = await rollout.ask(dialect, stream=stream)
            [record] = await rollout.settled(1)
            if stream:
                assert torn(dialect, answer)
                assert record.unusable_reason is Code.STREAM_TRUNCATED
                assert record.cum_len - record.prompt_len == 1
            else:
                assert answer.status == 504
                assert error_of(dialect, answer) is not None
                assert record.unusable_reason is Code.CALL_FAILED
            assert Code.ENGINE_LOST in (record.unusable_detail or "")
            assert running.metric("engine_errors_total", engine=engine.url, fault="silent") == 1
            rollout.sound()

    run(main())


@streams
@dialects
def test_an_engine_that_is_paused(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # It is silent while its weights are changed, and healthy: the call goes on afterwards.
    async def main() -> None:
        async def play(seen: Asked, wire: Wire) -> None:
            if stream:
                await wire.stream()
                await wire.piece(piece(seen, prompt=[1, 2]) + piece(seen, "hi", [5]))
            before = len(engine.asked("/health"))
            await until(lambda: len(engine.asked("/health")) >= before + 3)
            if stream:
                await wire.piece(piece(seen, "", [6], finish="stop") + usage(2, 2) + DONE)
                await wire.end()
                return
            choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "token_ids": [5, 6]}
            if seen.path.endswith("/chat/completions"):
                logprobs: Any = {"content": [{"token": "x", "logprob": -1.0, "top_logprobs": []}] * 2}
                choice |= {"message": {"role": "assistant", "content": "hi"}, "logprobs": logprobs}
                root: dict[str, Any] = {"prompt_token_ids": [1, 2]}
            else:
                logprobs = {"tokens": ["x"] * 2, "token_logprobs": [-1.0] * 2, "top_logprobs": None}
                choice |= {"text": "hi", "prompt_token_ids": [1, 2], "logprobs": logprobs}
                root = {}
            counts = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
            await wire.json({"id": "x", "model": "m", "choices": [choice], "usage": counts, **root})

        engine = HandEngine(play)
        settings = {"measured": False, "idle_timeout_s": 0.05}
        async with engine, gateway(tmp_path, engine.url, **settings) as running:
            rollout = await running.begin()
            answer = await rollout.ask(dialect, stream=stream)
            assert spoken(dialect, answer) == "hi"
            [record] = await rollout.settled(1)
            assert record.usable, record.unusable_detail

    run(main())


@dialects
def test_an_engine_that_is_not_there(tmp_path: Path, dialect: Dialect) -> None:
    # A harness that is told "come again" waits for the restart; one that hangs or gets a 200 does not.
    async def main() -> None:
        engine = engine_of(HELLO)
        serving = engine.serve()
        async with serving as url:
            pass
        async with gateway(tmp_path, url, measured=False) as running:
            rollout = await running.begin()
            for stream in (False, True):
                answer = await rollout.ask(dialect, stream=stream)
                assert answer.status in {502, 503}
                assert error_of(dialect, answer) is not None
                assert not answer.streamed
            records = await rollout.settled(2)
            assert {record.unusable_reason for record in records} == {Code.CALL_FAILED}
            assert all(Code.ENGINE_UNREACHABLE in (record.unusable_detail or "") for record in records)
            rollout.sound()

    run(main())


@dialects
def test_an_engine_that_stops_and_comes_back(tmp_path: Path, dialect: Dialect) -> None:
    # Crashes of the engine are daily; the rollout goes on with a new epoch of it.
    async def main() -> None:
        engine = engine_of(HELLO)
        serving = engine.serve()
        async with serving as url:
            port = int(url.rpartition(":")[2])
            async with gateway(tmp_path, url) as running:
                rollout = await running.begin()
                first = await rollout.ask(dialect)
                await asyncio.to_thread(serving.stop)
                failed = await rollout.ask(dialect, stream=True)
                assert failed.status in {502, 503}
                again = engine_of(HELLO)
                async with again.serve(port=port):
                    deadline = asyncio.get_running_loop().time() + 30
                    while (answer := await rollout.ask(dialect)).status != 200:
                        assert asyncio.get_running_loop().time() < deadline
                        await asyncio.sleep(0.05)
                    assert spoken(dialect, answer) == "Hello there."
                    await running.idle()
                    assert rollout.record(answer.call_id).usable
                    assert rollout.record(first.call_id).usable
                    assert not rollout.record(failed.call_id).usable
                    rollout.sound()

    run(main())


@dialects
def test_an_error_event_of_the_engine(tmp_path: Path, dialect: Dialect) -> None:
    # The engine's own words are what the user needs to see, in the dialect of the harness.
    async def main() -> None:
        async def play(seen: Asked, wire: Wire) -> None:
            error = {"error": {"message": "out of pages", "type": "InternalServerError", "code": 500}}
            await wire.stream()
            if len(engine.calls) == 1:
                await wire.piece(piece(seen, prompt=[1, 2]) + piece(seen, "hi", [5]))
            await wire.piece(b"data: " + json.dumps(error).encode() + b"\n\n" + DONE)
            await wire.end()

        engine = HandEngine(play)
        async with engine, gateway(tmp_path, engine.url, measured=False) as running:
            rollout = await running.begin()
            for text in ("late", "at once"):
                answer = await rollout.ask(dialect, text, stream=True)
                assert not saw_finish(dialect, answer)
                error = error_of(dialect, answer)
                assert error is not None, answer
                assert "out of pages" in error["message"]
            records = await rollout.settled(2)
            assert all(not record.usable for record in records)
            assert records[0].cum_len - records[0].prompt_len == 1
            assert any("out of pages" in (record.unusable_detail or "") for record in records)
            assert running.metric("engine_errors_total", engine=engine.url, fault="error") == 2
            rollout.sound()

    run(main())


@streams
@dialects
def test_a_generation_that_the_engine_aborted(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # It looks complete in some dialects; trained as such, the model learns to stop in mid-sentence.
    async def main() -> None:
        engine = engine_of({"content": "Half of it", "finish": "abort"})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout = await running.begin()
            answer = await rollout.ask(dialect, stream=stream)
            [record] = await rollout.settled(1)
            assert record.unusable_reason is Code.ABORTED
            assert record.cum_len > record.prompt_len
            if dialect in {Dialect.CHAT, Dialect.COMPLETIONS}:
                # The engine's own dialects can say it.
                assert answer.status == 200
                assert b'"abort"' in answer.raw
            elif stream:
                assert not saw_finish(dialect, answer)
            else:
                assert answer.status == 503
                assert error_of(dialect, answer) is not None
            assert running.metric("calls_unusable_total", reason="aborted") == 1
            rollout.sound()

    run(main())


@streams
@dialects
def test_a_reply_without_end(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # An engine in a loop would fill the gateway's memory, and with it end every other rollout.
    async def main() -> None:
        begun = asyncio.Event()

        async def play(seen: Asked, wire: Wire) -> None:
            if stream:
                await wire.stream()
                await wire.piece(piece(seen, prompt=[1, 2]) + piece(seen, "begun", [4]))
                await begun.wait()
                while True:
                    await wire.piece(piece(seen, "y" * 10_000, [5]))
            await wire.head(200, content_type="application/json", transfer_encoding="chunked")
            while True:
                await wire.piece(b" " * 10_000)

        settings = {"measured": False, "max_reply_bytes": 300_000, "abort_wait_s": 0.2}
        async with HandEngine(play) as engine, gateway(tmp_path, engine.url, **settings) as running:
            rollout = await running.begin()
            if stream:
                open_stream = await rollout.open(dialect)
                await open_stream.has("begun")
                begun.set()
                answer = await open_stream.whole()
            else:
                answer = await rollout.ask(dialect)
            [record] = await rollout.settled(1)
            if stream:
                assert torn(dialect, answer)
                assert record.unusable_reason is Code.STREAM_TRUNCATED
                assert len(answer.raw) < 4_000_000
            else:
                assert answer.status == 502
                assert error_of(dialect, answer) is not None
            assert "300,000 bytes" in (record.unusable_detail or "")
            assert running.metric("engine_errors_total", engine=engine.url, fault="oversized") == 1
            rollout.sound()

    run(main())


@streams
@dialects
def test_an_engine_that_repeats_its_ids(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    # Two calls of one id would be one call to whoever selects by it.
    async def main() -> None:
        engine = engine_of({"content": "Hello {{last}}{{prompt}}.", "wrong": {"response_id": "same"}})
        async with engine.serve() as url, gateway(tmp_path, url) as running:
            rollout, other = await running.begin("a"), await running.begin("b")
            answers = [await rollout.ask(dialect, text, stream=stream) for text in ("one", "two", "two")]
            await other.ask(dialect, "one", stream=stream)
            records = [*await rollout.settled(3), *other.records()]
            assert all(record.usable for record in records)
            assert {record.upstream_id for record in records} == {"same"}
            assert len({record.response_id for record in records}) == 4
            assert len({record.model_call_id for record in records}) == 4
            for answer, record in zip(answers, records, strict=False):
                assert record.response_id.encode() in answer.raw
                assert b'"same"' not in answer.raw
            rollout.sound()

    run(main())


def bombs() -> dict[str, bytes]:
    """Return what is small and unpacks to 64 MB, in every encoding that is taken."""
    zeros = b" " * (64 * 1024 * 1024)
    return {"gzip": gzip.compress(zeros, 6), "deflate": zlib.compress(zeros, 6), "zstd": zstandard.compress(zeros, 3)}


def test_bodies_that_unpack_to_too_much(tmp_path: Path) -> None:
    # 64 kilobytes from a sandbox must not become gigabytes here.
    async def main() -> None:
        engine = engine_of(HELLO)
        packed = bombs()
        async with engine.serve() as url, gateway(tmp_path, url, max_body_bytes=1_000_000) as running:
            rollout = await running.begin()
            for (encoding, data), dialect in product(packed.items(), DIALECTS):
                assert len(data) < 1_000_000
                answer = await rollout.post(PATHS[dialect], data, headers={"content-encoding": encoding})
                assert answer.status == 413, (encoding, answer)
                assert error_of(dialect, answer) is not None
            for path in ("/tokenize", "/v1/messages/count_tokens"):
                answer = await rollout.post(path, packed["gzip"], headers={"content-encoding": "gzip"})
                assert answer.status == 413
            large = json.dumps(body_of(Dialect.CHAT, "x" * 1_000_001)).encode()
            assert (await rollout.post("/v1/chat/completions", large)).status == 413
            answer = await rollout.post("/v1/chat/completions", b"{}", headers={"content-encoding": "br"})
            assert answer.status == 415
            for encoding, pack in (("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", zstandard.compress)):
                body = pack(json.dumps(body_of(Dialect.CHAT)).encode())
                good = await rollout.post("/v1/chat/completions", body, headers={"content-encoding": encoding})
                assert spoken(Dialect.CHAT, good) == "Hello there."
            assert len(sampled(engine)) == 3
            await running.idle()
            assert running.metric("requests_refused_total", code="body_too_large") == 15
            rollout.sound()

    run(main())


@dialects
def test_more_calls_than_there_is_room_for(tmp_path: Path, dialect: Dialect) -> None:
    # The harness waits and comes again; the call is not one of the rollout's.
    async def main() -> None:
        go = asyncio.Event()

        async def play(seen: Asked, wire: Wire) -> None:
            await go.wait()
            await wire.stream()
            end = piece(seen, prompt=[1, 2]) + piece(seen, "hi", [5], finish="stop") + usage(2, 1) + DONE
            await wire.piece(end)
            await wire.end()

        async with HandEngine(play) as engine, gateway(tmp_path, engine.url, measured=False, max_calls=2) as running:
            rollout = await running.begin()
            asking = [asyncio.create_task(rollout.ask(dialect, stream=True)) for _ in range(2)]
            await until(lambda: len(engine.calls) == 2)
            refused = await rollout.ask(dialect, stream=True)
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert error_of(dialect, refused) is not None
            assert running.metric("requests_refused_total", code="gateway_busy") == 1
            go.set()
            assert all(saw_finish(dialect, answer) for answer in await asyncio.gather(*asking))
            assert saw_finish(dialect, await rollout.ask(dialect, stream=True))
            await rollout.settled(3)

    run(main())
