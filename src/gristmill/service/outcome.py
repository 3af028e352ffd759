"""What a captured attempt comes to under a built-in policy: verdicts, rows, funnel, as JSON.

Invariant: everything here is the pipeline's; a rollout that is refused is an answer, not an error.

Not here: HTTP (api), policies of one's own (the command line).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gristmill.export.row_json import encode_row
from gristmill.ledger import AttemptKey, LedgerReader, Summary
from gristmill.pipeline import Funnel, RebuiltRollout, funnel_of, run_rollout
from gristmill.records import CallRecord, Capture, Result
from gristmill.selection import Rejected, Selection, SelectionPolicy, resolve_selection_policy

__all__ = ["Outcome", "call_json", "outcome_of", "rows_of", "summary_json", "verdicts_json"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What selecting and rebuilding an attempt came to.

    Attributes:
        outcome: `selected`, or `rejected` with `code`, `where`, `message` and `evidence`.
        rows: how many rows it makes.
    """

    policy: str
    outcome: str
    code: str | None = None
    where: str | None = None
    message: str | None = None
    evidence: Mapping[str, Any] = {}
    rows: int = 0
    funnel: Funnel = Funnel()

    def json(self) -> dict[str, Any]:
        """Give the outcome as JSON."""
        told: dict[str, Any] = msgspec.to_builtins(self)
        return told


def _run(
    ledger: LedgerReader, key: AttemptKey, policy: str | SelectionPolicy
) -> tuple[Capture, RebuiltRollout | Rejected]:
    capture, result = ledger.read(key)
    chosen = resolve_selection_policy(policy) if isinstance(policy, str) else policy
    return capture, run_rollout(capture, Result() if result is None else result, chosen)


def outcome_of(ledger: LedgerReader, key: AttemptKey, policy: str | SelectionPolicy) -> Outcome:
    """Select and rebuild an attempt, and count it.

    Raises:
        LedgerError: `rollout_unknown`.
        PolicyError: a custom policy broke its contract.
    """
    capture, made = _run(ledger, key, policy)
    funnel = funnel_of(capture, made)
    if isinstance(made, Rejected):
        return Outcome(
            policy=made.policy,
            outcome="rejected",
            code=str(made.code),
            where=made.where,
            message=made.message,
            evidence=made.evidence,
            funnel=funnel,
        )
    return Outcome(policy=made.selection.policy, outcome="selected", rows=len(made.rows), funnel=funnel)


def verdicts_json(ledger: LedgerReader, key: AttemptKey, policy: str) -> dict[str, Any]:
    """Say of every call whether it is trained and why, with the keys of `gristmill select`'s rollouts.

    Raises:
        LedgerError: `rollout_unknown`.
    """
    capture, made = _run(ledger, key, policy)
    outcome: Selection | Rejected = made if isinstance(made, Rejected) else made.selection
    told: dict[str, Any] = {"outcome": "rejected" if isinstance(outcome, Rejected) else "selected"}
    told.update(msgspec.to_builtins(outcome))
    told["funnel"] = msgspec.to_builtins(funnel_of(capture, made))
    return told


def rows_of(ledger: LedgerReader, key: AttemptKey, policy: str) -> list[bytes] | Rejected:
    """Rebuild an attempt's rows, one line of JSON each; or say why there are none.

    Raises:
        LedgerError: `rollout_unknown`.
        ExportError: `row_malformed`.
    """
    _, made = _run(ledger, key, policy)
    return made if isinstance(made, Rejected) else [encode_row(row) + b"\n" for row in made.rows]


def summary_json(summary: Summary, in_flight: int) -> dict[str, Any]:
    """Write one attempt as it is listed."""
    told: dict[str, Any] = msgspec.to_builtins(summary)
    del told["key"]
    return {"rollout_id": summary.key.rollout_id, "attempt": summary.key.attempt, **told, "in_flight": in_flight}


_CALL = (
    "model_call_id",
    "response_id",
    "choice_index",
    "ordinal",
    "parent_call_id",
    "parent_resolution",
    "dialect",
    "model",
    "requested_model",
    "upstream",
    "session_id",
    "parent_session_id",
    "response_status",
    "finish_reason",
    "usable",
    "unusable_reason",
    "unusable_detail",
    "delivery",
    "changes",
    "retry_of",
    "continuation",
    "admitted_at",
    "completed_at",
)


def call_json(record: CallRecord) -> Mapping[str, Any]:
    """Write one call without what it said."""
    told: dict[str, Any] = {name: msgspec.to_builtins(getattr(record, name)) for name in _CALL}
    told["prompt_tokens"] = record.prompt_len
    told["sampled_tokens"] = record.cum_len - record.prompt_len
    told["purpose"] = str(record.purpose.label)
    told["purpose_evidence"] = record.purpose.evidence
    return told
