"""The authored items of a result, flat and in order, with the places where a call may not reach across.

Invariant: every authored item of every envelope is here exactly once per flattening, in the order returned. Repeated
snapshot items are left out only by identity, or in a second flattening that must agree with the first.

Not here: which call an item came from (candidates, readings).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import msgspec

from gristmill.atoms import Item, read_item, strip_transport
from gristmill.canonical import JsonValue, canonical_text
from gristmill.errors import Code, SelectionError
from gristmill.records import Atom
from gristmill.selection.result import Envelope

__all__ = ["EnvelopeSpan", "History", "read_histories"]

_Place = tuple[int, int, int]
IsIdentity = Callable[[Item], bool]


class EnvelopeSpan(msgspec.Struct, frozen=True, gc=False):
    """The authored items [start, end) that envelope number `envelope` holds."""

    envelope: int
    response_id: str | None
    start: int
    end: int


class History(msgspec.Struct):
    """Authored items in order.

    Attributes:
        items: the items, read; `atoms_I` and `ids_I` repeat what every later step asks them for.
        raw: the same items as returned.
        run_ends_I: per item, the index behind the last item of its run; no call reaches across that.
        envelopes: which items came from which envelope.
    """

    items: list[Item]
    atoms_I: list[tuple[Atom, ...]]
    ids_I: list[str | None]
    raw: list[JsonValue]
    run_ends_I: list[int]
    envelopes: list[EnvelopeSpan]
    places: list[_Place]
    sources: Sequence[Envelope]

    def where(self, index: int) -> str:
        """Return the JSON path of an item."""
        envelope, snapshot, position = self.places[index]
        return self.sources[envelope].item_where(snapshot, position)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the runs [start, end) of items between bounds and envelope ends."""
        start = 0
        while start < len(self.items):
            end = self.run_ends_I[start]
            yield start, end
            start = end

    def without(self, dropped: set[int]) -> History:
        """Return the history without some items; what was separated stays separated."""
        kept = [index for index in range(len(self.items)) if index not in dropped]
        new_index = {old: new for new, old in enumerate(kept)}
        below = [0] * (len(self.items) + 1)
        for index in range(len(self.items)):
            below[index + 1] = below[index] + (index in new_index)
        return History(
            [self.items[index] for index in kept],
            [self.atoms_I[index] for index in kept],
            [self.ids_I[index] for index in kept],
            [self.raw[index] for index in kept],
            [below[self.run_ends_I[index]] for index in kept],
            [EnvelopeSpan(e.envelope, e.response_id, below[e.start], below[e.end]) for e in self.envelopes],
            [self.places[index] for index in kept],
            self.sources,
        )


def read_histories(envelopes: Sequence[Envelope], is_identity: IsIdentity) -> tuple[History, History | None]:
    """Read the authored items of all envelopes.

    Args:
        envelopes: as read from the result.
        is_identity: tells whether an item's id names one captured call.

    Returns:
        The history, and a second one with repeated snapshot items kept where snapshots without identity leave it
        open whether they repeat (the first skips them then).

    Raises:
        SelectionError: `item_type_unsupported`, `output_malformed`, `item_too_deep`, `item_too_large`,
            `snapshot_item_conflict`.
    """
    skipping = _Flattening(envelopes, is_identity)
    open_question = False
    for number in range(len(envelopes)):
        open_question |= skipping.add_envelope(number, skip_repeats=True)
    if not open_question:
        return skipping.history, None
    keeping = _Flattening(envelopes, is_identity)
    for number in range(len(envelopes)):
        keeping.add_envelope(number, skip_repeats=False)
    return skipping.history, keeping.history


