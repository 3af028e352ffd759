"""The one thread that writes: many callers' writes in one transaction, one sync for all of them.

Invariant: a write is answered only after the transaction that holds it is durable, or after it was certainly not made.
A write that the ledger refuses, or that SQLite cannot make, fails alone. After a failed sync nobody knows what is on
the disk, so nothing more is written until the ledger is opened again; nor once the file has another schema.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar

from gristmill.errors import Code, LedgerError
from gristmill.ledger.book import Library
from gristmill.ledger.database import check_version, translated
from gristmill.ledger.imports import Import
from gristmill.ledger.writes import Write

__all__ = ["Writer"]

ValueT = TypeVar("ValueT")

_GROUP: Final = 512
_LINGER: Final = 0.25
"""How long to wait for writers that wrote together last time, as a share of the time a transaction takes."""
_CHECKPOINT_bytes: Final = 4 * 1024 * 1024
"""Content written since the last checkpoint; its pages take some four times as much of the log."""
_LONG_LOG_bytes: Final = 48 * 1024 * 1024
_RESTART_WAIT_ms: Final = 50


class _Job:
    __slots__ = ("future", "write")

    def __init__(self, write: Write[Any]) -> None:
        self.write = write
        self.future: Future[Any] = Future()


class Writer:
    """Owns the connection and its thread.

    Args:
        library: the writer's books and connection.
        path: the database, for messages.
        most_waiting: how many writes may wait.
    """

    def __init__(self, library: Library, path: Path, most_waiting: int) -> None:
        self._library: Final = library
        self._connection: Final = library.connection
        self._path: Final = path
        self._most_waiting: Final = most_waiting
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._broken: LedgerError | None = None
        (self._page_bytes,) = self._connection.execute("PRAGMA page_size").fetchone()
        self._closing: Final = threading.Lock()
        self._closed = False
        self._last_size, self._last_s = 1, 0.0
        self._thread: Final = threading.Thread(target=self._run, name="gristmill-ledger", daemon=True)
        self._thread.start()

    def submit(self, write: Write[ValueT]) -> Future[ValueT]:
        """Queue a write; the future is done when the write is durable.

        Raises:
            LedgerError: `ledger_closed`, `ledger_busy`, `ledger_write_failed`.
        """
        job = _Job(write)
        # Under the lock no job can come behind the last one.
        with self._closing:
            if self._closed:
                raise LedgerError("expected an open ledger, it was closed", code=Code.LEDGER_CLOSED)
            if self._broken is not None:
                raise self._broken
            if self._jobs.qsize() >= self._most_waiting:
                raise LedgerError(
                    f"expected at most {self._most_waiting} waiting writes, got one more",
                    code=Code.LEDGER_BUSY,
                    hint="try again later",
                )
            self._jobs.put(job)
        return job.future

    def waiting(self) -> int:
        """Return about how many writes wait."""
        return self._jobs.qsize()

    def close(self) -> None:
        """Write what waits, then end the thread and close the connection."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        ended = False
        while not ended:
            jobs, ended = self._next_group()
            start: list[_Job] = []
            for job in jobs:
                if not job.future.set_running_or_notify_cancel():
                    continue
                if isinstance(job.write, Import):
                    self._group(start)
                    self._group([job])
                    start = []
                else:
                    start.append(job)
            self._group(start)
            # Between transactions, when nobody waits for an answer.
            self._library.trim()
            if self._library.unsaved_bytes > _CHECKPOINT_bytes or ended:
                self._checkpoint()
        with suppress(sqlite3.Error):
            self._connection.close()

    def _next_group(self) -> tuple[list[_Job], bool]:
        """Wait for a write; take those that wait with it. True: it is the last group."""
        first = self._jobs.get()
        if first is None:
            return [], True
        jobs, until = [first], monotonic() + _LINGER * self._last_s
        while len(jobs) < _GROUP:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                left_s = until - monotonic()
                if len(jobs) >= self._last_size or left_s <= 0:
                    break
                try:
                    job = self._jobs.get(timeout=left_s)
                except queue.Empty:
                    break
            if job is None:
                return jobs, True
            jobs.append(job)
        return jobs, False

    def _group(self, jobs: list[_Job]) -> None:
        if not jobs:
            return
        if self._broken is not None:
            for job in jobs:
                job.future.set_exception(self._broken)
            return
        start = monotonic()
        error = self._transaction(jobs)
        self._last_size, self._last_s = len(jobs), monotonic() - start
        if error is None:
            return
        if len(jobs) == 1 or self._broken is not None:
            for job in jobs:
                job.future.set_exception(error)
            return
        for job in jobs:
            self._group([job])

    def _transaction(self, jobs: list[_Job]) -> BaseException | None:
        """Write jobs and answer them; an error means that nothing was written and nobody was answered."""
        answers: list[tuple[_Job, Any, LedgerError | None]] = []
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._check_schema()
            for job in jobs:
                answers.append(self._apply(job))
            self._library.flush()
            self._connection.execute("COMMIT")
        # Boundary: the thread outlives whatever a write raises, an import's reader included.
        except BaseException as error:  # noqa: BLE001
            self._roll_back(error)
            return self._ours(error, jobs)
        for job, value, refusal in answers:
            if refusal is None:
                job.future.set_result(value)
            else:
                job.future.set_exception(refusal)
        return None

    def _check_schema(self) -> None:
        """Write nothing more into a file that another program has brought to another schema."""
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        try:
            check_version(version, self._path)
        except LedgerError as error:
            self._broken = error
            raise

    def _apply(self, job: _Job) -> tuple[_Job, Any, LedgerError | None]:
        try:
            return job, job.write.apply(self._library), None
        except LedgerError as refusal:
            if isinstance(job.write, Import):
                raise
            return job, None, refusal

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

    def _ours(self, error: BaseException, jobs: list[_Job]) -> BaseException:
        if self._broken is not None:
            return self._broken
        if isinstance(jobs[0].write, Import) and not isinstance(error, sqlite3.Error):
            # What the import's reader raises is its own.
            return error
        return translated(error, self._path)

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
