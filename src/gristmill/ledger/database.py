"""A SQLite file as a ledger: opened, told from foreign files, and its errors in our words.

Invariant: nothing is written to a file before it is known to be a ledger of this version, or empty. Connections sync at
every commit. Whatever SQLite or a damaged file raises comes out as a `LedgerError`.

Not here: the tables (schema), writing (writer), older versions (migrate).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

from gristmill.errors import Code, LedgerError
from gristmill.ledger.damage import DAMAGE
from gristmill.ledger.schema import APPLICATION_ID, SCHEMA_VERSION, TABLES

__all__ = [
    "check_file",
    "check_version",
    "create",
    "open_reader",
    "open_writer",
    "read_version",
    "reading",
    "translated",
]

_MAGIC: Final = b"SQLite format 3\0"
_HEADER_BYTES: Final = 100
_PAGE_BYTES: Final = 4096
_FULL_BELOW_BYTES: Final = 64 * 1024
_WAIT_ms: Final = 10_000


def translated(error: BaseException, path: Path) -> LedgerError:
    """Turn an error of SQLite, or of reading what it gave, into ours."""
    if isinstance(error, LedgerError):
        return error
    code: int = getattr(error, "sqlite_errorcode", None) or 0
    where, kind = str(path), code & 0xFF
    if kind == sqlite3.SQLITE_FULL or (kind == sqlite3.SQLITE_IOERR and _is_full(path)):
        return LedgerError(
            f"expected room for a write, the disk of {path} is full",
            code=Code.LEDGER_FULL,
            where=where,
            hint="make room and try again: nothing that was acknowledged is lost",
        )
    if kind == sqlite3.SQLITE_IOERR:
        name = getattr(error, "sqlite_errorname", "SQLITE_IOERR")
        return LedgerError(
            f"expected to read and write {path}, the operating system refused ({name})",
            code=Code.LEDGER_WRITE_FAILED,
            where=where,
            hint="look at the disk; nothing that was acknowledged is lost",
        )
    if kind in {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH}:
        return _read_only(path)
    if kind in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}:
        return LedgerError(
            f"expected {path} to be free, another process holds it locked",
            code=Code.LEDGER_LOCKED,
            where=where,
            hint="end the process that writes to it",
        )
    if kind == sqlite3.SQLITE_CANTOPEN:
        return LedgerError(
            f"expected a file that can be opened, got {error}: {path}",
            code=Code.FILE_UNREADABLE,
            where=where,
            hint="a reader needs the files -wal and -shm beside it, or a folder that it can write them to",
        )
    if kind == sqlite3.SQLITE_TOOBIG or (not code and isinstance(error, OverflowError | UnicodeEncodeError)):
        return LedgerError(f"expected values that SQLite can store, got: {error}", code=Code.OPTION_INVALID)
    return LedgerError(
        f"expected an undamaged ledger, got {type(error).__name__}: {error}",
        code=Code.LEDGER_DAMAGED,
        where=where,
        hint="restore the file from a copy, or save what is readable with `sqlite3 FILE .recover`",
    )


def _is_full(path: Path) -> bool:
    try:
        stat = os.statvfs(path.parent)
    except OSError:
        return False
    return stat.f_bavail * stat.f_frsize < _FULL_BELOW_BYTES


def _read_only(path: Path) -> LedgerError:
    return LedgerError(
        f"expected a file that can be written to, {path} cannot",
        code=Code.LEDGER_READ_ONLY,
        where=str(path),
        hint="a ledger's file, its folder and its lock file must be writable for the one who writes to it",
    )


@contextmanager
def reading(path: Path) -> Generator[None]:
    """Turn what reading a damaged file raises into a `LedgerError`."""
    try:
        yield
    except (sqlite3.Error, *DAMAGE) as error:
        raise translated(error, path) from error


def check_file(path: Path) -> bool:
    """Tell whether a path holds a SQLite file (True) or nothing yet (False).

    Raises:
        LedgerError: `ledger_foreign`, `file_unreadable`.
    """
    try:
        if not path.exists():
            if path.parent.is_dir():
                return False
            raise LedgerError(f"expected a folder, got no such folder: {path.parent}", where=str(path))
        if not path.is_file():
            raise _foreign(path, "something that is no file")
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
    except OSError as error:
        raise LedgerError(f"expected a file that can be read, got {error.strerror}: {path}", where=str(path)) from error
    if not head:
        return False
    if not head.startswith(_MAGIC) or len(head) < _HEADER_BYTES:
        raise _foreign(path, "a file of another kind")
    application, cookie = (int.from_bytes(head[at : at + 4], "big") for at in (68, 40))
    # What was written to the log alone is not in here yet: then there is no schema cookie either.
    if application != APPLICATION_ID and (application or cookie):
        raise _foreign(path, "a database of another program")
    return True


def _foreign(path: Path, got: str) -> LedgerError:
    return LedgerError(
        f"expected a ledger of gristmill, {path} is {got}",
        code=Code.LEDGER_FOREIGN,
        where=str(path),
        hint="name another file; captures in files are read with `gristmill import`",
    )


def read_version(connection: sqlite3.Connection, path: Path) -> int | None:
    """Return the schema version of a ledger, None for a database that is still empty.

    Raises:
        LedgerError: `ledger_foreign`.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application == APPLICATION_ID:
        return version
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application or version or tables:
        raise _foreign(path, "a database of another program")
    return None


