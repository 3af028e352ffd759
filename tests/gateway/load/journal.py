"""What the harnesses of a load run note outside of the gateway: every request they sent, and what came of it.

Invariant: a request is noted before it is sent, and of the gateway's own word only what a client gets is taken.

Not here: comparing it with the ledger (verify).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from gristmill.ledger import AttemptKey, AttemptState
from gristmill.records import Dialect
from tests.gateway.load.replies import SaidReply

__all__ = ["AttemptJournal", "Fate", "Journal", "Sent"]

Json = dict[str, Any]


class Fate(StrEnum):
    """What became of a request, as its client knows it."""

    ACKNOWLEDGED = "acknowledged"
    DROPPED = "dropped"
    BROKEN = "broken"
    REFUSED = "refused"


class Sent(msgspec.Struct, kw_only=True):
    """One request.

    Attributes:
        nonce: what it asked.
        parent: the call that it continues, None where it continues none.
        evidence: digest of its body without `stream`, None where the gateway stores another one.
        marked: it said that it is a retry.
        fate: None as long as it is on its way.
        call_id: what the gateway called it; None where no head came.
        replayed: the answer came from the record.
        sent_on: how often a gateway named another one.
        reply: the reply as far as it came.
        problem: what went wrong.
    """

    nonce: str
    dialect: Dialect
    stream: bool
    n: int = 1
    parent: str | None = None
    evidence: str | None = None
    marked: bool = False
    fate: Fate | None = None
    status: int = 0
    call_id: str | None = None
    replayed: bool = False
    sent_on: int = 0
    reply: SaidReply = SaidReply()
    problem: str = ""


class AttemptJournal(msgspec.Struct, kw_only=True):
    """One attempt.

    Attributes:
        sent: its requests in the order in which they were sent.
        path: the calls of the history that was handed back, in order.
        result, reward, group_id: what it was finished with.
        outcome: what finishing it said.
        state: what it has to be in the end.
        snapshot_id: what freezing it said.
    """

    key: AttemptKey
    dialect: Dialect
    sent: list[Sent] = []
    path: list[str] = []
    result: Json | None = None
    reward: float | None = None
    group_id: str | None = None
    outcome: str | None = None
    state: AttemptState = AttemptState.OPEN
    snapshot_id: str | None = None

    @property
    def name(self) -> str:
        """What it is called in sentences."""
        return f"{self.key.rollout_id}/{self.key.attempt}"


class Journal(msgspec.Struct):
    """The whole run.

    Attributes:
        orphans: attempts that may have been opened by a request whose answer was lost.
        violations: what no harness should ever see.
        killed_at: when the gateway was killed, in unix seconds.
        acknowledged: replies so far.
    """

    attempts: dict[AttemptKey, AttemptJournal] = {}
    orphans: set[AttemptKey] = set()
    violations: list[str] = []
    killed_at: list[float] = []
    acknowledged: int = 0

    def sent(self) -> list[Sent]:
        """Return all requests."""
        return [sent for attempt in self.attempts.values() for sent in attempt.sent]
