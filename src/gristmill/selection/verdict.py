"""What a selection decided, and why, per captured call.

Invariant: every captured call has exactly one verdict. A verdict names a rule of the closed set and the evidence; it
never changes what was decided.

Not here: the rules themselves (the policies) and the checks after them (pipeline).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from gristmill.canonical import JsonValue
from gristmill.errors import Code

__all__ = ["Decision", "ExplainingPolicy", "Reason", "Rejected", "Selection", "Verdict"]


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
