"""The load run: `python -m tests.gateway.load [--rollouts 1000] [--calls 20] [--at-once 64] [--kills 10] [--seed N]`.

With `--gateways 2 --ledger postgres` several gateways have one ledger, in a server that is started for the run; the
harnesses ask any of them.

A gateway is killed (SIGKILL) and started again while harnesses of four dialects talk through it to a scripted engine.
Then it is shown that no acknowledged call was lost, that none is attributed to a wrong rollout or attempt, and that
what was interrupted is marked and never complete. Prints totals; ends with 1 and the first violations if there are any.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.gateway.load.run import Outcome, Plan, run
from tests.ledger.server import PostgresServer

_SHOWN = 20


def lines(outcome: Outcome) -> list[str]:
    """Return the totals, a line each."""
    verified = outcome.verified
    outcomes = ", ".join(f"{count} {name}" for name, count in verified.by_outcome.most_common())
    return [
        f"attempts      {outcome.attempts}",
        f"requests      {outcome.sent}: {outcome.acknowledged} acknowledged, {outcome.broken} broken, "
        f"{outcome.dropped} dropped by the client, {outcome.refused} failed",
        f"sent on       {outcome.sent_on} requests by the gateway that was asked to the one whose attempt it was",
        f"replays       {outcome.replays} requests answered from the record",
        f"calls         {verified.calls}: {verified.committed} committed, {verified.lost} lost",
        f"outcomes      {outcomes}",
        f"acknowledged  {verified.acknowledged} replies compared with ledger and engine, "
        f"{verified.unheard} completed without a client that has them",
        f"interrupted   {outcome.broken} requests by {outcome.kills} kills, "
        f"lost calls found at each start: {' '.join(map(str, outcome.lost_on_open))}",
        f"retries       {verified.ambiguous} parents and {verified.refused} selections left open, because a reply "
        "that did not arrive said the same as its retry",
        f"selection     {verified.selected} attempts",
        f"time          {outcome.seconds:.1f} s ({outcome.down_s:.1f} s without a gateway), "
        f"{verified.calls / outcome.seconds:.0f} calls/s, checked in {outcome.checking_s:.1f} s",
        f"gateway       {outcome.peak_rss_bytes / 2**20:.0f} MiB at most"
        f"; ledger {outcome.ledger_bytes / 2**20:.0f} MiB, "
        f"{verified.sampled_tokens} tokens sampled",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gateway.load", description=__doc__.split("\n\n")[2])
    parser.add_argument("--rollouts", type=int, default=1000, help="conversations; some get a second attempt")
    parser.add_argument("--calls", type=int, default=20, help="replies that each conversation wants")
    parser.add_argument("--at-once", type=int, default=64, help="rollouts under way at a time")
    parser.add_argument("--kills", type=int, default=10, help="how often the gateway is killed")
    parser.add_argument("--gateways", type=int, default=1, help="how many; several need a ledger in PostgreSQL")
    parser.add_argument("--ledger", choices=("file", "postgres"), default="file", help="where calls go")
    parser.add_argument("--seed", type=int, default=None, help="of everything that is left to chance but time")
    parser.add_argument("--keep", type=Path, default=None, help="an empty folder for ledger and logs, which stay there")
    given = parser.parse_args()
    seed = random.randrange(2**31) if given.seed is None else given.seed
    folder = Path(tempfile.mkdtemp(prefix="gristmill-load-")) if given.keep is None else given.keep
    folder.mkdir(parents=True, exist_ok=True)
    # Whoever ends this program ends the processes that it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.stdout.write(f"seed          {seed}\n")
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        ledger = None
        if given.ledger == "postgres":
            ledger = stack.enter_context(contextlib.closing(PostgresServer(durable=True))).url()
        plan = Plan(
            rollouts=given.rollouts,
            calls=given.calls,
            at_once=given.at_once,
            kills=given.kills,
            gateways=given.gateways,
            ledger=ledger,
            seed=seed,
        )
        outcome = asyncio.run(run(plan, folder))
    sys.stdout.write("\n".join(lines(outcome)) + "\n")
    if outcome.violations:
        shown = "\n".join(f"  {each}" for each in outcome.violations[:_SHOWN])
        sys.stdout.write(f"{shown}\nFAILED: {len(outcome.violations)} violations; ledger and logs are in {folder}\n")
        return 1
    if given.keep is None:
        shutil.rmtree(folder)
    sys.stdout.write(f"ok: {outcome.acknowledged} acknowledged replies survived {outcome.kills} kills, none astray\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
