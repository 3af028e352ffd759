"""What a gateway can be told: one frozen struct, each field with the flag, variable and TOML key of its name.

Invariant: a `GatewayConfig` that exists is usable: every value is in range, and names of models and hosts are unique.
Secrets are never in it; only where to find them is.

Not here: reading flags, environment and files (settings).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from gristmill.errors import Code, ConfigError
from gristmill.ledger.address import LedgerAddress

__all__ = [
    "ANY_MODEL",
    "CONTINUE",
    "OVERRIDES",
    "EngineSetting",
    "GatewayConfig",
    "admin_key_beside",
    "check_overrides",
    "parse_model",
]

ANY_MODEL: Final = "*"

CONTINUE: Final = "continue"
"""Name of the setting, and of the override, that says whether calls are continued by tokens."""

OVERRIDES: Final = frozenset({"temperature", "top_p", "top_k", "seed", "max_tokens", "chat_template_kwargs", CONTINUE})
"""Settings that a rollout's or the gateway's configuration may set over what the harness asks for."""

_CONTINUED: Final = ("off", "tokens")

_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


class EngineSetting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: base address, kind (`auto`, `vllm`, `sglang`, `generic`), and the variable that holds its key."""

    url: str
    kind: str = "auto"
    key_env: str | None = None


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a gateway is told.

    Attributes:
        upstreams: the engines; an attempt stays with one of them.
        ledger: where calls go: a file, or the URL of a PostgreSQL database that several gateways may share.
        host, port: where to listen; port 0 takes a free one.
        public_url: base address that sandboxes use, where it is not the one listened on.
        advertise_url: base address that other gateways of a shared ledger send requests on to, where that is neither
            `public_url` nor the one listened on.
        tls_cert, tls_key: PEM files.
        admin_key_file: by default the ledger's path with `.admin-key`; of a database, its name and schema with it.
        models: from a name that harnesses ask for to the engine's name; `*` is any name; empty: every name is
            served by the engine's model of that name, else by its first.
        overrides: sampling settings over what harnesses ask for, for every rollout.
        continuation: `tokens` gives the engine the exact tokens of the call that a request continues, `off` lets it
            render every history anew.
        tokenizer: folder of the engine's tokenizer and chat template, to render for engines that have no route for it.
        render_timeout_s: for all renderings of one call; behind it the call is not continued.
        allowed_hosts: names beside loopback, `host` and `public_url` that requests may give as `Host`.
        max_body_bytes: largest request body, after decompression.
        max_reply_bytes: largest reply of an engine.
        max_calls: calls in flight; more are answered 503.
        max_attempts_in_memory: attempts whose tokens and lineage stay in memory between calls.
        min_free_bytes: free space on the ledger's disk below which no call is admitted.
        connect_timeout_s: to an engine.
        idle_timeout_s: without a byte from the engine before its health is asked.
        health_timeout_s: for that question.
        abort_wait_s: how long an aborted generation may take to answer with what it sampled.
        drain_s: how long calls in flight may go on at `finish` and at shutdown.
        lease_s: how long a gateway may be silent before others of a shared ledger take its attempts.
        abandon_after_s: idle time after which a rollout that was never finished is abandoned.
        insecure_http: listen off loopback without TLS, keys in the clear.
        keep_exchanges: keep request and served reply of every call in the ledger.
        log_level: `debug`, `info`, `warning`, `error`.
    """

    upstreams: tuple[EngineSetting, ...] = ()
    ledger: LedgerAddress = Path("run.gristmill")
    host: str = "127.0.0.1"
    port: int = 8600
    public_url: str | None = None
    advertise_url: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    admin_key_file: Path | None = None
    models: Mapping[str, str | None] = {}
    overrides: Mapping[str, Any] = {}
    continuation: str = msgspec.field(name=CONTINUE, default="off")
    tokenizer: Path | None = None
    render_timeout_s: float = 10.0
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 64 * 1024 * 1024
    max_reply_bytes: int = 512 * 1024 * 1024
    max_calls: int = 2048
    max_attempts_in_memory: int = 4096
    min_free_bytes: int = 1024 * 1024 * 1024
    connect_timeout_s: float = 10.0
    idle_timeout_s: float = 120.0
    health_timeout_s: float = 5.0
    abort_wait_s: float = 5.0
    drain_s: float = 30.0
    lease_s: float = 30.0
    abandon_after_s: float = 24 * 3600.0
    insecure_http: bool = False
    keep_exchanges: bool = True
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not self.upstreams:
            raise _wrong("upstreams", "at least one engine", "none", "name one with --upstream URL")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise _wrong(name, "a positive number", getattr(self, name))
        for name in _DURATIONS:
            if not 0 < getattr(self, name) < 1e9:
                raise _wrong(name, "a positive number of seconds", getattr(self, name))
        if not 0 <= self.port <= 65535:
            raise _wrong("port", "0 to 65535", self.port)
        if self.min_free_bytes < 0:
            raise _wrong("min_free_bytes", "0 or more", self.min_free_bytes)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise _wrong("tls_cert", "both tls_cert and tls_key", "one of them")
        if self.log_level not in {"debug", "info", "warning", "error"}:
            raise _wrong("log_level", "debug, info, warning or error", self.log_level)
        for name in ("public_url", "advertise_url"):
            url: str | None = getattr(self, name)
            if url is not None and not re.match(r"https?://[^/?#@\s]+(/[^?#\s]*)?\Z", url):
                raise _wrong(name, "http(s)://host[:port][/path]", url)
        if self.continuation not in _CONTINUED:
            raise _wrong(CONTINUE, " or ".join(_CONTINUED), self.continuation)
        check_overrides(self.overrides, "overrides")

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the listener."""
        return self.host in _LOOPBACK

    @property
    def admin_key_path(self) -> Path:
        """Where the admin key is kept."""
        if self.admin_key_file is not None:
            return self.admin_key_file
        return admin_key_beside(self.ledger)


