"""An engine as it is configured: address, kind, models, key; and the limits of every connection to one.

Invariant: an address is a scheme, a host, a port and a plain path, so that a request goes where its label says and no
log holds a credential.

Not here: what an engine turns out to be (probe).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final
from urllib.parse import SplitResult, urlsplit

import msgspec

from gristmill.errors import ConfigError
from gristmill.gateway.upstream.protocol import EngineKind

__all__ = ["UpstreamSettings", "UpstreamSpec", "engine_address"]

_WHERE: Final = "--upstream"
_PORTS: Final = {"http": 80, "https": 443}
_host = re.compile(r"[a-z0-9_]([a-z0-9._-]*[a-z0-9_])?|\[[0-9a-f:.]+\]")
_prefix = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)*")
_key = re.compile(r"[!-~]+")


class UpstreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the connections to engines.

    Attributes:
        connect_timeout_s: until a connection stands.
        idle_timeout_s: without a byte of an answer, before the engine's health is checked.
        health_timeout_s: of one health check.
        check_interval_s: between health checks of an engine that is well.
        down_after, up_after: checks in a row that take an engine out, and bring it back.
        keepalive_s: how long an idle connection is kept; less than engines do (5 s in vLLM and SGLang), or a request
            could be sent into a connection that is being closed.
        connections: at most, to one engine, beside a few for aborts.
        reply_limit_bytes: of one answer.
        probe_timeout_s: of one request of a probe.
    """

    connect_timeout_s: float = 10.0
    idle_timeout_s: float = 120.0
    health_timeout_s: float = 10.0
    check_interval_s: float = 5.0
    down_after: int = 2
    up_after: int = 2
    keepalive_s: float = 2.0
    connections: int = 4096
    reply_limit_bytes: int = 256 * 1024 * 1024
    probe_timeout_s: float = 30.0


class UpstreamSpec(msgspec.Struct, frozen=True):
    """One engine.

    Attributes:
        url: base address; a path in front of the engine's routes is allowed, a last `/v1` is taken off.
        kind: which adapter; None finds out.
        models: the engine's own names of models that are sent to it; none takes what it lists.
        api_key: sent as bearer token.

    Raises:
        ConfigError: `option_invalid`.
    """

    url: str
    kind: EngineKind | None = None
    models: tuple[str, ...] = ()
    api_key: str | None = None

    def __post_init__(self) -> None:
        engine_address(self.url)
        if self.api_key is not None and not _key.fullmatch(self.api_key):
            raise ConfigError(
                "expected the engine's key in printable ASCII without blanks, got something else",
                where="--upstream-key-env",
            )

    @property
    def label(self) -> str:
        """Its address, which is its name in records and logs."""
        return engine_address(self.url)

    def __repr__(self) -> str:
        key = "" if self.api_key is None else ", api_key=…"
        return f"UpstreamSpec({self.label!r}, kind={self.kind}, models={self.models}{key})"


@lru_cache(maxsize=256)
def engine_address(url: str) -> str:
    """Bring the base address of an engine into its one form, without a slash at the end.

    Raises:
        ConfigError: `option_invalid`: the address is no `http://HOST[:PORT][/PATH]`, or says more than that.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _refused(f"it cannot be read: {error}") from None
    if parts.scheme not in _PORTS:
        raise _refused(f"its scheme is {parts.scheme!r}" if parts.scheme else "it has no scheme")
    if parts.username is not None or parts.password is not None:
        raise _refused("it holds a user name; give a key with --upstream-key-env")
    if "?" in url or "#" in url:
        raise _refused("it has a query or a fragment")
    path = parts.path.rstrip("/").removesuffix("/v1")
    if not _prefix.fullmatch(path):
        raise _refused(f"its path is {parts.path!r}")
    shown_port = "" if port in {None, _PORTS[parts.scheme]} else f":{port}"
    return f"{parts.scheme}://{_host_of(parts)}{shown_port}{path}"


def _host_of(parts: SplitResult) -> str:
    name = (parts.hostname or "").lower()
    host = f"[{name}]" if ":" in name else name
    if not _host.fullmatch(host):
        raise _refused(f"its host is {host!r}" if host else "it has no host")
    return host


def _refused(got: str) -> ConfigError:
    return ConfigError(
        f"expected the address of an engine: {got}",
        where=_WHERE,
        hint="give it as http://HOST:PORT, with a path if a proxy puts the engine below one",
    )
