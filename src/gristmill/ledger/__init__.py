"""The durable store of captured calls: one protocol, several stores."""

from gristmill.ledger.address import LedgerAddress, PostgresAddress, parse_address
from gristmill.ledger.lock import LockHolder, read_holder
from gristmill.ledger.memory import MemoryLedger
from gristmill.ledger.migrate import migrate
from gristmill.ledger.opening import holders_of, migrate_ledger, open_ledger, open_reader
from gristmill.ledger.protocol import (
    LATE_REASON,
    SETUP_SCHEMA,
    AttemptElsewhere,
    AttemptKey,
    AttemptSetup,
    AttemptState,
    Counts,
    Imported,
    Ledger,
    StoredCall,
    Summary,
)
from gristmill.ledger.read_side import LedgerReader
from gristmill.ledger.snapshot import snapshot_id
from gristmill.ledger.sqlite import SqliteLedger, SqliteReader
from gristmill.ledger.write_side import LedgerWriter

__all__ = [
    "LATE_REASON",
    "SETUP_SCHEMA",
    "AttemptElsewhere",
    "AttemptKey",
    "AttemptSetup",
    "AttemptState",
    "Counts",
    "Imported",
    "Ledger",
    "LedgerAddress",
    "LedgerReader",
    "LedgerWriter",
    "LockHolder",
    "MemoryLedger",
    "PostgresAddress",
    "SqliteLedger",
    "SqliteReader",
    "StoredCall",
    "Summary",
    "holders_of",
    "migrate",
    "migrate_ledger",
    "open_ledger",
    "open_reader",
    "parse_address",
    "read_holder",
    "snapshot_id",
]
