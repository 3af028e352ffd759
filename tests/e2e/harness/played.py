"""A scenario that has been played: what ledger, witness and engine have of it, and what must hold of any.

Invariant: which call is which is told by the engine's script, never by the gateway's own labels.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.ledger import AttemptKey
from gristmill.records import CallRecord, Capture, PurposeLabel
from tests.e2e.checks import Checks
from tests.e2e.evidence import check_all_captured, check_rows, check_tokens
from tests.e2e.harness.launch import Harness, Json
from tests.e2e.stage import captured, gristmill
from tests.e2e.witness import Seen

__all__ = ["Played", "check_attempt", "check_chain", "check_played", "ids_of", "labelled", "read_played"]

_ASIDE = {PurposeLabel.AUXILIARY, PurposeLabel.SUBAGENT, PurposeLabel.COMPACTION}


@dataclass
class Played:
    """One attempt: its calls, what the engine saw, which rule answered which call, and what was selected."""

    ledger: Path
    key: AttemptKey
    capture: Capture
    seen: list[Seen]
    rules: dict[str, str]
    outcome: Json

    @property
    def selected(self) -> list[str]:
        return self.outcome.get("calls") or []

    def of(self, *rules: str, usable: bool = True) -> list[CallRecord]:
        """Return the calls that some rules answered, in the order in which the engine saw them."""
        by_id = {record.model_call_id: record for record in self.capture.records}
        ids = [call.call_id or "" for call in self.seen if self.rules.get(call.call_id or "") in rules]
        found = [by_id[call_id] for call_id in ids if call_id in by_id]
        return [record for record in found if record.usable or not usable]

    def unusable(self) -> list[str]:
        """Return the calls to which the engine gave no whole reply."""
        return [call.call_id or "" for call in self.seen if not call.whole]


def read_played(ledger: Path, key: AttemptKey, seen: Sequence[Seen], engine_url: str, options: Sequence[str]) -> Played:
    """Read an attempt that was finished; `seen` are its requests, `options` the policy's."""
    words = ("select", str(ledger), "--rollout", key.rollout_id, *options, "--json")
    outcome = json.loads(gristmill(*words, check=False).stdout)["rollouts"][0]
    return Played(ledger, key, captured(ledger, key), list(seen), _rules(engine_url), outcome)


def _rules(engine_url: str) -> dict[str, str]:
    with urllib.request.urlopen(f"{engine_url}/script/requests", timeout=20) as answer:
        told = json.loads(answer.read())
    asked = told if isinstance(told, list) else told["requests"]
    return {each["headers"].get("x-request-id", ""): each["rule"] for each in asked}


def check_played(checks: Checks, harness: Harness, made: Played) -> None:
    """What holds in every scenario that has a ledger of its own."""
    check_attempt(checks, harness, made)
    expected = {made.key.rollout_id: (made.capture, made.seen)}
    rows = made.ledger.with_name("rows")
    if harness.options:
        check_rows(checks, made.ledger, rows, expected, harness.options, made.selected)
    else:
        check_rows(checks, made.ledger, rows, expected)


def check_attempt(checks: Checks, harness: Harness, made: Played) -> None:
    """What holds of every attempt."""
    check_all_captured(checks, made.capture, made.seen)
    check_tokens(checks, made.capture, made.seen, unusable=made.unusable())
    if harness.makes_title:
        titles = made.of("title")
        checks.check("its title call is auxiliary", bool(titles) and labelled(titles, PurposeLabel.AUXILIARY), titles)
    main = {record.purpose.label for record in made.of("main", "after", usable=False)}
    checks.check("no call of the main agent is labelled as something else", not main & _ASIDE, main)
    checks.equal("the returned history is accepted", "selected", made.outcome["outcome"])
    if made.outcome["outcome"] != "selected":
        checks.check("(why it was not)", False, {key: made.outcome.get(key) for key in ("code", "where", "message")})


def labelled(records: Sequence[CallRecord], label: PurposeLabel) -> bool:
    """Whether all calls have a label."""
    return all(record.purpose.label is label for record in records)


def ids_of(records: Sequence[CallRecord]) -> list[str]:
    """Return the ids of calls."""
    return [record.model_call_id for record in records]


def check_chain(checks: Checks, what: str, records: Sequence[CallRecord]) -> None:
    """Each call continues the one before; the first begins a conversation."""
    parents = [record.parent_call_id for record in records]
    checks.equal(f"each turn of the {what} continues the one before", [None, *ids_of(records)][: len(records)], parents)
