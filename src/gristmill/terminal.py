"""Which captured call was scored, and on what evidence.

Invariant: a call is named only by witnesses that agree; each witness abstains rather than guesses, a contradiction
names nobody, and `resolve_terminal` never raises. The trail of witnesses is kept either way.

Not here: what is done without a scored call (the policies).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import msgspec

from gristmill.atoms import EMPTY, Item, read_item
from gristmill.canonical import JsonValue
from gristmill.errors import Code, SelectionError
from gristmill.fingerprint import atoms_fingerprint
from gristmill.interchange import interchange_groups
from gristmill.lineage import NO_PARENT, Forest

__all__ = ["Attribution", "Witness", "resolve_terminal"]

_EMPTY_PRINT: Final = atoms_fingerprint((EMPTY,))

Fingerprint = Callable[[JsonValue], str]


class Witness(msgspec.Struct, frozen=True):
    """What one witness says: the calls that it names, and why it names none or several."""

    name: str
    calls: tuple[str, ...]
    says: str


class Attribution(msgspec.Struct, frozen=True):
    """The scored call, or why none is named.

    Attributes:
        position: the call's position in commit order; None where nobody is named.
        code: None, `terminal_unattributed` or `witness_disagreement`.
        trail: every witness that was asked.
    """

    position: int | None
    model_call_id: str | None
    response_id: str | None
    code: Code | None
    trail: tuple[Witness, ...]

    def evidence(self) -> dict[str, Any]:
        """Give the trail as JSON-able evidence."""
        return {"witnesses": [msgspec.structs.asdict(witness) for witness in self.trail]}


def resolve_terminal(
    records: Sequence[Any],
    response: JsonValue,
    *,
    declared_response_id: str | None = None,
    lineage_walk: bool = False,
    fingerprint: Fingerprint | None = None,
) -> Attribution:
    """Name the scored call.

    Args:
        records: captured calls of one attempt in commit order.
        response: the scored response: an object with `id` and `output`, or with `messages`; None for none.
        declared_response_id: the response id that the harness says it kept; a miss or several calls stop everything.
        lineage_walk: with no witness at all, follow the earliest conversation to its one end.
        fingerprint: how the records' fingerprints were made, if not by us.
    """
    return _Inquiry(records, fingerprint).attribute(response, declared_response_id, lineage_walk)


class _Inquiry:
    def __init__(self, records: Sequence[Any], fingerprint: Fingerprint | None) -> None:
        self.records = records
        self.fingerprint = fingerprint
        self.trail: list[Witness] = []

    def attribute(self, response: JsonValue, declared: str | None, lineage_walk: bool) -> Attribution:
        named: list[int] = []
        if declared is not None:
            found = self._by_response_id("declared", declared)
            if len(found) != 1:
                return self._nobody(Code.TERMINAL_UNATTRIBUTED)
            named.append(found[0])
        body: Mapping[str, JsonValue] = {}
        if isinstance(response, Mapping):
            body = cast(Mapping[str, JsonValue], response)
        response_id = body.get("id")
        by_id = self._by_response_id("response_id", response_id) if isinstance(response_id, str) else []
        if len(by_id) == 1:
            named.append(by_id[0])
        pool = self._by_content(body)
        alike = interchange_groups(self.records, pool, named)
        if len({alike.get(call, call) for call in pool}) == 1:
            # Collapse only towards a call that another witness names, or the group's own representative.
            named.append(next((call for call in named if call in pool), alike.get(pool[0], pool[0])))
        elif pool and named and not set(named) <= set(pool):
            return self._nobody(Code.WITNESS_DISAGREEMENT)
        if not named:
            asked = any(witness.calls for witness in self.trail)
            if lineage_walk and not asked:
                return self._walk()
            return self._nobody(Code.TERMINAL_UNATTRIBUTED)
        if len(set(named)) > 1:
            return self._nobody(Code.WITNESS_DISAGREEMENT)
        return self._somebody(named[0])

    def _somebody(self, position: int) -> Attribution:
        record = self.records[position]
        return Attribution(position, record.model_call_id, record.response_id, None, tuple(self.trail))

    def _nobody(self, code: Code) -> Attribution:
        return Attribution(None, None, None, code, tuple(self.trail))

    def _testify(self, name: str, calls: Sequence[int], says: str) -> None:
        self.trail.append(Witness(name, tuple(self.records[call].model_call_id for call in calls), says))

    def _by_response_id(self, name: str, response_id: str) -> list[int]:
        found = [index for index, record in enumerate(self.records) if record.response_id == response_id]
        counted = {0: "no captured call has it", 1: "one call has it"}.get(len(found), "several calls have it")
        self._testify(name, found, f"{response_id!r}: {counted}")
        return found

    # Content

    def _by_content(self, body: Mapping[str, JsonValue]) -> list[int]:
        try:
            items = self._items(body)
        except SelectionError as error:
            self._testify("content", (), f"cannot be read: {error.message}")
            return []
        trailing: list[str] = []
        for item in reversed(items):
            if item.key is None:
                break
            trailing.append(item.key)
        if not any(item.key for item in items):
            self._testify("content", (), "nothing that a model authored is returned")
            return []
        elements = _elements(items)
        whole = tuple(key for key, optional in elements if not optional)
        own = {whole, _shown(trailing[::-1])} - {()}
        contents = [_shown([item.fingerprint for item in record.output_items]) for record in self.records]
        pool = {index for index, content in enumerate(contents) if content in own}
        pool.update(self._continuing(contents, elements))
        found = sorted(pool)
        says = {0: "equals no call's output", 1: "equals one call's output"}.get(len(found), "equals several")
        self._testify("content", found, says)
        return found

    def _items(self, body: Mapping[str, JsonValue]) -> list[_Piece]:
        """Read the history: the fingerprint of each atom, and where the environment stands between them."""
        raw = body.get("output") if "output" in body else body.get("messages")
        if body.get("contains_transitions") is True and isinstance(raw, list) and raw:
            raw = cast(list[JsonValue], raw)[-1]
        if raw is None:
            return []
        if not isinstance(raw, list):
            raise SelectionError(Code.OUTPUT_MALFORMED, "expected an array of items")
        pieces: list[_Piece] = []
        for value in cast(list[JsonValue], raw):
            item = read_item(value)
            if item.authored:
                pieces.extend(_Piece(key) for key in self._prints(item, value))
            else:
                pieces.append(_Piece(None, not item.tool_result))
        return pieces

    def _prints(self, item: Item, value: JsonValue) -> list[str]:
        if self.fingerprint is not None:
            return [self.fingerprint(value)]
        return [atoms_fingerprint((atom,)) for atom in item.atoms]

    def _continuing(self, contents: Sequence[tuple[str, ...]], elements: Sequence[tuple[str, bool]]) -> list[int]:
        """Return the calls whose outputs, from the root to them, are the whole history.

        Every different beginning of a continuation gets a number, so each call is walked once.
        """
        forest = Forest(self.records)
        numbers: dict[tuple[int, str], int] = {}
        reached: dict[int, int] = {}
        for position in range(len(self.records)):
            path, end = forest.path_to_root(position) if position not in reached else ([], NO_PARENT)
            if end != NO_PARENT:
                continue
            for call in [*reversed(path), position]:
                if call in reached:
                    continue
                parent = forest.parents_C[call]
                number = reached[parent] if parent >= 0 else 0
                for key in contents[call]:
                    number = numbers.setdefault((number, key), len(numbers) + 1)
                reached[call] = number
        at = {0}
        for key, optional in elements:
            onward = {numbers[number, key] for number in at if (number, key) in numbers}
            at = at | onward if optional else onward
        return [call for call, number in reached.items() if number in at and contents[call]]

    # Lineage walk

    def _walk(self) -> Attribution:
        """Follow the earliest conversation that was continued; a lone call is its own end."""
        children = Forest(self.records).children()
        roots = children.get(NO_PARENT, [])
        extended = [root for root in roots if root in children]
        if len(self.records) == 1 and roots:
            extended = roots
        if not extended:
            self._testify("lineage_walk", roots, "no conversation was continued")
            return self._nobody(Code.TERMINAL_UNATTRIBUTED)
        position = extended[0]
        while position in children:
            following = children[position]
            surviving = [child for child in following if child in children] or following
            if len(surviving) != 1:
                self._testify("lineage_walk", surviving, "the conversation goes on in several calls")
                return self._nobody(Code.TERMINAL_UNATTRIBUTED)
            position = surviving[0]
        self._testify("lineage_walk", (position,), "the one end of the earliest conversation")
        return self._somebody(position)


class _Piece(NamedTuple):
    """One returned atom by its fingerprint; without key, what the environment put there, and whether it is a bound."""

    key: str | None
    bound: bool = False


def _shown(keys: Sequence[str]) -> tuple[str, ...]:
    """Drop what shows nothing, unless nothing else is there."""
    kept = tuple(key for key in keys if key != _EMPTY_PRINT)
    return kept or ((_EMPTY_PRINT,) if keys else ())


def _elements(pieces: Sequence[_Piece]) -> list[tuple[str, bool]]:
    """Return the authored atoms, and whether each may be passed over.

    What shows nothing may, beside something that shows; alone between bounds it stands for a call.
    """
    elements: list[tuple[str, bool]] = []
    run: list[str] = []
    for piece in (*pieces, _Piece(None, True)):
        if piece.key is not None:
            run.append(piece.key)
        elif piece.bound and run:
            alone = not any(key != _EMPTY_PRINT for key in run)
            elements.extend((key, key == _EMPTY_PRINT and not (alone and not index)) for index, key in enumerate(run))
            run = []
    return elements
