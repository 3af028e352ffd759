"""The policy `all_captured`: every captured call that finished, whatever the harness returned.

Invariant: only calls that did not finish *and* that nothing depends on are left out; an unfinished call that is the
scored one, or that another call continues, stays and refuses the rollout later instead of being hidden.

Not here: which calls the harness used (returned_history, final_context).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from gristmill.canonical import JsonValue
from gristmill.errors import Code, SelectionError
from gristmill.selection.captured import CapturedCalls, Fingerprint
from gristmill.selection.completion import is_finished
from gristmill.selection.result import malformed
from gristmill.selection.verdict import Decision, Reason
from gristmill.terminal import Attribution, resolve_terminal

__all__ = ["AllCaptured", "attribute_terminal", "returns_nothing"]


class AllCaptured:
    """Selects every finished call in commit order.

    Args:
        fingerprint: how the records' fingerprints were made, for records that carry no atoms.
    """

    name = "all_captured"

    def __init__(self, *, fingerprint: Fingerprint | None = None) -> None:
        self._fingerprint = fingerprint

    def options(self) -> Mapping[str, str]:
        """Return the options that differ from their defaults: there are none."""
        return {}

    def __call__(self, records: Sequence[Any], result: JsonValue) -> tuple[list[Any], str | None]:
        """Select every finished call.

        Args:
            records: captured calls of one attempt in commit order.
            result: the harness's result, plain JSON.

        Returns:
            The selected records, unchanged, in commit order, and the scored call's response id.

        Raises:
            SelectionError: `terminal_unattributed`, `witness_disagreement`, `call_identity_reused`,
                `output_malformed`, `selection_empty`.
        """
        decision = self.decide(records, result)
        assert decision.terminal is not None
        return [records[position] for position in decision.selected], records[decision.terminal].response_id

    def decide(self, records: Sequence[Any], result: JsonValue) -> Decision:
        """Select, and say why: the same refusals as calling the policy."""
        CapturedCalls(records)
        attribution = attribute_terminal(records, result, self._fingerprint, lineage_walk=False)
        assert attribution.position is not None
        continued = {record.parent_call_id for record in records}
        reasons: dict[int, Reason] = {}
        selected: list[int] = []
        for position, record in enumerate(records):
            finish = {"response_status": record.response_status, "finish_reason": record.finish_reason}
            if is_finished(record):
                selected.append(position)
                reasons[position] = Reason(Code.CAPTURED, finish)
            elif position == attribution.position or record.model_call_id in continued:
                why = "scored" if position == attribution.position else "continued by another call"
                selected.append(position)
                reasons[position] = Reason(Code.CAPTURED, {**finish, "kept_although_unfinished": why})
            else:
                reasons[position] = Reason(Code.UNFINISHED_LEAF, finish)
        notes = tuple(f"{witness.name}: {witness.says}" for witness in attribution.trail)
        return Decision(
            tuple(selected),
            attribution.position,
            reasons,
            Code.UNFINISHED_LEAF,
            notes + _labels(records, selected),
        )


def _labels(records: Sequence[Any], selected: Sequence[int]) -> tuple[str, ...]:
    """Report the selected calls whose label says that they are not the agent's own: advice, never a filter."""
    by_label: dict[str, list[str]] = {}
    for position in selected:
        label = getattr(getattr(records[position], "purpose", None), "label", None)
        if label in {"auxiliary", "compaction", "subagent"}:
            by_label.setdefault(str(label), []).append(records[position].model_call_id)
    return tuple(
        f"{len(calls)} selected call(s) are labelled {label}: {', '.join(calls)}"
        for label, calls in sorted(by_label.items())
    )


def returns_nothing(result: JsonValue) -> bool:
    """Tell whether a result holds neither a history nor references."""
    keys = ("response", "responses", "messages", "ng_trajectory", "trajectory", "terminal_response_id")
    if not isinstance(result, Mapping):
        return False
    body = cast(Mapping[str, JsonValue], result)
    return all(body.get(key) is None for key in keys)


def attribute_terminal(
    records: Sequence[Any], result: JsonValue, fingerprint: Fingerprint | None, *, lineage_walk: bool
) -> Attribution:
    """Name the scored call of a result.

    The scored response is `response`, else the last of `responses`, else the `messages` history.

    Raises:
        SelectionError: `terminal_unattributed` or `witness_disagreement` with the trail; `output_malformed`.
    """
    if not isinstance(result, Mapping):
        raise malformed("$", "an object", result)
    body = cast(Mapping[str, JsonValue], result)
    declared = body.get("terminal_response_id")
    if declared is not None and not isinstance(declared, str):
        raise malformed("$.terminal_response_id", "a string or null", declared)
    responses = body.get("responses")
    scored = body.get("response")
    if scored is None and isinstance(responses, list) and responses:
        scored = cast(list[JsonValue], responses)[-1]
    if scored is None and body.get("messages") is not None:
        scored = {"messages": body["messages"]}
    attribution = resolve_terminal(
        records, scored, declared_response_id=declared, lineage_walk=lineage_walk, fingerprint=fingerprint
    )
    if attribution.code is not None:
        told = "; ".join(f"{witness.name} {witness.says}" for witness in attribution.trail) or "nobody was asked"
        raise SelectionError(
            attribution.code,
            f"expected one captured call to be the scored one, the evidence names none: {told}",
            evidence=attribution.evidence(),
        )
    return attribution
