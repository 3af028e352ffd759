"""Which adapter speaks to an engine."""

from __future__ import annotations

from gristmill.gateway.upstream.generic import Generic
from gristmill.gateway.upstream.protocol import Capabilities, Engine, EngineKind
from gristmill.gateway.upstream.sglang import Sglang
from gristmill.gateway.upstream.vllm import Vllm

__all__ = ["engine_for"]


def engine_for(found: Capabilities) -> Engine:
    """Return the adapter for what the probe found."""
    match found.kind:
        case EngineKind.VLLM:
            return Vllm(found)
        case EngineKind.SGLANG:
            return Sglang(found)
        case EngineKind.GENERIC:
            return Generic(found)
