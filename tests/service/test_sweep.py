from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import time

from gristmill.ledger import AttemptKey, AttemptState
from gristmill.scripted import ScriptedEngine
from gristmill.service.asked import FinishAsked, MintAsked
from gristmill.service.server import Service
from gristmill.service.sweep import Sweep
from tests.service.gateways import SCRIPT, config_of, request, user

HOUR_s = 3600.0


def with_service(path: Path, act: Callable[[Service, Sweep], Awaitable[None]]) -> None:
    async def main(engine: str) -> None:
        service = Service(config_of(engine, path / "run.gristmill"))
        await service.start()
        try:
            await act(service, Sweep(service.rollouts, HOUR_s, 5.0))
        finally:
            await service.stop()

    with ScriptedEngine(SCRIPT).serve() as engine:
        asyncio.run(main(engine))


async def call(service: Service, key: str, text: str = "hi") -> int:
    body = {"model": "scripted", "messages": [user(text)]}
    answer = await asyncio.to_thread(request, service.address, "POST", "/v1/chat/completions", body, key=key)
    return answer.status


def abandoned(service: Service) -> float:
    value = service.gateway.metrics.registry.get_sample_value("gristmill_rollouts_abandoned_total")
    assert value is not None
    return value


def test_idle_rollouts_are_abandoned(tmp_path: Path) -> None:
    """A harness that was killed leaves a key that works and a rollout that nobody counts."""

    async def act(service: Service, sweep: Sweep) -> None:
        idle = await service.rollouts.mint(MintAsked(rollout_id="idle"))
        done = await service.rollouts.mint(MintAsked(rollout_id="done"))
        assert await call(service, idle.secret) == 200
        await service.rollouts.finish(done.key, FinishAsked(policy="final_context"), 1.0)
        assert await sweep.once(time()) == []
        assert await sweep.once(time() + 2 * HOUR_s) == [AttemptKey("idle")]
        assert await call(service, idle.secret) == 401
        states = {summary.key.rollout_id: summary.state for summary in service.ledger.summaries()}
        assert states == {"idle": AttemptState.ABANDONED, "done": AttemptState.FINISHED}
        assert abandoned(service) == 1
        assert await sweep.once(time() + 2 * HOUR_s) == []

    with_service(tmp_path, act)


def test_a_rollout_with_a_running_call_is_not_idle(tmp_path: Path) -> None:
    """A long generation is work, however long ago it began."""

    async def act(service: Service, sweep: Sweep) -> None:
        minted = await service.rollouts.mint(MintAsked())
        running = asyncio.ensure_future(call(service, minted.secret, "slow"))
        while not service.gateway.attempts.in_flight(minted.key):
            await asyncio.sleep(0.01)
        assert await sweep.once(time() + 2 * HOUR_s) == []
        await service.gateway.attempts.close(minted.key, drain_s=0)
        await running

    with_service(tmp_path, act)


def test_the_sweep_runs_by_itself(tmp_path: Path) -> None:
    """Nobody starts it by hand."""

    async def main(engine: str) -> None:
        service = Service(config_of(engine, tmp_path / "run.gristmill", abandon_after_s=0.05))
        await service.start()
        try:
            minted = await service.rollouts.mint(MintAsked())
            async with asyncio.timeout(20):
                while (await service.rollouts.summary(minted.key)).state is AttemptState.OPEN:
                    await asyncio.sleep(0.05)
        finally:
            await service.stop()

    with ScriptedEngine(SCRIPT).serve() as engine:
        asyncio.run(main(engine))