def check_version(version: int, path: Path) -> None:
    """Refuse an older or newer schema.

    Raises:
        LedgerError: `schema_unsupported`.
    """
    if version == SCHEMA_VERSION:
        return
    if version < SCHEMA_VERSION:
        hint = f"gristmill ledger migrate {path}"
    else:
        hint = "use the version of gristmill that wrote it, or a newer one"
    raise LedgerError(
        f"expected a ledger of schema {SCHEMA_VERSION}, {path} has schema {version}",
        code=Code.SCHEMA_UNSUPPORTED,
        where=str(path),
        hint=hint,
    )


def _connect(path: Path, options: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?{options}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
        timeout=_WAIT_ms / 1000,
    )


def open_reader(path: Path) -> sqlite3.Connection:
    """Open a ledger to read; never blocks its writer, and works when the writer is dead.

    Raises:
        LedgerError: there is no ledger of this version, or it cannot be read.
    """
    with reading(path):
        if not check_file(path):
            raise LedgerError(f"expected a ledger, got no such file: {path}", where=str(path))
        connection = _connect(path, "mode=ro")
        try:
            try:
                version = read_version(connection, path)
            except sqlite3.OperationalError as error:
                wal = path.with_name(f"{path.name}-wal")
                code: int = error.sqlite_errorcode & 0xFF
                if code not in {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY} or _has_bytes(wal):
                    raise
                # A folder that cannot be written to, and a ledger that was closed: nobody writes to it.
                connection.close()
                connection = _connect(path, "mode=ro&immutable=1")
                version = read_version(connection, path)
            if version is None:
                raise _foreign(path, "an empty database")
            check_version(version, path)
        except BaseException:
            connection.close()
            raise
        return connection


def _has_bytes(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def open_writer(path: Path) -> sqlite3.Connection:
    """Open a database to write, durably; the caller holds the lock.

    Raises:
        LedgerError: `ledger_read_only`, `ledger_damaged`, `ledger_foreign`.
    """
    with reading(path):
        if path.exists() and not os.access(path, os.W_OK):
            raise _read_only(path)
        connection = _connect(path, "mode=rwc")
        try:
            read_version(connection, path)
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise LedgerError(
                    f"expected a file system that can hold a write-ahead log, got journal mode {mode}",
                    code=Code.LEDGER_READ_ONLY,
                    where=str(path),
                )
            for pragma in (
                "synchronous = FULL",
                "fullfsync = ON",
                "checkpoint_fullfsync = ON",
                "foreign_keys = ON",
                "wal_autocheckpoint = 0",
                "cache_size = -16384",
            ):
                connection.execute(f"PRAGMA {pragma}")
        except BaseException:
            connection.close()
            raise
        return connection


def create(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables in an empty database, all at once.

    Raises:
        sqlite3.Error: nothing was made.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        for table in TABLES:
            for statement in table.ddl:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    # The file's name has to last as its content does.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
