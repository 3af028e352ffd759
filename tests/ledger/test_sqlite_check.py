"""Edits of a ledger's file with another program.

If one of these fails, somebody can change a reward or take a call away, and `gristmill verify` says that all is well.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from gristmill.canonical import loads
from gristmill.errors import Code, LedgerError
from gristmill.ledger import AttemptKey, AttemptSetup, Imported, Ledger, MemoryLedger, SqliteLedger, SqliteReader
from gristmill.ledger.calls import label_checksum as crc
from gristmill.ledger.schema import SETUPS
from gristmill.ledger.setups import setup_checksum
from gristmill.records import Capture, Delivery, Purpose, PurposeLabel, Result
from tests.ledger.attempts import fill, lone

KEY = AttemptKey("r")
STAGES = ("open", "finished", "frozen", "imported")


def captured() -> tuple[Capture, Result | None]:
    memory = MemoryLedger()
    fill(memory, KEY, 4)
    memory.admit(KEY, "gone")
    memory.finish(KEY, Result(value=[1], reward=1.0, group_id="g", metadata={"m": 1.5}))
    return memory.read(KEY, exchanges=True)


def fill_to(ledger: Ledger, stage: str) -> None:
    """Bring an attempt to a stage, with lost calls, late ones and deliveries where it can have them."""
    if stage == "imported":
        ledger.import_attempts([captured()])
        return
    ledger.begin(KEY, AttemptSetup(key_digest="a" * 64, group_id="h", metadata={"a": 1}, created_at=1.5))
    fill(ledger, KEY, 4)
    ledger.label(KEY, {"c0": Purpose(PurposeLabel.AUXILIARY, "a title"), "c3": Purpose(PurposeLabel.AGENT, "tools")})
    ledger.deliver(KEY, "c1", Delivery.DELIVERED)
    ledger.admit(KEY, "gone")
    ledger.admit(KEY, "late")
    if stage == "open":
        return
    ledger.finish(KEY, Result(value=[1], reward=1.0, group_id="g"))
    ledger.commit(KEY, lone("late"))
    if stage == "frozen":
        ledger.freeze(KEY)


def made(path: Path, stage: str) -> Path:
    with SqliteLedger(path) as ledger:
        fill_to(ledger, stage)
    return path


def edit(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            assert connection.execute(statement).rowcount, statement


def checked(path: Path) -> tuple[str, ...]:
    with SqliteReader(path) as reader:
        (key,) = reader.attempts()
        return reader.check(key)


@pytest.mark.parametrize("stage", STAGES)
def test_what_was_written_has_nothing_to_say(tmp_path: Path, stage: str) -> None:
    path = made(tmp_path / "x.ledger", stage)
    assert checked(path) == ()
    with SqliteLedger(path) as ledger:
        assert ledger.check(KEY) == ()
        ledger.deliver(KEY, "c0", Delivery.DELIVERED)
        assert ledger.check(KEY) == ()
        with pytest.raises(LedgerError) as caught:
            ledger.check(AttemptKey("none"))
        assert caught.value.code is Code.ROLLOUT_UNKNOWN
    memory = MemoryLedger()
    fill_to(memory, stage)
    assert memory.check(KEY) == ()


EDITS = (
    "UPDATE attempts SET rollout_id = 'other'",
    "UPDATE attempts SET attempt = 7",
    "UPDATE attempts SET attempt_no = 7",
    "UPDATE attempts SET calls = calls + 1",
    "UPDATE attempts SET lost = 0",
    "UPDATE attempts SET usable_calls = 0",
    "UPDATE attempts SET sampled_tokens = sampled_tokens - 1",
    "UPDATE attempts SET prompt_tokens = 0",
    "UPDATE attempts SET models = '[]'",
    "UPDATE attempts SET first_at = NULL",
    "UPDATE attempts SET last_at = 5.0",
    "UPDATE attempts SET state = 'nothing'",
    f"UPDATE attempts SET snapshot_id = '{'0' * 64}'",
    "UPDATE calls SET call_id = 'x' WHERE call_id = 'c3'",
    "UPDATE calls SET ordinal = 9 WHERE call_id = 'c3'",
    "UPDATE calls SET cum_len = cum_len + 1 WHERE call_id = 'c3'",
    "UPDATE calls SET cum_len = NULL WHERE call_id = 'c3'",
    "UPDATE calls SET late = 1 - late WHERE call_id = 'c3'",
    "DELETE FROM calls WHERE call_id = 'c3'",
    "DELETE FROM tokens WHERE call_no = (SELECT max(call_no) FROM tokens)",
    "DELETE FROM intents WHERE call_id = 'gone'",
    "UPDATE exchanges SET status = 500 WHERE call_no = (SELECT max(call_no) FROM exchanges)",
    "UPDATE exchanges SET status = NULL",
)
OF_SETUPS_AND_LABELS = (
    "UPDATE setups SET key_digest = NULL",
    f"UPDATE setups SET key_digest = '{'b' * 64}'",
    "UPDATE setups SET group_id = 'other'",
    "UPDATE setups SET metadata = x'7b7d'",
    "UPDATE setups SET overrides = x'7b226e223a317d'",
    "UPDATE setups SET created_at = 2.5",
    "UPDATE setups SET schema = 9",
    "UPDATE labels SET call_id = 'c1'",
    "UPDATE labels SET call_id = 'none'",
    "UPDATE labels SET label = 'agent'",
    "UPDATE labels SET label = 'unheard of'",
    "UPDATE labels SET evidence = 'others'",
)
OF_RESULTS = (
    "UPDATE results SET reward = 2.0",
    "UPDATE results SET reward = NULL",
    "UPDATE results SET group_id = 'other'",
    "UPDATE results SET group_id = NULL",
    "DELETE FROM results",
)


@pytest.mark.parametrize("stage", STAGES)
def test_every_edit_is_found(tmp_path: Path, stage: str) -> None:
    whole = made(tmp_path / "whole.ledger", stage).read_bytes()
    statements = (*EDITS, *OF_RESULTS * (stage != "open"), *OF_SETUPS_AND_LABELS * (stage != "imported"))
    for number, statement in enumerate(statements):
        path = tmp_path / f"{number}.ledger"
        path.write_bytes(whole)
        edit(path, statement)
        # A state that is none stops even the listing.
        sentences = checked(path) if "'nothing'" not in statement else refused(lambda path=path: checked(path))
        assert sentences, statement
        assert all(sentence.startswith("expected ") for sentence in sentences), sentences


def refused(work: Callable[[], object]) -> tuple[str, ...]:
    with pytest.raises(LedgerError) as caught:
        work()
    assert caught.value.code is Code.LEDGER_DAMAGED
    return (caught.value.message,)


def test_a_difference_hides_no_other(tmp_path: Path) -> None:
    path = made(tmp_path / "x.ledger", "frozen")
    edit(path, "UPDATE attempts SET calls = 9", "UPDATE results SET reward = 2.0")
    sentences = checked(path)
    assert sentences[0] == "expected calls of the attempt 4, got 9"
    assert "expected the result of r/0 as it was written" in sentences[1]
    edit(path, "UPDATE results SET value = 'text'")
    assert len(checked(path)) == 2


@pytest.mark.parametrize("table", ["labels", "setups"])
def test_what_is_gone_from_a_frozen_attempt_is_missed(tmp_path: Path, table: str) -> None:
    path = made(tmp_path / "x.ledger", "frozen")
    edit(path, f"DELETE FROM {table}")
    assert "snapshot" in checked(path)[0]


def test_labels_of_no_call_are_named(tmp_path: Path) -> None:
    path = made(tmp_path / "x.ledger", "open")
    purpose = Purpose(PurposeLabel.AGENT, "e")
    edit(path, f"UPDATE labels SET call_id = 'zz', label = 'agent', evidence = 'e', checksum = {crc('zz', purpose)}")
    assert checked(path)[0] == "expected labels of the attempt's calls only, got one of 'zz'"


def test_a_setup_of_a_newer_version_is_not_read(tmp_path: Path) -> None:
    path = made(tmp_path / "x.ledger", "open")
    with closing(sqlite3.connect(path)) as connection:
        row = next(SETUPS.rows(connection))
    edit(path, f"UPDATE setups SET schema = 2, checksum = {setup_checksum(row._replace(schema=2))}")
    with SqliteReader(path) as reader, pytest.raises(LedgerError) as caught:
        reader.setup(KEY)
    assert caught.value.code is Code.SCHEMA_UNSUPPORTED


@pytest.mark.parametrize("statement", ["UPDATE results SET reward = 0.0", "UPDATE results SET group_id = 'x'"])
def test_an_edited_result_is_not_read(tmp_path: Path, statement: str) -> None:
    path = made(tmp_path / "x.ledger", "finished")
    edit(path, statement)
    with SqliteReader(path) as reader, pytest.raises(LedgerError) as caught:
        reader.read(KEY)
    assert caught.value.code is Code.LEDGER_DAMAGED


def test_an_import_compares_content(tmp_path: Path) -> None:
    # The snapshot id is a column like any other: it does not prove that its attempt is still there.
    path = tmp_path / "x.ledger"
    made(path, "imported")
    edit(path, "UPDATE calls SET ordinal = 9 WHERE call_id = 'c3'")
    with SqliteLedger(path) as ledger:
        with pytest.raises(LedgerError) as caught:
            ledger.import_attempts([captured()])
        assert caught.value.code is Code.ATTEMPT_DIFFERS
    edit(path, "UPDATE calls SET ordinal = 3 WHERE call_id = 'c3'", "UPDATE attempts SET snapshot_id = 'x'")
    with SqliteLedger(path) as ledger:
        assert ledger.import_attempts([captured()]) == Imported(0, 1)


def test_numbers_of_another_kind_are_the_same_attempt(tmp_path: Path) -> None:
    # A capture made in Python may say 100 where the ledger reads 100.0.
    capture, _ = captured()
    records = [msgspec.structs.replace(record, admitted_at=100, completed_at=200) for record in capture.records]
    given = msgspec.structs.replace(capture, records=tuple(records))
    result = Result(value=loads("1.10"), reward=1, metadata={"a": loads("1.10"), "b": [loads('{"k": 1, "k": 2}')]})
    with SqliteLedger(tmp_path / "x.ledger") as ledger:
        assert ledger.import_attempts([(given, result)]) == Imported(1, 0)
        assert ledger.check(KEY) == ()
        assert ledger.import_attempts([(given, result)]) == Imported(0, 1)


def test_calls_whose_time_is_no_number(tmp_path: Path) -> None:
    with SqliteLedger(tmp_path / "x.ledger") as ledger:
        ledger.commit(KEY, lone("a", admitted_at=float("nan"), completed_at=2.0))
        ledger.commit_choices(KEY, [lone("b", admitted_at=1.0)])
        assert ledger.check(KEY) == ()
