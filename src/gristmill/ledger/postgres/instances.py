"""Who writes to a PostgreSQL ledger: a row for each process, with a lease that it has to renew.

Invariant: only the server's clock decides. Each transaction of a writer takes the instance's own lock, looks at its
lease, and holds the lock until it ends; who wants to end a lease needs that lock, too. So a lease is never ended in the
middle of a write, and never written under once it has ended. A writer that is paused in the middle of one does not stay
there: when its lease has expired, its connection is cut off.

    alive ── lease expired, and somebody looks ──▶ ended: its calls in flight are lost, its attempts are free
      └───── close ─────────────────────────────▶ ended, likewise

Not here: whose an attempt is (library), threads (heartbeat).
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import Final

from gristmill.errors import Code, LedgerError
from gristmill.ledger.address import PostgresAddress
from gristmill.ledger.lock import LockHolder
from gristmill.ledger.postgres.schema import check_version
from gristmill.ledger.postgres.session import PostgresSession
from gristmill.ledger.protocol import LOST_WITH_WRITER, AttemptState
from gristmill.ledger.schema import PARTS

__all__ = [
    "LOST_WITH_LEASE",
    "cut_off",
    "end",
    "end_expired",
    "expired_error",
    "hold",
    "holders",
    "reach",
    "register",
    "renew",
]

LOST_WITH_LEASE: Final = "the lease of the process that made the call expired before its outcome"
"""Why a call counts as lost whose process was silent for too long."""

_FORGET_AFTER: Final = "interval '7 days'"
_STATES: Final = f"('{AttemptState.OPEN}', '{AttemptState.FINISHED}')"
_ALIVE: Final = "ended IS NULL AND lease_until > clock_timestamp()"
_EXPIRED: Final = "ended IS NULL AND lease_until <= clock_timestamp()"
_LOCK_OF: Final = "('x' || {})::bit(64)::int8"
"""An instance's id is the number of its lock."""


def register(session: PostgresSession, lease_s: float, address: str | None) -> str:
    """Begin a lease and return the id of the instance that has it."""
    instance = secrets.token_hex(8)
    session.execute(
        "INSERT INTO instances (instance, host, pid, address, lease_until) "
        "VALUES (?, ?, ?, ?, clock_timestamp() + make_interval(secs => ?))",
        (instance, socket.gethostname(), os.getpid(), address, lease_s),
    )
    return instance


def hold(session: PostgresSession, instance: str, address: PostgresAddress) -> str | None:
    """Take an instance's lock until the transaction ends, and return the transaction's id; None: its lease has ended.

    Raises:
        LedgerError: `schema_unsupported`: the tables were brought to another version meanwhile.
    """
    session.execute(f"SELECT pg_advisory_xact_lock({_LOCK_OF.format('?')})", (instance,))
    # A statement of its own: it sees what was committed before the lock was got.
    found = session.execute(
        f"SELECT version, {_ALIVE}, pg_current_xact_id()::text FROM ledger, instances WHERE instance = ?", (instance,)
    ).fetchone()
    if found is None:
        return None
    version, alive, transaction = found
    check_version(version, address)
    return transaction if alive else None


def renew(session: PostgresSession, instance: str, lease_s: float) -> bool:
    """Let a lease last anew; False where it has ended. The transaction is no writer's."""
    renewed = session.execute(
        "UPDATE instances SET lease_until = clock_timestamp() + make_interval(secs => ?) "
        f"WHERE instance = ? AND {_ALIVE} RETURNING instance",
        (lease_s, instance),
    )
    return renewed.fetchone() is not None


def end_expired(session: PostgresSession, instance: str | None = None) -> int:
    """End the leases that have expired, of one instance or of all, and return how many calls are lost with them.

    An instance that is in the middle of a write is left alone. The transaction is the caller's.
    """
    one = "" if instance is None else "AND instance = ? "
    expired = session.execute(
        f"SELECT instance FROM instances WHERE {_EXPIRED} {one}ORDER BY instance",
        () if instance is None else (instance,),
    )
    lost = 0
    for (name,) in expired:
        locked = session.execute(f"SELECT pg_try_advisory_xact_lock({_LOCK_OF.format('?')})", (name,)).fetchone()
        if not locked[0]:
            continue
        ended = session.execute(
            "UPDATE instances SET ended = clock_timestamp(), how = 'expired' "
            f"WHERE instance = ? AND {_EXPIRED} RETURNING instance",
            (name,),
        )
        if ended.fetchone() is not None:
            lost += _lose(session, name, LOST_WITH_LEASE)
    return lost


def cut_off(session: PostgresSession) -> None:
    """End the connections of writers that are in the middle of a write although their leases have expired.

    Raises:
        psycopg.Error: they belong to another user of the server.
    """
    session.execute(
        "SELECT pg_terminate_backend(locks.pid) FROM instances JOIN pg_locks AS locks "
        f"ON (locks.classid::int8 << 32 | locks.objid::int8) = {_LOCK_OF.format('instance')} "
        "JOIN pg_database ON pg_database.oid = locks.database AND datname = current_database() "
        f"WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND locks.pid <> pg_backend_pid() AND {_EXPIRED}"
    )


def end(session: PostgresSession, instance: str) -> int:
    """End an instance's own lease, because it closes, and return how many calls are lost with it."""
    closed = session.execute(
        "UPDATE instances SET ended = clock_timestamp(), how = 'closed' WHERE instance = ? AND ended IS NULL "
        "RETURNING instance",
        (instance,),
    ).fetchone()
    session.execute(f"DELETE FROM instances WHERE ended < clock_timestamp() - {_FORGET_AFTER}")
    return 0 if closed is None else _lose(session, instance, LOST_WITH_WRITER)


def _lose(session: PostgresSession, instance: str, reason: str) -> int:
    """Mark the calls that an instance had in flight; a frozen attempt keeps what its snapshot says."""
    return session.execute(
        "UPDATE intents SET reason = ? WHERE reason IS NULL AND instance = ? "
        f"AND intent_no / {PARTS} IN (SELECT attempt_no FROM attempts WHERE state IN {_STATES})",
        (reason, instance),
    ).rowcount


def reach(session: PostgresSession, instance: str) -> tuple[bool, str | None]:
    """Tell whether an instance that has attempts lives, and where it can be reached.

    One whose lease has expired is ended on the way, unless it is in the middle of a write.
    """
    select = "SELECT ended IS NULL, lease_until > clock_timestamp(), address FROM instances WHERE instance = ?"
    found = session.execute(select, (instance,)).fetchone()
    if found is None or not found[0]:
        return False, None
    if not found[1]:
        end_expired(session, instance)
        found = session.execute(select, (instance,)).fetchone()
    return found is not None and found[0], None if found is None else found[2]


def holders(session: PostgresSession) -> list[LockHolder]:
    """Return the instances whose leases last, those first that began first."""
    rows = session.execute(
        "SELECT pid, host, instance, extract(epoch FROM started)::float8, address FROM instances "
        f"WHERE {_ALIVE} ORDER BY started"
    )
    return [
        LockHolder(pid=pid, host=host, instance=instance, started=started, address=address)
        for pid, host, instance, started, address in rows
    ]


def expired_error(instance: str, address: PostgresAddress) -> LedgerError:
    """Make the error for a write under a lease that has ended."""
    return LedgerError(
        f"expected the lease of instance {instance} of {address} to last, it has expired: nothing was written",
        code=Code.LEASE_EXPIRED,
        where=str(address),
        hint="the process was paused or cut off for longer than its lease; calls in flight are lost, new ones go on",
    )
