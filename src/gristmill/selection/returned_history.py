"""The policy `returned_history`: the selected calls are exactly those whose replies the harness returned.

Invariant: membership is proved or the rollout is refused. Identity (item ids, response ids, references) constrains
content and never overrides it; ancestry is evidence and never adds a call. Steps are numbered as in
docs/reference/selection.md, and their order is the precedence of the refusals.

Not here: reading JSON (result, history), identity (question), content and refusals (answer), proofs (settle).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.canonical import JsonValue
from gristmill.errors import Code, ConfigError, SelectionError
from gristmill.selection.answer import Answer, Chosen, named_calls
from gristmill.selection.captured import CapturedCalls, Fingerprint, MatchOptions
from gristmill.selection.history import read_histories
from gristmill.selection.question import Question
from gristmill.selection.readings import NoReading, Settled
from gristmill.selection.result import read_returned_result
from gristmill.selection.verdict import Decision, Reason

__all__ = ["ReturnedHistory"]


class ReturnedHistory:
    """Selects the calls whose replies stand in the returned history.

    Args:
        reasoning: `optional` lets a call match without its reasoning, all of it or none.
        whitespace: `trim` compares texts without leading and trailing whitespace.
        tool_call_ids: `renamed` lets a returned id stand for the one captured id that fits, one to one.
        unmatched: `context` passes over an authored run between bounds in which nothing matches.
        fingerprint: how the records' fingerprints were made, for records that carry no atoms.

    Raises:
        ConfigError: `policy_option_invalid`.
    """

    name = "returned_history"

    def __init__(
        self,
        *,
        reasoning: str = "required",
        whitespace: str = "exact",
        tool_call_ids: str = "exact",
        unmatched: str = "refuse",
        fingerprint: Fingerprint | None = None,
    ) -> None:
        given = {
            "reasoning": (reasoning, ("required", "optional")),
            "whitespace": (whitespace, ("exact", "trim")),
            "tool_call_ids": (tool_call_ids, ("exact", "renamed")),
            "unmatched": (unmatched, ("refuse", "context")),
        }
        for option, (value, allowed) in given.items():
            if value not in allowed:
                raise ConfigError(
                    f"expected {option} to be {' or '.join(allowed)}, got {value!r}",
                    code=Code.POLICY_OPTION_INVALID,
                    where=option,
                    hint=f"--set {option}={allowed[1]}",
                )
        self._given = {option: value for option, (value, allowed) in given.items() if value != allowed[0]}
        self._fingerprint = fingerprint
        self._options = MatchOptions(
            reasoning_optional=reasoning == "optional",
            trim_whitespace=whitespace == "trim",
            renamed_call_ids=tool_call_ids == "renamed",
            unmatched_context=unmatched == "context",
        )

    def options(self) -> Mapping[str, str]:
        """Return the options that differ from their defaults."""
        return self._given

    def __call__(self, records: Sequence[Any], result: JsonValue) -> tuple[list[Any], str | None]:
        """Select; see the module.

        Args:
            records: captured calls of one attempt in commit order.
            result: the harness's result, plain JSON.

        Returns:
            The selected records, unchanged and in order of the history, and the scored call's response id.

        Raises:
            SelectionError: with the code of the first step that refuses.
        """
        chosen = self._choose(records, result)
        terminal = None if chosen.terminal is None else records[chosen.terminal].response_id
        return [records[position] for position in chosen.calls], terminal

    def decide(self, records: Sequence[Any], result: JsonValue) -> Decision:
        """Select, and say why: the same refusals as calling the policy."""
        chosen = self._choose(records, result)
        reasons = {position: _reason(chosen, position, order) for order, position in enumerate(chosen.calls)}
        return Decision(
            tuple(chosen.calls),
            chosen.terminal,
            reasons,
            Code.NOT_RETURNED,
            (*chosen.notes, *_notes(chosen, self)),
        )

    def _choose(self, records: Sequence[Any], result: JsonValue) -> Chosen:
        captured = CapturedCalls(records)
        question = Question(captured, read_returned_result(result))
        if question.references is not None and not question.returned.has_content:
            calls = question.calls_by_reference()
            return Chosen(calls, question.terminal(calls, True), question)
        envelopes = question.returned.envelopes()
        histories = read_histories(envelopes, question.is_identity)
        question.bind_envelopes(histories[0])
        answers = [
            Answer(question, history, self._options, self._fingerprint) for history in histories if history is not None
        ]
        return _agreed(answers) if len(answers) > 1 else answers[0].chosen()


def _agreed(answers: Sequence[Answer]) -> Chosen:
    """Return the decision of two flattenings of snapshots, if those that can be read agree."""
    if not any(answer.matcher.history.items for answer in answers):
        return answers[0].chosen()
    outcomes = [answer.settle() for answer in answers]
    readable = [
        (answer, outcome)
        for answer, outcome in zip(answers, outcomes, strict=True)
        if not isinstance(outcome, NoReading)
    ]
    if not readable:
        first = outcomes[0]
        assert isinstance(first, NoReading)
        raise answers[0].refusal(first)
    settled = [(answer, outcome) for answer, outcome in readable if isinstance(outcome, Settled)]
    if len(settled) < len(readable):
        answer, outcome = next(pair for pair in readable if not isinstance(pair[1], Settled))
        assert not isinstance(outcome, Settled)
        raise answer.refusal(outcome)
    sets = {frozenset(outcome.reading.calls) for _, outcome in settled}
    if len(sets) > 1:
        ids = answers[0].captured.ids
        raise SelectionError(
            Code.SNAPSHOT_AMBIGUOUS,
            "expected repeated snapshot items to be repeats or replies of their own, both can be read",
            evidence={
                "skipping": named_calls(settled[0][1].reading, ids),
                "keeping": named_calls(settled[1][1].reading, ids),
            },
        )
    return settled[0][0].accept(settled[0][1])


def _reason(chosen: Chosen, position: int, order: int) -> Reason:
    question = chosen.question
    record_id = question.captured.ids[position]
    if chosen.settled is None or chosen.matcher is None or chosen.graph is None:
        reference = (question.returned.references or ())[order]
        return Reason(Code.REFERENCE, {"where": reference.where, "reference": reference.describe()})
    matcher, graph = chosen.matcher, chosen.graph
    node, _, end = chosen.settled.reading.steps[order]
    start, stop = graph.item(node), graph.item(end)
    evidence: dict[str, Any] = {
        "items": [matcher.history.where(index) for index in range(start, stop)],
        "model_call_id": record_id,
    }
    if question.references is not None:
        reference = (question.returned.references or ())[node // graph.width]
        return Reason(Code.REFERENCE, {**evidence, "reference": reference.describe()})
    named = [entry.response_id for entry in question.named_terminals() if position in entry.calls]
    named += [native.response_id for native in question.native if position in native.calls]
    if named:
        return Reason(Code.RESPONSE_ID, {**evidence, "response_id": named[0]})
    item_ids = [matcher.history.items[index].id for index in range(start, stop) if matcher.owners_I[index] == position]
    if item_ids:
        return Reason(Code.ITEM_ID, {**evidence, "item_ids": item_ids})
    others = chosen.settled.stood_in.get(position)
    required = position in chosen.settled.required
    if others and not required:
        stands = [question.captured.ids[other] for other in others]
        return Reason(Code.INTERCHANGEABLE, {**evidence, "stands_for": stands})
    alike = sorted({call for option in graph.options[node] for call in option.calls} - {position})
    if not alike:
        return Reason(Code.CONTENT, {**evidence, "candidates": 1})
    evidence["candidates"] = len(alike) + 1
    evidence["alike"] = [question.captured.ids[other] for other in alike[:8]]
    if required and not set(alike) <= set(chosen.calls):
        return Reason(Code.LINEAGE, evidence)
    return Reason(Code.CONTENT, evidence)


def _notes(chosen: Chosen, policy: ReturnedHistory) -> list[str]:
    notes = [f"option {name}={value} was in force" for name, value in policy.options().items()]
    settled = chosen.settled
    if settled is not None:
        if settled.reordered:
            notes.append("where calls of equal content could change places, they stand in commit order")
        for call, others in sorted(settled.stood_in.items()):
            ids = chosen.question.captured.ids
            alike = ", ".join(ids[other] for other in others)
            notes.append(f"call {ids[call]} stands for the interchangeable {alike}")
    return notes
