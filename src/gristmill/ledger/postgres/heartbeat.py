"""Keeps a lease alive, and ends those of others that have expired.

Invariant: a beat waits for nobody's transaction; while the server cannot be reached it tries again and again, and when
the lease turns out to have ended, the writer is told to look.

Not here: what a lease is (instances).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import psycopg

from gristmill.errors import LedgerError
from gristmill.ledger.address import PostgresAddress
from gristmill.ledger.postgres.connection import connect
from gristmill.ledger.postgres.instances import cut_off, end_expired, renew
from gristmill.ledger.postgres.session import Connection, PostgresSession

__all__ = ["Heartbeat"]

_BEATS_a_lease: Final = 4
_AGAIN_s: Final = 1.0


class Heartbeat:
    """A thread that beats from here to `stop`.

    Args:
        address: the ledger.
        instance: says which one lives now.
        lease_s: how long a lease lasts without a beat.
        ended: called where the lease has ended.
    """

    def __init__(
        self, address: PostgresAddress, instance: Callable[[], str], lease_s: float, ended: Callable[[], None]
    ) -> None:
        self._address: Final = address
        self._instance: Final = instance
        self._lease_s: Final = lease_s
        self._ended: Final = ended
        self._connection: Connection | None = None
        self._stopping: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name="gristmill-lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = every_s = self._lease_s / _BEATS_a_lease
        while not self._stopping.wait(pause_s):
            try:
                self._beat()
                pause_s = every_s
            except (psycopg.Error, LedgerError):
                # The server is gone for now; whoever writes is told so by the writer.
                self._drop()
                pause_s = min(_AGAIN_s, every_s)
        self._drop()

    def _beat(self) -> None:
        if self._connection is None:
            self._connection = connect(self._address)
        session = PostgresSession(self._connection)
        if not renew(session, self._instance(), self._lease_s):
            self._ended()
        with self._connection.transaction():
            end_expired(session)
        with suppress(psycopg.errors.InsufficientPrivilege):
            # Of another user of the server: its own processes will do it.
            cut_off(session)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()
