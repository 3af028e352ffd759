"""What stands between a gateway and an engine, as far as headers, model lists and start times show it."""

from __future__ import annotations

from typing import Final

from gristmill.gateway.upstream.client import Client
from gristmill.gateway.upstream.identity import Identity, started
from gristmill.gateway.upstream.protocol import EngineKind
from gristmill.gateway.upstream.spec import UpstreamSpec

__all__ = ["between"]

_LOOKS: Final = 4
_OWN_SERVERS: Final = frozenset({"uvicorn", "granian", "hypercorn"})


async def between(client: Client, spec: UpstreamSpec, identity: Identity, timeout_s: float) -> list[str]:
    """Say what stands between, in sentences; nothing where nothing shows."""
    notes = list[str]()
    if identity.wants_key:
        notes.append("It wants a key, or another one: name the variable that holds it with --upstream-key-env.")
    if identity.via is not None:
        notes.append(f"A proxy passes it on: its answers say via {identity.via!r}.")
    is_engine = identity.kind is not EngineKind.GENERIC
    if is_engine and identity.server is not None and identity.server.lower() not in _OWN_SERVERS:
        notes.append(f"Its answers come from the server {identity.server!r}, which is not {identity.kind}'s own.")
    owners = sorted({model.owner for model in identity.listed if model.owner is not None})
    if is_engine and owners and owners != [identity.kind.value]:
        notes.append(
            f"Its models are listed as owned by {', '.join(owners)}, which {identity.kind} itself does not say."
        )
    if is_engine and identity.version is None:
        notes.append(f"It does not say its version, as {identity.kind} does: its other routes may be hidden as well.")
    looks = [await started(client, spec, identity.kind, timeout_s) for _ in range(_LOOKS)]
    if len({look for look in looks if look.start_s is not None}) > 1:
        notes.append(
            "Several engines answer at this address: neither prefix caches nor restarts can be followed. Give each"
            " with an --upstream of its own."
        )
    return notes
