"""Several processes on one PostgreSQL ledger: whose an attempt is, and what becomes of it when its process is gone.

If one of these fails, two gateways may write to one attempt, or a call that is still running may count as lost.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from time import monotonic, sleep
from typing import Any

import msgspec
import pytest

from gristmill.errors import Code, LedgerError
from gristmill.ledger import (
    AttemptElsewhere,
    AttemptKey,
    AttemptSetup,
    PostgresAddress,
    parse_address,
)
from gristmill.ledger.postgres import PostgresLedger, PostgresReader
from gristmill.ledger.postgres.connection import connect
from gristmill.ledger.postgres.instances import LOST_WITH_LEASE
from gristmill.ledger.protocol import LOST_WITH_WRITER
from gristmill.records import Capture, Delivery, LostCall, Result
from tests.ledger.attempts import chain, fill, lone, refused
from tests.ledger.crash import check_attempt, seed_of
from tests.ledger.postgres_writer import THREADS

KEY = AttemptKey("r", 0)
WITHIN_s = 30.0


def in_flight(call_id: str) -> LostCall:
    return LostCall(model_call_id=call_id)


def asked(url: str, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """Ask the ledger's tables, past the ledger."""
    address = parse_address(url)
    assert isinstance(address, PostgresAddress)
    with closing(connect(address)) as connection:
        cursor = connection.execute(statement, values)  # pyright: ignore
        return cursor.fetchall() if cursor.description else []


def expire(url: str, instance: str) -> None:
    """Let a lease have expired a second ago, as if the process had been silent."""
    asked(url, "UPDATE instances SET lease_until = clock_timestamp() - interval '1 s' WHERE instance = %s", instance)


@pytest.fixture
def pair(postgres_url: str) -> Iterator[tuple[PostgresLedger, PostgresLedger]]:
    with PostgresLedger(postgres_url) as one, PostgresLedger(postgres_url) as other:
        one.announce("http://one:8600")
        yield one, other


def elsewhere(work: Any, *arguments: Any) -> AttemptElsewhere:
    error = refused(Code.ATTEMPT_ELSEWHERE, work, *arguments)
    assert isinstance(error, AttemptElsewhere)
    return error


def test_an_attempt_belongs_to_whoever_wrote_to_it_first(pair: tuple[PostgresLedger, PostgresLedger]) -> None:
    one, other = pair
    one.admit(KEY, "a")
    for work in (
        lambda: other.admit(KEY, "b"),
        lambda: other.commit(KEY, lone("a")),
        lambda: other.lose(KEY, "a", "x"),
        lambda: other.deliver(KEY, "a", Delivery.DELIVERED),
        lambda: other.begin(KEY, AttemptSetup()),
        lambda: other.finish(KEY, Result(value=1)),
        lambda: other.freeze(KEY),
    ):
        error = elsewhere(work)
        assert error.address == "http://one:8600"
        assert error.hint == "ask there"
    assert one.commit(KEY, lone("a")) == 0
    found = other.owner(KEY)
    assert found is not None
    assert found.address == "http://one:8600"
    assert one.owner(KEY) is None
    assert other.owner(AttemptKey("none")) is None
    # Whoever reads needs not own it.
    assert [record.model_call_id for record in other.read(KEY)[0].records] == ["a"]


