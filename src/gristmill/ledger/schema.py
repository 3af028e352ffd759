"""The tables of a ledger in SQLite, declared once.

Invariant: whatever belongs to an attempt has a key that begins with the attempt's number (`part_no`), so that an
attempt lies together on disk, is read by a range and deleted by a range, and needs no further index. The parts of one
attempt count up in the order in which they were written: the order of the keys is the commit order.

Not here: what is in the blobs (calls, bodies), older schemas (migrate).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from gristmill.ledger.table import Table

__all__ = [
    "APPLICATION_ID",
    "ATTEMPTS",
    "BODIES",
    "CALLS",
    "DELIVERIES",
    "EXCHANGES",
    "INTENTS",
    "LABELS",
    "PARTS",
    "RESULTS",
    "SCHEMA_VERSION",
    "SETUPS",
    "TABLES",
    "TOKENS",
    "AttemptRow",
    "BodyRow",
    "CallRow",
    "DeliveryRow",
    "ExchangeRow",
    "IntentRow",
    "LabelRow",
    "ResultRow",
    "SetupRow",
    "TokenRow",
    "part_no",
    "part_range",
]

APPLICATION_ID: Final = 0x67726D6C  # "grml"
SCHEMA_VERSION: Final = 2
PARTS: Final = 2**24
"""Most rows of one kind in an attempt."""


def part_no(attempt_no: int, position: int) -> int:
    """Return the key of the attempt's row at a position."""
    return attempt_no * PARTS + position


def part_range(attempt_no: int) -> tuple[int, int]:
    """Return the smallest and the largest key that an attempt's rows can have."""
    return part_no(attempt_no, 0), part_no(attempt_no, PARTS - 1)


class AttemptRow(NamedTuple):
    """An attempt, and the sums that `summaries` needs; `snapshot_id` only while it is the one of what is stored."""

    attempt_no: int
    rollout_id: str
    attempt: int
    state: str
    calls: int
    lost: int
    usable_calls: int
    sampled_tokens: int
    prompt_tokens: int
    models: str
    first_at: float | None
    last_at: float | None
    touched_at: float
    snapshot_id: str | None


class IntentRow(NamedTuple):
    """A call without an outcome: in flight while `reason` is NULL, else lost. The outcome takes its place."""

    intent_no: int
    call_id: str
    parent_call_id: str | None
    instance: str
    admitted_at: float
    reason: str | None
    maybe_received: int


class CallRow(NamedTuple):
    """An outcome. `record` is a `CallRecord` in msgpack; its ordinal, delivery and label are stored beside it.

    `cum_len` is NULL where no tokens are stored; `late` is 1 where the attempt had finished before.
    """

    call_no: int
    call_id: str
    ordinal: int
    late: int
    instance: str
    cum_len: int | None
    record: bytes
    checksum: int


class TokenRow(NamedTuple):
    """Token delta: ids int32[T] little-endian; log-probabilities float32[G] of the generation alone; extras msgpack."""

    call_no: int
    ids: bytes
    logprobs: bytes
    extras: bytes | None
    checksum: int


class ExchangeRow(NamedTuple):
    """JSON texts in which references stand for bodies."""

    call_no: int
    request: bytes
    reply: bytes
    headers: bytes
    status: int | None
    checksum: int


class BodyRow(NamedTuple):
    """A piece of JSON text that exchanges of one attempt have in common."""

    body_no: int
    digest: bytes
    text: bytes


class DeliveryRow(NamedTuple):
    """What became of a reply; the last row of a call counts."""

    delivery_no: int
    call_id: str
    state: str
    at: float


class LabelRow(NamedTuple):
    """What a call was for, and the evidence; the last row of a call counts."""

    label_no: int
    call_id: str
    label: str
    evidence: str
    at: float
    checksum: int


class SetupRow(NamedTuple):
    """What an attempt was opened with; `metadata` and `overrides` are JSON texts. Only `revoked` ever changes."""

    attempt_no: int
    key_digest: str | None
    revoked: int
    group_id: str | None
    metadata: bytes
    overrides: bytes
    created_at: float | None
    schema: int
    checksum: int


class ResultRow(NamedTuple):
    """What the harness handed back; `value` and `metadata` are JSON texts, a credit is a second line of `metadata`."""

    attempt_no: int
    reward: float | None
    group_id: str | None
    value: bytes
    metadata: bytes
    checksum: int


ATTEMPTS: Final = Table("attempts", AttemptRow, unique=("rollout_id", "attempt"), monotonic=True)
INTENTS: Final = Table("intents", IntentRow)
CALLS: Final = Table("calls", CallRow)
TOKENS: Final = Table("tokens", TokenRow, references="calls")
EXCHANGES: Final = Table("exchanges", ExchangeRow, references="calls")
BODIES: Final = Table("bodies", BodyRow)
DELIVERIES: Final = Table("deliveries", DeliveryRow)
LABELS: Final = Table("labels", LabelRow)
SETUPS: Final = Table("setups", SetupRow, unique=("key_digest",), indexed=("group_id",), references="attempts")
RESULTS: Final = Table("results", ResultRow, indexed=("group_id",), references="attempts")

TABLES: Final[tuple[Table[Any], ...]] = (
    ATTEMPTS,
    INTENTS,
    CALLS,
    TOKENS,
    EXCHANGES,
    BODIES,
    DELIVERIES,
    LABELS,
    SETUPS,
    RESULTS,
)
"""Each table before those that refer to it."""
