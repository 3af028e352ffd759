"""A ledger by its address, whichever kind it is.

Invariant: what PostgreSQL needs is imported only for the address of one, and named where it is not installed.

Not here: the ledgers themselves (sqlite, postgres).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from gristmill.errors import Code, ConfigError
from gristmill.extras import install_hint
from gristmill.ledger.address import LedgerAddress
from gristmill.ledger.lock import LockHolder, read_holder
from gristmill.ledger.migrate import migrate
from gristmill.ledger.read_side import LedgerReader
from gristmill.ledger.schema import SCHEMA_VERSION
from gristmill.ledger.sqlite import SqliteLedger, SqliteReader
from gristmill.ledger.write_side import LedgerWriter

__all__ = ["Migrated", "holders_of", "migrate_ledger", "open_ledger", "open_reader"]

_EXTRA = "gristmill[postgres]"


class Migrated(NamedTuple):
    """Versions of a ledger's schema, before and after."""

    found: int
    current: int


@contextmanager
def _packages() -> Generator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "gristmill":
            raise
        raise ConfigError(
            f"expected the packages of {_EXTRA} for a ledger in PostgreSQL, {error.name} is not installed",
            code=Code.OPTION_INVALID,
            where=_EXTRA,
            hint=install_hint("postgres"),
        ) from error


def open_reader(address: LedgerAddress) -> LedgerReader:
    """Open a ledger to read.

    Raises:
        LedgerError: there is no ledger of this version at the address, or it cannot be read.
        ConfigError: `option_invalid`: the packages for it are not installed.
    """
    if isinstance(address, Path):
        return SqliteReader(address)
    with _packages():
        from gristmill.ledger.postgres import PostgresReader  # noqa: PLC0415  an extra
    return PostgresReader(address)


def open_ledger(address: LedgerAddress, *, lease_s: float | None = None, keep_open: bool = False) -> LedgerWriter:
    """Open a ledger to write; it is made where there is none.

    Args:
        address: where it is.
        lease_s: where several processes may write: how long this one may be silent before others take its attempts.
        keep_open: leave the calls that earlier writers had in flight as they are, to go on with a copy.

    Raises:
        LedgerError: another process writes to a file, or the ledger cannot be written to.
        ConfigError: `option_invalid`: the packages for it are not installed.
    """
    if isinstance(address, Path):
        return SqliteLedger(address, keep_open=keep_open)
    with _packages():
        from gristmill.ledger.postgres import PostgresLedger  # noqa: PLC0415
        from gristmill.ledger.postgres.ledger import LEASE_s  # noqa: PLC0415
    return PostgresLedger(address, lease_s=LEASE_s if lease_s is None else lease_s)


def holders_of(address: LedgerAddress) -> list[LockHolder]:
    """Return who says that it writes to a ledger; of a file one at most, which need not live any more.

    Raises:
        LedgerError: the database cannot be read.
    """
    if isinstance(address, Path):
        holder = read_holder(address)
        return [] if holder is None else [holder]
    with _packages():
        from gristmill.ledger.postgres import PostgresReader  # noqa: PLC0415
    with PostgresReader(address) as reader:
        return [*reader.holders()]


def migrate_ledger(address: LedgerAddress) -> Migrated:
    """Bring a ledger to this version's schema, with nobody else at it.

    Raises:
        LedgerError: `ledger_locked`; `schema_unsupported` where it is newer. Nothing was changed.
    """
    if isinstance(address, Path):
        return Migrated(migrate(address), SCHEMA_VERSION)
    with _packages():
        from gristmill.ledger.postgres import migrate as bring_up  # noqa: PLC0415
        from gristmill.ledger.postgres.schema import POSTGRES_SCHEMA_VERSION  # noqa: PLC0415
    return Migrated(bring_up(address), POSTGRES_SCHEMA_VERSION)
