"""Selections in words: why a call or a rollout came out as it did, on which evidence.

Invariant: everything said stands in the records, the verdicts or the refusal; nothing is guessed. Pure: records in,
text out; the text may hold anything that a model wrote, so whoever shows it makes it safe.

Not here: what would change it (remedies), and showing it (explain).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from gristmill.cli.plural import counted
from gristmill.cli.remedies import OTHERWISE_INCLUDED, VERDICT_REMEDIES, refusal_remedies
from gristmill.continuation import REASON_MEANINGS, ContinuationReason
from gristmill.errors import CODE_MEANINGS, Code
from gristmill.records import CallRecord, Capture, OutputItem
from gristmill.selection import Rejected, Selection, Verdict
from gristmill.selection.nearest import describe_atom

__all__ = ["Explainer", "Explanation", "brief", "refusal_text", "rollout_text"]

_SHOWN: Final = 8
_IN_MESSAGE: Final = 6  # names that a refusal's own message lists
_indexed = re.compile(r"^(.*)\[(\d+)\]$")


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why one captured call was selected or not.

    Attributes:
        meaning: the rule behind `code`.
        evidence: of the verdict; of a refused rollout also that of the refusal.
        would_change: sentences.
        text: one paragraph that says all of it.
        unusable_reason: why no row can be made of an included call.
    """

    rollout_id: str
    attempt: int
    model_call_id: str
    included: bool
    code: Code
    meaning: str
    evidence: Mapping[str, Any]
    would_change: tuple[str, ...]
    text: str
    unusable_reason: str | None = None


class Explainer:
    """Explains the calls of one attempt.

    Args:
        capture: the attempt.
        outcome: its selection or refusal.
    """

    def __init__(self, capture: Capture, outcome: Selection | Rejected) -> None:
        self.outcome = outcome
        self._records = {record.model_call_id: record for record in capture.records}
        self._children: dict[str, list[str]] = {}
        for record in capture.records:
            if record.parent_call_id is not None:
                self._children.setdefault(record.parent_call_id, []).append(record.model_call_id)

    def calls(self) -> Iterator[Explanation]:
        """Explain every call; a refusal of the whole rollout is not told again for each."""
        for verdict in self.outcome.verdicts:
            yield self.call(verdict, alone=False)

    def call(self, verdict: Verdict, *, alone: bool = True) -> Explanation:
        """Explain the verdict of one call.

        Args:
            verdict: one of the outcome's.
            alone: tell the refusal of the rollout too.
        """
        outcome, call_id = self.outcome, verdict.model_call_id
        record = self._records.get(call_id)
        evidence = dict(verdict.evidence)
        said = [f"Call {call_id} was lost." if record is None else self._described(record), _rule(verdict)]
        said.append(_particular(verdict))
        would_change: tuple[str, ...] = (VERDICT_REMEDIES[verdict.code],)
        if record is not None and not verdict.included and not record.usable and verdict.code in OTHERWISE_INCLUDED:
            would_change = (f"Nothing would have it trained: its tokens are not usable ({record.unusable_reason}).",)
        if isinstance(outcome, Rejected):
            evidence["refusal"] = {"code": str(outcome.code), "where": outcome.where, **outcome.evidence}
            if alone:
                said.append(refusal_text(outcome))
            said.append(_part_in_refusal(outcome, call_id))
            if verdict.code is Code.ROLLOUT_REJECTED:
                would_change = refusal_remedies(outcome.code, outcome.evidence)
        elif call_id == outcome.terminal_call_id:
            said.append("It is the scored call.")
        unusable = record if record is not None and verdict.included and not record.usable else None
        if unusable is not None:
            detail = f" ({unusable.unusable_detail})" if unusable.unusable_detail else ""
            said.append(f"No row can be made of it: {unusable.unusable_reason}{detail}.")
        told = would_change if alone or not isinstance(outcome, Rejected) else ()
        return Explanation(
            rollout_id=outcome.rollout_id,
            attempt=outcome.attempt,
            model_call_id=call_id,
            included=verdict.included,
            code=verdict.code,
            meaning=CODE_MEANINGS[verdict.code],
            evidence=evidence,
            would_change=would_change,
            text=" ".join(sentence for sentence in (*said, *told) if sentence),
            unusable_reason=None if unusable is None else str(unusable.unusable_reason),
        )

    def _described(self, record: CallRecord) -> str:
        """Say what a call continued, sampled and served, and what continues it."""
        call_id = record.model_call_id
        parent = f"continues {record.parent_call_id}" if record.parent_call_id else "begins a conversation"
        model = f" of {record.model}" if record.model else ""
        sampled = counted(record.cum_len - record.prompt_len, "token")
        tokens = f"sampled {sampled}" if record.usable else f"has no usable tokens ({record.unusable_reason})"
        ended = f" and ended with {record.finish_reason!r}" if record.finish_reason else ""
        served = _some([_served(item) for item in record.output_items]) or "nothing"
        children = self._children.get(call_id, [])
        verb = "continues" if len(children) == 1 else "continue"
        followed = f"{_some(children)} {verb} it" if children else "no call continues it"
        told = f"Call {call_id}{model} {parent}, {tokens}{ended}; it served {served}, and {followed}."
        return f"{told} {_prompt_of(record)}".rstrip()


