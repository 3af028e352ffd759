"""Engines of a gateway, from its settings; their keys come from the environment and are never settings themselves."""

from __future__ import annotations

import os

from gristmill.errors import Code, ConfigError
from gristmill.gateway.config import EngineSetting, GatewayConfig
from gristmill.gateway.upstream.protocol import EngineKind
from gristmill.gateway.upstream.replicas import Replicas
from gristmill.gateway.upstream.spec import UpstreamSettings, UpstreamSpec

__all__ = ["open_replicas"]

_KEY: str = "GRISTMILL_UPSTREAM_KEY"
_AUTO = "auto"


def open_replicas(config: GatewayConfig) -> Replicas:
    """Return the engines, not yet connected to.

    Raises:
        ConfigError: `option_invalid`: an address, a kind, or a variable without a key.
    """
    settings = UpstreamSettings(
        connect_timeout_s=config.connect_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
        health_timeout_s=config.health_timeout_s,
        reply_limit_bytes=config.max_reply_bytes,
        connections=config.max_calls,
    )
    return Replicas([_spec(setting) for setting in config.upstreams], settings)


def _spec(setting: EngineSetting) -> UpstreamSpec:
    kinds = [_AUTO, *(str(kind) for kind in EngineKind)]
    if setting.kind not in kinds:
        raise ConfigError(
            f"expected one of {', '.join(kinds)}, got {setting.kind!r}", code=Code.OPTION_INVALID, where="upstreams"
        )
    kind = None if setting.kind == _AUTO else EngineKind(setting.kind)
    return UpstreamSpec(url=setting.url, kind=kind, api_key=_key(setting))


def _key(setting: EngineSetting) -> str | None:
    if setting.key_env is None:
        return os.environ.get(_KEY)
    key = os.environ.get(setting.key_env)
    if not key:
        raise ConfigError(
            f"expected the engine's key in the variable {setting.key_env}, got nothing",
            code=Code.OPTION_INVALID,
            where="upstreams",
        )
    return key
