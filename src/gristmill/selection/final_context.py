"""The policy `final_context`: the scored call and what it continues.

For harnesses that return nothing but a reward. Invariant: only recorded parent links are followed, from an attributed
call; labels never count, and an ambiguity refuses.

Not here: attribution itself (terminal).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.canonical import JsonValue
from gristmill.errors import Code, SelectionError
from gristmill.lineage import NO_PARENT
from gristmill.selection.all_captured import attribute_terminal, returns_nothing
from gristmill.selection.captured import CapturedCalls, Fingerprint
from gristmill.selection.verdict import Decision, Reason

__all__ = ["FinalContext"]


class FinalContext:
    """Selects the scored call and its resolved ancestors, parents first.

    Args:
        fingerprint: how the records' fingerprints were made, for records that carry no atoms.
    """

    name = "final_context"

    def __init__(self, *, fingerprint: Fingerprint | None = None) -> None:
        self._fingerprint = fingerprint

    def options(self) -> Mapping[str, str]:
        """Return the options that differ from their defaults: there are none."""
        return {}

    def __call__(self, records: Sequence[Any], result: JsonValue) -> tuple[list[Any], str | None]:
        """Select the final context.

        Args:
            records: captured calls of one attempt in commit order.
            result: the harness's result, plain JSON.

        Returns:
            The selected records, unchanged, parents first, and the scored call's response id.

        Raises:
            SelectionError: `terminal_unattributed`, `witness_disagreement`, `lineage_broken`,
                `call_identity_reused`, `output_malformed`.
        """
        decision = self.decide(records, result)
        assert decision.terminal is not None
        return [records[position] for position in decision.selected], records[decision.terminal].response_id

    def decide(self, records: Sequence[Any], result: JsonValue) -> Decision:
        """Select, and say why: the same refusals as calling the policy."""
        captured = CapturedCalls(records)
        attribution = attribute_terminal(records, result, self._fingerprint, lineage_walk=returns_nothing(result))
        assert attribution.position is not None
        path, end = captured.forest.path_to_root(attribution.position)
        if end != NO_PARENT:
            last = captured.ids[path[-1] if path else attribution.position]
            raise SelectionError(
                Code.LINEAGE_BROKEN,
                f"expected the ancestors of the scored call to end at a root, the parent of {last!r} "
                + ("comes round again" if end >= 0 else "was not captured"),
                where=f"call={last}",
                evidence={"model_call_id": last},
            )
        selected = (*reversed(path), attribution.position)
        reasons = {
            position: Reason(
                Code.ANCESTOR_OF_TERMINAL,
                {"scored_call": attribution.model_call_id, "steps_before": len(selected) - 1 - order},
            )
            for order, position in enumerate(selected)
        }
        notes = tuple(f"{witness.name}: {witness.says}" for witness in attribution.trail)
        return Decision(selected, attribution.position, reasons, Code.NOT_IN_FINAL_CONTEXT, notes)
