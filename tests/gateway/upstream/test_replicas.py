"""Which engine takes an attempt, and what happens when engines go and come back."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from gristmill.errors import CaptureError, Code, ConfigError
from gristmill.gateway.upstream.protocol import Ask, EngineKind, Support, UpstreamError, UpstreamFault
from gristmill.gateway.upstream.replicas import Replica, Replicas
from gristmill.gateway.upstream.spec import UpstreamSettings, UpstreamSpec
from gristmill.ledger import AttemptKey
from gristmill.records import Dialect
from tests.gateway.upstream.toy import Toy
from tests.gateway.upstream.wire import FakeEngine, Seen, Wire, running, until

QUICK = UpstreamSettings(check_interval_s=0.02, health_timeout_s=1.0, probe_timeout_s=1.0, connect_timeout_s=1.0)
KEYS = [AttemptKey(f"rollout-{number}", number % 3) for number in range(300)]


def dress(engine: FakeEngine, *models: str, start_s: float | None = 1000.0, version: str = "0.32.0") -> None:
    """Make a server answer as vLLM does, but for sampling."""
    cards = [{"id": name, "owned_by": "vllm", "max_model_len": 32768} for name in models or ("m",)]
    engine.says("/v1/models", {"object": "list", "data": cards})
    engine.says("/version", {"version": version})
    engine.says("/health", {})

    async def metrics(_: Seen, wire: Wire) -> None:
        text = "# TYPE process_start_time_seconds gauge\n"
        await wire.text(text if start_s is None else f"{text}process_start_time_seconds {start_s}\n")

    engine.on("/metrics", metrics)


def choices(replicas: Replicas, model: str = "m") -> dict[AttemptKey, str]:
    return {key: replicas.for_attempt(key, model).label for key in KEYS}


def test_attempts_are_spread_and_stay() -> None:
    """An attempt that wanders loses its prefix cache; a crowd on one engine loses the others."""

    async def main() -> None:
        async with FakeEngine() as a, FakeEngine() as b, FakeEngine() as c:
            for engine in (a, b, c):
                dress(engine)
            specs = [UpstreamSpec(engine.url) for engine in (a, b, c)]
            async with Replicas(specs, QUICK) as replicas, Replicas(specs[::-1], QUICK) as others:
                chosen = choices(replicas)
                assert chosen == choices(others), "the order of the options must not matter"
                assert min(Counter(chosen.values()).values()) > 60

    running(main())


def test_an_engine_that_is_down_moves_only_its_own_attempts() -> None:
    """One engine lost must not cost the others their caches, nor stay lost when it is back."""

    async def main() -> None:
        async with FakeEngine() as a, FakeEngine() as b, FakeEngine() as c:
            for engine in (a, b, c):
                dress(engine)
            async with Replicas([UpstreamSpec(engine.url) for engine in (a, b, c)], QUICK) as replicas:
                lost = {replica.label: replica for replica in replicas}[b.url]
                before = choices(replicas)
                await b.stop()
                await until(lambda: not lost.up)
                during = choices(replicas)
                assert b.url not in during.values()
                assert {key for key in KEYS if before[key] != during[key]} == {
                    key for key in KEYS if before[key] == b.url
                }
                assert {during[key] for key in KEYS if before[key] == b.url} == {a.url, c.url}
                await b.start()
                await until(lambda: lost.up)
                assert choices(replicas) == before

    running(main())


def test_calls_go_where_the_model_is() -> None:
    """With a model each, half the attempts would otherwise get a 404."""

    async def main() -> None:
        async with FakeEngine() as a, FakeEngine() as b:
            dress(a, "big", "both")
            dress(b, "small", "both")
            async with Replicas([UpstreamSpec(a.url), UpstreamSpec(b.url)], QUICK) as replicas:
                assert set(choices(replicas, "big").values()) == {a.url}
                assert set(choices(replicas, "small").values()) == {b.url}
                assert set(choices(replicas, "both").values()) == {a.url, b.url}
                # The engine's own words on a name that nobody has are the best answer.
                assert set(choices(replicas, "none").values()) == {a.url, b.url}
            specs = [UpstreamSpec(a.url, models=("both",)), UpstreamSpec(b.url)]
            async with Replicas(specs, QUICK) as replicas:
                assert set(choices(replicas, "small").values()) == {b.url}

    running(main())


def test_no_engine_is_an_error_that_says_so() -> None:
    """A harness gets a 503 that names the engines, and the gateway goes on."""

    async def main() -> None:
        engine = FakeEngine()
        async with engine:
            pass
        async with Replicas([UpstreamSpec(engine.url)], QUICK) as replicas:
            with pytest.raises(CaptureError) as caught:
                replicas.for_attempt(KEYS[0], "m")
            assert caught.value.code is Code.ENGINE_UNREACHABLE
            assert engine.url in caught.value.message
            dress(engine)
            await engine.start()
            [replica] = replicas
            await until(lambda: replica.up)
            found = replicas.for_attempt(KEYS[0], "m")
            assert (found.engine.kind, found.max_model_len, found.epoch) == (EngineKind.VLLM, 32768, 0)
            await engine.stop()

    running(main())


def test_addresses_must_differ() -> None:
    """The same engine twice would count twice in the choice."""
    same = [UpstreamSpec("http://127.0.0.1:8000"), UpstreamSpec("http://127.0.0.1:8000/v1")]
    for specs in ([], same):
        with pytest.raises(ConfigError):
            Replicas(specs)


async def restarted(engine: FakeEngine, replica: Replica, **dressed: Any) -> int:
    """Stop an engine, start it again in other clothes, and return how far its epoch rose."""
    before = replica.epoch
    await engine.stop()
    with pytest.raises(UpstreamError):
        await replica.open(Ask("/v1/chat/completions", {}))
    dress(engine, **dressed)
    await engine.start()
    looked = len(engine.seen)
    await until(lambda: replica.up and not replica.measuring and len(engine.asked("/metrics")) > 0)
    await until(lambda: len(engine.seen) > looked + 8)
    return replica.epoch - before


@pytest.mark.parametrize(
    ("before", "after", "rise"),
    [
        ({"start_s": 1000.0}, {"start_s": 2000.0}, 1),
        ({"start_s": 1000.0}, {"start_s": 1000.0}, 0),  # only the network was away
        ({"start_s": None}, {"start_s": None}, 1),  # it does not say: unreachable, then back
        ({"start_s": 1000.0, "version": "1"}, {"start_s": 1000.0, "version": "2"}, 1),
    ],
)
def test_a_restarted_engine_has_a_new_epoch(before: dict[str, Any], after: dict[str, Any], rise: int) -> None:
    """A restart may have loaded other weights: records before and after it must not look alike."""

    async def main() -> None:
        async with FakeEngine() as engine:
            dress(engine, **before)
            async with Replicas([UpstreamSpec(engine.url)], QUICK) as replicas:
                [replica] = replicas
                assert replica.epoch == 0
                assert await restarted(engine, replica, **after) == rise

    running(main())


def test_one_failed_check_changes_nothing() -> None:
    """A busy engine that misses a check must not send its attempts elsewhere."""

    async def main() -> None:
        async with FakeEngine() as engine:
            dress(engine)
            async with Replicas([UpstreamSpec(engine.url)], QUICK) as replicas:
                [replica] = replicas
                failures = 0

                async def once(_: Seen, wire: Wire) -> None:
                    nonlocal failures
                    failures += 1
                    await wire.json({}, 503 if failures == 1 else 200)

                engine.on("/health", once)
                was_up = True
                while failures < 4:
                    await asyncio.sleep(0.005)
                    was_up = was_up and replica.up
                assert was_up
                engine.says("/health", {}, 503)
                await until(lambda: not replica.up)

    running(main())


def test_an_engine_in_trouble_is_looked_at_out_of_turn() -> None:
    """With a check every few seconds, every call until the next one would fail on a dead engine."""

    async def main() -> None:
        rarely = UpstreamSettings(check_interval_s=3600.0, connect_timeout_s=1.0)
        engine = FakeEngine()
        async with engine:
            dress(engine)
            async with Replicas([UpstreamSpec(engine.url)], rarely) as replicas:
                [replica] = replicas
                await engine.stop()
                with pytest.raises(UpstreamError) as caught:
                    await replica.open(Ask("/v1/chat/completions", {}))
                assert caught.value.fault in {UpstreamFault.UNREACHABLE, UpstreamFault.RESET}
                await until(lambda: not replica.up)

    running(main())


@pytest.mark.parametrize(
    ("toy", "route", "broken", "healthy"),
    [
        (Toy("vllm"), "/health", 503, False),
        (Toy("vllm"), "/health", 200, True),
        (Toy("sglang"), "/server_info", 503, False),
        (Toy("sglang"), "/health", 503, True),  # what SGLang says there while it is paused
        (Toy("generic"), "/v1/models", 500, False),
        (Toy("generic"), "/v1/models", 401, True),  # it wants a key, and is there
    ],
)
def test_health_is_asked_where_a_paused_engine_is_well(toy: Toy, route: str, broken: int, healthy: bool) -> None:
    """An engine that is paused for new weights would be given up, with every call that it holds."""

    async def main() -> None:
        async with toy.dress(FakeEngine()) as engine:
            rarely = UpstreamSettings(check_interval_s=3600.0, connect_timeout_s=1.0)
            async with Replicas([UpstreamSpec(engine.url)], rarely) as replicas:
                [replica] = replicas
                await until(lambda: not replica.measuring)
                assert await replica.healthy()
                engine.says(route, {}, broken)
                assert await replica.healthy() is healthy

    running(main())


def test_capabilities_are_measured_behind_the_calls() -> None:
    """Calls need not wait for the measurement, and its result is used as soon as it is there."""

    async def main() -> None:
        engine = Toy("vllm", weight_versions=True).dress(FakeEngine())
        async with engine, Replicas([UpstreamSpec(engine.url)], QUICK) as replicas:
            replica = replicas.for_attempt(KEYS[0], "m")
            assert replica.engine.kind is EngineKind.VLLM
            await until(lambda: replica.capabilities.abort_by_id is Support.YES)
            assert replica.engine.abort(Dialect.CHAT, "c") is not None
            assert (replica.epoch, replica.max_model_len) == (0, 4096)

    running(main())


def test_a_failure_of_the_watch_is_told() -> None:
    """A watch that ended would leave dead engines up for ever."""

    async def main() -> None:
        engine = Toy("vllm").dress(FakeEngine())
        async with engine, Replicas([UpstreamSpec(engine.url)], QUICK) as replicas:
            [watching] = replicas._watching
            watching.cancel()
            await until(watching.done)
            with pytest.raises(asyncio.CancelledError):
                replicas.for_attempt(KEYS[0], "m")

    running(main())
