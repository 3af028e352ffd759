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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from time import time
from types import TracebackType
from typing import Final, Self, TypeVar

from gristmill.errors import Code, LedgerError
from gristmill.ledger.book import Library, check_names
from gristmill.ledger.check import check_attempt
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
from gristmill.ledger.imports import Import
from gristmill.ledger.lock import LockHolder, WriterLock
from gristmill.ledger.protocol import AttemptKey, AttemptSetup, AttemptState, Counts, Imported, StoredCall, Summary
from gristmill.ledger.reader import find_attempt, read_capture, read_late, read_result
from gristmill.ledger.schema import PARTS, part_range
from gristmill.ledger.setups import read_grants, read_setup
from gristmill.ledger.snapshot import snapshot_id as digest_attempt
from gristmill.ledger.summaries import counts, summary_page
from gristmill.ledger.writer import Writer
from gristmill.ledger.writes import (
    Admit,
    Begin,
    Commit,
    Deliver,
    Finish,
    Freeze,
    KeepSnapshot,
    Label,
    Lose,
    Retire,
    Revoke,
    Write,
    prepare_call,
    prepare_result,
)
from gristmill.records import Capture, Delivery, Purpose, Result

__all__ = ["SqliteLedger", "SqliteReader"]

ValueT = TypeVar("ValueT")

_LOST_WITH_WRITER: Final = "the process that made the call ended before its outcome"
_MOST_WAITING: Final = 4096


