"""The durable store of captured calls: one protocol, several stores."""

from gristmill.ledger.memory import MemoryLedger
from gristmill.ledger.protocol import AttemptKey, Ledger, StoredCall
from gristmill.ledger.snapshot import snapshot_id

__all__ = ["AttemptKey", "Ledger", "MemoryLedger", "StoredCall", "snapshot_id"]
