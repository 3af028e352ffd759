"""The durable store of captured calls: one protocol, several stores."""

from gristmill.ledger.lock import LockHolder, read_holder
from gristmill.ledger.memory import MemoryLedger
from gristmill.ledger.migrate import migrate
from gristmill.ledger.protocol import (
    LATE_REASON,
    SETUP_SCHEMA,
    AttemptKey,
    AttemptSetup,
    AttemptState,
    Counts,
    Imported,
    Ledger,
    StoredCall,
    Summary,
)
from gristmill.ledger.snapshot import snapshot_id
from gristmill.ledger.sqlite import SqliteLedger, SqliteReader

__all__ = [
    "LATE_REASON",
    "SETUP_SCHEMA",
    "AttemptKey",
    "AttemptSetup",
    "AttemptState",
    "Counts",
    "Imported",
    "Ledger",
    "LockHolder",
    "MemoryLedger",
    "SqliteLedger",
    "SqliteReader",
    "StoredCall",
    "Summary",
    "migrate",
    "read_holder",
    "snapshot_id",
]
