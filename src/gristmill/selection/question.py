"""What a result and the captured ids say before any content is compared (steps 1 to 7).

Invariant: identity is read once, here; what names a call names exactly one, or the rollout is refused.

Not here: content (answer).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gristmill.atoms import Item
from gristmill.errors import Code, SelectionError
from gristmill.lineage import MISSING_PARENT
from gristmill.selection.captured import SHARED, CapturedCalls
from gristmill.selection.history import History
from gristmill.selection.result import Reference, ReturnedResult

__all__ = ["NamedTerminal", "NativeEnvelope", "Question"]


class NativeEnvelope(NamedTuple):
    """An envelope whose id is that of captured calls (several with choices)."""

    envelope: int
    response_id: str
    calls: list[int]


class NamedTerminal(NamedTuple):
    """S or D: the refusal where it is not selected, the response id that names it, its calls."""

    refusal: Code
    response_id: str | None
    calls: list[int]


class Question:
    """What the result and the captured ids say, before content is compared (steps 1 to 7)."""

    def __init__(self, captured: CapturedCalls, returned: ReturnedResult) -> None:
        self.captured = captured
        self.returned = returned
        self.scored = self._named(returned.scored_response_id)
        self.declared = self._named(returned.declared_response_id)
        self.references = self._resolve(returned.references)
        self.native: list[NativeEnvelope] = []

    def _named(self, response_id: str | None) -> list[int]:
        return self.captured.named(response_id)

    def is_identity(self, item: Item) -> bool:
        """Tell whether an item's id was served by exactly one call."""
        return item.id is not None and self.captured.owners.get(item.id, SHARED) != SHARED

    # References (step 3)

    def _resolve(self, references: Sequence[Reference] | None) -> list[list[int]] | None:
        return None if references is None else [self._resolve_one(reference) for reference in references]

    def _resolve_one(self, reference: Reference) -> list[int]:
        captured = self.captured
        named: list[int] | None = None
        if reference.response_id is not None:
            named = captured.named(reference.response_id)
            if not named:
                raise self._unknown(reference, f"response id {reference.response_id!r}")
            if reference.choice_index is not None:
                named = [position for position in named if captured.choice(position) == reference.choice_index]
                if not named:
                    raise self._unknown(reference, f"choice {reference.choice_index} of that response")
        if reference.model_call_id is not None:
            position = captured.by_id.get(reference.model_call_id)
            if position is None:
                raise self._unknown(reference, f"model call id {reference.model_call_id!r}")
            if named is not None and position not in named:
                raise self._contradictory(reference, "they name different calls")
            if reference.choice_index not in {None, captured.choice(position)}:
                raise self._contradictory(reference, "the call is another choice")
            named = [position]
        if named is None:
            raise self._contradictory(reference, "it names neither a response nor a call")
        return named

    def _unknown(self, reference: Reference, what: str) -> SelectionError:
        return SelectionError(
            Code.REFERENCE_UNKNOWN,
            f"expected a captured call, got a reference ({reference.describe()}) whose {what} was not captured",
            where=reference.where,
            evidence={"response_id": reference.response_id, "model_call_id": reference.model_call_id},
        )

    def _contradictory(self, reference: Reference, why: str) -> SelectionError:
        return SelectionError(
            Code.REFERENCE_CONTRADICTORY,
            f"expected the keys of a reference to name one call, got {reference.describe()}: {why}",
            where=reference.where,
            evidence={"response_id": reference.response_id, "model_call_id": reference.model_call_id},
        )

    def calls_by_reference(self) -> list[int]:
        """Return what the references name, where nothing else is returned (step 4)."""
        calls: list[int] = []
        for reference, named in zip(self.returned.references or (), self.references or (), strict=True):
            if len(named) > 1:
                raise self._contradictory(reference, f"it names {len(named)} choices and no content picks one")
            if named[0] in calls:
                raise SelectionError(
                    Code.SELECTION_DUPLICATED,
                    f"expected every call to be referenced once, got {self.captured.ids[named[0]]!r} twice",
                    where=reference.where,
                    evidence={"model_call_id": self.captured.ids[named[0]]},
                )
            calls.append(named[0])
        self.check_conflict()
        for refusal, response_id, named in self.named_terminals():
            declared = refusal is Code.DECLARED_TERMINAL_NOT_SELECTED
            # A response id that no call has is the harness's own, unless it was declared to be a captured one.
            if response_id is not None and (named or declared) and sum(call in calls for call in named) != 1:
                raise self.not_selected(refusal)
        return calls

    # Terminal (steps 9a, 12, 13)

    def named_terminals(self) -> list[NamedTerminal]:
        """Return S and D."""
        return [
            NamedTerminal(Code.TERMINAL_NOT_SELECTED, self.returned.scored_response_id, self.scored),
            NamedTerminal(Code.DECLARED_TERMINAL_NOT_SELECTED, self.returned.declared_response_id, self.declared),
        ]

    def not_selected(self, code: Code) -> SelectionError:
        """Build the refusal for S or D not being in any reading."""
        declared = code is Code.DECLARED_TERMINAL_NOT_SELECTED
        response_id = self.returned.declared_response_id if declared else self.returned.scored_response_id
        calls = [self.captured.ids[position] for position in (self.declared if declared else self.scored)]
        named = f"call {', '.join(calls)}" if calls else "no captured call"
        return SelectionError(
            code,
            f"expected the returned history to hold the call of response id {response_id!r} ({named}), it does not",
            where="$.terminal_response_id" if declared else "$.response.id",
            evidence={"response_id": response_id, "calls": calls},
        )

    def check_conflict(self) -> None:
        """Refuse where S and D are two different calls (step 12)."""
        if self.scored and self.declared and set(self.scored).isdisjoint(self.declared):
            raise SelectionError(
                Code.DECLARED_TERMINAL_CONFLICT,
                f"expected terminal_response_id and response.id to name one call, got "
                f"{self.returned.declared_response_id!r} and {self.returned.scored_response_id!r}",
                where="$.terminal_response_id",
                evidence={
                    "declared": [self.captured.ids[position] for position in self.declared],
                    "scored": [self.captured.ids[position] for position in self.scored],
                },
            )

    def terminal(self, calls: Sequence[int], last_is_certain: bool) -> int | None:
        """Name the scored call: D, else S, else the last one if that is certain."""
        held = set(calls)
        for group in (self.declared, self.scored):
            for position in group:
                if position in held:
                    return position
        return calls[-1] if last_is_certain else None

    # Envelopes (step 6)

    def bind_envelopes(self, history: History) -> None:
        """Note the envelopes that name captured calls; one of them without authored items is refused."""
        for span in history.envelopes:
            if span.response_id is None:
                continue
            named = self._named(span.response_id)
            if not named:
                continue
            if span.start == span.end:
                raise SelectionError(
                    Code.ENVELOPE_EMPTY,
                    f"expected envelope {span.response_id!r} to hold what the model authored, got nothing",
                    where=history.sources[span.envelope].where,
                    evidence={"response_id": span.response_id},
                )
            self.native.append(NativeEnvelope(span.envelope, span.response_id, named))

    # Lineage (step 7)

    def ancestors(self, proven: Iterable[int]) -> set[int]:
        """Return calls that are proven to belong, with everything that they continue.

        Raises:
            SelectionError: `lineage_broken` where a recorded parent is missing, or the parents form a cycle.
        """
        parents = self.captured.forest.parents_C
        walks: dict[int, int] = {}
        for walk, call in enumerate(proven):
            position = call
            while position not in walks:
                walks[position] = walk
                parent = parents[position]
                if parent < 0:
                    if parent == MISSING_PARENT:
                        raise self._missing_parent(position)
                    break
                position = parent
            else:
                # A call met before on this very walk: the parents come round.
                if walks[position] == walk:
                    raise self._cycle(position)
        return set(walks)

    def _missing_parent(self, position: int) -> SelectionError:
        call_id = self.captured.ids[position]
        parent = self.captured.records[position].parent_call_id
        return SelectionError(
            Code.LINEAGE_BROKEN,
            f"expected parent {parent!r} of call {call_id!r} to be captured, it is not",
            where=f"call={call_id}",
            evidence={"model_call_id": call_id, "parent_call_id": parent},
        )

    def _cycle(self, position: int) -> SelectionError:
        call_id = self.captured.ids[position]
        return SelectionError(
            Code.LINEAGE_BROKEN,
            f"expected the parents of call {call_id!r} to end at a root, they come back to it",
            where=f"call={call_id}",
            evidence={"model_call_id": call_id},
        )
