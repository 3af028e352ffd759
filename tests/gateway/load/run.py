"""A load run: an engine, gateways that are killed again and again, and harnesses that go on regardless.

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

from gristmill.ledger import AttemptKey, AttemptState, LedgerAddress
from gristmill.ledger.postgres import PostgresReader
from tests.gateway.load.admin import Admin, Refused
from tests.gateway.load.engine import read_log
from tests.gateway.load.harness import Harness
from tests.gateway.load.journal import Fate, Journal
from tests.gateway.load.processes import Fleet, engine
from tests.gateway.load.verify import Verified, verify

__all__ = ["Outcome", "Plan", "run"]

_SECOND_ATTEMPTS: Final = 0.15
_FROZEN_AGAIN: Final = 50
_STARTS_AGAIN_s: Final = 30.0
_TAKES_OVER_s: Final = 8.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is asked to do.

    Attributes:
        rollouts: how many; some of them have a second attempt.
        calls: replies that each conversation wants.
        at_once: rollouts under way at a time.
        kills: how often a gateway is killed.
        gateways: how many there are.
        ledger: URL of the PostgreSQL ledger that they have, None for a file.
        sample: finished attempts whose selection is checked.
        gap_s, slow_gap_s: between the chunks of an ordinary and of a slow reply.
    """

    rollouts: int = 1000
    calls: int = 20
    at_once: int = 64
    kills: int = 10
    gateways: int = 1
    ledger: str | None = None
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
    sent_on: int
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
        fleet = Fleet(folder, url, plan.ledger, plan.gateways)
        try:
            await fleet.start()
            began = monotonic()
            await _load(plan, fleet, journal)
            seconds = monotonic() - began
            statuses = await fleet.stop()
            if any(statuses):
                journal.violations.append(f"the gateways ended with status {statuses}")
        finally:
            await fleet.ended()
    began = monotonic()
    gateways = fleet.gateways
    journal.killed_at = sorted(at for gateway in gateways for at in gateway.killed_at)
    lost_on_open = [lost for gateway in gateways for lost in gateway.lost_on_open()]
    verified = verify(
        gateways[0].ledger, journal, read_log(folder / "engine.jsonl"), sample=plan.sample, seed=plan.seed
    )
    sent = journal.sent()
    fates = [each.fate for each in sent]
    complaints = [f"a gateway's log: {each}" for gateway in gateways for each in gateway.complaints()]
    violations = [*journal.violations, *verified.violations, *complaints]
    if len(journal.killed_at) != plan.kills:
        violations.append(f"expected {plan.kills} kills, there were {len(journal.killed_at)}")
    # Of a ledger that several have, whoever comes first finds out what is lost.
    if plan.ledger is None and sum(lost_on_open) != verified.lost:
        violations.append(f"the gateways found {lost_on_open} lost calls, {verified.lost} are in the ledger")
    return Outcome(
        attempts=len(journal.attempts),
        sent=len(sent),
        acknowledged=fates.count(Fate.ACKNOWLEDGED),
        broken=fates.count(Fate.BROKEN),
        dropped=fates.count(Fate.DROPPED),
        refused=fates.count(Fate.REFUSED),
        replays=sum(each.replayed and each.fate is Fate.ACKNOWLEDGED for each in sent),
        kills=len(journal.killed_at),
        sent_on=sum(each.sent_on for each in sent),
        lost_on_open=lost_on_open,
        seconds=seconds,
        down_s=sum(gateway.down_s for gateway in gateways),
        checking_s=monotonic() - began,
        peak_rss_bytes=max(gateway.peak_rss_bytes for gateway in gateways),
        ledger_bytes=_size_bytes(gateways[0].ledger),
        journal=journal,
        verified=verified,
        violations=violations,
    )


def _size_bytes(ledger: LedgerAddress) -> int:
    if isinstance(ledger, Path):
        return ledger.stat().st_size
    with PostgresReader(ledger) as reader:
        return reader.size_bytes()


async def _load(plan: Plan, fleet: Fleet, journal: Journal) -> None:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15)
    timeout = aiohttp.ClientTimeout(total=120, sock_connect=10)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        admin = Admin(session, fleet, plan.seed)
        room = asyncio.Semaphore(plan.at_once)
        async with asyncio.TaskGroup() as group:
            killing = group.create_task(_kill(plan, fleet, journal))
            rollouts = [
                group.create_task(_rollout(plan, number, session, admin, journal, room))
                for number in range(plan.rollouts)
            ]
            await asyncio.wait(rollouts)
            # A gateway that was killed is started again. Where a rollout has failed, the moment of the last kill is
            # never reached.
            await asyncio.wait({killing}, timeout=_STARTS_AGAIN_s)
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


async def _kill(plan: Plan, fleet: Fleet, journal: Journal) -> None:
    """Kill gateways at random moments, now and then while it starts."""
    draw = random.Random(f"{plan.seed}/kills")
    wanted = plan.rollouts * plan.calls
    moments = sorted(draw.uniform(0.03, 0.92) * wanted for _ in range(plan.kills))
    while moments:
        moment = moments.pop(0)
        while journal.acknowledged < moment:
            await asyncio.sleep(0.002)
        await asyncio.sleep(draw.uniform(0.0, 0.05))
        gateway = fleet.gateways[0] if len(fleet.gateways) == 1 else draw.choice(fleet.gateways)
        await gateway.kill()
        # Where there is another one it has time to take over what the killed one had.
        await asyncio.sleep(draw.uniform(0.0, 0.5 if len(fleet.gateways) == 1 else _TAKES_OVER_s))
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
