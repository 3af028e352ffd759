"""Who writes to a ledger: a lock file beside the database.

Invariant: at most one process holds the lock, and the operating system takes it back when that process ends, however it
ends. What the file says is for people and for those who want to join the holder; only the lock itself decides.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import Final
from weakref import WeakSet

import msgspec

from gristmill.errors import Code, LedgerError

__all__ = ["LockHolder", "WriterLock", "lock_path", "read_holder"]


class LockHolder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that writes: where it runs, since when (unix seconds), and where it can be reached if anywhere."""

    pid: int
    host: str
    instance: str
    started: float
    address: str | None = None


def lock_path(database: Path) -> Path:
    """Return the lock file of a database."""
    return database.with_name(f"{database.name}.lock")


def read_holder(database: Path) -> LockHolder | None:
    """Return what the lock file says, None where it says nothing; the process need not live any more."""
    try:
        return msgspec.json.decode(lock_path(database).read_bytes(), type=LockHolder)
    except (OSError, msgspec.MsgspecError):
        return None


class WriterLock:
    """The lock, held from here to `release`.

    Args:
        database: the ledger's file.
        instance: id of this writer.
        started: unix seconds.

    Raises:
        LedgerError: `ledger_locked`, naming the holder; `ledger_read_only` where the file cannot be made.

    Attributes:
        previous: the holder that ended without releasing the lock, None where there was none.
    """

    def __init__(self, database: Path, instance: str, started: float) -> None:
        self._path: Final = lock_path(database)
        holder = LockHolder(pid=os.getpid(), host=socket.gethostname(), instance=instance, started=started)
        self._holder = holder
        try:
            self._file: int | None = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LedgerError(
                f"expected a folder that can be written to, got {error.strerror} for {self._path}",
                code=Code.LEDGER_READ_ONLY,
                where=str(self._path),
                hint="a ledger's file, its folder and its lock file must be writable for the one who writes to it",
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._drop()
            raise _locked(database, error) from error
        self.previous: Final = read_holder(database)
        _held.add(self)
        self._write(msgspec.json.encode(holder))

    def announce(self, address: str) -> None:
        """Say where the holder can be reached."""
        self._holder = msgspec.structs.replace(self._holder, address=address)
        self._write(msgspec.json.encode(self._holder))

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            os.pwrite(self._file, data, 0)
            os.ftruncate(self._file, len(data))
        except OSError:
            # A full disk: the lock holds, only its text is missing.
            return

    def release(self) -> None:
        """Give the lock back."""
        self._write(b"")
        _held.discard(self)
        self._drop()

    def _drop(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def leave_to_parent(self) -> None:
        """Let a child process that was forked off not keep the lock alive."""
        self._drop()


def _locked(database: Path, error: OSError) -> LedgerError:
    holder = read_holder(database)
    if not isinstance(error, BlockingIOError):
        return LedgerError(
            f"expected a file system with locks, got {error.strerror} for {lock_path(database)}",
            code=Code.LEDGER_NETWORK_FILE_SYSTEM,
            where=str(database),
            hint="put the ledger on a local disk",
        )
    who = "another process" if holder is None else f"process {holder.pid} on {holder.host}"
    reach = "" if holder is None or holder.address is None else f", or use it at {holder.address}"
    return LedgerError(
        f"expected to be the only writer of {database}, {who} writes to it",
        code=Code.LEDGER_LOCKED,
        where=str(database),
        hint=f"end that process{reach}; reading needs no lock",
    )


_held: WeakSet[WriterLock] = WeakSet()


def _after_fork() -> None:
    for lock in list(_held):
        lock.leave_to_parent()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)
