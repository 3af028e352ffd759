"""What a selection decided, and why, per captured call.

Invariant: every captured call has exactly one verdict. A verdict names a rule of the closed set and the evidence; it
never changes what was decided.

Not here: the rules themselves (the policies) and the checks after them (pipeline).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from gristmill.canonical import JsonValue
from gristmill.errors import Code
from gristmill.records import CallRecord, Capture

__all__ = [
    "Decision",
    "ExplainingPolicy",
    "Reason",
    "Rejected",
    "Selection",
    "Verdict",
    "decided_verdicts",
    "refused_verdicts",
]


class Reason(msgspec.Struct, frozen=True):
    """The rule that decided about one call, and its evidence."""

    code: Code
    evidence: Mapping[str, Any] = {}


class Decision(msgspec.Struct, frozen=True):
    """What a policy decided, calls by position in commit order.

    Attributes:
        selected: in order.
        terminal: the scored call, None where the policy cannot name one.
        reasons: for the selected calls, and for excluded ones where the policy has a particular reason.
        excluded: the code for every other call.
        notes: what was tolerated, or settled by a rule that a reader may want to know of.
    """

    selected: tuple[int, ...]
    terminal: int | None
    reasons: Mapping[int, Reason]
    excluded: Code
    notes: tuple[str, ...] = ()


@runtime_checkable
class ExplainingPolicy(Protocol):
    """A policy that can say why; the built-in ones do."""

    @property
    def name(self) -> str: ...

    def options(self) -> Mapping[str, str]: ...

    def decide(self, records: Sequence[Any], result: JsonValue) -> Decision: ...


class Verdict(msgspec.Struct, frozen=True):
    """Why one captured call is in the selection or not."""

    model_call_id: str
    included: bool
    code: Code
    evidence: Mapping[str, Any] = {}


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one rollout that are to be trained.

    Attributes:
        calls: model call ids in order.
        terminal_call_id, terminal_response_id: the scored call.
        verdicts: one per captured call in commit order, lost calls last.
        truncated: a selected call was stopped by length.
        lost: calls that were admitted, have no outcome, and do not concern the selection.
    """

    rollout_id: str
    attempt: int
    policy: str
    options: Mapping[str, str] = {}
    calls: tuple[str, ...]
    terminal_call_id: str
    terminal_response_id: str
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    truncated: bool = False
    lost: tuple[str, ...] = ()


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that cannot be trained: a value to keep and to count."""

    rollout_id: str
    attempt: int
    policy: str
    options: Mapping[str, str] = {}
    code: Code
    where: str
    message: str
    evidence: Mapping[str, Any] = {}
    verdicts: tuple[Verdict, ...] = ()


def decided_verdicts(capture: Capture, decision: Decision, foreign: Collection[int]) -> tuple[Verdict, ...]:
    """Write the verdicts of a decision.

    Args:
        capture: everything captured of the attempt.
        decision: of any policy.
        foreign: positions of selected calls that become context, since another model made them.
    """
    selected = set(decision.selected)
    included_requests: dict[Any, str] = {}
    for position in decision.selected:
        record = capture.records[position]
        included_requests.setdefault(_request_key(capture, record), record.model_call_id)
    verdicts: list[Verdict] = []
    for position, record in enumerate(capture.records):
        reason = decision.reasons.get(position)
        if position in foreign:
            verdict = Verdict(record.model_call_id, False, Code.FOREIGN_MODEL, {"model": record.model})
        elif reason is not None:
            verdict = Verdict(record.model_call_id, position in selected, reason.code, reason.evidence)
        else:
            superseding = included_requests.get(_request_key(capture, record))
            if superseding is not None:
                verdict = Verdict(record.model_call_id, False, Code.RETRY_SUPERSEDED, {"superseded_by": superseding})
            else:
                verdict = Verdict(record.model_call_id, False, decision.excluded)
        verdicts.append(verdict)
    return (*verdicts, *_lost_verdicts(capture))


def refused_verdicts(
    capture: Capture, code: Code, unusable: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[Verdict, ...]:
    """Write the verdicts of a rollout that was refused.

    Args:
        capture: everything captured of the attempt.
        code: of the refusal.
        unusable: calls whose tokens are the reason, by id, with their evidence.
    """
    unusable, evidence = unusable or {}, {"code": str(code)}
    verdicts = [
        Verdict(record.model_call_id, False, Code.UNUSABLE_TOKENS, unusable[record.model_call_id])
        if record.model_call_id in unusable
        else Verdict(record.model_call_id, False, Code.ROLLOUT_REJECTED, evidence)
        for record in capture.records
    ]
    return (*verdicts, *_lost_verdicts(capture))


def _lost_verdicts(capture: Capture) -> list[Verdict]:
    return [Verdict(call.model_call_id, False, Code.LOST, {"reason": call.reason}) for call in capture.lost]


def _request_key(capture: Capture, record: CallRecord) -> Any:
    """Give what two calls share exactly if they answer the same request of the same parent."""
    if record.context_digest is not None:
        digests = (record.context_digest, record.system_digest, record.tools_digest)
        return record.parent_call_id, digests
    delta = capture.tokens.get(record.model_call_id)
    if delta is None or not record.prompt_len:
        return record.model_call_id
    suffix = delta.ids_T[: record.prompt_len - record.prev_len].tobytes()
    return record.parent_call_id, record.base_call_id, record.prev_len, suffix