class SqliteReader:
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

    def attempts(self) -> Iterator[AttemptKey]:
        """Yield the attempts in the order in which they began."""
        for summary in self.summaries():
            yield summary.key

    def rollout(self, rollout_id: str) -> tuple[AttemptKey, ...]:
        """Return the attempts of one rollout by number; empty where it is not known."""
        with self._reading() as connection:
            select = "SELECT rollout_id, attempt FROM attempts WHERE rollout_id = ? ORDER BY attempt"
            return tuple(map(AttemptKey._make, connection.execute(select, (rollout_id,))))

    def summaries(
        self,
        *,
        after: AttemptKey | None = None,
        state: AttemptState | None = None,
        group_id: str | None = None,
    ) -> Iterator[Summary]:
        """Yield one line for each attempt, in the order in which they began; see `Ledger.summaries`."""
        number = 0
        if after is not None:
            with self._reading() as connection:
                number = find_attempt(connection, after).attempt_no
        while True:
            with self._reading() as connection:
                page = summary_page(connection, number, state, group_id)
            if not page:
                return
            number = page[-1][0]
            for _, summary in page:
                yield summary

    def summary(self, key: AttemptKey) -> Summary:
        """Return the line of one attempt; see `Ledger.summary`."""
        with self._reading() as connection:
            number = find_attempt(connection, key).attempt_no
            [(_, summary)] = summary_page(connection, number - 1, None, None, 1)
            return summary

    def counts(self) -> Counts:
        """Add up all attempts."""
        with self._reading() as connection:
            return counts(connection)

    def read(self, key: AttemptKey, *, tokens: bool = True, exchanges: bool = False) -> tuple[Capture, Result | None]:
        """Return everything captured of an attempt, and its result; see `Ledger.read`."""
        with self._reading() as connection:
            row = find_attempt(connection, key)
            capture = read_capture(connection, row, tokens=tokens, exchanges=exchanges)
            return capture, read_result(connection, row)

    def late(self, key: AttemptKey) -> tuple[StoredCall, ...]:
        """Return the outcomes that came after the attempt had finished, in commit order."""
        with self._reading() as connection:
            return read_late(connection, find_attempt(connection, key))

    def setup(self, key: AttemptKey) -> AttemptSetup | None:
        """Return what an attempt was opened with, None where it has only calls; see `Ledger.setup`."""
        with self._reading() as connection:
            return read_setup(connection, find_attempt(connection, key))

    def grants(self) -> Iterator[tuple[str, AttemptKey]]:
        """Yield the key digests that open an attempt, with their attempts; see `Ledger.grants`."""
        with self._reading() as connection:
            found = read_grants(connection)
        yield from found

    def check(self, key: AttemptKey) -> tuple[str, ...]:
        """Say where what is stored of an attempt contradicts itself; see `Ledger.check`."""
        found: list[str] = []
        try:
            with self._reading() as connection:
                row = find_attempt(connection, key)
                # One at a time: what was found before the rows cannot be read any more stays.
                for sentence in check_attempt(connection, row):
                    found.append(sentence)
        except LedgerError as error:
            if error.code != Code.LEDGER_DAMAGED:
                raise
            found.append(error.message)
        return tuple(found)

    def close(self) -> None:
        """Close the file."""
        self._shut = True
        while self._idle:
            self._idle.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SqliteLedger(SqliteReader):
    """A ledger that this process writes to; any thread may call it.

    Args:
        path: the database; made where there is none.
        clock: unix seconds.
        most_waiting: how many writes may wait before `ledger_busy`.
        mounts: where the system lists its mounts.

    Raises:
        LedgerError: another process writes to it (`ledger_locked`), or the file, folder, file system or schema is not
            one that can be written to; nothing was changed.

    Attributes:
        instance: id of this writer, in every intent and call it writes.
        file_system: type of the file system, None where it could not be checked.
        previous: the writer that ended without closing the ledger, None where there was none.
        lost_on_open: how many calls of earlier writers were in flight and are lost.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Callable[[], float] = time,
        most_waiting: int = _MOST_WAITING,
        mounts: Path = MOUNTS,
    ) -> None:
        database = Path(path)
        check_file(database)
        self.file_system: Final = refuse_network(database, mounts)
        self.instance: Final = secrets.token_hex(8)
        self._lock: Final = WriterLock(database, self.instance, clock())
        try:
            connection = open_writer(database)
            try:
                with reading(database):
                    version = read_version(connection, database)
                    if version is None:
                        create(connection, database)
                    else:
                        check_version(version, database)
                    self.lost_on_open: Final = _lose_open_intents(connection)
                super().__init__(database)
            except BaseException:
                connection.close()
                raise
        except BaseException:
            self._lock.release()
            raise
        self._writer: Final = Writer(Library(connection, self.instance, clock), database, most_waiting)

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

    def begin(self, key: AttemptKey, setup: AttemptSetup) -> None:
        """Open an attempt before its first call; see `Ledger.begin`."""
        self.submit(Begin(key, setup)).result()

    def revoke(self, key: AttemptKey) -> None:
        """Let the attempt's key never open it again; see `Ledger.revoke`."""
        self.submit(Revoke(key)).result()

    def label(self, key: AttemptKey, labels: Mapping[str, Purpose]) -> None:
        """Append purposes by call id, all or none; see `Ledger.label`."""
        self.submit(Label(key, dict(labels))).result()

    def admit(self, key: AttemptKey, model_call_id: str, parent_call_id: str | None = None) -> None:
        """Record that a call is about to be made; see `Ledger.admit`."""
        check_names(key, model_call_id, parent_call_id)
        self.submit(Admit(key, model_call_id, parent_call_id)).result()

    def commit(self, key: AttemptKey, call: StoredCall) -> int:
        """Store the outcome of a call and return its ordinal; see `Ledger.commit`."""
        return self.commit_choices(key, (call,))[0]

    def commit_choices(self, key: AttemptKey, calls: Sequence[StoredCall]) -> tuple[int, ...]:
        """Store the calls of one reply, all or none, and return their ordinals."""
        check_names(key)
        return self.submit(Commit(key, [prepare_call(key, call) for call in calls])).result()

    def lose(self, key: AttemptKey, model_call_id: str, reason: str) -> None:
        """Say why an admitted call has no outcome and will get none; see `Ledger.lose`."""
        check_names(key, model_call_id, reason)
        self.submit(Lose(key, model_call_id, reason)).result()

    def deliver(self, key: AttemptKey, model_call_id: str, delivery: Delivery) -> None:
        """Append whether the client got the reply; see `Ledger.deliver`."""
        check_names(key, model_call_id)
        self.submit(Deliver(key, model_call_id, delivery)).result()

    def finish(self, key: AttemptKey, result: Result) -> None:
        """Store what the harness handed back; see `Ledger.finish`."""
        check_names(key, result.group_id)
        self.submit(Finish(key, prepare_result(result))).result()

    def import_attempts(self, attempts: Iterable[tuple[Capture, Result | None]]) -> Imported:
        """Add whole attempts, frozen: all of them or none; see `Ledger.import_attempts`.

        The attempts are read in the writer's thread, in one transaction; other writes wait for it.
        """
        return self.submit(Import(attempts)).result()

    def freeze(self, key: AttemptKey) -> str:
        """Admit no more calls and return the snapshot id."""
        return self._freeze(key, AttemptState.FROZEN)

    def abandon(self, key: AttemptKey) -> str:
        """Freeze an attempt that its harness never finished; see `Ledger.abandon`."""
        return self._freeze(key, AttemptState.ABANDONED)

    def _freeze(self, key: AttemptKey, state: AttemptState) -> str:
        known = self.submit(Freeze(key, state)).result()
        while known is None:
            with self._reading() as connection:
                row = find_attempt(connection, key)
                capture = read_capture(connection, row, exchanges=True)
                result, late = read_result(connection, row), read_late(connection, row)
                digest = digest_attempt(capture, result, late, read_setup(connection, row))
                count = "SELECT count(*) FROM deliveries WHERE delivery_no BETWEEN ? AND ?"
                (deliveries,) = connection.execute(count, part_range(row.attempt_no)).fetchone()
            if self.submit(KeepSnapshot(key, digest, deliveries)).result():
                return digest
        return known

    def retire(self, key: AttemptKey, snapshot_id: str) -> None:
        """Delete a frozen attempt that has not changed; see `Ledger.retire`."""
        with self._reading() as connection:
            state = AttemptState(find_attempt(connection, key).state)
        if state in {AttemptState.FROZEN, AttemptState.ABANDONED}:
            self.freeze(key)
        self.submit(Retire(key, snapshot_id)).result()

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
    return connection.execute(update, (_LOST_WITH_WRITER,)).rowcount
