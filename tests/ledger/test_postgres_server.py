"""A PostgreSQL ledger whose server is killed, refuses, or holds something else.

If one of these fails, a call that a gateway was told is stored is gone with the server, or a write's answer is a guess.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from secrets import token_hex
from typing import Any

import psycopg
import pytest

from gristmill.errors import Code, ConfigError, LedgerError
from gristmill.ledger import AttemptKey, AttemptSetup, Imported, PostgresAddress, StoredCall
from gristmill.ledger.postgres import PostgresLedger, PostgresReader, migrate
from gristmill.ledger.postgres import schema as tables
from gristmill.records import Exchange, Purpose, PurposeLabel, Result
from tests.ledger.attempts import chain, fill, lone, refused
from tests.ledger.crash import CALLS, seed_of
from tests.ledger.server import PostgresServer, wanted_server
from tests.ledger.test_postgres_leases import asked

KEY = AttemptKey("r", 0)
WITHIN_s = 60.0


@pytest.fixture
def durable() -> Iterator[PostgresServer]:
    wanted_server()
    server = PostgresServer(durable=True)
    yield server
    server.close()


class Load:
    """Threads that write as fast as they can, and note what was acknowledged and what was refused."""

    def __init__(self, ledger: PostgresLedger, threads: int) -> None:
        self._ledger = ledger
        self.acknowledged: dict[AttemptKey, dict[str, int]] = {}
        self.codes: set[Code] = set()
        self._stop = threading.Event()
        self._more = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._write, args=(n,)) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def _write(self, thread: int) -> None:
        attempt = 0
        while not self._stop.is_set():
            key = AttemptKey(f"t{thread}", attempt)
            told = self.acknowledged.setdefault(key, {})
            try:
                for call in chain(CALLS, seed_of(key)):
                    call_id = call.record.model_call_id
                    self._ledger.admit(key, call_id)
                    told[call_id] = self._ledger.commit(key, call)
                    self._more.release()
            except LedgerError as error:
                self.codes.add(error.code)
                # One that failed is not known to be there; the next attempt begins.
            attempt += 1

    def wait(self, calls: int) -> None:
        """Wait until so many more calls were acknowledged."""
        for _ in range(calls):
            assert self._more.acquire(timeout=WITHIN_s)

    def drain(self) -> None:
        """Count from now on."""
        while self._more.acquire(blocking=False):
            pass

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_what_was_acknowledged_outlives_the_server(durable: PostgresServer) -> None:
    with PostgresLedger(durable.url()) as ledger:
        load = Load(ledger, 4)
        try:
            for _ in range(2):
                load.wait(40)
                durable.kill()
                durable.start()
                load.drain()
            load.wait(40)
        finally:
            load.stop()
        assert load.codes <= {Code.LEDGER_UNREACHABLE, Code.LEASE_EXPIRED}
        assert Code.LEDGER_UNREACHABLE in load.codes
        for key, calls in load.acknowledged.items():
            if not calls:
                continue
            capture, _ = ledger.read(key, exchanges=True)
            assert calls.items() <= {record.model_call_id: record.ordinal for record in capture.records}.items()
            wanted = {call.record.model_call_id: call.exchange for call in chain(CALLS, seed_of(key))}
            assert all(exchange == wanted[call_id] for call_id, exchange in capture.exchanges.items())
            assert ledger.check(key) == ()


class Breaking:
    """A connection that breaks at its next commit, before the server has it or after."""

    def __init__(self, real: Any, *, before: bool) -> None:
        self._real = real
        self._before = before

    def execute(self, query: Any, *arguments: Any, **options: Any) -> Any:
        if query != "COMMIT":
            return self._real.execute(query, *arguments, **options)
        if not self._before:
            self._real.execute("COMMIT")
        self._real.close()
        raise psycopg.OperationalError("the connection is lost")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.mark.parametrize("before", [True, False])
def test_a_commit_without_an_answer_is_asked_for(postgres_url: str, before: bool) -> None:
    # Told that it failed, a gateway would withhold a reply that is stored; told that it was made, it would lose one.
    with PostgresLedger(postgres_url) as ledger:
        ledger.admit(KEY, "a")
        session = ledger._writer._library.session
        session.connection = Breaking(session.connection, before=before)  # pyright: ignore
        # What was certainly not made is made then, and what was made is not made twice.
        assert ledger.commit(KEY, lone("a")) == 0
        assert [record.model_call_id for record in ledger.read(KEY)[0].records] == ["a"]
        ledger.admit(KEY, "b")
        assert ledger.commit(KEY, lone("b")) == 1


def test_a_connection_that_was_cut_while_idle_fails_no_write(postgres_url: str) -> None:
    with PostgresLedger(postgres_url) as ledger:
        fill(ledger, KEY, 2)
        pid = ledger._writer._library.session.connection.info.backend_pid
        asked(postgres_url, "SELECT pg_terminate_backend(%s::int4, 10000)", pid)
        ledger.admit(KEY, "next")
        assert ledger.commit(KEY, lone("next")) == 2
        list(ledger.summaries())


def test_a_server_that_is_not_there_is_named(durable: PostgresServer) -> None:
    with PostgresLedger(durable.url()) as ledger:
        fill(ledger, KEY, 1)
        durable.stop()
        error = refused(Code.LEDGER_UNREACHABLE, ledger.admit, KEY, "x")
        assert error.where == durable.url()
        refused(Code.LEDGER_UNREACHABLE, PostgresLedger, durable.url())
        refused(Code.LEDGER_UNREACHABLE, PostgresReader, durable.url())
        durable.start()
        ledger.admit(KEY, "x")
        assert len(ledger.read(KEY)[0].records) == 1


def test_a_database_that_is_not_there_is_named(postgres_url: str) -> None:
    error = refused(Code.LEDGER_UNREACHABLE, PostgresLedger, postgres_url.replace("@/postgres", "@/nothing"))
    assert "nothing" in error.message


def test_another_programs_schema_is_left_alone(postgres_url: str) -> None:
    schema = postgres_url.rpartition("=")[2]
    with closing(wanted_server().connect()) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
        connection.execute(f"CREATE TABLE {schema}.attempts (a int)")
        refused(Code.LEDGER_FOREIGN, PostgresLedger, postgres_url)
        refused(Code.LEDGER_FOREIGN, PostgresReader, postgres_url)
        refused(Code.LEDGER_FOREIGN, migrate, PostgresAddress(postgres_url))
        # Even one that has tables of the same names.
        connection.execute(f"CREATE TABLE {schema}.ledger (mark text, version int8)")
        connection.execute(f"CREATE TABLE {schema}.instances (a int)")
        refused(Code.LEDGER_FOREIGN, PostgresLedger, postgres_url)
        found = connection.execute(
            "SELECT count(*) FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace "
            "WHERE nspname = %s AND relkind = 'r'",
            [schema],
        ).fetchone()
        assert found == (3,)


def test_an_empty_schema_that_is_there_is_used(postgres_url: str) -> None:
    # Whoever may not make schemas is given one.
    schema = postgres_url.rpartition("=")[2]
    with closing(wanted_server().connect()) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
    with PostgresLedger(postgres_url) as ledger:
        fill(ledger, KEY, 1)


def test_a_reader_makes_nothing(postgres_url: str) -> None:
    refused(Code.FILE_UNREADABLE, PostgresReader, postgres_url)
    refused(Code.FILE_UNREADABLE, migrate, PostgresAddress(postgres_url))
    with PostgresLedger(postgres_url):
        pass


def test_a_user_who_may_only_read_reads(postgres_url: str) -> None:
    server, schema = wanted_server(), postgres_url.rpartition("=")[2]
    with PostgresLedger(postgres_url) as ledger, closing(server.connect()) as connection:
        fill(ledger, KEY, 2)
        connection.execute(f"CREATE ROLE reader_{schema} LOGIN")
        connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO reader_{schema}")
        connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO reader_{schema}")
        url = server.url(schema, user=f"reader_{schema}")
        with PostgresReader(url) as reader:
            assert len(reader.read(KEY)[0].records) == 2
        refused(Code.LEDGER_READ_ONLY, PostgresLedger, url)
        refused(Code.LEDGER_READ_ONLY, PostgresLedger, server.url(f"{schema}_new", user=f"reader_{schema}"))


def test_a_newer_ledger_is_refused_and_stops_writers(postgres_url: str) -> None:
    with PostgresLedger(postgres_url) as ledger, PostgresReader(postgres_url) as reader:
        ledger.admit(KEY, "a")
        asked(postgres_url, "UPDATE ledger SET version = %s", tables.POSTGRES_SCHEMA_VERSION + 1)
        refused(Code.SCHEMA_UNSUPPORTED, ledger.commit, KEY, lone("a"))
        refused(Code.SCHEMA_UNSUPPORTED, reader.read, KEY)
        refused(Code.SCHEMA_UNSUPPORTED, PostgresLedger, postgres_url)
        error = refused(Code.SCHEMA_UNSUPPORTED, PostgresReader, postgres_url)
        assert error.hint is not None
        assert "newer" in error.hint


def test_an_older_ledger_is_brought_up_with_nobody_at_it(postgres_url: str) -> None:
    address, older = PostgresAddress(postgres_url), tables.POSTGRES_SCHEMA_VERSION - 1

    def step(session: Any) -> None:
        session.execute("ALTER TABLE results ADD COLUMN added text")

    with PostgresLedger(postgres_url) as ledger:
        fill(ledger, KEY, 2)
        refused(Code.LEDGER_LOCKED, migrate, address)
    assert migrate(address) == tables.POSTGRES_SCHEMA_VERSION
    asked(postgres_url, "UPDATE ledger SET version = %s", older)
    error = refused(Code.SCHEMA_UNSUPPORTED, PostgresLedger, postgres_url)
    assert error.hint == f"gristmill ledger migrate '{address}'"
    refused(Code.SCHEMA_UNSUPPORTED, migrate, address)
    assert migrate(address, steps={older: step}) == older
    with PostgresLedger(postgres_url) as ledger:
        assert len(ledger.read(KEY)[0].records) == 2
    assert asked(postgres_url, "SELECT added FROM results") == []


def test_texts_that_postgresql_cannot_hold_are_kept(postgres_url: str) -> None:
    odd = "a\0b\x01c\x010\x01\x01"
    with PostgresLedger(postgres_url) as ledger:
        key = AttemptKey(odd)
        ledger.begin(key, AttemptSetup(group_id="\0"))
        ledger.admit(key, odd, "\x01")
        ledger.admit(key, odd + "0")
        ledger.commit(key, StoredCall(record=lone(odd).record, exchange=Exchange(model_call_id=odd, request="\0\x01")))
        ledger.lose(key, odd + "0", "\0")
        ledger.label(key, {odd: Purpose(PurposeLabel.AUXILIARY, "\0")})
        capture, _ = ledger.read(key, exchanges=True)
        assert capture.rollout_id == odd
        [record], [lost] = capture.records, capture.lost
        assert (record.model_call_id, record.purpose.evidence) == (odd, "\0")
        assert (lost.model_call_id, lost.reason) == (odd + "0", "\0")
        assert capture.exchanges[odd].request == "\0\x01"
        assert [summary.key for summary in ledger.summaries(group_id="\0")] == [key]
        assert ledger.check(key) == ()


def test_what_cannot_be_stored_fails_alone(postgres_url: str) -> None:
    with PostgresLedger(postgres_url) as ledger:
        ledger.admit(KEY, "a")
        refused(Code.OPTION_INVALID, ledger.admit, AttemptKey(token_hex(10_000)), "a")
        refused(Code.OPTION_INVALID, ledger.commit, KEY, lone("b", cum_len=2**63))
        assert ledger.commit(KEY, lone("a")) == 0


def test_many_attempts_are_copied_in(postgres_url: str) -> None:
    from tests.ledger.test_contract import captured

    attempts = [captured(6, n, f"r{n}") for n in range(120)]
    with PostgresLedger(postgres_url) as ledger:
        assert ledger.import_attempts(iter(attempts)) == Imported(120, 0)
        assert ledger.import_attempts(iter([*attempts, captured(1, 0, "new")])) == Imported(1, 120)
        for capture, _ in attempts:
            assert ledger.check(AttemptKey(capture.rollout_id)) == ()
        # Imported attempts belong to nobody.
        assert asked(postgres_url, "SELECT count(*) FROM attempts WHERE owner IS NOT NULL") == [(0,)]
        twice = [captured(1, 1, "twice"), captured(1, 2, "twice")]
        refused(Code.ATTEMPT_DIFFERS, ledger.import_attempts, twice)
        assert ledger.rollout("twice") == ()


def test_durability_is_asked_of_a_server_that_would_not_wait(postgres_url: str) -> None:
    role = "hasty"
    with closing(wanted_server().connect()) as connection:
        connection.execute(f"CREATE ROLE {role} SUPERUSER LOGIN")
        connection.execute(f"ALTER ROLE {role} SET synchronous_commit = off")
    with PostgresLedger(postgres_url.replace("postgres@", f"{role}@")) as ledger:
        ledger.finish(KEY, Result(value=1))
        setting = ledger._writer._library.session.execute("SHOW synchronous_commit").fetchone()
    assert setting == ("on",)


def test_a_url_that_libpq_does_not_understand_is_refused_without_its_password() -> None:
    for url in (
        "postgresql://me:s3cret@host/db?nonsense=1",
        "postgresql://me:s3cret@host:port/db",
        "postgresql://me:s3 cret@host/db",
        "postgresql://me:s3%cret@host/db",
        "postgresql://me:s3/cret@host/db",
        "postgresql://me@host/db?password=s3cret&schema=Bad",
        "postgresql+psycopg://me:s3cret@host/db",
        "Postgres://me:s3cret@host/db",
        "postgresql:/me:s3cret@host/db",
    ):
        with pytest.raises((ConfigError, LedgerError)) as caught:
            PostgresLedger(url)
        said = f"{caught.value.message} {caught.value.where} {caught.value.hint}"
        assert "s3" not in said, said
        assert caught.value.code in {Code.OPTION_INVALID, Code.LEDGER_UNREACHABLE}


def test_a_server_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # A test that is passed over in silence proves nothing; where the server has to be there, it fails.
    monkeypatch.setattr("tests.ledger.server.binaries", lambda: None)
    monkeypatch.delenv("REQUIRE_POSTGRES", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no PostgreSQL server is installed"):
        wanted_server()
    monkeypatch.setenv("REQUIRE_POSTGRES", "1")
    with pytest.raises(pytest.fail.Exception, match="no PostgreSQL server is installed"):
        wanted_server()