def admin_key_beside(ledger: LedgerAddress) -> Path:
    """Return where the admin key of a ledger's gateway is kept by default; a database's is in the working directory."""
    if isinstance(ledger, Path):
        return ledger.with_name(ledger.name + ".admin-key")
    name = re.sub(r"[^A-Za-z0-9_-]", "_", ledger.name) or "postgresql"
    return Path(f"{name}.{ledger.schema}.admin-key")


_COUNTS: Final = ("max_body_bytes", "max_reply_bytes", "max_calls", "max_attempts_in_memory")
_DURATIONS: Final = (
    "connect_timeout_s",
    "idle_timeout_s",
    "health_timeout_s",
    "abort_wait_s",
    "drain_s",
    "lease_s",
    "render_timeout_s",
    "abandon_after_s",
)


def _wrong(name: str, expected: str, got: object, hint: str | None = None) -> ConfigError:
    return ConfigError(f"expected {expected}, got {got!r}", code=Code.OPTION_INVALID, where=name, hint=hint)


def parse_model(text: str) -> tuple[str, str | None]:
    """Read `NAME` or `NAME=ENGINE_NAME`; None stands for the engine's model of that name, else its first.

    Raises:
        ConfigError: a name is empty.
    """
    name, equals, engine = text.partition("=")
    if not name or (equals and not engine):
        raise _wrong("models", "NAME or NAME=ENGINE_NAME", text)
    return name, engine or None


def check_overrides(overrides: Mapping[str, Any], where: str) -> None:
    """Check overrides: known names, numbers where numbers belong.

    Raises:
        ConfigError: `option_invalid`, naming the setting.
    """
    for name, value in overrides.items():
        place = f"{where}.{name}"
        if name not in OVERRIDES:
            raise _wrong(place, f"one of {', '.join(sorted(OVERRIDES))}", name)
        if name == "chat_template_kwargs":
            if not isinstance(value, Mapping):
                raise _wrong(place, "an object", value)
        elif name == CONTINUE:
            if value not in _CONTINUED:
                raise _wrong(place, " or ".join(_CONTINUED), value)
        elif name in {"top_k", "seed", "max_tokens"}:
            if type(value) is not int or not -(2**63) <= value < 2**63:
                raise _wrong(place, "an integer of 64 bits", value)
        elif type(value) not in {int, float} or not -1e6 < value < 1e6:
            raise _wrong(place, "a number", value)
