"""Where a program's rollouts are opened: at a gateway that runs already, or at one that is started for it.

Invariant: a ledger in a file has one gateway. If another process has the ledger open and says where it can be reached,
that gateway is joined; a gateway started here listens on loopback only, and stays until those who joined it are done.
A ledger in a database may have several: one more is started, unless there is no engine to start it for.

Not here: rollouts themselves (rollout, run), listening (server).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path
from time import monotonic, sleep, time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from gristmill.errors import CaptureError, Code, ConfigError, LedgerError
from gristmill.gateway.config import GatewayConfig, admin_key_beside
from gristmill.gateway.keys import read_admin_key
from gristmill.ledger import AttemptKey, LedgerAddress, holders_of
from gristmill.service.client import AdminClient, GatewayUnreachable, Opened
from gristmill.service.packages import packages_of

if TYPE_CHECKING:
    from gristmill.service.server import ServiceThread

__all__ = ["Begun", "Place", "begin", "joined"]

_UPSTREAM_KEY: Final = "GRISTMILL_UPSTREAM_KEY"
_KEY_FILE: Final = "GRISTMILL_ADMIN_KEY_FILE"
_OTHERS_IDLE_s: Final = 600.0
_STARTS_s: Final = 10.0
_LOOK_EVERY_s: Final = 0.25


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway and how to ask it.

    Attributes:
        client: its admin API.
        ledger: its ledger, where that is known: a file of this machine, or a database.
        secrets: what no child of this process may see.
        own: it was started here.
    """

    client: AdminClient
    ledger: LedgerAddress | None = None
    secrets: tuple[str, ...] = ()
    own: bool = False


class Begun(NamedTuple):
    """A rollout that was opened, and where."""

    place: Place
    opened: Opened


def joined(gateway: str, admin_key_file: Path | None, ledger: LedgerAddress | None = None) -> Place:
    """Take part in a gateway that runs.

    Args:
        gateway: its address.
        admin_key_file: a copy of its admin key, in a file that only its owner can read;
            `GRISTMILL_ADMIN_KEY_FILE` names one where this is None.
        ledger: its ledger, if that is known; its key file is beside it.

    Raises:
        ConfigError: `option_invalid`, `file_unreadable`.
    """
    named = os.environ.get(_KEY_FILE)
    beside = None if ledger is None else admin_key_beside(ledger)
    path = admin_key_file if admin_key_file is not None else Path(named) if named else beside
    if path is None:
        raise ConfigError(
            "expected the file with the gateway's admin key, got none",
            code=Code.OPTION_INVALID,
            where="--admin-key-file",
            hint="it is beside the gateway's ledger, LEDGER.admin-key",
        )
    key = read_admin_key(path)
    return Place(client=AdminClient(gateway, key, path), ledger=ledger, secrets=(key, *_upstream_secrets(())))


def _upstream_secrets(variables: Collection[str]) -> tuple[str, ...]:
    found = (os.environ.get(name) for name in (_UPSTREAM_KEY, *variables))
    return tuple(value for value in found if value)


@contextlib.contextmanager
def begin(
    settings: Callable[..., GatewayConfig],
    asked: Mapping[str, Any],
    *,
    gateway: str | None = None,
    needs_ledger: bool = False,
    waiting: Callable[[int], None] | None = None,
) -> Generator[Begun]:
    """Open a rollout: at the gateway that is named or that has the ledger open, else at one started over the ledger.

    Args:
        settings: reads the settings; what it is called with goes over them. A gateway that is started here listens on
            a free port of loopback, whatever they say of addresses.
        asked: arguments of `AdminClient.open`.
        gateway: address of a gateway that runs.
        needs_ledger: refuse a gateway whose ledger is not a file that is known here.
        waiting: told how many other rollouts have joined, when this one is done and they are not.

    Raises:
        LedgerError: `ledger_locked` by a process that cannot be joined, or the ledger cannot be written.
        ConfigError: a setting, an engine's address, or the admin key's file.
        CaptureError: the gateway refused, or nobody answers at its address.
    """
    if gateway is not None:
        config = settings(upstreams=_NO_ENGINE)
        place = joined(gateway, config.admin_key_file, _known(config.ledger))
        if needs_ledger and place.ledger is None:
            raise ConfigError(
                "expected a built-in policy, or the gateway's ledger to run another one over",
                code=Code.POLICY_OPTION_INVALID,
                where="--policy",
                hint="name the ledger with --ledger",
            )
        yield Begun(place, place.client.open(**asked))
        return
    try:
        config = settings()
    except ConfigError as error:
        if "upstreams" not in f"{error.where} {error.message}":
            raise
        begun = _begin_at_holder(settings(upstreams=_NO_ENGINE), asked)
        if begun is None:
            raise
        yield begun
        return
    since_s = time()
    started = _started_or_joined(config, asked)
    if isinstance(started, Begun):
        yield started
        return
    with started:
        yield from _begin_here(started, config, asked, since_s, waiting)