def _prompt_of(record: CallRecord) -> str:
    """Say whether the engine was given the parent's tokens, and why not; nothing where nobody asked."""
    said = record.continuation
    if said is None or said.reason is ContinuationReason.NO_PARENT:
        return ""
    if said.reason is not None:
        meaning = _lower(REASON_MEANINGS[said.reason])
        return f"Its prompt was rendered anew ({said.reason}): {meaning}"
    closed = ", the first of them to end the turn that was cut" if said.closed else ""
    added = counted(said.suffix_len, "token")
    return f"Its prompt is the exact sequence of {said.parent_call_id} and {added} more{closed}."


def _served(item: OutputItem) -> str:
    if not item.atoms:
        return f"an item of kind {item.kind}"
    return ", ".join(describe_atom(atom) for atom in item.atoms)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def _places(places: Sequence[str]) -> str:
    """Write neighbouring items as a range: `$.response.output[1..3]`."""
    parsed = [_indexed.match(place) for place in places]
    runs: list[tuple[str, int, int]] = []
    for match in parsed:
        if match is None:
            return _some(places)
        stem, index = match[1], int(match[2])
        if runs and runs[-1][0] == stem and runs[-1][2] + 1 == index:
            runs[-1] = (stem, runs[-1][1], index)
        else:
            runs.append((stem, index, index))
    return _some(f"{stem}[{first}]" if first == last else f"{stem}[{first}..{last}]" for stem, first, last in runs)


# ---- verdicts ----------------------------------------------------------------------------------------------


def _texts(evidence: Mapping[str, Any], key: str) -> list[str]:
    value = evidence.get(key)
    return [str(one) for one in cast(Sequence[object], value)] if isinstance(value, list | tuple) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


def _rule(verdict: Verdict) -> str:
    """Say which rule decided."""
    kept, rule = "included" if verdict.included else "excluded", CODE_MEANINGS[verdict.code]
    return f"It is {kept} ({verdict.code}): {_lower(rule.partition(': ')[2])}"


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _particular(verdict: Verdict) -> str:
    """Say what the evidence of a verdict holds."""
    evidence = verdict.evidence
    if verdict.included:
        return _of_included(verdict.code, evidence)
    match verdict.code:
        case Code.RETRY_SUPERSEDED:
            return f"Call {evidence.get('superseded_by')} answers that request in this selection."
        case Code.UNUSABLE_TOKENS | Code.LOST:
            return f"Recorded reason: {evidence.get('reason')}{_detail(evidence)}."
        case Code.FOREIGN_MODEL:
            return f"Its model is {evidence.get('model')}."
        case Code.UNFINISHED_LEAF:
            return _finish(evidence)
        case _:
            return ""


def _of_included(code: Code, evidence: Mapping[str, Any]) -> str:
    items, alike = _places(_texts(evidence, "items")), _some(_texts(evidence, "alike"))
    stands = f"Its reply stands at {items}" if items else ""
    match code:
        case Code.REFERENCE:
            where = f" at {evidence['where']}" if "where" in evidence else ""
            return f"{stands or 'It was named'}, by the reference {evidence.get('reference')}{where}."
        case Code.RESPONSE_ID:
            return f"{stands}, and the result names its response id {evidence.get('response_id')}."
        case Code.ITEM_ID:
            return f"{stands}, under the item ids {_some(_texts(evidence, 'item_ids'))}."
        case Code.INTERCHANGEABLE:
            return f"{stands}; it stands for {_some(_texts(evidence, 'stands_for'))}."
        case Code.CONTENT if alike:
            return f"{stands}; {alike} served the same, and every reading of the history has this call."
        case Code.LINEAGE:
            return f"{stands}; {alike} served the same, but a call that is proved to belong continues this one."
        case Code.ANCESTOR_OF_TERMINAL:
            steps = int(evidence.get("steps_before", 0))
            return (
                f"It is {counted(steps, 'call')} before the scored call {evidence.get('scored_call')}." if steps else ""
            )
        case Code.CAPTURED:
            return _finish(evidence)
        case _:
            return f"{stands}, and its content is that of no other captured call that could stand there."


def _detail(evidence: Mapping[str, Any]) -> str:
    return f" ({evidence['detail']})" if evidence.get("detail") else ""


def _finish(evidence: Mapping[str, Any]) -> str:
    if "policy" in evidence:
        return f"The policy {evidence['policy']} returned it."
    status = f"Its status is {evidence.get('response_status')} and its finish reason {evidence.get('finish_reason')}"
    kept = evidence.get("kept_although_unfinished")
    return f"{status}; it did not finish and is kept because it is {kept}." if kept else f"{status}."


