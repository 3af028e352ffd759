"""One HTTP request on its way through the gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gristmill.gateway.body import Receive, read_body
from gristmill.gateway.client import Client
from gristmill.gateway.routes import Found

__all__ = ["Request"]


class Request(NamedTuple):
    """A request for a known route: `headers` by lower-case name, `pairs` as they were sent."""

    found: Found
    method: str
    headers: Mapping[str, str]
    pairs: Sequence[tuple[bytes, bytes]]
    receive: Receive
    client: Client

    async def body(self, limit_bytes: int) -> bytes:
        """Read the body; raises as `read_body`."""
        length = self.headers.get("content-length")
        return await read_body(
            self.receive,
            self.headers.get("content-encoding", "").strip().lower(),
            int(length[:18]) if length is not None and length.isascii() and length.isdigit() else None,
            limit_bytes,
        )