class _Flattening:
    """Builds one history out of envelopes and their snapshots."""

    def __init__(self, envelopes: Sequence[Envelope], is_identity: IsIdentity) -> None:
        self.history = History([], [], [], [], [], [], [], envelopes)
        self._is_identity = is_identity
        self._run_start = 0

    def add_envelope(self, number: int, *, skip_repeats: bool) -> bool:
        """Append one envelope; return True where skipping and keeping repeated items differ."""
        history = self.history
        source = history.sources[number]
        start = len(history.items)
        differs = False
        if source.transitions:
            differs = self._add_snapshots(number, skip_repeats=skip_repeats)
        else:
            self._add_items(number, source.snapshots[0])
        end = len(history.items)
        if end > self._run_start:
            self._end_run()
        history.envelopes.append(EnvelopeSpan(number, source.response_id, start, end))
        return differs

    def _read(self, number: int, snapshot: int, position: int, value: JsonValue) -> Item:
        try:
            return read_item(value)
        except SelectionError as error:
            raise self._located(error, number, snapshot, position) from error

    def _located(self, error: SelectionError, number: int, snapshot: int, position: int) -> SelectionError:
        where = self.history.sources[number].item_where(snapshot, position) + error.where.removeprefix("$")
        evidence = {**error.evidence, "item_index": position}
        return SelectionError(error.code, error.message, where=where, evidence=evidence)

    def _add_items(self, number: int, raw: Sequence[JsonValue]) -> None:
        """Append the items of an envelope without snapshots: the path that almost every result takes."""
        history = self.history
        items, add_raw, add_place = history.items, history.raw.append, history.places.append
        add_atoms, add_id = history.atoms_I.append, history.ids_I.append
        position = 0
        try:
            for position, value in enumerate(raw):
                item = read_item(value)
                if item.authored:
                    items.append(item)
                    add_atoms(item.atoms)
                    add_id(item.id)
                    add_raw(value)
                    add_place((number, 0, position))
                elif not item.tool_result and len(items) > self._run_start:
                    self._end_run()
        except SelectionError as error:
            raise self._located(error, number, 0, position) from error

    def _end_run(self) -> None:
        run_ends, end = self.history.run_ends_I, len(self.history.items)
        run_ends += (end,) * (end - self._run_start)
        self._run_start = end

    def _add_snapshots(self, number: int, *, skip_repeats: bool) -> bool:
        history = self.history
        seen: dict[str, Item] = {}
        differs = False
        previous: list[Item] = []
        previous_raw: Sequence[JsonValue] = ()
        for index, raw in enumerate(history.sources[number].snapshots):
            items = [self._read(number, index, position, value) for position, value in enumerate(raw)]
            begin = 0
            if previous and self._begins_with(items, raw, previous, previous_raw):
                repeated = (*previous, *items[: len(previous)])
                differs |= not all(item.authored and self._is_identity(item) for item in repeated)
                begin = len(previous) if skip_repeats else 0
            for position in range(begin, len(items)):
                item = items[position]
                if not item.authored:
                    if not item.tool_result and len(history.items) > self._run_start:
                        self._end_run()
                elif not self._was_seen(item, seen, number, index, position):
                    history.items.append(item)
                    history.atoms_I.append(item.atoms)
                    history.ids_I.append(item.id)
                    history.raw.append(raw[position])
                    history.places.append((number, index, position))
            previous, previous_raw = items, raw
        return differs

    def _begins_with(
        self,
        items: Sequence[Item],
        raw: Sequence[JsonValue],
        previous: Sequence[Item],
        previous_raw: Sequence[JsonValue],
    ) -> bool:
        """Tell whether a snapshot begins with all items of the one before; ids that name no call make no difference."""
        if len(items) < len(previous):
            return False
        for position, before in enumerate(previous):
            now = items[position]
            if now.authored != before.authored or now.atoms != before.atoms:
                return False
            if now.id != before.id and self._is_identity(now) and self._is_identity(before):
                return False
            if not now.authored and _visible(raw[position]) != _visible(previous_raw[position]):
                return False
        return True

    def _was_seen(self, item: Item, seen: dict[str, Item], number: int, index: int, position: int) -> bool:
        if item.id is None or not self._is_identity(item):
            return False
        earlier = seen.setdefault(item.id, item)
        if earlier is item:
            return False
        if earlier.atoms != item.atoms:
            raise SelectionError(
                Code.SNAPSHOT_ITEM_CONFLICT,
                f"expected item {item.id!r} to be the same in every snapshot, got two contents",
                where=self.history.sources[number].item_where(index, position),
                evidence={"item_id": item.id},
            )
        return True


def _visible(value: JsonValue) -> str:
    return canonical_text(strip_transport(cast(Mapping[str, JsonValue], value)))
