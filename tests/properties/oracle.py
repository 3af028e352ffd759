"""Brute-force `returned_history` for small histories: every reading is listed, then the rules are applied to the list.

Invariant: nothing here is clever. Each function is one sentence of the normative page (docs/reference/selection.md,
section 3), readings are enumerated one by one, and no code of `gristmill.selection` is used. Only the step from one
item to its atoms is shared with the product; it has tests of its own.

Where the page leaves a choice open, `Answer.also` holds the other codes that it allows; the choices are:

* a returned item that shows nothing may stand inside or beside any call's span in the same run;
* a snapshot "begins with all the items of the previous one" if their contents are equal, unless identities deny it;
* a reading "contains" a response id with several choices if it holds exactly one of them;
* a native envelope's call has to be in every reading, inside its envelope (`match_missing` if none holds it);
* every member of an interchangeable group has the same parent, so a reading with any member proves that parent;
* a returned tool-call id that was captured stands for itself only, whatever `tool_call_ids` says;
* an item with an identity is never context, whatever `unmatched` says.

Not here: malformed JSON (fuzzed elsewhere) and the evidence of refusals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.atoms import Item, read_item
from gristmill.errors import Code, SelectionError
from gristmill.records import CallRecord
from tests.properties.oracle_readings import Content
from tests.properties.oracle_terms import Answer, Flat, Options, Question, Refused, TooManyReadings

__all__ = ["Answer", "Options", "TooManyReadings", "decide"]

_DEFAULT = Options()


def decide(records: Sequence[CallRecord], result: Any, options: Options = _DEFAULT) -> Answer:
    """Apply selection.md section 3 to a small history."""
    ids = [record.model_call_id for record in records]
    try:
        return _Oracle(records, result, options).answer()
    except Refused as refused:
        readings = frozenset(tuple(ids[step.call] for step in reading) for reading in refused.readings)
        return Answer(code=refused.code, also=refused.also, readings=readings)


class _Oracle:
    def __init__(self, records: Sequence[CallRecord], result: Any, options: Options) -> None:
        self.records = records
        self.result = result
        self.calls = range(len(records))
        self._check_identities()  # step 1
        response = result.get("response")
        scored_id = response.get("id") if isinstance(response, dict) else None
        self.declared_id = result.get("terminal_response_id")
        scored = self._named(scored_id)  # step 2
        self.declared = self._named(self.declared_id)
        self.references = self._read_references()  # step 3
        self.owners = self._item_owners()
        self.question = Question(
            records, options, scored, self.declared, self.declared_id, self.references, self.owners
        )

    # Steps 1 to 4: identities and references

    def _check_identities(self) -> None:
        by_call = [record.model_call_id for record in self.records]
        by_choice = [(record.response_id, record.choice_index) for record in self.records]
        if len(set(by_call)) < len(by_call) or len(set(by_choice)) < len(by_choice):
            raise Refused(Code.CALL_IDENTITY_REUSED)

    def _named(self, response_id: str | None) -> frozenset[int]:
        return frozenset(c for c in self.calls if self.records[c].response_id == response_id)

    def _item_owners(self) -> dict[str, set[int]]:
        owners: dict[str, set[int]] = {}
        for call in self.calls:
            for item in self.records[call].output_items:
                if item.id is not None:
                    owners.setdefault(item.id, set()).add(call)
        return owners

    def _read_references(self) -> list[frozenset[int]] | None:
        lists: list[list[Any]] = []
        named = self.result.get("ng_trajectory")
        if named is not None:
            lists.append(named.get("turns") or [])
        other = self.result.get("trajectory")
        if isinstance(other, dict) and isinstance(other.get("turns"), list):
            lists.append(other["turns"])
        read = [self._references_of(turns) for turns in lists]
        given = [references for references in read if references]
        if len(given) == 2 and given[0] != given[1]:
            raise Refused(Code.REFERENCE_CONTRADICTORY)
        return [self._resolve(reference) for reference in given[0]] if given else None

    def _references_of(self, turns: list[Any]) -> list[tuple[Any, Any, Any]]:
        per_turn = [turn.get("model_calls") or [] for turn in turns]
        if any(per_turn) and not all(per_turn):
            raise Refused(Code.REFERENCES_PARTIAL)
        return [
            (reference.get("response_id"), reference.get("model_call_id"), reference.get("choice_index"))
            for references in per_turn
            for reference in references
        ]

    def _resolve(self, reference: tuple[Any, Any, Any]) -> frozenset[int]:
        response_id, call_id, choice = reference
        by_response = self._named(response_id)
        by_call = frozenset(c for c in self.calls if self.records[c].model_call_id == call_id)
        if (response_id is not None and not by_response) or (call_id is not None and not by_call):
            raise Refused(Code.REFERENCE_UNKNOWN, frozenset({Code.REFERENCE_CONTRADICTORY}))
        if response_id is None and call_id is None:
            raise Refused(Code.REFERENCE_CONTRADICTORY)
        named = frozenset(self.calls)
        if response_id is not None:
            named &= by_response
        if call_id is not None:
            named &= by_call
        if choice is not None:
            chosen = frozenset(c for c in named if self.records[c].choice_index == choice)
            if named and not chosen:
                raise Refused(Code.REFERENCE_UNKNOWN, frozenset({Code.REFERENCE_CONTRADICTORY}))
            named = chosen
        if not named:
            raise Refused(Code.REFERENCE_CONTRADICTORY)
        return named

    def answer(self) -> Answer:
        """Run steps 4 to 13."""
        if self.references and not self.result.keys() & {"response", "responses", "messages"}:
            return self._by_reference()
        flats = self._flattenings()
        for response_id, start, end in flats[0].envelopes:
            if response_id is not None and start == end and self._named(response_id):
                raise Refused(Code.ENVELOPE_EMPTY)
        answers: list[Answer] = []
        refusals: list[Refused] = []
        for flat in flats:
            try:
                answers.append(Content(self.question, flat).answer())
            except Refused as refused:
                refusals.append(refused)
        for refused in refusals:
            if refused.code in {Code.LINEAGE_BROKEN, Code.ITEM_IDENTITY_REUSED}:
                raise Refused(refused.code, frozenset(other.code for other in refusals))
        with_reading = [refused for refused in refusals if refused.readings]
        if with_reading:
            every = [reading for refused in with_reading for reading in refused.readings]
            also = {refused.code for refused in with_reading}
            also |= {Code.LINEAGE_BROKEN} & {code for refused in refusals for code in refused.also}
            if also == {Code.DECLARED_TERMINAL_CONFLICT} and len(flats) > 1:
                also.add(Code.SNAPSHOT_AMBIGUOUS)
            raise Refused(with_reading[0].code, frozenset(also), every)
        if not answers:
            raise Refused(refusals[0].code, refusals[0].also | {refused.code for refused in refusals})
        if len({frozenset(answer.calls or ()) for answer in answers}) > 1:
            raise Refused(Code.SNAPSHOT_AMBIGUOUS)
        return answers[0]

    def _by_reference(self) -> Answer:
        chosen: list[int] = []
        for named in self.references or ():
            if len(named) > 1:
                raise Refused(Code.REFERENCE_CONTRADICTORY)
            chosen.extend(named)
        if len(set(chosen)) < len(chosen):
            raise Refused(Code.SELECTION_DUPLICATED)
        if self.declared_id is not None and not self.declared & set(chosen):
            raise Refused(Code.DECLARED_TERMINAL_NOT_SELECTED)
        if len(self.declared & set(chosen)) > 1:
            raise Refused(Code.MATCH_AMBIGUOUS, frozenset({Code.DECLARED_TERMINAL_NOT_SELECTED}))
        named = tuple(self.records[call].model_call_id for call in chosen)
        return Answer(named, self.declared_id or self.records[chosen[-1]].response_id)

    # Steps 5 and 6: envelopes, authored items, bounds

    def _sources(self) -> list[Mapping[str, Any]]:
        result = self.result
        response = result.get("response")
        if result.get("responses"):
            return list(result["responses"])
        if response is not None and ("output" in response or result.get("messages") is None):
            return [response]
        if result.get("messages") is not None:
            return [{"output": result["messages"]}]
        raise Refused(Code.OUTPUT_MISSING)

    def _flattenings(self) -> list[Flat]:
        sources = self._sources()
        if len({(source.get("metadata") or {}).get("session_id") for source in sources}) > 1:
            raise Refused(Code.SESSIONS_MIXED)
        if any(not isinstance(source.get("output"), list) for source in sources):
            raise Refused(Code.OUTPUT_MISSING)
        skipping, keeping, repeats = Flat(), Flat(), False
        for source in sources:
            snapshots = source["output"] if source.get("contains_transitions") else [source["output"]]
            read = [[(self._read(raw), raw) for raw in snapshot] for snapshot in snapshots]
            for flat in (skipping, keeping):
                repeats |= self._flatten(flat, source, read, flat is skipping)
        return [skipping, keeping] if repeats else [skipping]

    def _read(self, raw: Any) -> Item:
        try:
            return read_item(raw)
        except SelectionError as error:
            raise Refused(error.code, frozenset({Code.SNAPSHOT_ITEM_CONFLICT})) from error

    def _is_identity(self, item: Item) -> bool:
        return item.authored and item.id is not None and len(self.owners.get(item.id, ())) == 1

    def _is_same(self, now: tuple[Item, Any], before: tuple[Item, Any]) -> bool:
        """Tell whether an item may repeat one of the snapshot before; only an identity can deny it."""
        if now[0].authored and before[0].authored:
            differ = self._is_identity(now[0]) and self._is_identity(before[0]) and now[0].id != before[0].id
            return now[0].atoms == before[0].atoms and not differ
        return _without_id(now[1]) == _without_id(before[1])

    def _flatten(self, flat: Flat, source: Mapping[str, Any], snapshots: Sequence[Any], skip: bool) -> bool:
        seen: dict[str, Item] = {}
        start, repeats, previous = len(flat.items), False, []
        new_run = True
        for snapshot in snapshots:
            same = [self._is_same(now, before) for now, before in zip(snapshot, previous, strict=False)]
            begins = bool(previous) and len(same) == len(previous) and all(same)
            repeats |= begins
            for item, _ in snapshot[len(previous) if begins and skip else 0 :]:
                if source.get("contains_transitions") and self._is_identity(item):
                    if item.id in seen:
                        if seen[item.id].atoms != item.atoms:
                            raise Refused(Code.SNAPSHOT_ITEM_CONFLICT)
                        continue
                    seen[item.id] = item
                if item.authored:
                    flat.runs.append((flat.runs[-1] if flat.runs else 0) + new_run)
                    flat.items.append(item)
                    new_run = False
                elif not item.tool_result:
                    new_run = True
            previous = snapshot
        flat.envelopes.append((source.get("id"), start, len(flat.items)))
        return repeats


def _without_id(raw: Any) -> Any:
    return {key: value for key, value in raw.items() if key != "id"}
