"""The transactions of a PostgreSQL ledger: one thread, one connection, one wait for the server's disk for many writes.

Invariant: each transaction begins by taking this instance's lock and looking at its lease; where that has expired,
nothing is written, the writes are refused with `lease_expired`, and the writer goes on as a new instance that has
nothing yet. Where the connection breaks while a transaction is being committed, the server is asked what became of it
before anybody is answered; only where it cannot be asked for half a minute does the refusal say that nobody knows.

Not here: groups (gristmill.ledger.group), whose an attempt is (library).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Event
from time import monotonic
from typing import Any, Final, NamedTuple

import psycopg

from gristmill.errors import Code, LedgerError
from gristmill.ledger.address import PostgresAddress
from gristmill.ledger.book import Library
from gristmill.ledger.group import Answer, GroupWriter, Job, applied
from gristmill.ledger.imports import Import
from gristmill.ledger.postgres.connection import connect, is_gone, translated
from gristmill.ledger.postgres.instances import end, end_expired, expired_error, hold, register
from gristmill.ledger.postgres.library import OwnedLibrary
from gristmill.ledger.postgres.session import Connection, PostgresSession

__all__ = ["Look", "Writer"]

_ASKED_FOR_s: Final = 30.0
_ASK_AGAIN_s: Final = 0.25
_TRIES: Final = 3
_RACES: Final = frozenset({"23505", "40001", "40P01"})
"""Two writers began one attempt, or waited for each other: what one of them has made the other finds the next time."""


class Look(NamedTuple):
    """Nothing is written; the writer finds out whether its lease lasts."""

    def apply(self, library: Library) -> None:
        """Do nothing."""


class Writer(GroupWriter):
    """Owns the connection and its thread.

    Args:
        connection: the writer's.
        address: the ledger.
        instance: the first one's id.
        lease_s: how long a lease lasts.
        clock: unix seconds, for the times of what is written.
        most_waiting: how many writes may wait.

    Attributes:
        announced: where this process can be reached; a new instance says so, too.
    """

    def __init__(
        self,
        connection: Connection,
        address: PostgresAddress,
        instance: str,
        lease_s: float,
        clock: Callable[[], float],
        most_waiting: int,
    ) -> None:
        super().__init__(most_waiting)
        self._connection: Connection | None = connection
        self._address: Final = address
        self._lease_s: Final = lease_s
        self._library: Final = OwnedLibrary(PostgresSession(connection), instance, clock)
        self._pause: Final = Event()
        self.announced: str | None = None
        self._start()

    @property
    def instance(self) -> str:
        """Id of the instance that writes now."""
        return self._library.instance

    def _session(self) -> PostgresSession:
        if self._connection is None:
            self._connection = connect(self._address)
            self._library.use(PostgresSession(self._connection))
        return self._library.session

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        self._library.forget()
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()

    def _transaction(self, jobs: list[Job]) -> BaseException | None:
        fresh = self._connection is None
        error = self._try(jobs)
        if not isinstance(jobs[0].write, Import):
            if error is not None and is_gone(error) and not fresh:
                # The connection had broken since it was last used: nothing was made, so it can be made now.
                error = self._try(jobs)
            tries = _TRIES
            while error is not None and getattr(error, "sqlstate", None) in _RACES and tries:
                error, tries = self._try(jobs), tries - 1
        if error is None or isinstance(error, LedgerError):
            return error
        if isinstance(jobs[0].write, Import) and not isinstance(error, psycopg.Error):
            # What the import's reader raises is its own.
            return error
        return translated(error, self._address)

    def _alone(self, error: BaseException) -> bool:
        return not (isinstance(error, LedgerError) and error.code in {Code.LEDGER_UNREACHABLE, Code.LEASE_EXPIRED})

    def _try(self, jobs: list[Job]) -> BaseException | None:
        """Write jobs and answer them; an error means that nothing was made, or says that nobody knows."""
        try:
            session = self._session()
            transaction, answers = self._written(session, jobs)
        # Boundary: the thread outlives whatever a write raises, an import's reader included.
        except BaseException as error:  # noqa: BLE001
            return self._rolled_back(error)
        try:
            session.connection.execute("COMMIT")
        except psycopg.Error as error:
            if not is_gone(error):
                return self._rolled_back(error)
            self._drop()
            doubt = self._doubt(transaction, error)
            if doubt is not None:
                return doubt
        for answer in answers:
            answer.give()
        return None

    def _written(self, session: PostgresSession, jobs: list[Job]) -> tuple[str, list[Answer]]:
        """Do everything of a transaction but its commit; return its id and what to answer."""
        session.connection.execute("BEGIN")
        self._library.bulk = isinstance(jobs[0].write, Import)
        if self._library.bulk:
            # Whoever reads what is imported may take his time over it.
            session.connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
            transaction, answers = self._applied(session, jobs)
            self._library.write_rows()
            self._library.bulk = False
        else:
            with session.connection.pipeline():
                transaction, answers = self._applied(session, jobs)
        return transaction, answers

    def _applied(self, session: PostgresSession, jobs: list[Job]) -> tuple[str, list[Answer]]:
        transaction = hold(session, self._library.instance, self._address)
        if transaction is None:
            raise expired_error(self._library.instance, self._address)
        answers = [applied(job, self._library) for job in jobs]
        self._library.flush()
        return transaction, answers

    def _rolled_back(self, error: BaseException) -> BaseException:
        self._library.bulk = False
        self._library.forget()
        if is_gone(error) or self._connection is None or self._connection.closed:
            self._drop()
            return error
        try:
            self._connection.execute("ROLLBACK")
            if isinstance(error, LedgerError) and error.code == Code.LEASE_EXPIRED:
                self._begin_anew(self._library.session)
        except psycopg.Error:
            # Nothing lasts of a transaction whose connection is gone.
            self._drop()
        return error

    def _begin_anew(self, session: PostgresSession) -> None:
        """Go on as a new instance; what the old one had in flight is lost, and its attempts are anybody's."""
        with session.connection.transaction():
            end_expired(session, self._library.instance)
            self._library.instance = register(session, self._lease_s, self.announced)

    def _doubt(self, transaction: str, error: psycopg.Error) -> BaseException | None:
        """Find out what became of a transaction whose commit was not answered; None: it was made."""
        until = monotonic() + _ASKED_FOR_s
        while monotonic() < until:
            try:
                status = self._status(transaction)
            except (psycopg.Error, LedgerError):
                self._drop()
                status = None
            if status == "committed":
                return None
            if status == "aborted":
                return error
            self._pause.wait(_ASK_AGAIN_s)
        return LedgerError(
            f"expected {self._address} to say whether a write was made, it could not be asked: the write may be there",
            code=Code.LEDGER_UNREACHABLE,
            where=str(self._address),
            hint="see that the server runs; what was acknowledged is there",
        )

    def _status(self, transaction: str) -> Any:
        asked = self._session().execute("SELECT pg_xact_status(?::xid8)", (transaction,))
        return asked.fetchone()[0]

    def _rest(self, *, ended: bool) -> None:
        self._library.trim()

    def _end(self) -> None:
        with suppress(psycopg.Error, LedgerError):
            # Where the server is gone the lease expires by itself.
            session = self._session()
            with session.connection.transaction():
                end(session, self._library.instance)
        self._drop()
