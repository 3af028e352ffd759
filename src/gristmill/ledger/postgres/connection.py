"""Connections to a PostgreSQL ledger, and the server's errors in our words.

Invariant: a connection looks into the ledger's own schema and no other, writes durably, and notices within a minute
that the server is gone. No error of ours repeats a password: messages name the address as it is shown.

Not here: the tables (schema), values (session).
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import psycopg
from psycopg import conninfo as libpq
from psycopg import sql
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from gristmill.errors import Code, ConfigError, LedgerError
from gristmill.ledger.address import PostgresAddress
from gristmill.ledger.damage import DAMAGE
from gristmill.ledger.postgres.session import Connection, adapt

__all__ = ["connect", "is_gone", "make_pool", "reading", "translated"]

_CONNECT_s: Final = 10
_READERS: Final = 8
_LENT_WITHIN_s: Final = 30.0
_DEFAULTS: Final = {
    "application_name": "gristmill",
    "connect_timeout": str(_CONNECT_s),
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}

# What the pool says of a server that is gone is said by the one who wanted the connection.
logging.getLogger("psycopg.pool").addHandler(logging.NullHandler())


def _told(address: PostgresAddress) -> str:
    """Return what libpq is told: the URL's parameters over ours."""
    try:
        given = libpq.conninfo_to_dict(address.conninfo)
    except psycopg.ProgrammingError:
        # The error may quote what it could not read, a password included.
        raise ConfigError(
            f"expected a URL that libpq understands, it does not: {address}",
            code=Code.OPTION_INVALID,
            where=str(address),
            hint="its parameters are in PostgreSQL's manual, chapter libpq; one more is schema",
        ) from None
    return libpq.make_conninfo("", **{**_DEFAULTS, **given})


def _configure(connection: Connection, address: PostgresAddress) -> None:
    """Bring a new connection into the ledger's schema, and see that its commits will last."""
    adapt(connection)
    was = connection.autocommit
    connection.autocommit = True
    connection.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(address.schema)))
    # A server that is told to wait for more than its own disk goes on doing so.
    connection.execute(
        "SELECT set_config('synchronous_commit', 'on', false) "
        "WHERE current_setting('synchronous_commit') IN ('off', 'local')"
    )
    connection.execute("SET timezone TO 'UTC'")
    connection.autocommit = was


def connect(address: PostgresAddress) -> Connection:
    """Open a connection; it begins no transaction by itself.

    Raises:
        LedgerError: `ledger_unreachable`, or `option_invalid` for a server with another encoding than UTF-8.
        ConfigError: `option_invalid`.
    """
    told = _told(address)
    with reading(address):
        connection = psycopg.connect(told, autocommit=True)
        try:
            encoding = connection.info.parameter_status("server_encoding")
            if encoding != "UTF8":
                raise LedgerError(
                    f"expected a database in UTF-8, {address} is in {encoding}",
                    code=Code.OPTION_INVALID,
                    where=str(address),
                    hint="createdb --encoding=UTF8 --template=template0 DATABASE",
                )
            _configure(connection, address)
        except BaseException:
            connection.close()
            raise
        return connection


def make_pool(address: PostgresAddress) -> ConnectionPool[Connection]:
    """Make a pool of connections for readers; they are opened when they are asked for."""
    return ConnectionPool(
        _told(address),
        kwargs={"autocommit": True},
        configure=lambda connection: _configure(connection, address),
        check=ConnectionPool.check_connection,
        min_size=0,
        max_size=_READERS,
        timeout=_LENT_WITHIN_s,
        reconnect_timeout=_LENT_WITHIN_s,
        open=True,
        name=f"gristmill {address}",
    )


@contextmanager
def reading(address: PostgresAddress) -> Generator[None]:
    """Turn what the server, or reading what it gave, raises into a `LedgerError`."""
    try:
        yield
    except (psycopg.Error, *DAMAGE) as error:
        raise translated(error, address) from error


def is_gone(error: BaseException) -> bool:
    """Tell whether an error says that the connection is of no more use."""
    state = getattr(error, "sqlstate", None)
    if state is not None:
        return state[:2] == "08" or state in {"57P01", "57P02", "57P03", "57P05", "25P03"}
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)


_BY_CLASS: Final = {
    "08": Code.LEDGER_UNREACHABLE,
    "22": Code.OPTION_INVALID,
    "23": Code.LEDGER_BUSY,
    "28": Code.LEDGER_UNREACHABLE,
    "3D": Code.LEDGER_UNREACHABLE,
    "40": Code.LEDGER_BUSY,
    "53": Code.LEDGER_BUSY,
    "54": Code.OPTION_INVALID,
    "55": Code.LEDGER_LOCKED,
    "57": Code.LEDGER_UNREACHABLE,
    "58": Code.LEDGER_WRITE_FAILED,
}
_BY_STATE: Final = {
    "25006": Code.LEDGER_READ_ONLY,
    "25P03": Code.LEDGER_UNREACHABLE,
    "42501": Code.LEDGER_READ_ONLY,
    "53100": Code.LEDGER_FULL,
    "53300": Code.LEDGER_UNREACHABLE,
    "57014": Code.LEDGER_BUSY,
}
_SAID: Final = {
    Code.LEDGER_UNREACHABLE: (
        "expected to reach the database of {0}, it refused or is gone: {1}",
        "see that the server runs and lets this user in (psql says the same); nothing that was acknowledged is lost",
    ),
    Code.LEDGER_READ_ONLY: (
        "expected to be let write to {0}, the server refused: {1}",
        "the user needs CREATE on the database for a new ledger, else the rights on its schema",
    ),
    Code.LEDGER_FULL: (
        "expected room for a write, the disk of {0} is full: {1}",
        "make room and try again: nothing that was acknowledged is lost",
    ),
    Code.LEDGER_BUSY: ("expected {0} to take a write, the server could not now: {1}", "try again later"),
    Code.LEDGER_LOCKED: ("expected {0} to be free, another session holds it locked: {1}", "try again later"),
    Code.LEDGER_WRITE_FAILED: (
        "expected the server of {0} to write, its system refused: {1}",
        "look at the server's disk; nothing that was acknowledged is lost",
    ),
    Code.OPTION_INVALID: ("expected values that {0} can store, got: {1}", None),
}


def translated(error: BaseException, address: PostgresAddress) -> LedgerError:
    """Turn an error of the server, or of reading what it gave, into ours."""
    if isinstance(error, LedgerError):
        return error
    state: str | None = getattr(error, "sqlstate", None)
    code = _code_of(error, state)
    if code is None:
        return LedgerError(
            f"expected an undamaged ledger, got {type(error).__name__}: {_first_line(error)}",
            code=Code.LEDGER_DAMAGED,
            where=str(address),
            hint="restore the database from a backup, or copy what is readable with `gristmill ledger copy`",
        )
    message, hint = _SAID[code]
    return LedgerError(message.format(address, _first_line(error)), code=code, where=str(address), hint=hint)


def _code_of(error: BaseException, state: str | None) -> Code | None:
    if state is not None:
        return _BY_STATE.get(state) or _BY_CLASS.get(state[:2])
    if isinstance(error, PoolTimeout | PoolClosed) or is_gone(error):
        return Code.LEDGER_UNREACHABLE
    if isinstance(error, OverflowError | UnicodeEncodeError | psycopg.DataError):
        return Code.OPTION_INVALID
    return None


def _first_line(error: BaseException) -> str:
    diagnosed = getattr(getattr(error, "diag", None), "message_primary", None)
    text = str(diagnosed or error).strip() or type(error).__name__
    return " ".join(text.splitlines()[0].split()).rstrip(":")
