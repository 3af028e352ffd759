"""One flattening of the history against the captured calls (steps 7 to 13).

Invariant: what is accepted is settled for every reading, and everything else is refused with the code of the first step
that refuses, the place and what would settle it.

Not here: the comparison (candidates, settle), snapshots that can be flattened in two ways (returned_history).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gristmill.errors import Code, SelectionError
from gristmill.interchange import interchange_groups
from gristmill.selection.candidates import NO_OWNER, Matcher
from gristmill.selection.captured import Fingerprint, MatchOptions
from gristmill.selection.graph import Graph, build_graph
from gristmill.selection.history import EnvelopeSpan, History
from gristmill.selection.nearest import describe_atom, miss_evidence, nearest_miss
from gristmill.selection.question import Question
from gristmill.selection.readings import (
    Ambiguous,
    Evidence,
    NoReading,
    Outcome,
    Problem,
    Reading,
    Settled,
    Undecided,
)
from gristmill.selection.settle import settle

__all__ = ["Answer", "Chosen", "named_calls"]


class Chosen(msgspec.Struct):
    """One decision, before anyone asks why."""

    calls: list[int]
    terminal: int | None
    question: Question
    settled: Settled | None = None
    matcher: Matcher | None = None
    graph: Graph | None = None
    notes: tuple[str, ...] = ()


class Answer:
    """One flattening of the history against the captured calls (steps 7 to 13)."""

    def __init__(
        self, question: Question, history: History, options: MatchOptions, fingerprint: Fingerprint | None
    ) -> None:
        self.question = question
        self.captured = question.captured
        self.matcher = Matcher(question.captured, history, options, fingerprint)
        self.notes: list[str] = []
        self._bind_native()
        identified = set(self.matcher.owners_I) - {NO_OWNER}
        identified.update(question.scored if len(question.scored) == 1 else ())
        identified.update(native.calls[0] for native in question.native if len(native.calls) == 1)
        self.identified = identified
        question.ancestors(sorted(identified))
        if options.unmatched_context:
            self._drop_context()
        self.graph: Graph | None = None

    def _bind_native(self) -> None:
        if not self.question.native:
            return
        # Envelopes stand in the history in their own order.
        spans = self.matcher.history.envelopes
        bound: dict[int, list[EnvelopeSpan]] = {}
        for envelope, _, calls in self.question.native:
            for position in calls:
                span = spans[envelope]
                if position in bound:
                    bound[position].append(span)
                else:
                    bound[position] = [span]
        self.matcher.bind_native(bound)

    def _drop_context(self) -> None:
        before = self.matcher.history
        dropped = self.matcher.drop_unmatched_runs()
        self._bind_native()
        for start, end in dropped:
            self.notes.append(f"items {before.where(start)} to {before.where(end - 1)} match no call: context")

    def settle(self) -> Outcome:
        """Compare content (steps 8 and 9)."""
        question, matcher = self.question, self.matcher
        self.graph = graph = build_graph(len(matcher.history.items), matcher.options_at, question.references)
        must = [tuple(native.calls) for native in question.native]
        if question.scored:
            must.append(tuple(question.scored))
        if question.returned.declared_response_id is not None:
            # A declared id that no call has makes an empty group, which no reading can hold.
            must.append(tuple(question.declared))
        problem = Problem(
            graph,
            self.captured.ids,
            self.captured.forest.parents_C,
            lambda calls: interchange_groups(self.captured.records, calls, self.identified),
            self._pairs if matcher.options.renamed_call_ids else None,
        )
        evidence = Evidence(tuple(dict.fromkeys(must)), frozenset(self.identified), question.ancestors)
        return settle(problem, evidence)

    def _pairs(self, node: int, call: int, end: int) -> tuple[tuple[str, str], ...]:
        width = len(self.matcher.history.items) + 1
        return self.matcher.renames(node % width, end % width, call) or ()

    def chosen(self) -> Chosen:
        """Return the decision, or raise the refusal of the first step that refuses."""
        count = len(self.matcher.history.items)
        if not count:
            return self._refuse_empty()
        outcome = self.settle()
        if isinstance(outcome, Settled):
            return self.accept(outcome)
        raise self.refusal(outcome)

    def _refuse_empty(self) -> Chosen:
        question = self.question
        for code, response_id, group in question.named_terminals():
            if response_id is not None and (group or code is Code.DECLARED_TERMINAL_NOT_SELECTED):
                raise question.not_selected(code)
        if question.references:
            raise self._unreturned(0)
        raise SelectionError(Code.SELECTION_EMPTY, "expected a history with authored items, got none")

    def accept(self, outcome: Settled) -> Chosen:
        """Check what holds for the whole selection (steps 9a, 12 and 13)."""
        question = self.question
        calls = outcome.reading.calls
        question.check_conflict()
        terminal = question.terminal(calls, outcome.last_is_certain)
        return Chosen(calls, terminal, question, outcome, self.matcher, self.graph, tuple(self.notes))

    # Refusals

    def refusal(self, outcome: Ambiguous | NoReading | Undecided) -> SelectionError:
        """Turn an outcome without a selection into its refusal."""
        if isinstance(outcome, Ambiguous):
            return self._ambiguous(outcome)
        if isinstance(outcome, Undecided):
            return SelectionError(
                Code.MATCH_UNDECIDED,
                f"the search for readings spent {outcome.steps} steps without a proof",
                evidence={"steps": outcome.steps},
            )
        if outcome.kind == "contradiction":
            return SelectionError(
                Code.LINEAGE_CONTRADICTION,
                "expected every call before the calls that descend from it, every reading has one after",
            )
        if outcome.kind == "duplicated":
            return SelectionError(
                Code.SELECTION_DUPLICATED,
                "the history can only be read if a call stands in it more than once",
            )
        if outcome.kind == "renamed":
            return self._not_renamed()
        return self._lacking(outcome) if outcome.kind == "evidence" else self._missing()

    def _not_renamed(self) -> SelectionError:
        history = self.matcher.history
        index, returned = next(
            (index, atom.call_id)
            for index, item in enumerate(history.items)
            for atom in item.atoms
            if atom.kind == "tool_call" and atom.call_id not in self.matcher.own_ids
        )
        return SelectionError(
            Code.MATCH_MISSING,
            f"expected one renaming of tool-call ids, one to one, to explain the history, there is none; item {index} "
            f"has {returned!r}",
            where=history.where(index),
            evidence={"item_index": index, "item_id": history.items[index].id, "tool_call_id": returned},
        )

    def _lacking(self, outcome: NoReading) -> SelectionError:
        question, lacking = self.question, set(outcome.lacking)
        if not lacking.isdisjoint(question.scored):
            return question.not_selected(Code.TERMINAL_NOT_SELECTED)
        if not lacking or not lacking.isdisjoint(question.declared):
            return question.not_selected(Code.DECLARED_TERMINAL_NOT_SELECTED)
        native = next(native for native in question.native if not lacking.isdisjoint(native.calls))
        calls = [self.captured.ids[position] for position in native.calls]
        return SelectionError(
            Code.MATCH_MISSING,
            f"expected envelope {native.response_id!r} to hold the reply of call {', '.join(calls)}, it does not",
            where=self.matcher.history.sources[native.envelope].where,
            evidence={"response_id": native.response_id, "calls": calls},
        )

    def _unreturned(self, used: int) -> SelectionError:
        references = self.question.returned.references or ()
        rest = [reference.describe() for reference in references[used:]]
        return SelectionError(
            Code.REFERENCE_UNRETURNED,
            f"expected the history to hold every referenced call, {len(rest)} are not in it: {'; '.join(rest[:5])}",
            where=references[used].where,
            evidence={"unreturned": rest},
        )

    def _missing(self) -> SelectionError:
        graph, matcher = self.graph, self.matcher
        assert graph is not None
        index, used = graph.item(graph.furthest), graph.furthest // graph.width
        if index == len(matcher.history.items):
            return self._unreturned(used)
        item = matcher.history.items[index]
        expected: list[int] = []
        evidence: dict[str, Any] = {"item_index": index, "item_id": item.id}
        references = self.question.references
        told = ""
        if references is not None:
            expected = references[used] if used < len(references) else []
            named = [self.captured.ids[position] for position in expected]
            evidence["expected_calls"] = named
            told = f"; the references expect {', '.join(named) or 'nothing more'} there"
        miss = nearest_miss(matcher, index, expected)
        evidence["owners"] = [] if matcher.owners_I[index] == NO_OWNER else [self.captured.ids[matcher.owners_I[index]]]
        evidence["nearest"] = miss_evidence(miss)
        named_id = f" (id {item.id})" if item.id else ""
        shown = describe_atom(item.atoms[0])
        nearest = f"; nearest is call {miss.model_call_id}" if miss.model_call_id else ""
        detail = f": returned {miss.returned}, captured {miss.captured}" if miss.captured else ""
        return SelectionError(
            Code.MATCH_MISSING,
            f"item {index}{named_id}, {shown}, is not explained by the captured calls{told}{nearest} "
            f"({miss.difference}{detail})",
            where=matcher.history.where(index),
            evidence=evidence,
        )

    def _ambiguous(self, outcome: Ambiguous) -> SelectionError:
        graph, ids = self.graph, self.captured.ids
        assert graph is not None
        first, second = outcome.first, outcome.second
        node = next(
            (step[0] for step, other in zip(first.steps, second.steps, strict=False) if step != other),
            first.steps[-1][0],
        )
        index = graph.item(node)
        candidates = sorted({call for option in graph.options[node] for call in option.calls})
        differing = sorted(set(first.calls) ^ set(second.calls))
        named = [ids[position] for position in candidates]
        return SelectionError(
            Code.MATCH_AMBIGUOUS,
            f"item {index} can be the reply of {len(candidates)} calls ({', '.join(named[:6])}), and the readings "
            f"select different calls: {', '.join(ids[position] for position in differing[:6])}",
            where=self.matcher.history.where(index),
            evidence={
                "item_index": index,
                "candidates": named,
                "readings": [named_calls(first, ids), named_calls(second, ids)],
                "told_apart_by": self._told_apart(differing),
                "settled_by": [
                    "item ids that the harness keeps",
                    "references to the calls (trajectory.turns[*].model_calls)",
                    "a returned reply that continues one of them",
                ],
            },
        )

    def _told_apart(self, differing: Sequence[int]) -> list[str]:
        names = ("response_id", "parent_call_id", "model", "sequence_digest", "response_status", "delivery")
        records = [self.captured.records[position] for position in differing]
        return [name for name in names if len({str(getattr(record, name, None)) for record in records}) > 1]


def named_calls(reading: Reading, ids: Sequence[str]) -> list[str]:
    return [ids[position] for position in reading.calls]
