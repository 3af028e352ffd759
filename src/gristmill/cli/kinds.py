"""What each captured call is to those before it: a start, a continuation, a retry, a branch, or what a label says.

Invariant: a kind only repeats what is recorded (parent, request digests or tokens, label); nothing is guessed from
text. Pure.

Not here: whether a call is trained (selection).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

from gristmill.records import CallRecord, Capture, PurposeLabel

__all__ = ["CallKind", "call_kinds", "main_children"]


class CallKind(StrEnum):
    """What a call is."""

    START = "start"
    CONTINUATION = "continuation"
    RETRY = "retry"
    BRANCH = "branch"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    AUXILIARY = "auxiliary"


_LABELLED: Final = {
    PurposeLabel.SUBAGENT: CallKind.SUBAGENT,
    PurposeLabel.COMPACTION: CallKind.COMPACTION,
    PurposeLabel.AUXILIARY: CallKind.AUXILIARY,
}


def call_kinds(capture: Capture) -> dict[str, CallKind]:
    """Say of every call what it is.

    A retry answers the same request of the same parent as an earlier call, a branch another request of a parent that
    an earlier call continues. A label goes before: `subagent`, `compaction`, `auxiliary`.
    """
    kinds: dict[str, CallKind] = {}
    requests: set[Any] = set()
    continued: set[str] = set()
    for record in capture.records:
        parent, key = record.parent_call_id, _request_key(capture, record)
        label = _LABELLED.get(record.purpose.label)
        if label is not None:
            kind = label
        elif key in requests:
            kind = CallKind.RETRY
        elif parent is None:
            kind = CallKind.START
        else:
            kind = CallKind.BRANCH if parent in continued else CallKind.CONTINUATION
        kinds[record.model_call_id] = kind
        requests.add(key)
        if parent is not None and label is None:
            continued.add(parent)
    return kinds


def _request_key(capture: Capture, record: CallRecord) -> Any:
    """Give what two calls share exactly if they answer the same request of the same parent; as the pipeline has it."""
    if record.context_digest is not None:
        return record.parent_call_id, (record.context_digest, record.system_digest, record.tools_digest)
    delta = capture.tokens.get(record.model_call_id)
    if delta is None or not record.prompt_len:
        return record.model_call_id
    suffix = delta.ids_T[: record.prompt_len - record.prev_len].tobytes()
    return record.parent_call_id, record.base_call_id, record.prev_len, suffix


def main_children(children: dict[int, list[int]], preferred: set[int]) -> dict[int, int]:
    """Choose, for each call that several continue, the one that the conversation goes on with.

    That is the last one whose part of the tree holds a preferred call, else the last one that is continued itself, else
    the last one.

    Args:
        children: positions by the position of the call that they continue, roots under a negative number.
        preferred: positions of selected calls.
    """
    parents = {child: parent for parent, found in children.items() for child in found}
    holding: set[int] = set()
    for position in preferred:
        at = position
        while at >= 0 and at not in holding:
            holding.add(at)
            at = parents.get(at, -1)
    chosen: dict[int, int] = {}
    for parent, found in children.items():
        if parent >= 0 and found:
            chosen[parent] = max(found, key=lambda child: (child in holding, child in children, child))
    return chosen