def _known(ledger: LedgerAddress) -> LedgerAddress | None:
    """Return the ledger that is named or usual, unless it is a file that is not here."""
    return None if isinstance(ledger, Path) and not ledger.is_file() else ledger


_NO_ENGINE: Final = ("http://127.0.0.1",)
"""Stands where a setting has to, of a gateway that has its own."""


def _begin_at_holder(config: GatewayConfig, asked: Mapping[str, Any]) -> Begun | None:
    """Open a rollout at a gateway that the ledger names; None where it names none that takes it."""
    for holder in holders_of(config.ledger):
        if holder.address is None:
            continue
        place = joined(holder.address, config.admin_key_path, config.ledger)
        try:
            return Begun(place, place.client.open(**asked))
        except GatewayUnreachable:
            continue
        except CaptureError as error:
            if error.code is not Code.GATEWAY_BUSY:
                raise
    return None


def _started_or_joined(config: GatewayConfig, asked: Mapping[str, Any]) -> ServiceThread | Begun:
    """Start a gateway, or join the one that has the ledger; one that starts or ends at this moment is waited for."""
    with packages_of("gateway"):
        from gristmill.service.server import ServiceThread  # noqa: PLC0415  a joined gateway needs no server

    here = msgspec.structs.replace(
        config, host="127.0.0.1", port=0, public_url=None, advertise_url=None, tls_cert=None, tls_key=None
    )
    until = monotonic() + _STARTS_s
    while True:
        try:
            return ServiceThread(here)
        except LedgerError as error:
            if error.code is not Code.LEDGER_LOCKED:
                raise
            begun = _begin_at_holder(config, asked)
            if begun is not None:
                return begun
            if monotonic() > until:
                raise
        sleep(_LOOK_EVERY_s)


def _begin_here(
    thread: ServiceThread,
    config: GatewayConfig,
    asked: Mapping[str, Any],
    since_s: float,
    waiting: Callable[[int], None] | None,
) -> Generator[Begun]:
    key = read_admin_key(config.admin_key_path)
    client = AdminClient(thread.service.address, key)
    variables = [upstream.key_env for upstream in config.upstreams if upstream.key_env is not None]
    place = Place(client=client, ledger=config.ledger, secrets=(key, *_upstream_secrets(variables)), own=True)
    # Whoever was quicker than this one joined it, and is not left over from before.
    before = {key for key, each in _open_attempts(client).items() if (each["touched_at"] or 0.0) < since_s}
    yield Begun(place, client.open(**asked))
    _wait_for_others(thread, client, before, waiting)


def _open_attempts(client: AdminClient) -> dict[AttemptKey, Mapping[str, Any]]:
    found: dict[AttemptKey, Mapping[str, Any]] = {}
    query = {"state": "open", "limit": "1000"}
    while page := client.rollouts(**query):
        found |= {AttemptKey(each["rollout_id"], each["attempt"]): each for each in page}
        query["after"] = f"{page[-1]['rollout_id']}/{page[-1]['attempt']}"
    return found


def _wait_for_others(
    thread: ServiceThread,
    client: AdminClient,
    before: Collection[AttemptKey],
    waiting: Callable[[int], None] | None,
) -> None:
    """Wait for rollouts that others opened here, as long as they make calls now and then."""
    told = 0
    rollouts = thread.service.rollouts
    while True:
        # None is opened between the last look and the end.
        rollouts.opening = False
        since_s = time() - _OTHERS_IDLE_s
        others = [
            key
            for key, each in _open_attempts(client).items()
            if key not in before
            and (each["in_flight"] or (each["touched_at"] or 0.0) > since_s)
            # Of a shared ledger the other gateways' rollouts are none of this one's.
            and (not rollouts.ledger.shared or rollouts.gateway.attempts.holds(key))
        ]
        if not others:
            return
        rollouts.opening = True
        if waiting is not None and len(others) != told:
            told = len(others)
            waiting(told)
        sleep(_LOOK_EVERY_s)
