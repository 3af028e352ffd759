"""An older ledger into this version's schema: by command, with nobody else at it, never by the way.

Invariant: all steps happen in one transaction, so that a ledger is either as it was or of this version.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from time import time
from types import MappingProxyType
from typing import Final

from gristmill.errors import LedgerError
from gristmill.ledger.database import check_file, check_version, open_writer, read_version, reading
from gristmill.ledger.filesystem import refuse_network
from gristmill.ledger.lock import WriterLock
from gristmill.ledger.schema import SCHEMA_VERSION

__all__ = ["STEPS", "Step", "migrate"]

Step = Callable[[sqlite3.Connection], None]
"""Changes the tables of one version into those of the next, inside a transaction."""


def _with_setups_and_labels(connection: sqlite3.Connection) -> None:
    """Version 2: attempts that are opened before their first call, labels as events."""
    for statement in _VERSION_2:
        connection.execute(statement)


# As version 2 declared them: what `schema` declares may be newer.
_VERSION_2: Final = (
    """CREATE TABLE labels (
  label_no INTEGER NOT NULL PRIMARY KEY,
  call_id TEXT NOT NULL,
  label TEXT NOT NULL,
  evidence TEXT NOT NULL,
  at REAL NOT NULL,
  checksum INTEGER NOT NULL
)""",
    """CREATE TABLE setups (
  attempt_no INTEGER NOT NULL PRIMARY KEY REFERENCES attempts,
  key_digest TEXT,
  revoked INTEGER NOT NULL,
  group_id TEXT,
  metadata BLOB NOT NULL,
  overrides BLOB NOT NULL,
  created_at REAL,
  schema INTEGER NOT NULL,
  checksum INTEGER NOT NULL,
  UNIQUE (key_digest)
)""",
    "CREATE INDEX setups_group_id ON setups (group_id)",
)

STEPS: Final[Mapping[int, Step]] = MappingProxyType({1: _with_setups_and_labels})
"""The step that leads away from each older version. Version 1 is the first that was ever released."""


def migrate(path: str | os.PathLike[str], *, steps: Mapping[int, Step] = STEPS) -> int:
    """Bring a ledger to this version's schema and return the version it had.

    Args:
        path: the database; nobody may write to it.
        steps: by the version they lead away from.

    Raises:
        LedgerError: `ledger_locked`; `schema_unsupported` where it is newer, or no step leads away from its version.
            Nothing was changed.
    """
    database = Path(path)
    if not check_file(database):
        raise LedgerError(f"expected a ledger, got no such file: {database}", where=str(database))
    refuse_network(database)
    lock = WriterLock(database, secrets.token_hex(8), time())
    try:
        with reading(database), closing(open_writer(database)) as connection:
            return _migrate(connection, database, steps)
    finally:
        lock.release()


def _migrate(connection: sqlite3.Connection, path: Path, steps: Mapping[int, Step]) -> int:
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("BEGIN EXCLUSIVE")
    try:
        found = version = read_version(connection, path) or 0
        while version < SCHEMA_VERSION and version in steps:
            steps[version](connection)
            version += 1
        check_version(version, path)
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    return found
