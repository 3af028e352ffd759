"""Renders by a route of the engine that is going to sample.

Invariant: the engine is asked by its own adapter, which names a route only where a probe saw it render what is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gristmill.gateway.continuation.renderer import RenderFailed, Rendering
from gristmill.gateway.upstream.protocol import UpstreamError
from gristmill.gateway.upstream.rendered import rendered_ids
from gristmill.gateway.upstream.replicas import Replica

__all__ = ["EngineRenderer"]


class EngineRenderer:
    """Asks an engine.

    Args:
        replica: the engine.
    """

    def __init__(self, replica: Replica) -> None:
        self.name: Final = "engine"
        self._replica: Final = replica

    async def render(self, asked: Rendering) -> Sequence[int]:
        """Return the ids of a prompt, as `Renderer.render`."""
        ask = self._replica.engine.render(asked)
        if ask is None:
            raise RenderFailed("the engine was not seen to render")
        try:
            answer = await self._replica.open(ask)
            try:
                body = await answer.read()
            finally:
                await answer.close()
        except UpstreamError as error:
            raise RenderFailed(error.message) from error
        ids = rendered_ids(answer.status, body)
        if ids is None:
            raise RenderFailed(f"the engine answered with status {answer.status} and no ids")
        return ids
