"""Brute-force `returned_history` for small histories: every reading is listed, then the rules are applied to the list.

Invariant: nothing here is clever. Each function is one sentence of the normative page (docs/reference/selection.md,
section 3), readings are enumerated one by one, and no code of `gristmill.selection` is used. Only the step from one
item to its atoms is shared with the product; it has tests of its own.

Where the page leaves a choice open, `Answer.also` holds the other codes that it allows; the choices are:

* a returned item that shows nothing may stand inside or beside any call's span in the same run;
* a snapshot "begins with all the items of the previous one" if they are equal with their ids;
* a reading "contains" a response id with several choices if it holds exactly one of them;
* a native envelope's call has to be in every reading, inside its envelope (`match_missing` if none holds it);
* every member of an interchangeable group has the same parent, so a reading with any member proves that parent;
* a returned tool-call id that was captured stands for itself only, whatever `tool_call_ids` says;
* an item with an identity is never context, whatever `unmatched` says.

Not here: malformed JSON (fuzzed elsewhere) and the evidence of refusals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gristmill.atoms import Item, read_item
from gristmill.errors import Code, SelectionError
from gristmill.records import Atom, CallRecord

__all__ = ["Answer", "Options", "TooManyReadings", "decide"]

MAX_STEPS = 100_000
EMPTY = Atom("empty")
NEVER = frozenset[Code]()


class TooManyReadings(Exception):
    """The history is not small."""


class _Refused(Exception):
    def __init__(self, code: Code, also: frozenset[Code] = NEVER, readings: Sequence[Reading] = ()) -> None:
        super().__init__(code)
        self.code, self.also, self.readings = code, also, readings


@dataclass(frozen=True)
class Options:
    """The options of the policy."""

    reasoning_optional: bool = False
    trim: bool = False
    renamed: bool = False
    context: bool = False


@dataclass(frozen=True)
class Step:
    """A call read from the authored items [start, end)."""

    start: int
    end: int
    call: int
    renames: tuple[tuple[str, str], ...] = ()


Reading = tuple[Step, ...]


@dataclass(frozen=True)
class Answer:
    """What the page says: calls and terminal, or the refusal.

    Attributes:
        calls: model call ids in order; None for a refusal.
        terminal: response id of the scored call, or None.
        code: why it is refused.
        also: codes that the page allows as well.
        readings: the calls of every reading that remains after the filters, in order.
    """

    calls: tuple[str, ...] | None = None
    terminal: str | None = None
    code: Code | None = None
    also: frozenset[Code] = NEVER
    readings: frozenset[tuple[str, ...]] = frozenset()

    def allows(self, code: Code) -> bool:
        return self.code is not None and (code == self.code or code in self.also)


@dataclass
class _Flat:
    """One flattening: authored items, the run that each stands in, and the envelopes [start, end) with their ids."""

    items: list[Item] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    envelopes: list[tuple[str | None, int, int]] = field(default_factory=list)


def decide(records: Sequence[CallRecord], result: Any, options: Options = Options()) -> Answer:
    """Apply selection.md section 3 to a small history."""
    ids = [record.model_call_id for record in records]
    try:
        return _Oracle(records, result, options).answer()
    except _Refused as refused:
        readings = frozenset(tuple(ids[step.call] for step in reading) for reading in refused.readings)
        return Answer(code=refused.code, also=refused.also, readings=readings)


class _Oracle:
    def __init__(self, records: Sequence[CallRecord], result: Any, options: Options) -> None:
        self.records = records
        self.result = result
        self.options = options
        self.calls = range(len(records))
        self._check_identities()  # step 1
        response = result.get("response")
        self.scored_id = response.get("id") if isinstance(response, dict) else None
        self.declared_id = result.get("terminal_response_id")
        self.scored = self._named(self.scored_id)  # step 2
        self.declared = self._named(self.declared_id)
        self.references = self._read_references()  # step 3
        self.owners = self._item_owners()

    # Steps 1 to 4: identities and references

    def _check_identities(self) -> None:
        by_call = [record.model_call_id for record in self.records]
        by_choice = [(record.response_id, record.choice_index) for record in self.records]
        if len(set(by_call)) < len(by_call) or len(set(by_choice)) < len(by_choice):
            raise _Refused(Code.CALL_IDENTITY_REUSED)

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
            raise _Refused(Code.REFERENCE_CONTRADICTORY)
        return [self._resolve(reference) for reference in given[0]] if given else None

    def _references_of(self, turns: list[Any]) -> list[tuple[Any, Any, Any]]:
        per_turn = [turn.get("model_calls") or [] for turn in turns]
        if any(per_turn) and not all(per_turn):
            raise _Refused(Code.REFERENCES_PARTIAL)
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
            raise _Refused(Code.REFERENCE_UNKNOWN, frozenset({Code.REFERENCE_CONTRADICTORY}))
        if response_id is None and call_id is None:
            raise _Refused(Code.REFERENCE_CONTRADICTORY)
        named = frozenset(self.calls)
        if response_id is not None:
            named &= by_response
        if call_id is not None:
            named &= by_call
        if choice is not None:
            chosen = frozenset(c for c in named if self.records[c].choice_index == choice)
            if named and not chosen:
                raise _Refused(Code.REFERENCE_UNKNOWN, frozenset({Code.REFERENCE_CONTRADICTORY}))
            named = chosen
        if not named:
            raise _Refused(Code.REFERENCE_CONTRADICTORY)
        return named

    def answer(self) -> Answer:
        """Run steps 4 to 13."""
        if self.references and not self.result.keys() & {"response", "responses", "messages"}:
            return self._by_reference()
        flats = self._flattenings()
        for response_id, start, end in flats[0].envelopes:
            if response_id is not None and start == end and self._named(response_id):
                raise _Refused(Code.ENVELOPE_EMPTY)
        answers: list[Answer] = []
        refusals: list[_Refused] = []
        for flat in flats:
            try:
                answers.append(_Content(self, flat).answer())
            except _Refused as refused:
                refusals.append(refused)
        for refused in refusals:
            if refused.code is Code.LINEAGE_BROKEN:
                raise _Refused(refused.code, frozenset(other.code for other in refusals))
        with_reading = [refused for refused in refusals if refused.readings]
        if with_reading:
            every = [reading for refused in with_reading for reading in refused.readings]
            also = {refused.code for refused in with_reading}
            if also == {Code.DECLARED_TERMINAL_CONFLICT} and len(flats) > 1:
                also.add(Code.SNAPSHOT_AMBIGUOUS)
            raise _Refused(with_reading[0].code, frozenset(also), every)
        if not answers:
            raise _Refused(refusals[0].code, refusals[0].also | {refused.code for refused in refusals})
        if len({frozenset(answer.calls or ()) for answer in answers}) > 1:
            raise _Refused(Code.SNAPSHOT_AMBIGUOUS)
        return answers[0]

    def _by_reference(self) -> Answer:
        chosen: list[int] = []
        for named in self.references or ():
            if len(named) > 1:
                raise _Refused(Code.REFERENCE_CONTRADICTORY)
            chosen.extend(named)
        if len(set(chosen)) < len(chosen):
            raise _Refused(Code.SELECTION_DUPLICATED)
        if self.declared_id is not None and not self.declared & set(chosen):
            raise _Refused(Code.DECLARED_TERMINAL_NOT_SELECTED)
        if len(self.declared & set(chosen)) > 1:
            raise _Refused(Code.MATCH_AMBIGUOUS, frozenset({Code.DECLARED_TERMINAL_NOT_SELECTED}))
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
        raise _Refused(Code.OUTPUT_MISSING)

    def _flattenings(self) -> list[_Flat]:
        sources = self._sources()
        if len({(source.get("metadata") or {}).get("session_id") for source in sources}) > 1:
            raise _Refused(Code.SESSIONS_MIXED)
        if any(not isinstance(source.get("output"), list) for source in sources):
            raise _Refused(Code.OUTPUT_MISSING)
        skipping, keeping, repeats = _Flat(), _Flat(), False
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
            raise _Refused(error.code, frozenset({Code.SNAPSHOT_ITEM_CONFLICT})) from error

    def _is_identity(self, item: Item) -> bool:
        return item.authored and item.id is not None and len(self.owners.get(item.id, ())) == 1

    def _flatten(self, flat: _Flat, source: Mapping[str, Any], snapshots: Sequence[Any], skip: bool) -> bool:
        seen: dict[str, Item] = {}
        start, repeats, previous = len(flat.items), False, []
        new_run = True
        for snapshot in snapshots:
            same = [_same_item(now, before) for now, before in zip(snapshot, previous, strict=False)]
            begins = bool(previous) and len(same) == len(previous) and all(same)
            repeats |= begins
            for item, _ in snapshot[len(previous) if begins and skip else 0 :]:
                if source.get("contains_transitions") and self._is_identity(item):
                    if item.id in seen:
                        if seen[item.id].atoms != item.atoms:
                            raise _Refused(Code.SNAPSHOT_ITEM_CONFLICT)
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


def _same_item(now: tuple[Item, Any], before: tuple[Item, Any]) -> bool:
    if now[0].authored and before[0].authored:
        return now[0].atoms == before[0].atoms and now[0].id == before[0].id
    return now[1] == before[1]


def _shown(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
    return tuple(atom for atom in atoms if atom != EMPTY) or (EMPTY,)


class _Content:
    """Steps 7 to 13 over one flattening."""

    def __init__(self, oracle: _Oracle, flat: _Flat) -> None:
        self.oracle = oracle
        self.records = oracle.records
        self.options = oracle.options
        self.items, self.runs = flat.items, flat.runs
        self.count = len(flat.items)
        self.native: list[tuple[frozenset[int], int, int]] = [
            (named, start, end)
            for response_id, start, end in flat.envelopes
            if response_id is not None and (named := oracle._named(response_id))  # noqa: SLF001
        ]
        self.item_owner = [self._owner(item) for item in self.items]
        self.served = [self._contents(call) for call in oracle.calls]
        self.captured_ids = {a.call_id for record in self.records for a in _atoms_of(record) if a.kind == "tool_call"}
        self.returned_ids = {a.call_id for item in self.items for a in item.atoms if a.kind == "tool_call"}
        self.context: set[int] = set()
        self.steps = 0
        self.identified = {owner for owner in self.item_owner if owner is not None}
        for named in [oracle.scored, *(named for named, _, _ in self.native)]:
            if len(named) == 1:
                self.identified |= named
        self.ancestors = [self._ancestors_of(call) for call in oracle.calls]
        self._check_lineage(self.identified)
        self.moves = self._moves()
        if self.options.context:
            self._find_context()

    # Step 7: identity

    def _owner(self, item: Item) -> int | None:
        owners = self.oracle.owners.get(item.id or "", set())
        if item.id is None or not owners:
            return None
        if len(owners) > 1:
            if item.id == item.tool_call_id:
                return None
            raise _Refused(Code.ITEM_IDENTITY_REUSED)
        return next(iter(owners))

    def _parent(self, call: int) -> int | None:
        parent_id = self.records[call].parent_call_id
        return next((c for c in self.oracle.calls if self.records[c].model_call_id == parent_id), None)

    def _ancestors_of(self, call: int) -> list[int]:
        found: list[int] = []
        parent = self._parent(call)
        while parent is not None and parent not in found:
            found.append(parent)
            parent = self._parent(parent)
        return found

    def _is_broken(self, call: int) -> bool:
        line = (call, *self.ancestors[call])
        missing = any(self.records[c].parent_call_id and self._parent(c) is None for c in line)
        return missing or any(c in self.ancestors[c] for c in line)

    def _check_lineage(self, proven: set[int]) -> None:
        if any(self._is_broken(call) for call in proven):
            raise _Refused(Code.LINEAGE_BROKEN)

    def _broken(self) -> frozenset[Code]:
        """Allow `lineage_broken` beside the refusals of step 9, where some lineage is: which comes first is open."""
        return frozenset({Code.LINEAGE_BROKEN}) if any(map(self._is_broken, self.oracle.calls)) else NEVER

    # Step 8: candidates

    def _compared(self, atoms: Sequence[Atom]) -> list[Atom]:
        made: list[Atom] = []
        for atom in atoms:
            if self.options.trim and atom.kind == "text":
                if atom.text.strip():
                    made.append(Atom("text", atom.text.strip()))
            elif self.options.renamed and atom.kind == "tool_call":
                made.append(Atom(atom.kind, atom.text, atom.form, atom.tool, atom.name))
            else:
                made.append(atom)
        return made

    def _contents(self, call: int) -> list[tuple[Atom, ...]]:
        """List what a call may be matched by: nothing if it served nothing or something that cannot be read."""
        record = self.records[call]
        if not record.output_items or any(item.atoms is None for item in record.output_items):
            return []
        full = _shown(self._compared(_atoms_of(record)))
        bare = tuple(atom for atom in full if not atom.kind.startswith("reasoning"))
        return [full, bare] if self.options.reasoning_optional and bare else [full]

    def _step(self, start: int, end: int, call: int) -> Step | None:
        """Give the step if the call can be read from these items."""
        if self.runs[start] != self.runs[end - 1]:
            return None
        span = [atom for item in self.items[start:end] for atom in item.atoms]
        shown = _shown(span if self.options == Options() else self._compared(span))
        if shown not in self.served[call]:
            return None
        if any(owner not in {None, call} for owner in self.item_owner[start:end]):
            return None
        own = [(first, last) for named, first, last in self.native if call in named]
        if own and not any(first <= start and end <= last for first, last in own):
            return None
        if not self.options.renamed:
            return Step(start, end, call)
        returned = [atom.call_id for atom in span if atom.kind == "tool_call"]
        captured = [atom.call_id for atom in _atoms_of(self.records[call]) if atom.kind == "tool_call"]
        for now, then in zip(returned, captured, strict=True):
            if now != then and (now in self.captured_ids or then in self.returned_ids):
                return None
        return Step(start, end, call, tuple(zip(returned, captured, strict=True)))

    def _moves(self) -> list[list[Step]]:
        return [
            [
                step
                for end in range(start + 1, self.count + 1)
                for call in self.oracle.calls
                if (step := self._step(start, end, call)) is not None
            ]
            for start in range(self.count)
        ]

    def _find_context(self) -> None:
        for run in sorted(set(self.runs))[:-1]:
            members = [index for index in range(self.count) if self.runs[index] == run]
            if not any(self.moves[index] or self.item_owner[index] is not None for index in members):
                self.context.update(members)

    # Step 9: readings

    def _paths(self, *, distinct: bool = True, ordered: bool = True, whole: bool = True) -> Iterator[Reading]:
        """Enumerate readings; `whole` asks for every reference to be used."""
        references = self.oracle.references

        def walk(index: int, path: Reading) -> Iterator[Reading]:
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise TooManyReadings
            while index in self.context:
                index += 1
            if index == self.count:
                if references is None or not whole or len(path) == len(references):
                    yield path
                return
            for step in self.moves[index]:
                if references is not None:
                    if len(path) >= len(references) or step.call not in references[len(path)]:
                        continue
                used = [earlier.call for earlier in path]
                if distinct and step.call in used:
                    continue
                if ordered and any(step.call in self.ancestors[earlier] for earlier in used):
                    continue
                if not _one_to_one((*path, step)):
                    continue
                yield from walk(step.end, (*path, step))

        yield from walk(0, ())

    def _exists(self, **loosened: bool) -> bool:
        return next(self._paths(**loosened), None) is not None

    def _readings(self) -> list[Reading]:
        found = list(self._paths())
        if found:
            return found
        broken = self._broken()
        if self._exists(ordered=False):
            raise _Refused(Code.LINEAGE_CONTRADICTION, broken)
        references = self.oracle.references or []
        named_twice = len(set(references)) < len(references)
        twice = frozenset({Code.SELECTION_DUPLICATED, Code.REFERENCE_UNRETURNED}) if named_twice else NEVER
        if references and self._exists(ordered=False, whole=False) and not self._exists(whole=False):
            raise _Refused(Code.LINEAGE_CONTRADICTION, broken | twice | {Code.REFERENCE_UNRETURNED})
        if self._exists(whole=False):
            unheld = frozenset({Code.TERMINAL_NOT_SELECTED, Code.DECLARED_TERMINAL_NOT_SELECTED})
            raise _Refused(Code.REFERENCE_UNRETURNED, twice | unheld)
        if self._exists(distinct=False, ordered=False):
            raise _Refused(Code.SELECTION_DUPLICATED)
        raise _Refused(Code.MATCH_MISSING, twice)

    def answer(self) -> Answer:
        """Filter the readings and compare their sets of calls (steps 9 to 13)."""
        readings = self._containing_evidence(self._readings())
        if not self.count:
            raise _Refused(Code.SELECTION_EMPTY)
        readings, required = self._containing_required(readings)
        groups = self._groups({step.call for reading in readings for step in reading})
        sets = {tuple(sorted(groups.get(step.call, step.call) for step in reading)) for reading in readings}
        if len(sets) > 1:
            raise _Refused(Code.MATCH_AMBIGUOUS, readings=readings)
        if len({frozenset(pair for step in reading for pair in step.renames) for reading in readings}) > 1:
            raise _Refused(Code.MATCH_AMBIGUOUS, readings=readings)
        scored, declared = self.oracle.scored, self.oracle.declared
        if scored and declared and not scored & declared:
            raise _Refused(Code.DECLARED_TERMINAL_CONFLICT, readings=readings)
        preferred = required | scored | declared
        chosen = min(readings, key=lambda reading: self._preference(reading, groups, preferred))
        calls = [step.call for step in chosen]
        if not calls:
            raise _Refused(Code.SELECTION_EMPTY, readings=readings)
        ids = [self.records[call].model_call_id for call in calls]
        lists = frozenset(tuple(self.records[s.call].model_call_id for s in reading) for reading in readings)
        return Answer(tuple(ids), self._terminal(calls, readings, groups), readings=lists)

    def _containing_evidence(self, readings: list[Reading]) -> list[Reading]:
        """Filter (a), and native envelopes."""
        oracle = self.oracle
        wanted = [(Code.MATCH_MISSING, named) for named, _, _ in self.native]
        if oracle.scored:
            wanted.insert(0, (Code.TERMINAL_NOT_SELECTED, oracle.scored))
        if oracle.declared_id is not None:
            wanted.insert(0, (Code.DECLARED_TERMINAL_NOT_SELECTED, oracle.declared))

        def holds(reading: Reading, named: frozenset[int]) -> bool:
            return sum(step.call in named for step in reading) == 1

        lacking = {code for code, named in wanted if not any(holds(reading, named) for reading in readings)}
        kept = [reading for reading in readings if all(holds(reading, named) for _, named in wanted)]
        if kept:
            return kept
        codes = lacking or {Code.DECLARED_TERMINAL_CONFLICT, *(code for code, _ in wanted)}
        several = {Code.MATCH_AMBIGUOUS} if any(len(named) > 1 for _, named in wanted) else set[Code]()
        raise _Refused(min(codes), frozenset(codes | several) | self._broken())

    def _containing_required(self, readings: list[Reading]) -> tuple[list[Reading], frozenset[int]]:
        """Filter (b), repeated with the ancestors of every call that is in all remaining readings."""
        certain = set(self.identified)
        while True:
            self._check_lineage(certain)
            required = certain | {parent for call in certain for parent in self.ancestors[call]}
            in_some = {step.call for reading in readings for step in reading} & required
            kept = [reading for reading in readings if in_some <= {step.call for step in reading}]
            readings = kept or readings
            everywhere = self._in_every(readings)
            if everywhere <= certain | required:
                return readings, frozenset(required)
            certain |= everywhere

    def _in_every(self, readings: Sequence[Reading]) -> set[int]:
        """Find the calls that are in every reading, and the parents of interchangeable ones of which any is."""
        held = [{step.call for step in reading} for reading in readings]
        groups = self._groups(set.union(*held))
        found = set.intersection(*held)
        for group in set(groups.values()):
            if all(any(groups.get(call) == group for call in calls) for calls in held):
                parent = self._parent(group)
                found |= set() if parent is None else {parent}
        return found

    def _groups(self, candidates: set[int]) -> dict[int, int]:
        """Map interchangeable candidates to the first of them."""
        first: dict[Any, int] = {}
        groups: dict[int, int] = {}
        for call in sorted(candidates):
            record = self.records[call]
            if record.sequence_digest is None or record.logprobs_digest is None or record.cum_len == record.prompt_len:
                continue
            key = (
                record.sequence_digest,
                record.prompt_len,
                record.logprobs_digest,
                record.weight_versions,
                record.model,
                record.parent_call_id,
                record.usable,
                record.delivery,
            )
            groups[call] = first.setdefault(key, call)
        return groups

    def _preference(self, reading: Reading, groups: Mapping[int, int], preferred: frozenset[int]) -> Any:
        calls = [step.call for step in reading]
        standing = sorted(
            (groups[call], call not in preferred, self.records[call].model_call_id) for call in calls if call in groups
        )
        return standing, calls, [step.start for step in reading]

    def _terminal(self, calls: list[int], readings: list[Reading], groups: Mapping[int, int]) -> str | None:
        for named in (self.oracle.declared, self.oracle.scored):
            if named:
                return next(self.records[call].response_id for call in calls if call in named)
        ends = {groups.get(reading[-1].call, reading[-1].call) for reading in readings}
        return self.records[calls[-1]].response_id if len(ends) == 1 else None


def _atoms_of(record: CallRecord) -> list[Atom]:
    return [atom for item in record.output_items for atom in item.atoms or ()]


def _one_to_one(path: Reading) -> bool:
    pairs = {pair for step in path for pair in step.renames}
    return len({now for now, _ in pairs}) == len(pairs) == len({then for _, then in pairs})
