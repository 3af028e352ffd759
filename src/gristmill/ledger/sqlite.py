"""A ledger in one SQLite file: one process writes, any number read.

Invariant: a method that writes returns when its write is durable (write-ahead log, `synchronous=FULL`), and raises when
it was not made. Readers see whole transactions and never wait for the writer.

    with SqliteLedger("run.ledger") as ledger:
        ledger.admit(key, "c1")
        ledger.commit(key, StoredCall(record=record, tokens=delta))

Why it is built this way: docs/design/ledger-on-sqlite.md.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Final, TypeVar

from gristmill.errors import Code, LedgerError
from gristmill.ledger.book import Library
from gristmill.ledger.database import (
    check_file,
    check_version,
    create,
    open_reader,
    open_writer,
    read_version,
    reading,
)
from gristmill.ledger.filesystem import MOUNTS, refuse_network
from gristmill.ledger.lock import LockHolder, WriterLock
from gristmill.ledger.protocol import LOST_WITH_WRITER, AttemptKey, AttemptState
from gristmill.ledger.read_side import LedgerReader
from gristmill.ledger.schema import PARTS
from gristmill.ledger.write_side import LedgerWriter
from gristmill.ledger.writer import Writer
from gristmill.ledger.writes import Write

__all__ = ["SqliteLedger", "SqliteReader"]

ValueT = TypeVar("ValueT")

_MOST_WAITING: Final = 4096


class SqliteReader(LedgerReader):
    """Reads a ledger, while another process writes to it or after it has ended.

    Args:
        path: the database.

    Raises:
        LedgerError: there is no ledger of this version at the path, or it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Final = Path(path)
        self._idle: list[sqlite3.Connection] = []
        self._inherited: list[sqlite3.Connection] = []
        self._owner: Final = os.getpid()
        self._reader_pid = self._owner
        self._shut = False
        self._idle.append(open_reader(self.path))

    @property
    def address(self) -> Path:
        """Where the ledger is."""
        return self.path

    @contextmanager
    def _reading(self) -> Generator[sqlite3.Connection]:
        """Lend a connection that sees one state of the ledger."""
        if self._shut:
            raise LedgerError("expected an open ledger, it was closed", code=Code.LEDGER_CLOSED, where=str(self.path))
        if self._reader_pid != os.getpid():
            # A connection must not be used, nor closed, on both sides of a fork.
            self._inherited += self._idle
            self._reader_pid, self._idle = os.getpid(), []
        with reading(self.path):
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = open_reader(self.path)
            try:
                connection.execute("BEGIN")
                # Another program may have brought the file to a newer schema since it was opened.
                check_version(connection.execute("PRAGMA user_version").fetchone()[0], self.path)
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                connection.close()
                raise
            if self._shut:
                connection.close()
            else:
                self._idle.append(connection)

    def close(self) -> None:
        """Close the file."""
        self._shut = True
        while self._idle:
            self._idle.pop().close()


class SqliteLedger(SqliteReader, LedgerWriter):
    """A ledger that this process writes to; any thread may call it.

    Args:
        path: the database; made where there is none.
        clock: unix seconds.
        most_waiting: how many writes may wait before `ledger_busy`.
        mounts: where the system lists its mounts.
        keep_open: leave calls in flight as they are, to go on with a copy; by default they are lost.

    Raises:
        LedgerError: another process writes to it (`ledger_locked`), or the file, folder, file system or schema is not
            one that can be written to; nothing was changed.

    Attributes:
        file_system: type of the file system, None where it could not be checked.
        previous: the writer that ended without closing the ledger, None where there was none.
    """

    shared = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Callable[[], float] = time,
        most_waiting: int = _MOST_WAITING,
        mounts: Path = MOUNTS,
        keep_open: bool = False,
    ) -> None:
        database = Path(path)
        check_file(database)
        self.file_system: Final = refuse_network(database, mounts)
        self._instance: Final = secrets.token_hex(8)
        self._lock: Final = WriterLock(database, self._instance, clock())
        try:
            connection = open_writer(database)
            try:
                with reading(database):
                    version = read_version(connection, database)
                    if version is None:
                        create(connection, database)
                    else:
                        check_version(version, database)
                    self.lost_on_open = 0 if keep_open else _lose_open_intents(connection)
                SqliteReader.__init__(self, database)
            except BaseException:
                connection.close()
                raise
        except BaseException:
            self._lock.release()
            raise
        self._writer: Final = Writer(Library(connection, self._instance, clock), connection, database, most_waiting)

    @property
    def instance(self) -> str:
        """Id of this writer."""
        return self._instance

    def owner(self, key: AttemptKey) -> None:
        """Return None: nobody else writes to it."""

    @property
    def previous(self) -> LockHolder | None:
        """The writer that ended without closing the ledger."""
        return self._lock.previous

    def announce(self, address: str) -> None:
        """Name in the lock file where this writer can be reached."""
        self._lock.announce(address)

    def waiting(self) -> int:
        """Return about how many writes wait."""
        return self._writer.waiting()

    def submit(self, write: Write[ValueT]) -> Future[ValueT]:
        """Queue a write for callers that do not want to block; the future is done when the write is durable.

        Raises:
            LedgerError: `ledger_closed`, `ledger_busy`, `ledger_write_failed`.
        """
        if self._owner != os.getpid():
            raise LedgerError(
                "expected the process that opened the ledger, got a fork of it",
                code=Code.LEDGER_CLOSED,
                where=str(self.path),
                hint="read it with SqliteReader, or write from the process that opened it",
            )
        return self._writer.submit(write)

    def free_bytes(self) -> int:
        """Return how much room the file system of the ledger has for this process.

        Raises:
            LedgerError: `file_unreadable`.
        """
        try:
            stat = os.statvfs(self.path.absolute().parent)
        except OSError as error:
            raise LedgerError(
                f"expected the folder of {self.path}, got {error.strerror}", where=str(self.path)
            ) from error
        return stat.f_bavail * stat.f_frsize

    def close(self) -> None:
        """Write what waits, move it into the database, give the lock back."""
        # The last connection to close puts the log away, and a reader cannot.
        super().close()
        if self._owner == os.getpid():
            self._writer.close()
            self._lock.release()


def _lose_open_intents(connection: sqlite3.Connection) -> int:
    """Mark the calls that earlier writers had in flight; a frozen attempt keeps what its snapshot says."""
    states = f"('{AttemptState.OPEN}', '{AttemptState.FINISHED}')"
    attempts = f"SELECT attempt_no FROM attempts WHERE state IN {states}"
    update = f"UPDATE intents SET reason = ? WHERE reason IS NULL AND intent_no / {PARTS} IN ({attempts})"
    return connection.execute(update, (LOST_WITH_WRITER,)).rowcount
