"""The gateway itself: `python -m bench.gateway_stack.capturing ENGINE_URL LEDGER` prints its port, then a rollout key."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from bench.gateway_stack.pass_through import serve
from gristmill.gateway.app import Gateway
from gristmill.gateway.keys import key_digest, mint_key
from gristmill.gateway.settings import load_settings
from gristmill.ledger import AttemptKey, AttemptSetup, SqliteLedger


async def _main(engine: str, path: Path) -> None:
    config = load_settings(
        {"upstreams": [{"url": engine, "kind": "vllm"}], "ledger": path, "min_free_bytes": 0, "log_level": "warning"},
        environment={},
    )
    with SqliteLedger(path) as ledger:
        gateway = Gateway(config, ledger)
        await gateway.start()
        keys: list[str] = []
        for number in range(64):
            key = mint_key()
            await gateway.attempts.begin(AttemptKey(f"bench-{number}"), AttemptSetup(key_digest=key_digest(key)))
            keys.append(key)
        print(" ".join(keys), flush=True)
        await asyncio.sleep(1)
        await serve(gateway.app)


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], Path(sys.argv[2])))
