"""Which captured calls can stand at a place in a history.

Invariant: an option is there exactly if the call's content equals a run of whole items, inside one run, and every
returned identity in that span is the call's own.

Not here: how options make paths (graph); distinctness, order and evidence (readings).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from gristmill.atoms import EMPTY
from gristmill.errors import Code, SelectionError
from gristmill.fingerprint import atoms_fingerprint
from gristmill.records import Atom
from gristmill.selection.captured import (
    SHARED,
    CapturedCalls,
    Fingerprint,
    MatchOptions,
    comparable,
    without_reasoning,
)
from gristmill.selection.graph import Option
from gristmill.selection.history import EnvelopeSpan, History

__all__ = ["NO_OWNER", "Matcher"]

NO_OWNER: Final = -2
_SLICES_PER_ITEM: Final = 200
_NOTHING: Final = (EMPTY,)


class _View(msgspec.Struct):
    """One way of comparing: the history's keys in a row, and the calls by their content in the same keys.

    The calls are indexed when content is first asked for: where every item names its call, it never is.
    """

    keys: list[Any]
    offsets_I: list[int]
    item_at: list[int]
    of_atoms: bool
    by_content: dict[tuple[Any, ...], list[int]]
    lengths: dict[Any, list[int]]
    indexed: bool = False


def _is_single(atoms: tuple[Atom, ...]) -> bool:
    return len(atoms) == 1


def _inside(spans: list[EnvelopeSpan] | None, index: int) -> bool:
    """Tell whether a call that envelopes name, or that none names, may begin at an item."""
    return spans is None or any(span.start <= index < span.end for span in spans)


def _has_atoms(content: tuple[Any, ...] | None) -> bool:
    return content is not None and not isinstance(content[0], str)


class Matcher:
    """Finds the options at each place of one history."""

    def __init__(
        self,
        captured: CapturedCalls,
        history: History,
        options: MatchOptions,
        fingerprint: Fingerprint | None,
    ) -> None:
        self.captured = captured
        self.history = history
        self.options = options
        self.contents, foreign = captured.contents(options)
        self.owners_I = self._owners()
        self._atoms_I = self._compared()
        self._has_empties = _NOTHING in self._atoms_I
        if self._has_empties and _NOTHING not in self.contents:
            self._drop_empties()
        self._bare = self._bare_contents() if options.reasoning_optional else {}
        self.own_ids = self._captured_tool_ids() if options.renamed_call_ids else frozenset[str]()
        self._returned_ids = self._returned_tool_ids() if options.renamed_call_ids else frozenset[str]()
        self._fingerprint = fingerprint
        self._foreign = foreign
        self._views = self._make_views()
        self._native: dict[int, list[EnvelopeSpan]] = {}
        self._plain = not (foreign or options.reasoning_optional or options.renamed_call_ids)
        self._restricted = options.renamed_call_ids or bool(set(self.owners_I) - {NO_OWNER})

    def _owners(self) -> list[int]:
        """Return, per item, the one call that its id identifies, or `NO_OWNER`."""
        owner_of = self.captured.owners.get
        owners = [NO_OWNER if item_id is None else owner_of(item_id, NO_OWNER) for item_id in self.history.ids_I]
        if SHARED in owners:
            for index, item in enumerate(self.history.items):
                if owners[index] == SHARED:
                    if item.id != item.tool_call_id:
                        self._refuse_shared(index)
                    owners[index] = NO_OWNER
        return owners

    def _refuse_shared(self, index: int) -> None:
        item_id = self.history.items[index].id
        calls = [
            self.captured.ids[position]
            for position, record in enumerate(self.captured.records)
            if any(item.id == item_id for item in record.output_items)
        ]
        raise SelectionError(
            Code.ITEM_IDENTITY_REUSED,
            f"expected item id {item_id!r} to be served by one call, got {', '.join(calls[:8])}",
            where=self.history.where(index),
            evidence={"item_index": index, "item_id": item_id, "calls": calls},
        )

    def _compared(self) -> list[tuple[Atom, ...]]:
        """Return the atoms of each item in the form in which they are compared."""
        if not self.options.changes_atoms:
            return self.history.atoms_I
        return [tuple(comparable(atoms, self.options)) or _NOTHING for atoms in self.history.atoms_I]

    def _drop_empties(self) -> None:
        """Leave out returned items that show nothing, where no choice depends on them.

        One without identity, in a run that shows something, is inside or beside some call's span whatever the
        reading; only a captured call that itself shows nothing could claim it.
        """
        dropped: set[int] = set()
        for start, end in self.history.runs():
            empties = [index for index in range(start, end) if self._atoms_I[index] == _NOTHING]
            if len(empties) < end - start:
                dropped.update(index for index in empties if self.owners_I[index] == NO_OWNER)
        self._leave_out(dropped)
        self._has_empties = _NOTHING in self._atoms_I

    def _leave_out(self, dropped: set[int]) -> None:
        if dropped:
            kept = [index for index in range(len(self.owners_I)) if index not in dropped]
            self.history = self.history.without(dropped)
            self.owners_I = [self.owners_I[index] for index in kept]
            self._atoms_I = [self._atoms_I[index] for index in kept]

    def bind_native(self, spans: dict[int, list[EnvelopeSpan]]) -> None:
        """Let each of these calls stand only inside the envelopes that name it."""
        self._native = spans
        self._restricted = self._restricted or bool(spans)

    # Contents

    def _bare_contents(self) -> dict[int, tuple[Any, ...]]:
        bare = ((position, without_reasoning(content)) for position, content in enumerate(self.contents) if content)
        return {position: content for position, content in bare if content}

    def _captured_tool_ids(self) -> frozenset[str]:
        return frozenset(
            atom.call_id
            for record in self.captured.records
            for item in record.output_items
            for atom in item.atoms or ()
            if atom.kind == "tool_call"
        )

    def _returned_tool_ids(self) -> frozenset[str]:
        return frozenset(atom.call_id for item in self.history.items for atom in item.atoms if atom.kind == "tool_call")

    def _make_views(self) -> list[_View]:
        return [self._atom_view(), self._fingerprint_view()] if self._foreign else [self._atom_view()]

    def _atom_view(self) -> _View:
        view = _View([], [0], [0], True, {}, {})
        keys, offsets, item_at = view.keys, view.offsets_I, view.item_at
        if all(map(_is_single, self._atoms_I)):
            keys.extend([atoms[0] for atoms in self._atoms_I])
            offsets.extend(range(1, len(keys) + 1))
            item_at.extend(offsets[1:])
        else:
            for index, atoms in enumerate(self._atoms_I):
                keys += atoms
                item_at += (-1,) * (len(atoms) - 1)
                item_at.append(index + 1)
                offsets.append(len(keys))
        return view

    def _fingerprint_view(self) -> _View:
        view = _View([], [0], [0], False, {}, {})
        for index, item in enumerate(self.history.items):
            if self._fingerprint is None:
                keys = [atoms_fingerprint((atom,)) for atom in item.atoms]
            else:
                keys = [self._fingerprint(self.history.raw[index])]
            view.keys.extend(keys)
            view.item_at.extend([-1] * (len(keys) - 1))
            view.item_at.append(index + 1)
            view.offsets_I.append(len(view.keys))
        return view

    def _indexed(self, view: _View) -> _View:
        """Return the view with its calls by content."""
        if view.indexed:
            return view
        view.indexed = True
        contents: Iterable[tuple[Any, ...] | None] = self.contents
        if self._foreign:
            contents = [content if _has_atoms(content) is view.of_atoms else None for content in self.contents]
        self._add_contents(view, contents)
        if self._bare and view.of_atoms:
            self._add_contents(view, [self._bare.get(position) for position in range(len(self.contents))])
            for calls in view.by_content.values():
                calls.sort()
        return view

    def _add_contents(self, view: _View, contents: Iterable[tuple[Any, ...] | None]) -> None:
        by_content, lengths = view.by_content, view.lengths
        for position, content in enumerate(contents):
            if content is None:
                continue
            calls = by_content.get(content)
            if calls is not None:
                calls.append(position)
                continue
            by_content[content] = [position]
            known = lengths.get(content[0])
            if known is None:
                lengths[content[0]] = [len(content)]
            elif len(content) not in known and len(known) <= _SLICES_PER_ITEM:
                known.append(len(content))

    def has_content(self, position: int, content: tuple[Any, ...]) -> bool:
        """Tell whether a call may be matched by this content."""
        return self.contents[position] == content or (bool(self._bare) and self._bare.get(position) == content)

    # Options

    def options_at(self, index: int) -> list[Option]:
        """Return the options at an item, nothing used yet."""
        if self._has_empties:
            return self._options_with_empties(index)
        owner = self.owners_I[index]
        if owner != NO_OWNER and self._plain:
            return self._options_of_owner(index, owner)
        found: list[Option] = []
        limit = self.history.run_ends_I[index]
        for view in map(self._indexed, self._views):
            start = view.offsets_I[index]
            first = view.keys[start]
            lengths = view.lengths.get(first)
            if lengths is None:
                continue
            if len(lengths) > _SLICES_PER_ITEM:
                raise self._undecided(index)
            last = view.offsets_I[limit]
            for length in lengths:
                stop = start + length
                if stop > last or view.item_at[stop] < 0:
                    continue
                content = (first,) if length == 1 else tuple(view.keys[start:stop])
                calls = view.by_content.get(content)
                if calls is not None:
                    end = view.item_at[stop]
                    if self._restricted:
                        calls = self._allowed(index, end, content, calls)
                    if calls:
                        found.append(Option(end, calls))
        return found

    def _options_of_owner(self, index: int, owner: int) -> list[Option]:
        """Return the option at an item that names its call: there is no other."""
        content, view = self.contents[owner], self._views[0]
        if content is None:
            return []
        start = view.offsets_I[index]
        stop = start + len(content)
        if stop > view.offsets_I[self.history.run_ends_I[index]]:
            return []
        end = view.item_at[stop]
        if end < 0 or tuple(view.keys[start:stop]) != content:
            return []
        if end - index > 1 and not {owner, NO_OWNER}.issuperset(self.owners_I[index:end]):
            return []
        if self._native and not _inside(self._native.get(owner), index):
            return []
        return [Option(end, [owner])]

    def _undecided(self, index: int) -> SelectionError:
        return SelectionError(
            Code.MATCH_UNDECIDED,
            f"expected calls that begin alike to end at {_SLICES_PER_ITEM} places at most, got more",
            where=self.history.where(index),
            evidence={"item_index": index},
        )

    def _options_with_empties(self, index: int) -> list[Option]:
        """Return the options where items that show nothing may stand inside or beside a call's span."""
        limit = self.history.run_ends_I[index]
        found: list[Option] = []
        for view in map(self._indexed, self._views):
            shown: list[Any] = []
            for item in range(index, limit):
                if self._atoms_I[item] != _NOTHING:
                    shown.extend(view.keys[view.offsets_I[item] : view.offsets_I[item + 1]])
                    if len(shown) > 1 and len(shown) > max(view.lengths.get(shown[0], [0])):
                        break
                content = tuple(shown) or self._empty_content(view)
                calls = view.by_content.get(content)
                if calls is not None:
                    calls = self._allowed(index, item + 1, content, calls)
                    if calls:
                        found.append(Option(item + 1, calls))
                        if len(found) > _SLICES_PER_ITEM:
                            raise self._undecided(index)
        return found

    def _empty_content(self, view: _View) -> tuple[Any, ...]:
        return (EMPTY,) if view is self._views[0] else (atoms_fingerprint((EMPTY,)),)

    def _allowed(self, index: int, end: int, content: tuple[Any, ...], calls: list[int]) -> list[int]:
        """Keep the calls that identity, envelopes and tool-call ids allow on items [index, end)."""
        for owner in self.owners_I[index:end]:
            if owner == NO_OWNER:
                continue
            if not self.has_content(owner, content):
                return []
            if len(calls) == 1 and calls[0] != owner:
                return []
            if len(calls) != 1:
                calls = [owner]
        if self._native:
            calls = self._inside_envelope(index, calls)
        if self.options.renamed_call_ids:
            if len(calls) > _SLICES_PER_ITEM:
                raise SelectionError(
                    Code.MATCH_UNDECIDED,
                    f"expected at most {_SLICES_PER_ITEM} calls that differ only in renamed ids, got {len(calls)}",
                    where=self.history.where(index),
                    evidence={"item_index": index},
                )
            kept = [call for call in calls if self.renames(index, end, call) is not None]
            calls = calls if len(kept) == len(calls) else kept
        return calls

    def _inside_envelope(self, index: int, calls: list[int]) -> list[int]:
        native = self._native
        if len(calls) == 1:
            return calls if _inside(native.get(calls[0]), index) else []
        kept = [call for call in calls if _inside(native.get(call), index)]
        return calls if len(kept) == len(calls) else kept

    def renames(self, index: int, end: int, call: int) -> tuple[tuple[str, str], ...] | None:
        """Return which returned tool-call id stands for which captured one, None where one may not."""
        captured_ids = [
            atom.call_id
            for item in self.captured.records[call].output_items
            for atom in item.atoms or ()
            if atom.kind == "tool_call"
        ]
        returned_ids = [
            atom.call_id for item in self.history.items[index:end] for atom in item.atoms if atom.kind == "tool_call"
        ]
        pairs = tuple(zip(returned_ids, captured_ids, strict=True))
        for returned, own in pairs:
            if returned != own and (returned in self.own_ids or own in self._returned_ids):
                return None
        return pairs

    # Context

    def drop_unmatched_runs(self) -> list[tuple[int, int]]:
        """Leave out the runs in which no call matches anywhere and no identity stands; never the last run."""
        runs = list(self.history.runs())
        dropped = [
            (start, end)
            for start, end in runs[:-1]
            if all(self.owners_I[item] == NO_OWNER and not self.options_at(item) for item in range(start, end))
        ]
        items = {item for start, end in dropped for item in range(start, end)}
        if items:
            self._leave_out(items)
            self._views = self._make_views()
        return dropped
