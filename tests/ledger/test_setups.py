"""Setups, keys and labels, on every ledger.

If one of these fails, a key opens an attempt that is not its own, or a restart forgets who may call.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from gristmill.canonical import loads
from gristmill.errors import Code
from gristmill.ledger import (
    AttemptKey,
    AttemptSetup,
    AttemptState,
    Imported,
    Ledger,
    MemoryLedger,
    SqliteLedger,
    SqliteReader,
)
from gristmill.ledger.writes import Admit, AdmitAll
from gristmill.records import UNLABELLED, Purpose, PurposeLabel, Result
from tests.ledger.attempts import ODD_JSON, comparable, fill, lone, refused

KEY, OTHER = AttemptKey("r"), AttemptKey("r", 1)
DIGEST = "0123456789abcdef" * 4
SETUP = AttemptSetup(
    key_digest=DIGEST,
    group_id="g",
    metadata={"task": "t1", "n": [1, 0.5, None]},
    overrides={"temperature": 0.7},
    created_at=1.5,
)
AGENT, TITLE = Purpose(PurposeLabel.AGENT, "has tools"), Purpose(PurposeLabel.AUXILIARY, "no tools")


def test_an_attempt_is_there_before_its_first_call(ledger: Ledger) -> None:
    # A harness that never calls must still be listed, finished and frozen.
    ledger.begin(KEY, SETUP)
    assert ledger.setup(KEY) == SETUP
    assert list(ledger.attempts()) == [KEY]
    [summary] = ledger.summaries(group_id="g")
    assert (summary.state, summary.calls, summary.group_id, summary.has_result) == (AttemptState.OPEN, 0, "g", False)
    ledger.begin(KEY, SETUP)
    ledger.finish(KEY, Result(value=1))
    ledger.begin(KEY, SETUP)
    ledger.freeze(KEY)
    ledger.begin(KEY, SETUP)
    assert ledger.setup(KEY) == SETUP


def test_a_setup_is_never_replaced(ledger: Ledger) -> None:
    # Otherwise a second client takes over an attempt, or changes its settings under way.
    ledger.begin(KEY, SETUP)
    for changed in (
        AttemptSetup(key_digest=DIGEST),
        AttemptSetup(),
        AttemptSetup(key_digest="f" * 64, group_id="g", metadata=SETUP.metadata, overrides=SETUP.overrides),
    ):
        refused(Code.KEY_EXISTS, ledger.begin, KEY, changed)
    refused(Code.KEY_EXISTS, ledger.begin, OTHER, SETUP)
    assert list(ledger.attempts()) == [KEY]
    ledger.begin(OTHER, AttemptSetup())
    ledger.begin(AttemptKey("third"), AttemptSetup())
    assert ledger.setup(KEY) == SETUP


def test_an_attempt_with_calls_may_be_given_a_setup(ledger: Ledger) -> None:
    fill(ledger, KEY, 2)
    assert ledger.setup(KEY) is None
    ledger.begin(KEY, SETUP)
    assert ledger.setup(KEY) == SETUP
    fill(ledger, OTHER, 1)
    ledger.finish(OTHER, Result(value=1))
    refused(Code.ATTEMPT_CLOSED, ledger.begin, OTHER, AttemptSetup())
    refused(Code.ROLLOUT_UNKNOWN, ledger.setup, AttemptKey("none"))


@pytest.mark.parametrize(
    ("setup", "code"),
    [
        (AttemptSetup(key_digest="gm_secret"), Code.OPTION_INVALID),
        (AttemptSetup(key_digest=DIGEST.upper()), Code.OPTION_INVALID),
        (AttemptSetup(group_id="\ud800"), Code.OPTION_INVALID),
        (AttemptSetup(metadata={"a": object()}), Code.OPTION_INVALID),
        (AttemptSetup(overrides={"a": float("nan")}), Code.OPTION_INVALID),
        (AttemptSetup(created_at=float("inf")), Code.OPTION_INVALID),
        (AttemptSetup(schema=2), Code.SCHEMA_UNSUPPORTED),
    ],
)
def test_a_setup_that_cannot_be_kept_is_refused(ledger: Ledger, setup: AttemptSetup, code: Code) -> None:
    # A key itself must not get in by mistake; what is not stored whole must not look stored.
    assert "gm_secret" not in refused(code, ledger.begin, KEY, setup).message
    assert list(ledger.attempts()) == []


def test_grants_end_with_the_attempt_or_by_revoking(ledger: Ledger) -> None:
    keys = [AttemptKey(f"r{n}") for n in range(5)]
    digests = [f"{n}" * 64 for n in range(5)]
    for key, digest in zip(keys, digests, strict=True):
        ledger.begin(key, AttemptSetup(key_digest=digest))
    ledger.begin(AttemptKey("keyless"), AttemptSetup())
    assert list(ledger.grants()) == list(zip(digests, keys, strict=True))
    ledger.finish(keys[0], Result(value=1))
    ledger.freeze(keys[1])
    ledger.abandon(keys[2])
    ledger.revoke(keys[3])
    ledger.revoke(keys[3])
    ledger.revoke(AttemptKey("keyless"))
    assert list(ledger.grants()) == [(digests[0], keys[0]), (digests[4], keys[4])]
    ledger.begin(keys[3], AttemptSetup(key_digest=digests[3]))
    assert (digests[3], keys[3]) not in list(ledger.grants())
    assert ledger.setup(keys[3]) == AttemptSetup(key_digest=digests[3])
    fill(ledger, keys[3], 1)
    refused(Code.ROLLOUT_UNKNOWN, ledger.revoke, AttemptKey("none"))


def test_revoking_a_key_changes_nothing_that_was_captured(ledger: Ledger) -> None:
    # A snapshot id that an archive has must stay true.
    ledger.begin(KEY, SETUP)
    fill(ledger, KEY, 2)
    digest = ledger.freeze(KEY)
    ledger.revoke(KEY)
    assert ledger.freeze(KEY) == digest
    ledger.retire(KEY, digest)
    refused(Code.ROLLOUT_UNKNOWN, ledger.setup, KEY)
    assert list(ledger.grants()) == []
    ledger.begin(KEY, AttemptSetup(group_id="anew"))
    assert ledger.read(KEY)[0].records == ()


def test_the_result_names_the_group_once_it_is_there(ledger: Ledger) -> None:
    ledger.begin(KEY, SETUP)
    ledger.begin(OTHER, AttemptSetup(group_id="h"))
    ledger.finish(KEY, Result(value=1, group_id="mine"))
    assert [summary.group_id for summary in ledger.summaries()] == ["mine", "h"]
    assert [summary.key for summary in ledger.summaries(group_id="mine")] == [KEY]
    assert list(ledger.summaries(group_id="g")) == []
    assert [summary.key for summary in ledger.summaries(group_id="h")] == [OTHER]


def test_the_last_label_of_a_call_counts(ledger: Ledger) -> None:
    ledger.commit(KEY, lone("a", purpose=TITLE))
    ledger.commit(KEY, lone("b"))
    ledger.admit(KEY, "late")
    ledger.label(KEY, {"b": TITLE, "late": TITLE})
    ledger.label(KEY, {"b": AGENT})
    ledger.label(KEY, {})
    ledger.finish(KEY, Result(value=1))
    ledger.commit(KEY, lone("late"))
    assert [record.purpose for record in ledger.read(KEY)[0].records] == [TITLE, AGENT]
    assert [call.record.purpose for call in ledger.late(KEY)] == [TITLE]
    ledger.label(KEY, {"a": AGENT, "b": Purpose()})
    assert [record.purpose for record in ledger.read(KEY)[0].records] == [AGENT, UNLABELLED]


def test_labels_are_all_stored_or_none(ledger: Ledger) -> None:
    fill(ledger, KEY, 2)
    refused(Code.CALL_UNKNOWN, ledger.label, KEY, {"c0": TITLE, "zz": AGENT})
    refused(Code.OPTION_INVALID, ledger.label, KEY, {"c0": TITLE, "c1": Purpose(PurposeLabel.AGENT, "\ud800")})
    refused(Code.ROLLOUT_UNKNOWN, ledger.label, OTHER, {"c0": TITLE})
    assert {record.purpose for record in ledger.read(KEY)[0].records} == {UNLABELLED}
    ledger.freeze(KEY)
    refused(Code.ATTEMPT_CLOSED, ledger.label, KEY, {"c0": TITLE})


def test_the_snapshot_covers_labels_and_setup_but_no_key(ledger: Ledger) -> None:
    # What is not covered could be lost in an archive, and the original be deleted all the same.
    setups = {
        "nothing": None,
        "empty": AttemptSetup(),
        "group": AttemptSetup(group_id="g"),
        "metadata": AttemptSetup(metadata={"a": 0.5}),
        "overrides": AttemptSetup(overrides={"a": 0.5}),
        "label": AttemptSetup(),
        "label undone": AttemptSetup(),
        "key": AttemptSetup(key_digest=DIGEST, created_at=1.0),
    }
    digests: dict[str, str] = {}
    for name, setup in setups.items():
        if setup is not None:
            ledger.begin(KEY, setup)
        fill(ledger, KEY, 1)
        if name.startswith("label"):
            ledger.label(KEY, {"c0": TITLE})
        if name == "label undone":
            ledger.label(KEY, {"c0": Purpose()})
        digests[name] = ledger.freeze(KEY)
        ledger.retire(KEY, digests[name])
    assert digests["empty"] == digests["key"] == digests["label undone"]
    distinct = ("nothing", "empty", "group", "metadata", "overrides", "label")
    assert all(digests[one] != digests[other] for one, other in combinations(distinct, 2))


def test_both_ledgers_give_one_snapshot_id(tmp_path: Path) -> None:
    digests: list[str] = []
    with SqliteLedger(tmp_path / "run.ledger") as stored:
        for ledger in (MemoryLedger(), stored):
            ledger.begin(KEY, AttemptSetup(group_id="g", metadata={"o": ODD_JSON, "f": 1e-7}, overrides={"n": 2**70}))
            fill(ledger, KEY)
            ledger.label(KEY, {"c0": TITLE, "c1": AGENT})
            digests.append(ledger.freeze(KEY))
    assert digests[0] == digests[1]


def test_an_import_compares_what_was_captured(ledger: Ledger) -> None:
    # A capture file has no setup; reading an attempt back in must not call it another.
    ledger.begin(KEY, SETUP)
    fill(ledger, KEY, 2)
    ledger.label(KEY, {"c0": TITLE})
    attempt = ledger.read(KEY, exchanges=True)
    assert ledger.import_attempts([attempt]) == Imported(0, 1)
    ledger.label(KEY, {"c0": AGENT})
    refused(Code.ATTEMPT_DIFFERS, ledger.import_attempts, [attempt])


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    # A harness must not notice that the gateway was started again.
    path = tmp_path / "run.ledger"
    memory = MemoryLedger()
    with SqliteLedger(path) as stored:
        for ledger in (memory, stored):
            ledger.begin(KEY, SETUP)
            ledger.begin(OTHER, AttemptSetup(key_digest="a" * 64))
            ledger.revoke(OTHER)
            fill(ledger, KEY, 3)
            ledger.label(KEY, {"c0": TITLE})
            ledger.label(KEY, {"c2": AGENT})
    with SqliteLedger(path) as again, SqliteReader(path) as reader:
        for kind in (again, reader):
            assert list(kind.grants()) == [(DIGEST, KEY)]
            assert (kind.setup(KEY), kind.setup(OTHER)) == (SETUP, AttemptSetup(key_digest="a" * 64))
            assert comparable(*kind.read(KEY, exchanges=True)) == comparable(*memory.read(KEY, exchanges=True))
        refused(Code.KEY_EXISTS, again.begin, AttemptKey("new"), AttemptSetup(key_digest="a" * 64))
        again.label(KEY, {"c0": AGENT})
        assert again.read(KEY)[0].records[0].purpose == AGENT
        assert again.check(KEY) == ()


def test_exact_numbers_of_a_setup_are_plain_when_read(ledger: Ledger) -> None:
    # Settings are used as numbers.
    ledger.begin(KEY, AttemptSetup(overrides={"temperature": loads("0.70")}))
    setup = ledger.setup(KEY)
    assert setup is not None
    assert setup.overrides == {"temperature": 0.7}


def test_the_choices_of_a_request_are_admitted_together(tmp_path: Path) -> None:
    # One intent without the others would be a call that was never made, and counts as lost.
    with SqliteLedger(tmp_path / "x.ledger") as ledger:
        ledger.submit(AdmitAll([Admit(KEY, "a", None), Admit(KEY, "a#1", None)])).result()
        for names in (("b", "a"), ("b", "b")):
            refused(Code.CALL_IDENTITY_REUSED, ledger.submit(AdmitAll([Admit(KEY, n, None) for n in names])).result)
        assert [lost.model_call_id for lost in ledger.read(KEY)[0].lost] == ["a", "a#1"]
        ledger.finish(KEY, Result(value=1))
        refused(Code.ATTEMPT_CLOSED, ledger.submit(AdmitAll([Admit(KEY, "c", None)])).result)


def test_the_room_on_the_disk_is_told(tmp_path: Path) -> None:
    # The gateway admits no call when there is too little.
    folder = tmp_path / "folder"
    folder.mkdir()
    with SqliteLedger(folder / "x.ledger") as ledger:
        assert ledger.free_bytes() > 0
        folder.rename(tmp_path / "moved")
        refused(Code.FILE_UNREADABLE, ledger.free_bytes)
