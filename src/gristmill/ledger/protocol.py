"""What a store of captured calls must do, whatever it is made of.

Invariant: what was acknowledged stays; calls and deliveries are only ever added; a call admitted without an outcome is
reported as lost and never forgotten; attempts never mix. `commit` assigns the ordinal that "commit order" means.

An attempt is open, then finished (its result is stored), then frozen (nothing changes any more but deliveries); one
that nobody finishes is abandoned, which is frozen under another name. An outcome that comes after `finish` is kept as
it is, can be read with `late`, and is never a record of the capture: there it stands among the lost calls.

An attempt may be opened with a setup before it has a call, and its calls may be labelled; a label is advice, kept as
an event like a delivery.

Not here: any particular store (memory, SQLite, PostgreSQL).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from gristmill.errors import Code, LedgerError
from gristmill.records import CallRecord, Capture, Delivery, Exchange, Purpose, Result, TokenDelta

__all__ = [
    "LATE_REASON",
    "LOST_WITH_WRITER",
    "SETUP_SCHEMA",
    "AttemptElsewhere",
    "AttemptKey",
    "AttemptSetup",
    "AttemptState",
    "Counts",
    "Imported",
    "Ledger",
    "StoredCall",
    "Summary",
]

LATE_REASON: Final = "its outcome came after the rollout had finished"
"""Why a call whose outcome was late counts as lost."""

LOST_WITH_WRITER: Final = "the process that made the call ended before its outcome"
"""Why a call counts as lost that was in flight when its writer ended."""

SETUP_SCHEMA: Final = 1
"""Version of `AttemptSetup`; readers refuse newer ones."""


class AttemptKey(NamedTuple):
    """One attempt of one rollout."""

    rollout_id: str
    attempt: int = 0


class AttemptState(StrEnum):
    """Where an attempt is in its life."""

    OPEN = "open"
    FINISHED = "finished"
    FROZEN = "frozen"
    ABANDONED = "abandoned"


class AttemptElsewhere(LedgerError):
    """The attempt belongs to another process that writes to the same ledger, and lives.

    Attributes:
        address: where that process can be reached, None where it did not say.
    """

    def __init__(self, key: AttemptKey, address: str | None) -> None:
        where = "" if address is None else f" at {address}"
        super().__init__(
            f"expected an attempt that nobody else has, {key.rollout_id}/{key.attempt} is another process's{where}",
            code=Code.ATTEMPT_ELSEWHERE,
            where=key.rollout_id,
            hint="ask there" if address is not None else "try again when that process has ended",
        )
        self.address = address


class AttemptSetup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an attempt is opened with.

    Attributes:
        key_digest: SHA-256 of the key that its harness calls with, 64 hexadecimal digits; None: it has none.
        group_id: its group as long as no result is stored.
        metadata: JSON, for the result and for people.
        overrides: JSON, settings that replace those of its requests.
        created_at: unix seconds.
    """

    key_digest: str | None = None
    group_id: str | None = None
    metadata: Mapping[str, Any] = {}
    overrides: Mapping[str, Any] = {}
    created_at: float | None = None
    schema: int = SETUP_SCHEMA


