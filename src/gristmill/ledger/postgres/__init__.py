"""A ledger in a PostgreSQL database: several processes write, each to its own attempts.

Not imported by `gristmill.ledger`: its packages are an extra. `gristmill.ledger.opening` opens either kind.
"""

from gristmill.ledger.postgres.ledger import PostgresLedger, PostgresReader
from gristmill.ledger.postgres.schema import migrate

__all__ = ["PostgresLedger", "PostgresReader", "migrate"]
