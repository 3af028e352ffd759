"""Where a program's rollouts go: a gateway that runs already, or one that is started for it.

Invariant: a ledger has one gateway. If another process has the ledger open and says where it can be reached, that
gateway is joined; a gateway started here listens on loopback only, and stays until those who joined it are done.

Not here: rollouts themselves (rollout, run), listening (server).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path
from threading import Event
from time import time
from typing import Any, Final

import msgspec

from gristmill.errors import Code, ConfigError, LedgerError
from gristmill.gateway.config import GatewayConfig
from gristmill.gateway.keys import read_admin_key
from gristmill.ledger import AttemptKey, read_holder
from gristmill.service.client import AdminClient

__all__ = ["Place", "joined", "open_place"]

_UPSTREAM_KEY: Final = "GRISTMILL_UPSTREAM_KEY"
_KEY_FILE: Final = "GRISTMILL_ADMIN_KEY_FILE"
_OTHERS_IDLE_s: Final = 600.0
_LOOK_EVERY_s: Final = 0.25


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway and how to ask it.

    Attributes:
        client: its admin API.
        ledger: its ledger, where that is a file of this machine that is known.
        secrets: what no child of this process may see.
        own: it was started here.
    """

    client: AdminClient
    ledger: Path | None = None
    secrets: tuple[str, ...] = ()
    own: bool = False


def joined(gateway: str, admin_key_file: Path | None, ledger: Path | None = None) -> Place:
    """Take part in a gateway that runs.

    Args:
        gateway: its address.
        admin_key_file: a copy of its admin key, in a file that only its owner can read;
            `GRISTMILL_ADMIN_KEY_FILE` names one where this is None.
        ledger: its ledger, if that is a file here; its key file is beside it.

    Raises:
        ConfigError: `option_invalid`, `file_unreadable`.
    """
    named = os.environ.get(_KEY_FILE)
    path = admin_key_file if admin_key_file is not None else Path(named) if named else _key_beside(ledger)
    if path is None:
        raise ConfigError(
            "expected the file with the gateway's admin key, got none",
            code=Code.OPTION_INVALID,
            where="--admin-key-file",
            hint="it is beside the gateway's ledger, LEDGER.admin-key",
        )
    key = read_admin_key(path)
    return Place(client=AdminClient(gateway, key), ledger=ledger, secrets=(key, *_upstream_secrets(())))


def _key_beside(ledger: Path | None) -> Path | None:
    return None if ledger is None else ledger.with_name(f"{ledger.name}.admin-key")


def _upstream_secrets(variables: Collection[str]) -> tuple[str, ...]:
    found = (os.environ.get(name) for name in (_UPSTREAM_KEY, *variables))
    return tuple(value for value in found if value)


@contextlib.contextmanager
def open_place(
    settings: Callable[..., GatewayConfig],
    *,
    gateway: str | None = None,
    waiting: Callable[[int], None] | None = None,
) -> Generator[Place]:
    """Join the gateway that is named or that has the ledger open, else start one over the ledger.

    Args:
        settings: reads the settings; what it is called with goes over them. A gateway that is started here listens on
            a free port of loopback, whatever they say of addresses.
        gateway: address of a gateway that runs.
        waiting: told how many other rollouts have joined, when this one is done and they are not.

    Raises:
        LedgerError: `ledger_locked` by a process that cannot be joined, or the ledger cannot be written.
        ConfigError: a setting, an engine's address, or the admin key's file.
    """
    if gateway is not None:
        config = settings(upstreams=_NO_ENGINE)
        ledger = config.ledger if config.ledger.is_file() else None
        yield joined(gateway, config.admin_key_file, ledger)
        return
    try:
        config = settings()
    except ConfigError as error:
        if "upstreams" not in f"{error.where} {error.message}":
            raise
        place = _join_holder(settings(upstreams=_NO_ENGINE))
        if place is None:
            raise
        yield place
        return
    with _own_place(config, waiting) as place:
        yield place


_NO_ENGINE: Final = ("http://127.0.0.1",)
"""Stands where a setting has to, of a gateway that has its own."""


def _join_holder(config: GatewayConfig) -> Place | None:
    """Join the gateway that the ledger's lock file names, None where it names none that answers."""
    holder = read_holder(config.ledger)
    if holder is None or holder.address is None:
        return None
    place = joined(holder.address, config.admin_key_path, config.ledger)
    return place if place.client.reachable() else None


@contextlib.contextmanager
def _own_place(config: GatewayConfig, waiting: Callable[[int], None] | None) -> Generator[Place]:
    from gristmill.service.server import ServiceThread  # noqa: PLC0415  a joined gateway needs no server

    here = msgspec.structs.replace(config, host="127.0.0.1", port=0, public_url=None, tls_cert=None, tls_key=None)
    try:
        thread = ServiceThread(here)
    except LedgerError as error:
        place = _join_holder(config) if error.code is Code.LEDGER_LOCKED else None
        if place is None:
            raise
        yield place
        return
    with thread:
        key = read_admin_key(config.admin_key_path)
        client = AdminClient(thread.service.address, key)
        variables = [upstream.key_env for upstream in config.upstreams if upstream.key_env is not None]
        before = set(_open_attempts(client))
        yield Place(client=client, ledger=config.ledger, secrets=(key, *_upstream_secrets(variables)), own=True)
        _wait_for_others(client, before, waiting)


def _open_attempts(client: AdminClient) -> dict[AttemptKey, Mapping[str, Any]]:
    found: dict[AttemptKey, Mapping[str, Any]] = {}
    query = {"state": "open", "limit": "1000"}
    while page := client.rollouts(**query):
        found |= {AttemptKey(each["rollout_id"], each["attempt"]): each for each in page}
        query["after"] = f"{page[-1]['rollout_id']}/{page[-1]['attempt']}"
    return found


def _wait_for_others(
    client: AdminClient, before: Collection[AttemptKey], waiting: Callable[[int], None] | None
) -> None:
    """Wait for rollouts that others opened here, as long as they make calls now and then."""
    told = 0
    pause = Event()
    while True:
        since_s = time() - _OTHERS_IDLE_s
        others = [
            key
            for key, each in _open_attempts(client).items()
            if key not in before and (each["in_flight"] or (each["touched_at"] or 0.0) > since_s)
        ]
        if not others:
            return
        if waiting is not None and len(others) != told:
            told = len(others)
            waiting(told)
        pause.wait(_LOOK_EVERY_s)
