"""One ASGI application out of two: model routes of the gateway, and the admin API beside them.

Invariant: a path belongs to one of the two by its first segments alone; the gateway never sees an administrator's
request, and the admin API never a harness's.

Not here: sockets and signals (server).
"""

from __future__ import annotations

from typing import Final

from starlette.types import Receive, Scope, Send

from gristmill.gateway.app import Gateway
from gristmill.gateway.config import GatewayConfig
from gristmill.ledger import LedgerWriter
from gristmill.service.api import PREFIX, AdminApi
from gristmill.service.rollouts import Rollouts

__all__ = ["ServiceApp"]


class ServiceApp:
    """Everything that listens on the port.

    Args:
        gateway: serves model calls.
        ledger: the gateway's.
        config: the gateway's.
    """

    def __init__(self, gateway: Gateway, ledger: LedgerWriter, config: GatewayConfig) -> None:
        self.rollouts: Final = Rollouts(gateway, ledger)
        self._gateway: Final = gateway
        self._admin: Final = AdminApi(self.rollouts, config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        path = scope.get("path", "")
        if scope["type"] == "http" and (path == PREFIX or path.startswith(f"{PREFIX}/")):
            await self._admin(scope, receive, send)
        else:
            await self._gateway.app(scope, receive, send)