class StoredCall(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one call: its record, its tokens if there are any, and what went over the wire if it is kept."""

    record: CallRecord
    tokens: TokenDelta | None = None
    exchange: Exchange | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt in a line of `ls`.

    Attributes:
        calls: committed calls that a policy can select.
        lost: calls without an outcome, those in flight and those whose outcome was late included.
        sampled_tokens, prompt_tokens: summed over `calls`; the prompt is counted anew in every call.
        group_id: of the result; of the setup while no result is stored.
        models: names as served, in the order of their first calls.
        first_at, last_at: earliest admission and latest completion of `calls`, unix seconds.
        touched_at: when the ledger last wrote to the attempt, unix seconds.
    """

    key: AttemptKey
    state: AttemptState
    calls: int = 0
    lost: int = 0
    usable_calls: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    models: tuple[str, ...] = ()
    reward: float | None = None
    group_id: str | None = None
    has_result: bool = False
    first_at: float | None = None
    last_at: float | None = None
    touched_at: float | None = None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of a ledger; `attempts` by state."""

    attempts: Mapping[AttemptState, int] = {}
    calls: int = 0
    lost: int = 0
    usable_calls: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0


class Imported(msgspec.Struct, frozen=True):
    """How many attempts an import added, and how many were there already with the same content."""

    added: int = 0
    unchanged: int = 0


class Ledger(Protocol):
    """A durable store of captured calls.

    Every method that writes returns only when the write is durable.
    """

    def begin(self, key: AttemptKey, setup: AttemptSetup) -> None:
        """Open an attempt before its first call; again with an equal setup changes nothing.

        An open attempt that has calls and no setup may be given one.

        Raises:
            LedgerError: `key_exists` where the attempt has another setup, or the key is another attempt's;
                `attempt_closed` where it has none and is not open; `option_invalid`, `schema_unsupported`.
        """
        ...

    def setup(self, key: AttemptKey) -> AttemptSetup | None:
        """Return what an attempt was opened with, None where it has only calls.

        Raises:
            LedgerError: `rollout_unknown`.
        """
        ...

    def revoke(self, key: AttemptKey) -> None:
        """Let the attempt's key never open it again; nothing else changes, and doing it again changes nothing.

        Raises:
            LedgerError: `rollout_unknown`.
        """
        ...

    def grants(self) -> Iterator[tuple[str, AttemptKey]]:
        """Yield the key digests that were not revoked, of attempts that are open or finished, with their attempts."""
        ...

    def admit(self, key: AttemptKey, model_call_id: str, parent_call_id: str | None = None) -> None:
        """Record that a call is about to be made; without a commit it is lost.

        Raises:
            LedgerError: `attempt_closed`, or `call_identity_reused` where the call id was admitted before.
        """
        ...

    def commit(self, key: AttemptKey, call: StoredCall) -> int:
        """Store the outcome of a call and return its ordinal in the attempt.

        Raises:
            LedgerError: `attempt_closed` where it is frozen; `call_identity_reused` where the call has an outcome
                already; `token_count_mismatch` where record, tokens and base disagree on a length.
        """
        ...

    def commit_choices(self, key: AttemptKey, calls: Sequence[StoredCall]) -> tuple[int, ...]:
        """Store the calls of one reply with several choices, all or none; otherwise as `commit`."""
        ...

    def lose(self, key: AttemptKey, model_call_id: str, reason: str) -> None:
        """Say why an admitted call has no outcome and will get none.

        Raises:
            LedgerError: `attempt_closed`; `call_unknown` where it was not admitted; `call_identity_reused` where it
                has an outcome, or was lost before.
        """
        ...

    def deliver(self, key: AttemptKey, model_call_id: str, delivery: Delivery) -> None:
        """Append whether the client got the reply; the last statement counts.

        Raises:
            LedgerError: `rollout_unknown`, `call_unknown`.
        """
        ...

    def label(self, key: AttemptKey, labels: Mapping[str, Purpose]) -> None:
        """Append purposes by call id, all or none; the last one of a call takes the place of its record's own.

        Raises:
            LedgerError: `rollout_unknown`, `call_unknown`; `attempt_closed` where it is frozen.
        """
        ...

    def finish(self, key: AttemptKey, result: Result) -> None:
        """Store what the harness handed back; the same result again changes nothing.

        Raises:
            LedgerError: `attempt_closed`, or `attempt_differs` where another result is stored.
        """
        ...

    def attempts(self) -> Iterator[AttemptKey]:
        """Yield the attempts in the order in which they began."""
        ...

    def rollout(self, rollout_id: str) -> tuple[AttemptKey, ...]:
        """Return the attempts of one rollout by number; empty where it is not known."""
        ...

    def summaries(
        self,
        *,
        after: AttemptKey | None = None,
        state: AttemptState | None = None,
        group_id: str | None = None,
    ) -> Iterator[Summary]:
        """Yield one line for each attempt, in the order in which they began, without touching tokens.

        Args:
            after: begin behind this attempt.
            state: only attempts in this state.
            group_id: only attempts of this group, as their summaries have it.

        Raises:
            LedgerError: `rollout_unknown`, there is no attempt `after`.
        """
        ...

    def summary(self, key: AttemptKey) -> Summary:
        """Return the line of one attempt.

        Raises:
            LedgerError: `rollout_unknown`.
        """
        ...

    def counts(self) -> Counts:
        """Add up all attempts."""
        ...

    def read(self, key: AttemptKey, *, tokens: bool = True, exchanges: bool = False) -> tuple[Capture, Result | None]:
        """Return everything captured of an attempt, and its result if it has finished.

        Args:
            key: which attempt.
            tokens: False leaves the tokens out.
            exchanges: True adds what went over the wire.

        Raises:
            LedgerError: `rollout_unknown`.
        """
        ...

    def late(self, key: AttemptKey) -> tuple[StoredCall, ...]:
        """Return the outcomes that came after the attempt had finished, in commit order.

        Raises:
            LedgerError: `rollout_unknown`.
        """
        ...

    def check(self, key: AttemptKey) -> tuple[str, ...]:
        """Say, a sentence each, where what is stored of an attempt contradicts itself; empty where it does not.

        A store that nobody else can write to has nothing to say.

        Raises:
            LedgerError: `rollout_unknown`.
        """
        ...

    def import_attempts(self, attempts: Iterable[tuple[Capture, Result | None]]) -> Imported:
        """Add whole attempts, frozen: all of them or none. One that is there with the same content is passed over.

        Raises:
            LedgerError: `attempt_differs`, naming the attempt; `token_count_mismatch`.
        """
        ...

    def freeze(self, key: AttemptKey) -> str:
        """Admit no more calls and return the snapshot id: the digest of the whole attempt."""
        ...

    def abandon(self, key: AttemptKey) -> str:
        """Freeze an attempt that its harness never finished; otherwise as `freeze`.

        Raises:
            LedgerError: `attempt_closed`, it is not open.
        """
        ...

    def retire(self, key: AttemptKey, snapshot_id: str) -> None:
        """Delete a frozen attempt whose snapshot id is still this one.

        Raises:
            LedgerError: `manifest_differs`: it is not frozen, or has changed.
        """
        ...
