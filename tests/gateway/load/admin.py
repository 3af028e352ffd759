"""The administrator's side of a load run: rollouts are opened and ended whatever happens to the gateway meanwhile.

Invariant: an act is asked for again until it is answered; all of them may be asked for twice, except that an attempt
whose key was lost on the way is given up and its number is not used again.
"""

from __future__ import annotations

import asyncio
import random
from time import monotonic
from typing import Any, Final, NamedTuple

import aiohttp
import orjson

from gristmill.ledger import AttemptKey
from tests.gateway.load.processes import Fleet

__all__ = ["HOPS", "Admin", "Minted", "PATIENCE_s", "Refused"]

Json = dict[str, Any]

PATIENCE_s: Final = 90.0
"""How long a gateway may be away before a run fails."""

HOPS: Final = 3
"""How often a request is sent on before it is asked again from the beginning."""


class Refused(Exception):
    """The gateway refused what it should have done."""


class Minted(NamedTuple):
    """An open attempt: its key, and the addresses without and with it in the path."""

    key: AttemptKey
    secret: str
    base_url: str
    prefixed: str


class Admin:
    """Asks the admin API.

    Args:
        session: of HTTP.
        fleet: who is asked, one or another.
        seed: chooses.

    Attributes:
        orphans: attempts that may be open and have no key any more.
    """

    def __init__(self, session: aiohttp.ClientSession, fleet: Fleet, seed: int) -> None:
        self._session: Final = session
        self.fleet: Final = fleet
        self._draw: Final = random.Random(f"{seed}/admin")
        self._headers: Final = {"authorization": f"Bearer {fleet.admin_key}"}
        self.orphans: Final[set[AttemptKey]] = set()

    async def _post(self, path: str, body: Json) -> tuple[int, Json, int]:
        """Ask until there is an answer; return status, body, and how often none came."""
        until, failures = monotonic() + PATIENCE_s, 0
        while True:
            url = f"{self.fleet.any_url(self._draw)}/gristmill/v1{path}"
            try:
                for _ in range(HOPS):
                    async with self._session.post(
                        url, data=orjson.dumps(body), headers=self._headers, allow_redirects=False
                    ) as got:
                        told = orjson.loads(await got.read())
                        if got.status == 307:
                            url = got.headers["location"]
                        elif got.status < 500:
                            return got.status, told, failures
                        else:
                            break
            except (aiohttp.ClientError, ConnectionError):
                failures += 1
            if monotonic() > until:
                raise TimeoutError(f"the admin API did not answer {path} for {PATIENCE_s:.0f} s")
            await asyncio.sleep(0.1)

    async def mint(self, key: AttemptKey, group_id: str) -> Minted:
        """Open an attempt, or the next one where the answer that held the key was lost."""
        while True:
            asked = {"rollout_id": key.rollout_id, "attempt": key.attempt, "group_id": group_id}
            status, told, failures = await self._post("/rollouts", asked)
            if status == 201:
                below = told["prefix_base_urls"]["anthropic"]
                return Minted(AttemptKey(told["rollout_id"], told["attempt"]), told["key"], told["base_url"], below)
            if not failures or told["error"]["code"] != "key_exists":
                raise Refused(f"expected to open {key}, got {status}: {told}")
            self.orphans.add(key)
            key = AttemptKey(key.rollout_id, key.attempt + 100)

    async def act(self, key: AttemptKey, act: str, **body: Any) -> Json:
        """Do `finish`, `freeze` or `abandon`."""
        status, told, failures = await self._post(f"/rollouts/{key.rollout_id}/{key.attempt}/{act}", body)
        if status != 200 and not (failures and act == "abandon"):
            raise Refused(f"expected to {act} {key}, got {status}: {told}")
        return told
