"""A small load run, and that its checks would notice what they look for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gristmill.ledger import SqliteReader
from gristmill.records import Capture, Delivery, LostCall
from tests.gateway.load.attempt_check import AttemptCheck
from tests.gateway.load.engine import EngineSaw, read_log
from tests.gateway.load.journal import AttemptJournal, Fate, Sent
from tests.gateway.load.run import Outcome, Plan, run
from tests.gateway.load.verify import calls_by_attempt, calls_by_id
from tests.ledger.server import fresh_url

pytestmark = pytest.mark.e2e


class Evidence(msgspec.Struct):
    """One attempt, to be tampered with: notes of the harness, what the ledger holds, what the engine saw."""

    attempt: AttemptJournal
    capture: Capture
    other: Capture
    by_call: dict[str, EngineSaw]
    sampled: set[str]
    killed_at: list[float]

    def found(self) -> list[str]:
        """Check it."""
        return AttemptCheck(self.attempt, self.capture, self.by_call, self.sampled, self.killed_at).run()

    @property
    def last(self) -> Sent:
        """The request whose reply ends the history."""
        [sent] = [
            sent
            for sent in self.attempt.sent
            if sent.fate is Fate.ACKNOWLEDGED and sent.call_id == self.attempt.path[-1].partition("#")[0]
        ]
        return sent

    def change(self, call_id: str, **changes: object) -> None:
        """Change a record."""
        changed = [
            msgspec.structs.replace(record, **changes) if record.model_call_id == call_id else record
            for record in self.capture.records
        ]
        self.capture = msgspec.structs.replace(self.capture, records=tuple(changed))

    def remove(self, call_id: str) -> None:
        """Take a call out of the ledger."""
        kept = tuple(record for record in self.capture.records if record.model_call_id.partition("#")[0] != call_id)
        exchanges = {record.model_call_id: self.capture.exchanges[record.model_call_id] for record in kept}
        self.capture = msgspec.structs.replace(self.capture, records=kept, exchanges=exchanges)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    folder = tmp_path_factory.mktemp("load")
    return asyncio.run(run(Plan(rollouts=24, calls=6, at_once=24, kills=2, seed=7), folder)), folder


def test_nothing_is_lost_or_astray_where_two_gateways_have_one_ledger(tmp_path: Path) -> None:
    # Harnesses ask either; what one has the other must send on, and take over when that one is killed.
    plan = Plan(rollouts=20, calls=5, at_once=20, kills=2, seed=11, gateways=2, ledger=fresh_url())
    outcome = asyncio.run(run(plan, tmp_path))
    assert outcome.violations == []
    assert outcome.kills == 2
    assert outcome.acknowledged >= 20 * 5
    assert outcome.verified.acknowledged >= outcome.acknowledged
    assert outcome.sent_on > 0


def _plain_end(attempt: AttemptJournal) -> bool:
    """Tell whether the last reply of a history came at once, so that no retry hides what is tampered with."""
    call_id = attempt.path[-1].partition("#")[0]
    [nonce] = [sent.nonce for sent in attempt.sent if sent.call_id == call_id and sent.fate is Fate.ACKNOWLEDGED]
    return [sent.nonce for sent in attempt.sent].count(nonce) == 1


@pytest.fixture
def evidence(made: tuple[Outcome, Path]) -> Evidence:
    outcome, folder = made
    by_call = calls_by_id(read_log(folder / "engine.jsonl"), [])
    journals = list(outcome.journal.attempts.values())
    attempt = next(each for each in journals if _plain_end(each))
    other = next(each for each in journals if each is not attempt)
    with SqliteReader(folder / "load.gristmill") as reader:
        capture = reader.read(attempt.key, exchanges=True)[0]
        foreign = reader.read(other.key, exchanges=True)[0]
    sampled = calls_by_attempt(by_call)[attempt.key]
    return Evidence(deepcopy(attempt), capture, foreign, deepcopy(by_call), set(sampled), outcome.journal.killed_at)


def test_nothing_is_lost_or_astray_while_the_gateway_is_killed(made: tuple[Outcome, Path]) -> None:
    # A gateway that dies would lose replies that harnesses have, or put them into other people's rollouts.
    outcome, _ = made
    assert outcome.violations == []
    assert outcome.kills == 2
    assert outcome.acknowledged >= 24 * 6
    assert outcome.verified.acknowledged >= outcome.acknowledged
    assert outcome.verified.selected > 0


def test_untouched_evidence_is_good(evidence: Evidence) -> None:
    # A check that finds something anyway would make the next tests pass whatever they change.
    assert evidence.found() == []


def _lose(evidence: Evidence) -> None:
    evidence.remove(str(evidence.last.call_id))


def _forget(evidence: Evidence) -> None:
    evidence.capture = msgspec.structs.replace(evidence.capture, records=(), exchanges={}, lost=())
    evidence.attempt.sent = [sent for sent in evidence.attempt.sent if sent.fate is not Fate.ACKNOWLEDGED]


def _misplace(evidence: Evidence) -> None:
    foreign = evidence.other.records[0]
    exchanges = {
        **evidence.capture.exchanges,
        foreign.model_call_id: evidence.other.exchanges[foreign.model_call_id],
    }
    records = (*evidence.capture.records, foreign)
    evidence.capture = msgspec.structs.replace(evidence.capture, records=records, exchanges=exchanges)


def _swap_nonces(evidence: Evidence) -> None:
    first, last = evidence.attempt.sent[0], evidence.attempt.sent[-1]
    first.nonce, last.nonce = last.nonce, first.nonce


def _other_id(evidence: Evidence) -> None:
    evidence.by_call[str(evidence.last.call_id)].choices[0].ids[-1] += 1


def _other_prompt(evidence: Evidence) -> None:
    evidence.by_call[str(evidence.last.call_id)].prompt = "0" * 64


def _other_logprob(evidence: Evidence) -> None:
    logprobs = evidence.by_call[str(evidence.last.call_id)].choices[0].logprobs
    logprobs[0] = float(np.nextafter(np.float32(logprobs[0]), np.float32(-100.0)))


def _unfinished(evidence: Evidence) -> None:
    evidence.by_call[str(evidence.last.call_id)].whole = False


def _orphan(evidence: Evidence) -> None:
    evidence.change(str(evidence.last.call_id), parent_call_id="somebody-else")


def _mark_lost(evidence: Evidence) -> None:
    lost = (LostCall(model_call_id=str(evidence.last.call_id)),)
    evidence.capture = msgspec.structs.replace(evidence.capture, lost=lost)


def _spoil(evidence: Evidence) -> None:
    evidence.change(str(evidence.last.call_id), usable=False)


def _rename(evidence: Evidence) -> None:
    evidence.change(str(evidence.last.call_id), response_id="another")


def _undeliver(evidence: Evidence) -> None:
    evidence.change(str(evidence.last.call_id), delivery=Delivery.PARTIAL)


def _other_words(evidence: Evidence) -> None:
    reply = evidence.last.reply
    said = msgspec.structs.replace(reply.choices[0], text="something else")
    evidence.last.reply = msgspec.structs.replace(reply, choices=(said, *reply.choices[1:]))


def _answer_twice(evidence: Evidence) -> None:
    evidence.attempt.sent.append(deepcopy(evidence.last))


def _unsend(evidence: Evidence) -> None:
    evidence.attempt.sent.remove(evidence.last)


@pytest.mark.parametrize(
    ("tamper", "sentence"),
    [
        (_lose, "was acknowledged, and there is no record of it"),
        (_forget, "and the ledger has it not"),
        (_misplace, "which another attempt asked"),
        (_swap_nonces, "its nonce is"),
        (_other_id, "its ids are not those that the engine sent"),
        (_other_prompt, "its prompt's ids are not those that the engine sent"),
        (_other_logprob, "its log-probabilities are not those that the engine sent"),
        (_unfinished, "it is completed, and the engine never finished it"),
        (_orphan, "and its parent is somebody-else"),
        (_mark_lost, "it is lost, and somebody has its reply"),
        (_spoil, "acknowledged and not usable"),
        (_rename, "its response id is"),
        (_undeliver, "and its delivery is partial"),
        (_other_words, "its content is"),
        (_answer_twice, "two requests were answered with one call"),
        (_unsend, "was sent 0 times, and there are 1 calls of it"),
    ],
)
def test_a_check_notices(evidence: Evidence, tamper: Callable[[Evidence], None], sentence: str) -> None:
    # A check that nothing can fail would let a gateway through that loses calls.
    tamper(evidence)
    found = evidence.found()
    assert any(sentence in each for each in found), found
