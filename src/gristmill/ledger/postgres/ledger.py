"""A ledger in a PostgreSQL database: several processes write, any number read.

Invariant: a method that writes returns when its write is durable on the server, and raises when it was not made.
Readers see whole transactions and never wait for a writer.

    with PostgresLedger(PostgresAddress("postgresql://me@host/captures")) as ledger:
        ledger.admit(key, "c1")
        ledger.commit(key, StoredCall(record=record, tokens=delta))

Why it is built this way: docs/design/ledger-on-postgresql.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from time import time
from typing import Final, TypeVar

from gristmill.errors import Code, LedgerError
from gristmill.ledger.address import PostgresAddress, parse_address
from gristmill.ledger.lock import LockHolder
from gristmill.ledger.postgres.connection import connect, make_pool, reading
from gristmill.ledger.postgres.heartbeat import Heartbeat
from gristmill.ledger.postgres.instances import end_expired, holders, register
from gristmill.ledger.postgres.schema import check_version, make_or_check, read_version
from gristmill.ledger.postgres.session import PostgresSession
from gristmill.ledger.postgres.writer import Look, Writer
from gristmill.ledger.protocol import AttemptElsewhere, AttemptKey
from gristmill.ledger.read_side import LedgerReader
from gristmill.ledger.write_side import LedgerWriter
from gristmill.ledger.writes import Write

__all__ = ["LEASE_s", "PostgresLedger", "PostgresReader"]

ValueT = TypeVar("ValueT")

LEASE_s: Final = 30.0
"""How long a process that writes may be silent before others take its attempts, unless it is told otherwise."""

_MOST_WAITING: Final = 4096


def _address(given: PostgresAddress | str) -> PostgresAddress:
    address = parse_address(given)
    if not isinstance(address, PostgresAddress):
        raise LedgerError(f"expected the URL of a database, got a path: {address}", code=Code.OPTION_INVALID)
    return address


class PostgresReader(LedgerReader):
    """Reads a ledger, while others write to it or after they have ended.

    Args:
        address: the ledger, or its URL.

    Raises:
        LedgerError: there is no ledger of this version at the address, or it cannot be reached.
        ConfigError: `option_invalid`: the URL is none.
    """

    def __init__(self, address: PostgresAddress | str) -> None:
        self._address = _address(address)
        with reading(self.address), closing(connect(self.address)) as connection:
            version = read_version(PostgresSession(connection), self.address)
            if version is None:
                raise LedgerError(
                    f"expected a ledger, there is none at {self.address}",
                    where=str(self.address),
                    hint="gristmill serve and gristmill import make one",
                )
            check_version(version, self.address)
        self._open_pool()

    @property
    def address(self) -> PostgresAddress:
        """Where the ledger is."""
        return self._address

    def _open_pool(self) -> None:
        self._owner_pid = os.getpid()
        self._shut = False
        self._pool = make_pool(self.address)
        self._inherited: list[object] = []

    @contextmanager
    def _reading(self) -> Generator[PostgresSession]:
        """Lend a connection that sees one state of the ledger."""
        if self._shut:
            raise LedgerError(
                "expected an open ledger, it was closed", code=Code.LEDGER_CLOSED, where=str(self.address)
            )
        if self._owner_pid != os.getpid():
            # Connections must not be used, nor closed, on both sides of a fork; the pool's threads stayed behind.
            self._inherited.append(self._pool)
            self._owner_pid, self._pool = os.getpid(), make_pool(self.address)
        with reading(self.address), self._pool.connection() as connection:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            session = PostgresSession(connection)
            # Another program may have brought the tables to a newer version since they were looked at.
            (version,) = session.execute("SELECT version FROM ledger").fetchone()
            check_version(version, self.address)
            yield session

    def holders(self) -> list[LockHolder]:
        """Return who writes to the ledger now, those first that began first."""
        with self._reading() as session:
            return holders(session)

    def size_bytes(self) -> int:
        """Return how much room the ledger takes on the server, indexes included."""
        with self._reading() as session:
            select = (
                "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::int8 FROM pg_class c "
                "JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = ? AND relkind IN ('r', 'p')"
            )
            return session.execute(select, (self.address.schema,)).fetchone()[0]

    def close(self) -> None:
        """Close the connections."""
        self._shut = True
        if self._owner_pid == os.getpid():
            self._pool.close()


class PostgresLedger(PostgresReader, LedgerWriter):
    """A ledger that this process writes to, perhaps beside others; any thread may call it.

    An attempt that nobody has becomes this process's with the first write to it; a write to one that another process
    has raises `AttemptElsewhere`.

    Args:
        address: the ledger, or its URL; its schema and tables are made where there are none.
        clock: unix seconds, for the times of what is written; leases go by the server's clock.
        lease_s: how long this process may be silent before others take its attempts.
        most_waiting: how many writes may wait before `ledger_busy`.

    Raises:
        LedgerError: `ledger_unreachable`, `ledger_read_only`, `ledger_foreign`, `schema_unsupported`; nothing was
            changed.
        ConfigError: `option_invalid`: the URL is none.
    """

    shared = True

    def __init__(
        self,
        address: PostgresAddress | str,
        *,
        clock: Callable[[], float] = time,
        lease_s: float = LEASE_s,
        most_waiting: int = _MOST_WAITING,
    ) -> None:
        self._address = _address(address)
        connection = connect(self.address)
        try:
            with reading(self.address):
                make_or_check(connection, self.address)
                session = PostgresSession(connection)
                with connection.transaction():
                    self.lost_on_open = end_expired(session)
                    instance = register(session, lease_s, None)
        except BaseException:
            connection.close()
            raise
        self._open_pool()
        self._writer_pid: Final = os.getpid()
        self._writer: Final = Writer(connection, self.address, instance, lease_s, clock, most_waiting)
        self._heartbeat: Final = Heartbeat(self.address, lambda: self._writer.instance, lease_s, self._look)

    @property
    def instance(self) -> str:
        """Id of this writer; a new one where its lease had expired."""
        return self._writer.instance

    def _look(self) -> None:
        """Let the writer find out that its lease has ended, and go on with a new one."""
        with suppress(LedgerError):
            # It is closing, or has more to do than this.
            self._writer.submit(Look())

    def announce(self, address: str) -> None:
        """Say where this process can be reached, for those who ask others for its attempts.

        Raises:
            LedgerError: the ledger cannot be written to.
        """
        self._writer.announced = address
        with reading(self.address), closing(connect(self.address)) as connection:
            PostgresSession(connection).execute(
                "UPDATE instances SET address = ? WHERE instance = ?", (address, self.instance)
            )

    def waiting(self) -> int:
        """Return about how many writes wait."""
        return self._writer.waiting()

    def free_bytes(self) -> None:
        """Return None: how much room the server has it does not say."""

    def owner(self, key: AttemptKey) -> AttemptElsewhere | None:
        """Return whose an attempt is where it is another writer's that lives; see `LedgerWriter.owner`."""
        if not -(2**63) <= key.attempt < 2**63:
            return None
        select = (
            "SELECT address FROM attempts JOIN instances ON instance = owner WHERE rollout_id = ? AND attempt = ? "
            "AND owner <> ? AND ended IS NULL AND lease_until > clock_timestamp()"
        )
        with self._reading() as session:
            found = session.execute(select, (*key, self.instance)).fetchone()
        return None if found is None else AttemptElsewhere(key, found[0])

    def submit(self, write: Write[ValueT]) -> Future[ValueT]:
        """Queue a write for callers that do not want to block; the future is done when the write is durable.

        Raises:
            LedgerError: `ledger_closed`, `ledger_busy`.
        """
        if self._writer_pid != os.getpid():
            raise LedgerError(
                "expected the process that opened the ledger, got a fork of it",
                code=Code.LEDGER_CLOSED,
                where=str(self.address),
                hint="read it with PostgresReader, or write from the process that opened it",
            )
        return self._writer.submit(write)

    def close(self) -> None:
        """Write what waits, end the lease, close the connections."""
        super().close()
        if self._writer_pid == os.getpid():
            self._heartbeat.stop()
            self._writer.close()