def brief(verdict: Verdict) -> str:
    """Say the evidence of a verdict in a few words, for a table."""
    evidence = verdict.evidence
    parts = [_places(_texts(evidence, "items"))]
    for key, told in (
        ("reference", "by "),
        ("response_id", "response "),
        ("superseded_by", "by "),
        ("reason", ""),
        ("model", "model "),
        ("kept_although_unfinished", "unfinished, but "),
        ("policy", "by "),
    ):
        if evidence.get(key):
            parts.append(f"{told}{evidence[key]}")
    if evidence.get("stands_for"):
        parts.append(f"for {_some(_texts(evidence, 'stands_for'))}")
    if evidence.get("alike"):
        parts.append(f"1 of {evidence.get('candidates')} alike")
    if evidence.get("steps_before"):
        parts.append(f"{evidence['steps_before']} before {evidence.get('scored_call')}")
    if verdict.code is Code.ROLLOUT_REJECTED:
        parts.append(str(evidence.get("code", "")))
    return " · ".join(part for part in parts if part)


# ---- refusals ----------------------------------------------------------------------------------------------


def refusal_text(rejected: Rejected) -> str:
    """Say why a rollout was refused, and what the evidence shows beyond the message."""
    said = [f"The rollout was refused with {rejected.code} at {rejected.where}: {rejected.message}."]
    evidence = rejected.evidence
    owners, candidates = _texts(evidence, "owners"), _texts(evidence, "candidates")
    if owners:
        said.append(f"The item's id was served by {_some(owners)}.")
    if len(candidates) > _IN_MESSAGE:
        said.append(f"The candidates are {_some(candidates)}.")
    said += _two_readings(evidence)
    apart = _texts(evidence, "told_apart_by")
    if apart:
        said.append(f"They are told apart by {_some(apart)}.")
    witnesses = evidence.get("witnesses")
    if isinstance(witnesses, list | tuple):
        for one in map(_mapping, cast(Sequence[object], witnesses)):
            named = _some(_texts(one, "calls")) or "nobody"
            said.append(f"The witness {one.get('name')} names {named}: {one.get('says')}.")
    for call_id, why in _mapping(evidence.get("unusable_calls")).items():
        said.append(f"Call {call_id}: {_mapping(why).get('reason')}{_detail(_mapping(why))}.")
    return " ".join(said)


def _two_readings(evidence: Mapping[str, Any]) -> list[str]:
    readings = evidence.get("readings")
    if isinstance(readings, list | tuple) and len(cast(Sequence[object], readings)) == 2:
        first, second = ({str(call): None for call in one} for one in cast(Sequence[Sequence[object]], readings))
    elif "skipping" in evidence and "keeping" in evidence:
        first = dict.fromkeys(_texts(evidence, "skipping"))
        second = dict.fromkeys(_texts(evidence, "keeping"))
    else:
        return []
    both = [call for call in first if call in second]
    told = f"Both readings select {_some(both)}; " if both else ""
    only_first = _some(call for call in first if call not in second) or "nothing else"
    only_second = _some(call for call in second if call not in first) or "nothing else"
    return [f"{told}{'o' if told else 'O'}ne reading adds {only_first}, the other {only_second}."]


def _part_in_refusal(rejected: Rejected, call_id: str) -> str:
    """Say what part a call has in the refusal of its rollout."""
    evidence = rejected.evidence
    if rejected.where == f"call={call_id}":
        return "The refusal is about this call."
    if _mapping(evidence.get("nearest")).get("model_call_id") == call_id:
        return "It is the call that comes nearest to the item that nothing explains."
    for key, told in (
        ("candidates", "It is one of the candidates."),
        ("owners", "It served the id of the item that nothing explains."),
        ("calls", "It is one of the calls that the refusal names."),
    ):
        if call_id in _texts(evidence, key):
            return told
    return ""


def rollout_text(outcome: Selection | Rejected) -> str:
    """Say how a whole rollout came out."""
    options = "".join(f", {name}={value}" for name, value in outcome.options.items())
    head = f"Rollout {outcome.rollout_id}, attempt {outcome.attempt}, policy {outcome.policy}{options}:"
    if isinstance(outcome, Rejected):
        return " ".join([head, refusal_text(outcome), *refusal_remedies(outcome.code, outcome.evidence)])
    said = [
        f"{head} {counted(len(outcome.calls), 'call')} of {len(outcome.verdicts)} selected; the scored call is "
        f"{outcome.terminal_call_id} (response {outcome.terminal_response_id})."
    ]
    if outcome.truncated:
        said.append("A selected call was cut at its length.")
    if outcome.lost:
        said.append(f"Lost calls that do not concern the selection: {_some(outcome.lost)}.")
    said += [f"Note: {note}." for note in outcome.notes]
    return " ".join(said)