def test_attempts_of_two_writers_do_not_mix(pair: tuple[PostgresLedger, PostgresLedger]) -> None:
    def work(ledger: PostgresLedger, name: str) -> None:
        for n in range(8):
            fill(ledger, AttemptKey(name, n), 5, seed_of(AttemptKey(name, n)))

    threads = [threading.Thread(target=work, args=(ledger, f"w{n}")) for n, ledger in enumerate(pair)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = pair[0]
    assert len(list(reader.attempts())) == 16
    for key in reader.attempts():
        capture, _ = reader.read(key, exchanges=True)
        wanted = list(chain(5, seed_of(key)))
        assert [record.ordinal for record in capture.records] == list(range(5))
        assert [capture.exchanges[f"c{n}"] for n in range(5)] == [call.exchange for call in wanted]
        assert reader.check(key) == ()


def opened(ledger: PostgresLedger, key: AttemptKey, digest: str, together: threading.Barrier) -> Code | None:
    together.wait()
    try:
        ledger.begin(key, AttemptSetup(key_digest=digest * 64))
    except LedgerError as error:
        return error.code
    return None


def test_one_of_two_that_open_an_attempt_at_once_has_it(pair: tuple[PostgresLedger, PostgresLedger]) -> None:
    with ThreadPoolExecutor(2) as pool:
        for n in range(16):
            key, together = AttemptKey("race", n), threading.Barrier(2)
            digests = [f"{n:x}", f"{(n + 1) % 16:x}"]
            codes = [
                pool.submit(opened, ledger, key, digest, together) for ledger, digest in zip(pair, digests, strict=True)
            ]
            told = [code.result() for code in codes]
            assert sorted(told, key=str) in ([None, Code.ATTEMPT_ELSEWHERE], [Code.ATTEMPT_ELSEWHERE, None])
            winner = pair[told.index(None)]
            winner.abandon(key)
            winner.retire(key, winner.freeze(key))
    assert pair[0].rollout("race") == ()


def test_what_has_ended_belongs_to_nobody(pair: tuple[PostgresLedger, PostgresLedger]) -> None:
    one, other = pair
    fill(one, KEY, 2)
    one.admit(KEY, "late")
    one.finish(KEY, Result(value=1))
    # A call is still in flight: its outcome is the first one's to bring.
    elsewhere(other.deliver, KEY, "c0", Delivery.DELIVERED)
    one.commit(KEY, lone("late"))
    other.deliver(KEY, "c0", Delivery.DELIVERED)
    one.deliver(KEY, "c1", Delivery.PARTIAL)
    assert other.freeze(KEY) == one.freeze(KEY)
    one.deliver(KEY, "c1", Delivery.DELIVERED)
    other.deliver(KEY, "c0", Delivery.PARTIAL)
    assert [record.delivery for record in one.read(KEY)[0].records] == [Delivery.PARTIAL, Delivery.DELIVERED]
    other.retire(KEY, one.freeze(KEY))
    assert list(one.attempts()) == []


def test_a_closed_ledger_lets_go_at_once(postgres_url: str) -> None:
    with PostgresLedger(postgres_url) as one:
        one.admit(KEY, "a")
    with PostgresLedger(postgres_url) as other:
        assert other.read(KEY)[0].lost == (msgspec.structs.replace(in_flight("a"), reason=LOST_WITH_WRITER),)
        other.admit(KEY, "b")
        other.commit(KEY, lone("b"))
        refused(Code.CALL_IDENTITY_REUSED, other.commit, KEY, lone("a"))


def test_only_an_expired_lease_is_lost(pair: tuple[PostgresLedger, PostgresLedger], postgres_url: str) -> None:
    one, _ = pair
    one.admit(KEY, "a")
    with PostgresLedger(postgres_url) as third:
        assert third.lost_on_open == 0
        assert third.read(KEY)[0].lost == (in_flight("a"),)
    expire(postgres_url, one.instance)
    with PostgresLedger(postgres_url) as third:
        assert third.lost_on_open == 1
        assert third.read(KEY)[0].lost == (LostCall(model_call_id="a", reason=LOST_WITH_LEASE),)


def test_a_frozen_attempt_keeps_what_its_snapshot_says(
    pair: tuple[PostgresLedger, PostgresLedger], postgres_url: str
) -> None:
    one, other = pair
    one.admit(KEY, "a")
    snapshot = one.freeze(KEY)
    expire(postgres_url, one.instance)
    with PostgresLedger(postgres_url) as third:
        assert third.lost_on_open == 0
    assert other.check(KEY) == ()
    assert other.freeze(KEY) == snapshot


def test_an_attempt_passes_on_when_its_owner_has_expired(
    pair: tuple[PostgresLedger, PostgresLedger], postgres_url: str
) -> None:
    one, other = pair
    fill(one, KEY, 3)
    one.admit(KEY, "running")
    expire(postgres_url, one.instance)
    other.admit(KEY, "next", "c2")
    other.commit(KEY, lone("next"))
    capture, _ = other.read(KEY)
    assert [record.model_call_id for record in capture.records] == ["c0", "c1", "c2", "next"]
    assert [record.ordinal for record in capture.records] == [0, 1, 2, 3]
    assert capture.lost == (LostCall(model_call_id="running", reason=LOST_WITH_LEASE),)


def test_a_writer_whose_lease_has_expired_writes_nothing(
    pair: tuple[PostgresLedger, PostgresLedger], postgres_url: str
) -> None:
    one, other = pair
    fill(one, KEY, 2)
    one.admit(KEY, "running")
    was = one.instance
    expire(postgres_url, was)
    other.admit(KEY, "next")
    before = other.read(KEY, tokens=False)[0]
    error = refused(Code.LEASE_EXPIRED, one.commit, KEY, lone("running"))
    assert was in error.message
    assert other.read(KEY, tokens=False)[0] == before
    # It goes on as another instance, and what is the other's stays the other's.
    assert one.instance != was
    elsewhere(one.commit, KEY, lone("running"))
    one.admit(AttemptKey("mine"), "a")
    one.commit(AttemptKey("mine"), lone("a"))
    assert other.owner(AttemptKey("mine")) is not None
    assert [holder.address for holder in other.holders()] == [None, "http://one:8600"]


def test_an_expired_lease_is_not_written_under_though_nobody_took_it(postgres_url: str) -> None:
    with PostgresLedger(postgres_url) as ledger:
        ledger.admit(KEY, "a")
        expire(postgres_url, ledger.instance)
        refused(Code.LEASE_EXPIRED, ledger.commit, KEY, lone("a"))
        refused(Code.CALL_IDENTITY_REUSED, ledger.commit, KEY, lone("a"))
        assert ledger.read(KEY)[0].lost == (LostCall(model_call_id="a", reason=LOST_WITH_LEASE),)
        ledger.admit(KEY, "b")
        assert ledger.commit(KEY, lone("b")) == 0


def test_an_idle_writer_finds_out_by_itself(postgres_url: str) -> None:
    # Whoever asks it for an attempt that others have by now is told so, not refused.
    with PostgresLedger(postgres_url, lease_s=0.4) as ledger:
        was = ledger.instance
        asked(postgres_url, "UPDATE instances SET ended = clock_timestamp() WHERE instance = %s", was)
        until = monotonic() + WITHIN_s
        while ledger.instance == was:
            assert monotonic() < until
            sleep(0.01)
        ledger.admit(KEY, "a")


def test_a_lease_outlasts_a_long_import(postgres_url: str) -> None:
    with PostgresLedger(postgres_url, lease_s=1.0) as ledger, PostgresLedger(postgres_url) as other:
        ledger.admit(KEY, "a")

        def attempts() -> Iterator[tuple[Capture, Result | None]]:
            yield Capture(rollout_id="x"), None
            until = monotonic() + 1.5
            while monotonic() < until:
                # The lease would have expired by now; nobody takes what is in the middle of a write.
                sleep(0.1)
                elsewhere(other.admit, KEY, "b")
            yield Capture(rollout_id="y"), None

        assert ledger.import_attempts(attempts()).added == 2
        ledger.commit(KEY, lone("a"))


def start_writer(url: str, name: str, lease_s: float) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-m", "tests.ledger.postgres_writer", url, name, str(lease_s)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE)


def lines_of(process: subprocess.Popen[bytes], least: int) -> list[bytes]:
    assert process.stdout is not None
    return [process.stdout.readline() for _ in range(least)]


def acknowledged(lines: list[bytes]) -> dict[AttemptKey, dict[str, int]]:
    found: dict[AttemptKey, dict[str, int]] = {}
    for line in lines:
        rollout_id, attempt, call_id, ordinal = line.decode().split()
        found.setdefault(AttemptKey(rollout_id, int(attempt)), {})[call_id] = int(ordinal)
    return found


def check_acknowledged(reader: PostgresReader, lines: list[bytes], lost: str) -> None:
    for key, calls in acknowledged(lines).items():
        capture, _ = reader.read(key, exchanges=True)
        assert calls.items() <= {record.model_call_id: record.ordinal for record in capture.records}.items()
        check_attempt(key, capture, lost)


def test_a_killed_writer_loses_nothing_but_what_was_in_flight(postgres_url: str) -> None:
    with PostgresLedger(postgres_url) as other, start_writer(postgres_url, "w", 60.0) as process:
        lines = lines_of(process, 40)
        process.send_signal(signal.SIGKILL)
        assert process.stdout is not None
        lines += [line for line in process.stdout if line.endswith(b"\n")]
        process.wait()
        with PostgresLedger(postgres_url) as third:
            assert third.lost_on_open == 0
        elsewhere(other.admit, AttemptKey("w-open", 0), "next")
        check_acknowledged(other, lines, in_flight("").reason)
        [instance] = asked(postgres_url, "SELECT instance FROM instances WHERE pid = %s", process.pid)[0]
        expire(postgres_url, instance)
        other.admit(AttemptKey("w-open", 0), "next")
        check_acknowledged(other, lines, LOST_WITH_LEASE)
        for n in range(THREADS):
            lost = other.read(AttemptKey("w-open", n))[0].lost
            assert lost[0] == LostCall(model_call_id="c0", reason=LOST_WITH_LEASE)


def test_a_paused_writer_is_fenced(postgres_url: str) -> None:
    # The one that does the harm: it was only asleep, and believes that it still has everything.
    with PostgresLedger(postgres_url, lease_s=2.0) as other, start_writer(postgres_url, "w", 0.5) as process:
        try:
            lines = lines_of(process, 30)
            process.send_signal(signal.SIGSTOP)
            key = AttemptKey("w-open", 0)
            until = monotonic() + WITHIN_s
            while True:
                try:
                    other.admit(key, "next")
                    break
                except AttemptElsewhere:
                    assert monotonic() < until
                    sleep(0.05)
            taken = list(acknowledged(lines))
            for each in taken:
                # A write that says nothing takes it over all the same.
                other.label(each, {})
            before = {each: other.read(each, tokens=False)[0] for each in taken}
            process.send_signal(signal.SIGCONT)
            # Its next write tells it.
            assert process.wait(WITHIN_s) == 0
            assert {each: other.read(each, tokens=False)[0] for each in taken} == before
            assert process.stdout is not None
            check_acknowledged(other, lines + list(process.stdout), LOST_WITH_LEASE)
        finally:
            process.kill()
