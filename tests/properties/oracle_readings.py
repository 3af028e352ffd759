"""The second half of the oracle (steps 7 to 13): candidates, every reading, the filters, the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gristmill.atoms import Item
from gristmill.errors import Code
from gristmill.records import Atom, CallRecord
from tests.properties.oracle_terms import (
    NEVER,
    Answer,
    Flat,
    Options,
    Question,
    Reading,
    Refused,
    Step,
    TooManyReadings,
)

__all__ = ["Content"]

MAX_STEPS = 100_000
EMPTY = Atom("empty")


def _shown(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
    return tuple(atom for atom in atoms if atom != EMPTY) or (EMPTY,)


class Content:
    """Steps 7 to 13 over one flattening."""

    def __init__(self, question: Question, flat: Flat) -> None:
        self.question = question
        self.records = question.records
        self.options = question.options
        self.items, self.runs = flat.items, flat.runs
        self.count = len(flat.items)
        self.native: list[tuple[frozenset[int], int, int]] = [
            (named, start, end)
            for response_id, start, end in flat.envelopes
            if response_id is not None and (named := question.named(response_id))
        ]
        self.item_owner = [self._owner(item) for item in self.items]
        self.served = [self._contents(call) for call in question.calls]
        self.captured_ids = {a.call_id for record in self.records for a in _atoms_of(record) if a.kind == "tool_call"}
        self.returned_ids = {a.call_id for item in self.items for a in item.atoms if a.kind == "tool_call"}
        self.context: set[int] = set()
        self.steps = 0
        self.identified = {owner for owner in self.item_owner if owner is not None}
        for named in [question.scored, *(named for named, _, _ in self.native)]:
            if len(named) == 1:
                self.identified |= named
        self.ancestors = [self._ancestors_of(call) for call in question.calls]
        self._check_lineage(self.identified)
        self.moves = self._moves()
        if self.options.context:
            self._find_context()

    # Step 7: identity

    def _owner(self, item: Item) -> int | None:
        owners = self.question.owners.get(item.id or "", set())
        if item.id is None or not owners:
            return None
        if len(owners) > 1:
            if item.id == item.tool_call_id:
                return None
            raise Refused(Code.ITEM_IDENTITY_REUSED)
        return next(iter(owners))

    def _parent(self, call: int) -> int | None:
        parent_id = self.records[call].parent_call_id
        return next((c for c in self.question.calls if self.records[c].model_call_id == parent_id), None)

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
            raise Refused(Code.LINEAGE_BROKEN)

    def _broken(self) -> frozenset[Code]:
        """Allow `lineage_broken` beside the refusals of step 9, where some lineage is: which comes first is open."""
        return frozenset({Code.LINEAGE_BROKEN}) if any(map(self._is_broken, self.question.calls)) else NEVER

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
                for call in self.question.calls
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
        references = self.question.references

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
            due = None if references is None else frozenset[int]().union(*references[len(path) :][:1])
            for step in self.moves[index]:
                if due is not None and step.call not in due:
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
            raise Refused(Code.LINEAGE_CONTRADICTION, broken)
        references = self.question.references or []
        named_twice = len(set(references)) < len(references)
        twice = frozenset({Code.SELECTION_DUPLICATED, Code.REFERENCE_UNRETURNED}) if named_twice else NEVER
        if references and self._exists(ordered=False, whole=False) and not self._exists(whole=False):
            raise Refused(Code.LINEAGE_CONTRADICTION, broken | twice | {Code.REFERENCE_UNRETURNED})
        if self._exists(whole=False):
            unheld = frozenset({Code.TERMINAL_NOT_SELECTED, Code.DECLARED_TERMINAL_NOT_SELECTED})
            raise Refused(Code.REFERENCE_UNRETURNED, twice | unheld)
        if self._exists(distinct=False, ordered=False):
            raise Refused(Code.SELECTION_DUPLICATED)
        raise Refused(Code.MATCH_MISSING, twice)

    def answer(self) -> Answer:
        """Filter the readings and compare their sets of calls (steps 9 to 13)."""
        readings = self._containing_evidence(self._readings())
        if not self.count:
            raise Refused(Code.SELECTION_EMPTY)
        readings, required = self._containing_required(readings)
        groups = self._groups({step.call for reading in readings for step in reading})
        sets = {tuple(sorted(groups.get(step.call, step.call) for step in reading)) for reading in readings}
        if len(sets) > 1:
            raise Refused(Code.MATCH_AMBIGUOUS, readings=readings)
        if len({frozenset(pair for step in reading for pair in step.renames) for reading in readings}) > 1:
            raise Refused(Code.MATCH_AMBIGUOUS, readings=readings)
        scored, declared = self.question.scored, self.question.declared
        if scored and declared and not scored & declared:
            raise Refused(Code.DECLARED_TERMINAL_CONFLICT, readings=readings)
        preferred = required | scored | declared
        chosen = min(readings, key=lambda reading: self._preference(reading, groups, preferred))
        calls = [step.call for step in chosen]
        if not calls:
            raise Refused(Code.SELECTION_EMPTY, readings=readings)
        ids = [self.records[call].model_call_id for call in calls]
        lists = frozenset(tuple(self.records[s.call].model_call_id for s in reading) for reading in readings)
        return Answer(tuple(ids), self._terminal(calls, readings, groups), readings=lists)

    def _containing_evidence(self, readings: list[Reading]) -> list[Reading]:
        """Filter (a), and native envelopes."""
        question = self.question
        wanted = [(Code.MATCH_MISSING, named) for named, _, _ in self.native]
        if question.scored:
            wanted.insert(0, (Code.TERMINAL_NOT_SELECTED, question.scored))
        if question.declared_id is not None:
            wanted.insert(0, (Code.DECLARED_TERMINAL_NOT_SELECTED, question.declared))

        def holds(reading: Reading, named: frozenset[int]) -> bool:
            return sum(step.call in named for step in reading) == 1

        lacking = {code for code, named in wanted if not any(holds(reading, named) for reading in readings)}
        kept = [reading for reading in readings if all(holds(reading, named) for _, named in wanted)]
        if kept:
            return kept
        codes = lacking or {Code.DECLARED_TERMINAL_CONFLICT, *(code for code, _ in wanted)}
        several = {Code.MATCH_AMBIGUOUS} if any(len(named) > 1 for _, named in wanted) else set[Code]()
        raise Refused(min(codes), frozenset(codes | several) | self._broken())

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
        for named in (self.question.declared, self.question.scored):
            if named:
                return next(self.records[call].response_id for call in calls if call in named)
        ends = {groups.get(reading[-1].call, reading[-1].call) for reading in readings}
        return self.records[calls[-1]].response_id if len(ends) == 1 else None


def _atoms_of(record: CallRecord) -> list[Atom]:
    return [atom for item in record.output_items for atom in item.atoms or ()]


def _one_to_one(path: Reading) -> bool:
    pairs = {pair for step in path for pair in step.renames}
    return len({now for now, _ in pairs}) == len(pairs) == len({then for _, then in pairs})
