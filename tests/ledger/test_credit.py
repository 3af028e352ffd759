"""Credit of results in ledgers: kept to the last bit, part of what is frozen, and nothing to those without."""

from __future__ import annotations

from contextlib import closing
from math import nan
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gristmill.errors import Code
from gristmill.ledger import AttemptKey, Ledger, SqliteLedger, snapshot_id
from gristmill.ledger.calls import result_checksum
from gristmill.records import Attribution, CallCredit, Capture, Failure, Result
from tests.captures.test_credit import GIVEN
from tests.ledger.attempts import fill, refused

KEY = AttemptKey("r")


def test_credit_is_kept(ledger: Ledger) -> None:
    # What a verifier or a process reward model said of each call is as much evidence as the reward.
    fill(ledger, KEY)
    ledger.finish(KEY, GIVEN)
    ledger.finish(KEY, GIVEN)
    assert ledger.read(KEY)[1] == GIVEN
    refused(Code.ATTEMPT_DIFFERS, ledger.finish, KEY, msgspec.structs.replace(GIVEN, advantage=0.0))
    capture, result = ledger.read(KEY, exchanges=True)
    assert ledger.freeze(KEY) == snapshot_id(capture, result)


def test_metadata_stands_beside_credit(ledger: Ledger) -> None:
    # Both are one column in SQLite.
    given = msgspec.structs.replace(GIVEN, metadata={"note": "two\nlines", "credits": [1]})
    fill(ledger, KEY)
    ledger.finish(KEY, given)
    assert ledger.read(KEY)[1] == given


@pytest.mark.parametrize(
    "given",
    [
        Result(advantage=nan),
        Result(credits=(CallCredit(model_call_id="c", reward=nan),)),
        Result(credits=(CallCredit(model_call_id="c"),)),
        Result(credits=(CallCredit(model_call_id="c", reward=1.0),) * 2),
        Result(credits=(CallCredit(model_call_id="c", start=1.5, reward=1.0),)),  # pyright: ignore[reportArgumentType]
        Result(credits=(CallCredit(model_call_id="\ud800", reward=1.0),)),
        Result(failure=Failure("", Attribution.MASK)),
    ],
)
def test_what_cannot_be_read_back_is_refused(ledger: Ledger, given: Result) -> None:
    # Stored once, it would refuse the whole attempt when it is trained.
    fill(ledger, KEY)
    refused(Code.OPTION_INVALID, ledger.finish, KEY, given)
    assert ledger.read(KEY)[1] is None


def test_the_snapshot_covers_credit() -> None:
    # An archive is deleted from the ledger only under the digest of what it holds.
    capture = Capture(rollout_id="r")
    changes: list[dict[str, Any]] = [
        {},
        {"advantage": 1.0},
        {"credits": ()},
        {"credits": GIVEN.credits[::-1]},
        {"failure": None},
        {"failure": Failure("the sandbox was gone", Attribution.SCORE)},
    ]
    ids = [snapshot_id(capture, msgspec.structs.replace(GIVEN, **change)) for change in changes]
    assert len(set(ids)) == len(ids)


def test_attempts_without_credit_keep_their_ids_and_bytes(tmp_path: Path) -> None:
    # An archive that was made before there was any credit must still be the one that the ledger holds.
    plain = Result(value={"messages": []}, reward=1.0, metadata={"a": 1})
    made = snapshot_id(Capture(rollout_id="r"), plain)
    assert made == "af1e9f9a7052deecf602d894099703861cb5c93740882a915ca6fa57c651cf63"
    with SqliteLedger(tmp_path / "l") as ledger:
        fill(ledger, KEY)
        ledger.finish(KEY, plain)
        with closing(ledger_connection(tmp_path / "l")) as connection:
            assert connection.execute("SELECT metadata FROM results").fetchall() == [(b'{"a":1}',)]


def ledger_connection(path: Path) -> Any:
    import sqlite3

    return sqlite3.connect(path)


def test_credit_of_a_newer_version_is_not_guessed(tmp_path: Path) -> None:
    # A key that this version does not know may change what the others mean.
    path = tmp_path / "l"
    with SqliteLedger(path) as ledger:
        fill(ledger, KEY)
        ledger.finish(KEY, GIVEN)
    with closing(ledger_connection(path)) as connection:
        [(value, reward)] = connection.execute("SELECT value, reward FROM results").fetchall()
        metadata = b'{}\n{"failure":{"reason":"x","attribution":"halve"}}'
        checksum = result_checksum(value, metadata, reward, None)
        connection.execute("UPDATE results SET metadata = ?, checksum = ?", (metadata, checksum))
        connection.commit()
    with SqliteLedger(path) as ledger:
        refused(Code.SCHEMA_UNSUPPORTED, ledger.read, KEY)
