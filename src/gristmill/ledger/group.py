"""The one thread that writes: many callers' writes in one transaction, one wait for the disk for all of them.

Invariant: a write is answered only after the transaction that holds it is durable, or after it was certainly not made.
A write that the ledger refuses, or that the database cannot make, fails alone.

Not here: transactions, which each database has its own way with (writer, postgres.writer).
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from time import monotonic
from typing import Any, Final, TypeVar

from gristmill.errors import Code, LedgerError
from gristmill.ledger.book import Library
from gristmill.ledger.imports import Import
from gristmill.ledger.writes import Write

__all__ = ["Answer", "GroupWriter", "Job", "applied"]

ValueT = TypeVar("ValueT")

_GROUP: Final = 512
_LINGER: Final = 0.25
"""How long to wait for writers that wrote together last time, as a share of the time a transaction takes."""


class Job:
    """A write and whoever waits for it."""

    __slots__ = ("future", "write")

    def __init__(self, write: Write[Any]) -> None:
        self.write = write
        self.future: Future[Any] = Future()


class Answer:
    """What becomes of a job once its transaction is durable: a value, or the refusal that it met alone."""

    __slots__ = ("job", "refusal", "value")

    def __init__(self, job: Job, value: Any, refusal: LedgerError | None) -> None:
        self.job, self.value, self.refusal = job, value, refusal

    def give(self) -> None:
        """Tell whoever waits."""
        if self.refusal is None:
            self.job.future.set_result(self.value)
        else:
            self.job.future.set_exception(self.refusal)


class GroupWriter(ABC):
    """Owns the thread; a database's writer says what a transaction is, and calls `_start` when it is ready for one.

    Args:
        most_waiting: how many writes may wait.
    """

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting: Final = most_waiting
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._broken: LedgerError | None = None
        self._closing: Final = threading.Lock()
        self._closed = False
        self._last_size, self._last_s = 1, 0.0
        self._thread: Final = threading.Thread(target=self._run, name="gristmill-ledger", daemon=True)

    def _start(self) -> None:
        self._thread.start()

    @abstractmethod
    def _transaction(self, jobs: list[Job]) -> BaseException | None:
        """Write jobs and answer them; an error means that nothing was written and nobody was answered."""

    @abstractmethod
    def _rest(self, *, ended: bool) -> None:
        """Do what is to be done between transactions, when nobody waits for an answer; `ended`: it was the last."""

    @abstractmethod
    def _end(self) -> None:
        """Let go of the database."""

    def submit(self, write: Write[ValueT]) -> Future[ValueT]:
        """Queue a write; the future is done when the write is durable.

        Raises:
            LedgerError: `ledger_closed`, `ledger_busy`, `ledger_write_failed`.
        """
        job = Job(write)
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
        """Write what waits, then end the thread and let go of the database."""
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
            start: list[Job] = []
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
            self._rest(ended=ended)
        self._end()

    def _next_group(self) -> tuple[list[Job], bool]:
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

    def _group(self, jobs: list[Job]) -> None:
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
        if len(jobs) == 1 or self._broken is not None or not self._alone(error):
            for job in jobs:
                job.future.set_exception(error)
            return
        for job in jobs:
            self._group([job])

    def _alone(self, error: BaseException) -> bool:
        """Say whether the writes of a group that failed may do better one by one."""
        return True


def applied(job: Job, library: Library) -> Answer:
    """Apply a job's write; a refusal is its answer, but that of an import fails the transaction."""
    try:
        return Answer(job, job.write.apply(library), None)
    except LedgerError as refusal:
        if isinstance(job.write, Import):
            raise
        return Answer(job, None, refusal)
