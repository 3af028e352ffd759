"""A ledger copied into another, of any two kinds.

If one of these fails, a run that was moved to another machine is not the run that was captured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from gristmill.errors import Code, LedgerError
from gristmill.ledger import (
    AttemptKey,
    AttemptSetup,
    AttemptState,
    LedgerAddress,
    LedgerReader,
    LedgerWriter,
    open_ledger,
    open_reader,
    parse_address,
)
from gristmill.ledger.reader import find_attempt, stored_digest
from gristmill.ledger.transfer import Copied, copy_ledger
from gristmill.records import Delivery, Purpose, PurposeLabel, Result
from tests.ledger.attempts import ODD_JSON, fill, lone, refused
from tests.ledger.server import fresh_url

OPEN, FINISHED, FROZEN, GONE, BARE = (AttemptKey(name, n) for n, name in enumerate(("o", "f", "z", "a", "b")))
DIGEST = "ab" * 32


@pytest.fixture(params=("sqlite", "postgres"))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> LedgerAddress:
    return parse_address(tmp_path / "source.ledger" if request.param == "sqlite" else fresh_url())


@pytest.fixture(params=("sqlite", "postgres"))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> LedgerAddress:
    return parse_address(tmp_path / "target.ledger" if request.param == "sqlite" else fresh_url())


def make(ledger: LedgerWriter) -> None:
    """Store everything that an attempt can have."""
    ledger.begin(OPEN, AttemptSetup(key_digest=DIGEST, group_id="g", metadata={"a": 0.5}, overrides={"seed": 1}))
    fill(ledger, OPEN, 4)
    ledger.admit(OPEN, "running", "c3")
    ledger.admit(OPEN, "gone")
    ledger.lose(OPEN, "gone", "engine_lost")
    ledger.label(OPEN, {"c0": Purpose(PurposeLabel.AUXILIARY, "a"), "c1": Purpose(PurposeLabel.COMPACTION, "b")})
    ledger.label(OPEN, {"c0": Purpose(PurposeLabel.SUBAGENT, "c")})
    ledger.deliver(OPEN, "c0", Delivery.PARTIAL)
    ledger.deliver(OPEN, "c0", Delivery.DELIVERED)
    fill(ledger, FINISHED, 2, 1)
    ledger.admit(FINISHED, "late")
    ledger.finish(FINISHED, Result(value=ODD_JSON, reward=0.25, group_id="h", metadata={"m": [1]}))
    ledger.commit(FINISHED, lone("late"))
    ledger.begin(FROZEN, AttemptSetup(key_digest="cd" * 32))
    fill(ledger, FROZEN, 3, 2)
    ledger.finish(FROZEN, Result(value=1))
    ledger.freeze(FROZEN)
    ledger.revoke(FROZEN)
    ledger.deliver(FROZEN, "c1", Delivery.ABORTED)
    fill(ledger, GONE, 1, 3)
    ledger.admit(GONE, "running")
    ledger.abandon(GONE)
    ledger.begin(BARE, AttemptSetup())


def digest(reader: LedgerReader, key: AttemptKey) -> str:
    """The snapshot id that an attempt has, or would have."""
    with reader._reading() as connection:
        return stored_digest(connection, find_attempt(connection, key))


def copied(source: LedgerReader, target: LedgerAddress) -> list[bool]:
    told: list[Copied] = []
    with open_ledger(target, keep_open=True) as ledger:
        copy_ledger(source, ledger, told.append)
    return [each.added for each in told]


def test_a_copy_is_the_same_ledger(source: LedgerAddress, target: LedgerAddress) -> None:
    with open_ledger(source) as ledger:
        make(ledger)
        assert copied(ledger, target) == [True] * 5
        with open_reader(target) as copy:
            assert list(copy.summaries()) == list(ledger.summaries())
            assert list(copy.grants()) == list(ledger.grants()) == [(DIGEST, OPEN)]
            for key in (OPEN, FINISHED, FROZEN, GONE, BARE):
                assert digest(copy, key) == digest(ledger, key)
                assert copy.setup(key) == ledger.setup(key)
                assert copy.read(key, tokens=False)[0].lost == ledger.read(key, tokens=False)[0].lost
                assert copy.check(key) == ()
            assert [call.record.model_call_id for call in copy.late(FINISHED)] == ["late"]
            assert copy.counts() == ledger.counts()
        frozen = ledger.freeze(FROZEN)
    with open_ledger(target) as copy:
        assert copy.freeze(FROZEN) == frozen
        # It goes on as the first one would: ordinals, bodies, chains.
        copy.admit(OPEN, "next", "c3")
        assert copy.commit(OPEN, lone("next")) == 4
        refused(Code.CALL_IDENTITY_REUSED, copy.commit, OPEN, lone("running"))
        refused(Code.ATTEMPT_CLOSED, copy.admit, GONE, "x")
        assert copy.check(OPEN) == ()


def test_copying_again_adds_nothing(source: LedgerAddress, target: LedgerAddress) -> None:
    with open_ledger(source) as ledger:
        make(ledger)
        copied(ledger, target)
        assert copied(ledger, target) == [False] * 5
        ledger.admit(AttemptKey("new"), "a")
        assert copied(ledger, target) == [False] * 5 + [True]


def test_a_copy_that_broke_off_goes_on(source: LedgerAddress, target: LedgerAddress) -> None:
    class Broken(Exception):
        pass

    def tell(count: int) -> Callable[[Copied], None]:
        left = iter(range(count))

        def told(_: Copied) -> None:
            if next(left, None) is None:
                raise Broken

        return told

    with open_ledger(source) as ledger:
        make(ledger)
        for n in range(8):
            ledger.admit(AttemptKey("more", n), "a")
        with open_ledger(target, keep_open=True) as copy, pytest.raises(Broken):
            copy_ledger(ledger, copy, tell(1))
        again = copied(ledger, target)
        assert again[0] is False
        assert again[-1] is True
        with open_reader(target) as copy:
            assert list(copy.summaries()) == list(ledger.summaries())


@pytest.mark.parametrize("change", ["call", "state", "delivery", "revoked"])
def test_an_attempt_that_differs_is_refused_by_name(source: LedgerAddress, target: LedgerAddress, change: str) -> None:
    with open_ledger(source) as ledger:
        make(ledger)
        copied(ledger, target)
        with open_ledger(target, keep_open=True) as copy:
            match change:
                case "call":
                    copy.commit(OPEN, lone("more"))
                case "state":
                    copy.freeze(OPEN)
                case "delivery":
                    copy.deliver(OPEN, "c1", Delivery.ABORTED)
                case _:
                    copy.revoke(OPEN)
            before = list(copy.summaries())
        with pytest.raises(LedgerError) as caught:
            copied(ledger, target)
        assert caught.value.code == Code.ATTEMPT_DIFFERS
        assert "o/0" in caught.value.message
        with open_reader(target) as copy:
            assert list(copy.summaries()) == before


def test_a_key_that_another_attempt_has_is_refused(source: LedgerAddress, target: LedgerAddress) -> None:
    with open_ledger(source) as ledger, open_ledger(target) as other:
        ledger.begin(OPEN, AttemptSetup(key_digest=DIGEST))
        other.begin(BARE, AttemptSetup(key_digest=DIGEST))
        with pytest.raises(LedgerError) as caught:
            copy_ledger(ledger, other, lambda _: None)
        assert caught.value.code == Code.KEY_EXISTS
        assert list(other.attempts()) == [BARE]


def test_a_damaged_attempt_is_not_copied(tmp_path: Path) -> None:
    import sqlite3

    source, target = tmp_path / "source.ledger", tmp_path / "target.ledger"
    with open_ledger(source) as ledger:
        fill(ledger, OPEN, 2)
    with closing(sqlite3.connect(source)) as connection:
        connection.execute("UPDATE tokens SET ids = zeroblob(length(ids))")
        connection.commit()
    with open_reader(source) as ledger:
        refused(Code.LEDGER_DAMAGED, copied, ledger, target)
    with open_reader(target) as copy:
        assert list(copy.attempts()) == []


def test_states_are_named_as_they_are() -> None:
    # The states that a copy has to know; a new one needs a line in `make`.
    assert {state.value for state in AttemptState} == {"open", "finished", "frozen", "abandoned"}
