"""What an attempt was opened with: the digest of its key, its group, metadata and overrides.

Invariant: a setup is written once and never changed; of a key only its digest is here, one digest belongs to one
attempt, and one that was revoked never names an attempt again.

Not here: keys themselves (gateway).
"""

from __future__ import annotations

import re
from math import isfinite
from typing import Final, NamedTuple, cast

from gristmill.canonical import loads
from gristmill.captures.exact import plain_numbers
from gristmill.errors import Code, LedgerError
from gristmill.ledger.bodies import written_plain
from gristmill.ledger.book import Library, check_names, closed_error, name_of
from gristmill.ledger.calls import checksum
from gristmill.ledger.protocol import SETUP_SCHEMA, AttemptKey, AttemptSetup, AttemptState
from gristmill.ledger.schema import SETUPS, AttemptRow, SetupRow
from gristmill.ledger.session import Session

__all__ = [
    "Begin",
    "Revoke",
    "key_exists",
    "prepare_setup",
    "read_grant",
    "read_grants",
    "read_setup",
    "setup_checksum",
    "setup_of",
]

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_GRANTING: Final = (AttemptState.OPEN, AttemptState.FINISHED)
_GRANTS: Final = (
    "SELECT key_digest, rollout_id, attempt FROM setups JOIN attempts USING (attempt_no) "
    "WHERE key_digest IS NOT NULL AND revoked = 0 AND state IN (?, ?)"
)


def prepare_setup(key: AttemptKey, setup: AttemptSetup) -> SetupRow:
    """Check and encode a setup; its attempt's number is still 0.

    Raises:
        LedgerError: `option_invalid`: the digest is none, a value is no JSON, or the time is no finite number.
    """
    check_names(key, setup.group_id)
    where = key.rollout_id
    if setup.key_digest is not None and not _DIGEST.fullmatch(setup.key_digest):
        raise LedgerError(
            "expected a key's SHA-256 as 64 hexadecimal digits in lower case, got something else",
            code=Code.OPTION_INVALID,
            where=where,
        )
    if setup.created_at is not None and not isfinite(setup.created_at):
        raise LedgerError(f"expected a finite time, got {setup.created_at}", code=Code.OPTION_INVALID, where=where)
    if not 1 <= setup.schema <= SETUP_SCHEMA:
        raise LedgerError(
            f"expected a setup of schema {SETUP_SCHEMA} or older, got {setup.schema}",
            code=Code.SCHEMA_UNSUPPORTED,
            where=where,
        )
    row = SetupRow(
        attempt_no=0,
        key_digest=setup.key_digest,
        revoked=0,
        group_id=setup.group_id,
        metadata=written_plain(setup.metadata, "$.metadata"),
        overrides=written_plain(setup.overrides, "$.overrides"),
        created_at=None if setup.created_at is None else float(setup.created_at),
        schema=setup.schema,
        checksum=0,
    )
    return row._replace(checksum=setup_checksum(row))


def setup_checksum(row: SetupRow) -> int:
    """Checksum of all that a setup row holds and that never changes."""
    created_at = None if row.created_at is None else row.created_at.hex().encode()
    names = (None if name is None else name.encode() for name in (row.key_digest, row.group_id))
    return checksum(*names, row.metadata, row.overrides, created_at, b"%d" % row.schema)


def key_exists(key: AttemptKey, got: str) -> LedgerError:
    """Make the error for a setup that cannot be this attempt's."""
    return LedgerError(
        f"expected a new attempt, or the one that is there with an equal setup, {got}",
        code=Code.KEY_EXISTS,
        where=key.rollout_id,
        hint="name another rollout id or attempt number",
    )


class Begin(NamedTuple):
    """An attempt that takes calls from now on, though it has none."""

    key: AttemptKey
    setup: AttemptSetup

    def apply(self, library: Library) -> None:
        """Store the setup; an equal one again changes nothing."""
        prepared = prepare_setup(self.key, self.setup)
        connection = library.connection
        book = library.look(self.key)
        stored = SETUPS.one(connection, "WHERE attempt_no = ?", (book.attempt_no,))
        if stored is not None:
            if stored._replace(attempt_no=0, revoked=0) != prepared:
                raise key_exists(self.key, f"{name_of(self.key)} is there with another")
            return
        if book.state != AttemptState.OPEN:
            raise closed_error(self.key, book.state, "takes a setup")
        if prepared.key_digest is not None and SETUPS.one(connection, "WHERE key_digest = ?", (prepared.key_digest,)):
            raise key_exists(self.key, "another attempt has its key")
        book = library.begin(self.key)
        library.insert(SETUPS, prepared._replace(attempt_no=book.attempt_no))
        library.change(book)


class Revoke(NamedTuple):
    """The attempt's key is worth nothing any more; what was captured stays as it is."""

    key: AttemptKey

    def apply(self, library: Library) -> None:
        """Mark the setup; one that is marked, and an attempt that has none, stay as they are."""
        book = library.known(self.key)
        library.connection.execute("UPDATE setups SET revoked = 1 WHERE attempt_no = ?", (book.attempt_no,))


def read_setup(connection: Session, attempt: AttemptRow) -> AttemptSetup | None:
    """Read what an attempt was opened with, None where nobody opened it.

    Raises:
        LedgerError: `ledger_damaged`; `schema_unsupported` where a newer version wrote it.
    """
    row = SETUPS.one(connection, "WHERE attempt_no = ?", (attempt.attempt_no,))
    return None if row is None else setup_of(AttemptKey(attempt.rollout_id, attempt.attempt), row)


def setup_of(key: AttemptKey, row: SetupRow) -> AttemptSetup:
    """Decode a setup; `LedgerError` as `read_setup`."""
    where = key.rollout_id
    if row.checksum != setup_checksum(row):
        raise LedgerError(
            f"expected the setup of {name_of(key)} as it was written, got other bytes",
            code=Code.LEDGER_DAMAGED,
            where=where,
        )
    if row.schema > SETUP_SCHEMA:
        raise LedgerError(
            f"expected a setup of schema {SETUP_SCHEMA} or older, got {row.schema}",
            code=Code.SCHEMA_UNSUPPORTED,
            where=where,
            hint="read it with the version of gristmill that wrote it, or a newer one",
        )
    return AttemptSetup(
        key_digest=row.key_digest,
        group_id=row.group_id,
        metadata=_mapping(row.metadata, "$.metadata"),
        overrides=_mapping(row.overrides, "$.overrides"),
        created_at=row.created_at,
        schema=row.schema,
    )


def _mapping(text: bytes, where: str) -> dict[str, object]:
    return cast("dict[str, object]", plain_numbers(loads(text, where), where))


def read_grants(connection: Session) -> list[tuple[str, AttemptKey]]:
    """Read which key digests open which attempts."""
    rows = connection.execute(f"{_GRANTS} ORDER BY attempt_no", _GRANTING)
    return [(digest, AttemptKey(rollout_id, attempt)) for digest, rollout_id, attempt in rows]


def read_grant(connection: Session, key_digest: str) -> AttemptKey | None:
    """Read which attempt one key digest opens, None where it opens none."""
    found = connection.execute(f"{_GRANTS} AND key_digest = ?", (*_GRANTING, key_digest)).fetchone()
    return None if found is None else AttemptKey(*found[1:])
