"""The transactions of a SQLite ledger.

Invariant: as `group` has it. After a failed sync nobody knows what is on the disk, so nothing more is written until the
ledger is opened again; nor once the file has another schema.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Final

from gristmill.errors import Code, LedgerError
from gristmill.ledger.book import Library
from gristmill.ledger.database import check_version, translated
from gristmill.ledger.group import GroupWriter, Job, applied
from gristmill.ledger.imports import Import

__all__ = ["Writer"]

_CHECKPOINT_bytes: Final = 4 * 1024 * 1024
"""Content written since the last checkpoint; its pages take some four times as much of the log."""
_LONG_LOG_bytes: Final = 48 * 1024 * 1024
_RESTART_WAIT_ms: Final = 50


class Writer(GroupWriter):
    """Owns the connection and its thread.

    Args:
        library: the writer's books.
        connection: the writer's, which the library has, too.
        path: the database, for messages.
        most_waiting: how many writes may wait.
    """

    def __init__(self, library: Library, connection: sqlite3.Connection, path: Path, most_waiting: int) -> None:
        super().__init__(most_waiting)
        self._library: Final = library
        self._connection: Final = connection
        self._path: Final = path
        (self._page_bytes,) = self._connection.execute("PRAGMA page_size").fetchone()
        self._start()

    def _transaction(self, jobs: list[Job]) -> BaseException | None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._check_schema()
            answers = [applied(job, self._library) for job in jobs]
            self._library.flush()
            self._connection.execute("COMMIT")
        # Boundary: the thread outlives whatever a write raises, an import's reader included.
        except BaseException as error:  # noqa: BLE001
            self._roll_back(error)
            return self._ours(error, jobs)
        for answer in answers:
            answer.give()
        return None

    def _check_schema(self) -> None:
        """Write nothing more into a file that another program has brought to another schema."""
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        try:
            check_version(version, self._path)
        except LedgerError as error:
            self._broken = error
            raise

    def _roll_back(self, error: BaseException) -> None:
        self._library.forget()
        with suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        self._note_failed_sync(error)

    def _note_failed_sync(self, error: BaseException) -> None:
        if getattr(error, "sqlite_errorcode", None) in {
            sqlite3.SQLITE_IOERR_FSYNC,
            sqlite3.SQLITE_IOERR_DIR_FSYNC,
        }:
            self._broken = LedgerError(
                f"expected {self._path} to be synced to its disk, the operating system refused",
                code=Code.LEDGER_WRITE_FAILED,
                where=str(self._path),
                hint="look at the disk, then open the ledger again; nothing that was acknowledged is lost",
            )

    def _ours(self, error: BaseException, jobs: list[Job]) -> BaseException:
        if self._broken is not None:
            return self._broken
        if isinstance(jobs[0].write, Import) and not isinstance(error, sqlite3.Error):
            # What the import's reader raises is its own.
            return error
        return translated(error, self._path)

    def _rest(self, *, ended: bool) -> None:
        self._library.trim()
        if self._library.unsaved_bytes > _CHECKPOINT_bytes or ended:
            self._checkpoint()

    def _end(self) -> None:
        with suppress(sqlite3.Error):
            self._connection.close()

    def _checkpoint(self) -> None:
        """Move what the log holds into the database; the log stays what it is where that fails."""
        self._library.unsaved_bytes = 0
        if self._broken is not None:
            return
        try:
            _, pages, _ = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if pages * self._page_bytes > _LONG_LOG_bytes:
                self._restart_log()
        except sqlite3.Error as error:
            self._note_failed_sync(error)

    def _restart_log(self) -> None:
        """Begin the log anew, which a checkpoint does only while nobody reads; wait for readers, but not long."""
        (wait_ms,) = self._connection.execute("PRAGMA busy_timeout").fetchone()
        self._connection.execute(f"PRAGMA busy_timeout = {_RESTART_WAIT_ms}")
        try:
            self._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        finally:
            self._connection.execute(f"PRAGMA busy_timeout = {wait_ms}")
