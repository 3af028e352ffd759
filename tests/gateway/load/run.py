"""A load run: an engine, a gateway that is killed again and again, and harnesses that go on regardless.

Invariant: all kills happen while harnesses have calls under way; the ledger is looked at only after the last gateway
has ended in good order and the engine has written down everything it saw.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Final

import aiohttp
import msgspec

from gristmill.ledger import AttemptKey, AttemptState
from tests.gateway.load.admin import Admin, Refused
from tests.gateway.load.engine import read_log
from tests.gateway.load.harness import Harness
from tests.gateway.load.journal import Fate, Journal
from tests.gateway.load.processes import GatewayProcess, engine
from tests.gateway.load.verify import Verified, verify

__all__ = ["Outcome", "Plan", "run"]

_SECOND_ATTEMPTS: Final = 0.15
_FROZEN_AGAIN: Final = 50


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is asked to do.

    Attributes:
        rollouts: how many; some of them have a second attempt.
        calls: replies that each conversation wants.
        at_once: rollouts under way at a time.
        kills: how often the gateway is killed.
        sample: finished attempts whose selection is checked.
        gap_s, slow_gap_s: between the chunks of an ordinary and of a slow reply.
    """

    rollouts: int = 1000
    calls: int = 20
    at_once: int = 64
    kills: int = 10
    seed: int = 0
    sample: int = 100
    gap_s: float = 0.004
    slow_gap_s: float = 0.05


class Outcome(msgspec.Struct, kw_only=True):
    """What became of a run; times in seconds."""

    attempts: int
    sent: int
    acknowledged: int
    broken: int
    dropped: int
    refused: int
    replays: int
    kills: int
    lost_on_open: Sequence[int]
    seconds: float
    down_s: float
    checking_s: float
    peak_rss_bytes: int
    ledger_bytes: int
    journal: Journal
    verified: Verified
    violations: list[str]


async def run(plan: Plan, folder: Path) -> Outcome:
    """Make the run and check what is left of it.

    Args:
        plan: what to do.
        folder: empty; ledger, logs and what the engine saw stay in it.
    """
    journal = Journal()
    async with engine(folder, gap_s=plan.gap_s, slow_gap_s=plan.slow_gap_s, seed=plan.seed) as url:
        gateway = GatewayProcess(folder, url)
        try:
            await gateway.launch()
            await gateway.listens()
            began = monotonic()
            await _load(plan, gateway, journal)
            seconds = monotonic() - began
            status = await gateway.stop()
            if status != 0:
                journal.violations.append(f"the gateway ended with status {status}")
        finally:
            await gateway.ended()
    began = monotonic()
    journal.killed_at = gateway.killed_at
    verified = verify(gateway.ledger, journal, read_log(folder / "engine.jsonl"), sample=plan.sample, seed=plan.seed)
    sent = journal.sent()
    fates = [each.fate for each in sent]
    complaints = [f"the gateway's log: {each}" for each in gateway.complaints()]
    violations = [*journal.violations, *verified.violations, *complaints]
    if len(gateway.killed_at) != plan.kills:
        violations.append(f"expected {plan.kills} kills, there were {len(gateway.killed_at)}")
    if sum(gateway.lost_on_open()) != verified.lost:
        violations.append(f"the gateways found {gateway.lost_on_open()} lost calls, {verified.lost} are in the ledger")
    return Outcome(
        attempts=len(journal.attempts),
        sent=len(sent),
        acknowledged=fates.count(Fate.ACKNOWLEDGED),
        broken=fates.count(Fate.BROKEN),
        dropped=fates.count(Fate.DROPPED),
        refused=fates.count(Fate.REFUSED),
        replays=sum(each.replayed and each.fate is Fate.ACKNOWLEDGED for each in sent),
        kills=len(gateway.killed_at),
        lost_on_open=gateway.lost_on_open(),
        seconds=seconds,
        down_s=gateway.down_s,
        checking_s=monotonic() - began,
        peak_rss_bytes=gateway.peak_rss_bytes,
        ledger_bytes=gateway.ledger.stat().st_size,
        journal=journal,
        verified=verified,
        violations=violations,
    )


async def _load(plan: Plan, gateway: GatewayProcess, journal: Journal) -> None:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15)
    timeout = aiohttp.ClientTimeout(total=120, sock_connect=10)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        admin = Admin(session, gateway)
        room = asyncio.Semaphore(plan.at_once)
        async with asyncio.TaskGroup() as group:
            killing = group.create_task(_kill(plan, gateway, journal))
            rollouts = [
                group.create_task(_rollout(plan, number, session, admin, journal, room))
                for number in range(plan.rollouts)
            ]
            await asyncio.wait(rollouts)
            # Where a rollout has failed, the moment of the last kill is never reached.
            killing.cancel()
        await _freeze_again(admin, journal)
        journal.orphans |= admin.orphans


async def _rollout(
    plan: Plan, number: int, session: aiohttp.ClientSession, admin: Admin, journal: Journal, room: asyncio.Semaphore
) -> None:
    name = f"load-{number:05d}"
    draw = random.Random(f"{plan.seed}/{name}")

    async def attempt(index: int) -> None:
        group_id = f"group-{number % 50}"
        minted = await admin.mint(AttemptKey(name, index), group_id)
        harness = Harness(session, admin, minted, journal, plan.calls, f"{plan.seed}/{name}/{index}")
        harness.attempt.group_id = group_id
        try:
            await harness.run()
        except (TimeoutError, Refused) as error:
            journal.violations.append(f"{name}/{index}: cannot go on: {error}")

    async with room:
        if draw.random() >= _SECOND_ATTEMPTS:
            await attempt(0)
        elif draw.random() < 0.5:
            await attempt(0)
            await attempt(1)
        else:
            await asyncio.gather(attempt(0), attempt(1))


async def _kill(plan: Plan, gateway: GatewayProcess, journal: Journal) -> None:
    """Kill the gateway at random moments, now and then while it starts."""
    draw = random.Random(f"{plan.seed}/kills")
    wanted = plan.rollouts * plan.calls
    moments = sorted(draw.uniform(0.03, 0.92) * wanted for _ in range(plan.kills))
    while moments:
        moment = moments.pop(0)
        while journal.acknowledged < moment:
            await asyncio.sleep(0.002)
        await asyncio.sleep(draw.uniform(0.0, 0.05))
        await gateway.kill()
        await asyncio.sleep(draw.uniform(0.0, 0.5))
        await gateway.launch()
        if moments and draw.random() < 0.2:
            moments.pop(0)
            await asyncio.sleep(draw.uniform(0.0, 2.0))
            await gateway.kill()
            await gateway.launch()
        await gateway.listens()


async def _freeze_again(admin: Admin, journal: Journal) -> None:
    """See that what was frozen before the last kill is still what it was."""
    frozen = [each for each in journal.attempts.values() if each.state is AttemptState.FROZEN]
    for attempt in frozen[:_FROZEN_AGAIN]:
        try:
            told: dict[str, Any] = await admin.act(attempt.key, "freeze")
        except Refused as error:
            journal.violations.append(f"{attempt.name}: cannot be frozen again: {error}")
            continue
        if told["snapshot_id"] != attempt.snapshot_id:
            journal.violations.append(f"{attempt.name}: frozen as {attempt.snapshot_id}, now {told['snapshot_id']}")
