"""An index over the captured calls of one attempt: by id, by served item id, by content.

Invariant: built once per decision in time linear in the calls; it reads only the attributes of `CapturedCall`, so that
foreign records work as they are. Calls are known by their position in commit order.

Not here: the returned history (history) and the search (candidates, readings).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from gristmill.atoms import EMPTY
from gristmill.canonical import JsonValue
from gristmill.errors import Code, SelectionError
from gristmill.lineage import Forest
from gristmill.records import Atom

__all__ = [
    "SHARED",
    "CapturedCalls",
    "Fingerprint",
    "MatchOptions",
    "comparable",
    "content_keys",
    "without_reasoning",
]

SHARED: Final = -1
"""Owner of an item id that several calls served."""

Fingerprint = Callable[[JsonValue], str]


class MatchOptions(msgspec.Struct, frozen=True):
    """What a match may overlook; everything off by default."""

    reasoning_optional: bool = False
    trim_whitespace: bool = False
    renamed_call_ids: bool = False
    unmatched_context: bool = False

    @property
    def changes_atoms(self) -> bool:
        """Tell whether atoms are compared in another form than their own."""
        return self.trim_whitespace or self.renamed_call_ids


def comparable(atoms: Sequence[Atom], options: MatchOptions) -> list[Atom]:
    """Give the form in which atoms are compared under the options."""
    made: list[Atom] = []
    for atom in atoms:
        if options.trim_whitespace and atom.kind == "text":
            text = atom.text.strip()
            if text:
                made.append(Atom("text", text))
        elif options.renamed_call_ids and atom.kind == "tool_call":
            made.append(Atom(atom.kind, atom.text, atom.form, atom.tool, atom.name))
        else:
            made.append(atom)
    return made


def content_keys(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
    """Drop what shows nothing, unless the call shows nothing at all."""
    if atoms and EMPTY not in atoms:
        return tuple(atoms)
    return tuple(atom for atom in atoms if atom.kind != "empty") or (EMPTY,)


def without_reasoning(content: tuple[Atom, ...]) -> tuple[Atom, ...] | None:
    """Drop all reasoning atoms; None where there are none, or nothing else would be left."""
    kept = tuple(atom for atom in content if atom.kind not in {"reasoning", "reasoning_payload"})
    return kept if kept and len(kept) != len(content) else None


class CapturedCalls:
    """The calls of one attempt, indexed.

    Attributes:
        records: as given, in commit order.
        ids: model call ids.
        by_id: position by model call id.
        owners: the one call that served an item id, or `SHARED`.

    Raises:
        SelectionError: `call_identity_reused`.
    """

    def __init__(self, records: Sequence[Any]) -> None:
        self.records = records
        self.ids: list[str] = [record.model_call_id for record in records]
        self.by_id: dict[str, int] = {call_id: index for index, call_id in enumerate(self.ids)}
        self._by_response: dict[str, int] = {}
        self._choices: dict[str, list[int]] = {}
        self.owners: dict[str, int] = {}
        self._forest: Forest | None = None
        self._check_identities()
        set_owner = self.owners.setdefault
        for position, record in enumerate(records):
            for item in record.output_items:
                if (item_id := item.id) is not None and set_owner(item_id, position) != position:
                    self.owners[item_id] = SHARED

    def _check_identities(self) -> None:
        if len(self.by_id) != len(self.ids):
            call_id = next(call_id for call_id, times in Counter(self.ids).items() if times > 1)
            raise SelectionError(
                Code.CALL_IDENTITY_REUSED,
                f"expected model call ids to be unique, got {call_id!r} twice",
                where=f"call={call_id}",
                evidence={"model_call_id": call_id},
            )
        responses = [record.response_id for record in self.records]
        self._by_response = {response_id: position for position, response_id in enumerate(responses)}
        if len(self._by_response) != len(responses):
            self._read_choices(responses)

    def _read_choices(self, responses: Sequence[str]) -> None:
        """Note which response ids name several calls; each of them must be another choice."""
        seen: dict[tuple[str, int], int] = {}
        for position, response_id in enumerate(responses):
            choice = self.choice(position)
            earlier = seen.setdefault((response_id, choice), position)
            if earlier != position:
                first, second = self.ids[earlier], self.ids[position]
                raise SelectionError(
                    Code.CALL_IDENTITY_REUSED,
                    f"expected response id {response_id!r} to name one call per choice, "
                    f"got calls {first!r} and {second!r} with choice {choice}",
                    where=f"call={second}",
                    evidence={"response_id": response_id, "calls": [first, second], "choice_index": choice},
                )
            self._choices.setdefault(response_id, []).append(position)

    def named(self, response_id: str | None) -> list[int]:
        """Return the calls that a response id names: several where the response had choices."""
        if response_id is None:
            return []
        if response_id in self._choices:
            return self._choices[response_id]
        position = self._by_response.get(response_id)
        return [] if position is None else [position]

    def choice(self, position: int) -> int:
        """Return which choice of its response a call is."""
        return getattr(self.records[position], "choice_index", 0) or 0

    @property
    def forest(self) -> Forest:
        """The recorded parents."""
        if self._forest is None:
            self._forest = Forest(self.records)
        return self._forest

    def contents(self, options: MatchOptions) -> tuple[list[tuple[Any, ...] | None], bool]:
        """Give what each call is matched by: its atoms, or its item fingerprints where it has no atoms.

        A call that served nothing, or something unsupported, is None: it is never matched. The second value tells
        whether any call has fingerprints only.

        Raises:
            SelectionError: `atoms_unavailable` where an option needs atoms that a record lacks.
        """
        contents: list[tuple[Any, ...] | None] = []
        foreign = False
        changed = options.changes_atoms
        add = contents.append
        for position, record in enumerate(self.records):
            items = record.output_items
            atoms: Sequence[Atom] | None
            try:
                atoms = items[0].atoms if len(items) == 1 else _joined_atoms(items)
            except AttributeError:
                # Somebody else's items have fingerprints and nothing else.
                atoms = None
            if atoms is None:
                content = self._fingerprints(position, options)
                foreign |= content is not None
                add(content)
                continue
            if changed:
                atoms = comparable(atoms, options)
            add(content_keys(atoms) if len(atoms) != 1 else tuple(atoms))
        return contents, foreign

    def _fingerprints(self, position: int, options: MatchOptions) -> tuple[str, ...] | None:
        """Return what a call without atoms is matched by; None for one that served nothing or something unsupported."""
        items = self.records[position].output_items
        if not items or any(getattr(item, "kind", None) == "unsupported" for item in items):
            return None
        if options.changes_atoms or options.reasoning_optional:
            self._refuse_without_atoms(position)
        return tuple(item.fingerprint for item in items)

    def _refuse_without_atoms(self, position: int) -> None:
        call_id = self.ids[position]
        raise SelectionError(
            Code.ATOMS_UNAVAILABLE,
            f"expected call {call_id!r} to carry canonical atoms, which the chosen options compare, "
            "got fingerprints only",
            where=f"call={call_id}",
        )


def _joined_atoms(items: Sequence[Any]) -> tuple[Atom, ...] | None:
    joined: list[Atom] = []
    for item in items:
        atoms = item.atoms
        if atoms is None:
            return None
        joined += atoms
    return tuple(joined) if joined else None
