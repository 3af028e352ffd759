"""Ledgers of older versions.

If one of these fails, a user who upgrades loses a run, or an old program writes what a new one misreads.
"""

from __future__ import annotations

import gzip
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gristmill.errors import Code
from gristmill.ledger import AttemptKey, AttemptSetup, AttemptState, MemoryLedger, SqliteLedger, SqliteReader, migrate
from gristmill.ledger.migrate import STEPS
from gristmill.ledger.schema import SCHEMA_VERSION
from gristmill.ledger.writes import Admit
from gristmill.records import Delivery, Purpose, PurposeLabel, Result
from tests.ledger.attempts import comparable, fill, lone, refused

VERSION_1 = Path(__file__).parents[1] / "fixtures" / "ledger" / "version-1.ledger.gz"
"""Written by version 1: an open attempt with a call in flight, and a frozen one with a late call."""
SNAPSHOT = "8bf3901b7dd456a167de50a613daf94c9d4c1e5ece58d74bae84b08937fac710"
"""What version 1 said of the frozen one."""
OPEN, FROZEN = AttemptKey("open"), AttemptKey("frozen", 1)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.ledger"
    path.write_bytes(gzip.decompress(VERSION_1.read_bytes()))
    return path


def tables(path: Path) -> set[tuple[str, str]]:
    with closing(sqlite3.connect(path)) as connection:
        return set(connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))


def test_an_older_schema_is_migrated_by_command_only(old: Path) -> None:
    # Done by the way, it could hit a file that another program still writes to.
    before = old.read_bytes()
    for kind in (SqliteLedger, SqliteReader):
        assert refused(Code.SCHEMA_UNSUPPORTED, kind, old).hint == f"gristmill ledger migrate {old}"
    refused(Code.SCHEMA_UNSUPPORTED, migrate, old, steps={})

    def breaks(connection: sqlite3.Connection) -> None:
        connection.execute("DROP TABLE tokens")
        raise sqlite3.OperationalError("no")

    refused(Code.LEDGER_DAMAGED, migrate, old, steps={1: breaks})
    assert old.read_bytes() == before
    assert migrate(old) == 1
    assert migrate(old) == SCHEMA_VERSION


def test_a_migrated_ledger_is_like_a_new_one(old: Path, tmp_path: Path) -> None:
    # A table that differs would be found out by whoever writes to it first.
    migrate(old)
    with SqliteLedger(tmp_path / "new.ledger"):
        pass
    assert tables(old) == tables(tmp_path / "new.ledger")
    assert set(STEPS) == set(range(1, SCHEMA_VERSION))


def test_what_an_older_version_wrote_is_all_there(old: Path) -> None:
    # Its rows, its lost and late calls, its snapshot ids, and the attempts that go on.
    migrate(old)
    memory = MemoryLedger()
    fill(memory, FROZEN, 3, seed=1)
    memory.deliver(FROZEN, "c1", Delivery.PARTIAL)
    memory.admit(FROZEN, "late")
    memory.finish(FROZEN, Result(value=[1], reward=1.0, group_id="g"))
    memory.commit(FROZEN, lone("late"))
    with SqliteLedger(old) as ledger:
        assert comparable(*ledger.read(FROZEN, exchanges=True)) == comparable(*memory.read(FROZEN, exchanges=True))
        assert ledger.freeze(FROZEN) == memory.freeze(FROZEN) == SNAPSHOT
        assert ledger.check(FROZEN) == ledger.check(OPEN) == ()
        assert (ledger.lost_on_open, list(ledger.grants()), ledger.setup(OPEN)) == (1, [], None)
        ledger.begin(OPEN, AttemptSetup(key_digest="a" * 64, group_id="g"))
        ledger.commit(OPEN, lone("more"))
        ledger.label(OPEN, {"c0": Purpose(PurposeLabel.AGENT, "seen")})
        assert ledger.read(OPEN)[0].records[0].purpose.evidence == "seen"
        assert [summary.key for summary in ledger.summaries(group_id="g")] == [OPEN, FROZEN]
        assert ledger.counts().attempts == {AttemptState.OPEN: 1, AttemptState.FROZEN: 1}


def test_a_writer_stops_when_the_schema_becomes_newer(tmp_path: Path) -> None:
    # A file that was migrated under a running gateway, say on a copied mount, must not get rows of the old kind.
    path = tmp_path / "x.ledger"
    with SqliteLedger(path) as ledger:
        fill(ledger, OPEN, 2)
        with SqliteReader(path) as reader, closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
            assert "newer" in str(refused(Code.SCHEMA_UNSUPPORTED, ledger.admit, OPEN, "c9").hint)
            refused(Code.SCHEMA_UNSUPPORTED, ledger.commit, OPEN, lone("c9"))
            refused(Code.SCHEMA_UNSUPPORTED, ledger.submit, Admit(OPEN, "c9", None))
            refused(Code.SCHEMA_UNSUPPORTED, reader.read, OPEN)
            other.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            assert [record.model_call_id for record in reader.read(OPEN)[0].records] == ["c0", "c1"]
