"""Compares what the harnesses noted, what the engine sent, and what the ledger holds.

Invariant: every finding is a sentence that names the attempt and the call. The ledger is read as any program reads it;
ids and log-probabilities are compared with what the engine put on the wire.

Not here: the checks of one attempt (attempt_check).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from gristmill.errors import Code
from gristmill.ledger import AttemptKey, LedgerAddress, LedgerReader, open_reader
from gristmill.pipeline import run_rollout
from gristmill.records import Capture, Result
from gristmill.selection import Rejected, resolve_selection_policy
from tests.gateway.load.attempt_check import AttemptCheck
from tests.gateway.load.engine import EngineSaw
from tests.gateway.load.journal import AttemptJournal, Journal

__all__ = ["Verified", "calls_by_attempt", "calls_by_id", "verify"]


_LEFT_OPEN: Final = frozenset({Code.MATCH_AMBIGUOUS, Code.CAPTURE_INCOMPLETE})
"""How a rollout is refused in which two calls said the same; the second where a call was lost as well."""


class Verified(msgspec.Struct, kw_only=True):
    """What was found in the ledger.

    Attributes:
        calls: that were admitted, one for each choice.
        committed: of these, with an outcome.
        lost: of these, without.
        by_outcome: committed calls by status and reason.
        acknowledged: choices of acknowledged replies that were looked for.
        unheard: calls that completed and whose reply no client has in full.
        ambiguous: calls whose parent is one of two that said the same.
        selected: attempts whose selection was checked.
        refused: of these, refused because two calls said the same.
    """

    calls: int = 0
    committed: int = 0
    lost: int = 0
    by_outcome: Counter[str] = msgspec.field(default_factory=Counter)
    acknowledged: int = 0
    unheard: int = 0
    ambiguous: int = 0
    sampled_tokens: int = 0
    selected: int = 0
    refused: int = 0
    violations: list[str] = []


def verify(ledger: LedgerAddress, journal: Journal, saw: Sequence[EngineSaw], *, sample: int, seed: int) -> Verified:
    """Check a whole run.

    Args:
        ledger: where it is; no gateway is running.
        journal: what the harnesses noted.
        saw: what the engine noted.
        sample: finished attempts whose selection is checked.
        seed: chooses them.
    """
    found = Verified()
    by_call = calls_by_id(saw, found.violations)
    by_attempt = calls_by_attempt(by_call)
    seen: set[AttemptKey] = set()
    finished = [key for key, attempt in journal.attempts.items() if attempt.result is not None]
    sampled = set(random.Random(f"{seed}/sample").sample(sorted(finished), min(sample, len(finished))))
    with open_reader(ledger) as reader:
        for key in reader.attempts():
            seen.add(key)
            attempt = journal.attempts.get(key)
            if attempt is None:
                _check_orphan(reader, key, journal, found)
                continue
            calls = by_attempt.pop(key, set())
            _check_attempt(reader, attempt, by_call, calls, journal.killed_at, found, sampled=key in sampled)
    found.violations += [
        f"{each.name}: is not in the ledger" for key, each in journal.attempts.items() if key not in seen
    ]
    found.violations += [f"{_name(key)}: the engine sampled for it, it is not in the ledger" for key in by_attempt]
    return found


def calls_by_id(saw: Sequence[EngineSaw], violations: list[str]) -> dict[str, EngineSaw]:
    """Index what the engine saw, without the questions that the gateway asks for itself."""
    by_call: dict[str, EngineSaw] = {}
    for each in saw:
        if not each.nonce:
            continue
        if each.call_id in by_call:
            violations.append(f"{each.nonce}: call {each.call_id} was sent to the engine twice")
        by_call[each.call_id] = each
    return by_call


def calls_by_attempt(by_call: Mapping[str, EngineSaw]) -> dict[AttemptKey, set[str]]:
    """Return the calls that the engine saw by the attempt that their nonces name."""
    calls: dict[AttemptKey, set[str]] = {}
    for call_id, each in by_call.items():
        rollout_id, attempt, *_ = each.nonce.split("/")
        calls.setdefault(AttemptKey(rollout_id, int(attempt)), set()).add(call_id)
    return calls


def _name(key: AttemptKey) -> str:
    return f"{key.rollout_id}/{key.attempt}"


def _check_orphan(reader: LedgerReader, key: AttemptKey, journal: Journal, found: Verified) -> None:
    if key not in journal.orphans:
        found.violations.append(f"{_name(key)}: nobody opened it")
    capture, _ = reader.read(key, tokens=False)
    if capture.records or capture.lost:
        found.violations.append(f"{_name(key)}: has calls, and nobody had its key")


def _check_attempt(
    reader: LedgerReader,
    attempt: AttemptJournal,
    by_call: Mapping[str, EngineSaw],
    calls: set[str],
    killed_at: Sequence[float],
    found: Verified,
    *,
    sampled: bool,
) -> None:
    key, name = attempt.key, attempt.name
    capture, result = reader.read(key, exchanges=True)
    check = AttemptCheck(attempt, capture, by_call, calls, killed_at)
    found.violations += check.run()
    found.violations += [f"{name}: the ledger contradicts itself: {each}" for each in reader.check(key)]
    found.violations += [f"{name}: {call.record.model_call_id} came after the end" for call in reader.late(key)]
    state = reader.summary(key).state
    if state is not attempt.state:
        found.violations.append(f"{name}: expected it to be {attempt.state}, it is {state}")
    if (result is None) != (attempt.result is None):
        found.violations.append(f"{name}: expected {'no ' if attempt.result is None else 'a '}result")
    if result is not None:
        _check_result(attempt, result, found)
    found.calls += len(capture.records) + len(capture.lost)
    found.committed += len(capture.records)
    found.lost += len(capture.lost)
    for record in capture.records:
        reason = f" {record.unusable_reason}" if record.unusable_reason is not None else ""
        found.by_outcome[f"{record.response_status}{reason}"] += 1
        found.sampled_tokens += record.cum_len - record.prompt_len
    found.acknowledged += check.acknowledged
    found.unheard += check.unheard
    found.ambiguous += check.ambiguous
    if attempt.outcome not in (None, "selected") and not check.twins_of(attempt.path):
        found.violations.append(f"{name}: when it was finished it was {attempt.outcome}")
    if sampled:
        _check_selection(capture, result, attempt, check.twins_of(attempt.path), found)


def _check_result(attempt: AttemptJournal, result: Result, found: Verified) -> None:
    given = attempt.result, attempt.reward, attempt.group_id
    if (result.value, result.reward, result.group_id) != given:
        found.violations.append(f"{attempt.name}: its result is not the one that was handed back")


def _check_selection(
    capture: Capture, result: Result | None, attempt: AttemptJournal, twins: set[str], found: Verified
) -> None:
    """See that exactly the calls of the history are selected, and that the rows train every token of them.

    Where another call said the same as one of the history, for a client that did not get it, either may be meant and
    the refusal to guess is right.
    """
    made = run_rollout(capture, Result() if result is None else result, resolve_selection_policy("returned_history"))
    found.selected += 1
    if isinstance(made, Rejected):
        if twins and made.code in _LEFT_OPEN:
            found.refused += 1
        else:
            found.violations.append(f"{attempt.name}: refused: {made.code} {made.message}")
        return
    wrong = set(made.selection.calls) ^ set(attempt.path)
    if wrong and not (twins and len(made.selection.calls) == len(attempt.path)):
        found.violations.append(f"{attempt.name}: the selection differs from the history in {sorted(wrong)}")
    chosen = {record.model_call_id: record for record in capture.records}
    tokens = sum(chosen[call_id].cum_len - chosen[call_id].prompt_len for call_id in made.selection.calls)
    if made.rebuilt.trained_tokens != tokens:
        found.violations.append(f"{attempt.name}: {tokens} tokens sampled, {made.rebuilt.trained_tokens} trained")
