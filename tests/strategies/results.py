"""What harnesses hand back: one envelope or many, snapshots, message histories, references, a declared terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.strategies.draws import Draws
from tests.strategies.forests import Forest
from tests.strategies.replies import Piece, environment, wire_items

__all__ = ["Returned", "returned"]

Wire = dict[str, Any]


@dataclass
class Returned:
    """A result, and how it was made.

    Attributes:
        result: plain JSON.
        shape: which of the forms it has.
        terminal: response id of the call that the harness scored.
        faithful: whether the form by itself keeps what the harness did; cumulative envelopes do only with item ids.
        renamed: tool-call ids were renamed on the way back.
    """

    result: Wire
    shape: str
    terminal: str
    faithful: bool = True
    renamed: bool = False
    trail: list[tuple[str | None, list[Wire]]] = field(default_factory=list)


def _fits_one_message(pieces: Sequence[Piece]) -> bool:
    order = {"reasoning": 0, "text": 1, "tool": 2, "empty": 3}
    kinds = [piece.kind for piece in pieces]
    texts = kinds.count("text") <= 1 and kinds.count("reasoning") <= 1
    return texts and kinds == sorted(kinds, key=order.__getitem__) and ("empty" not in kinds or len(kinds) == 1)


def _returned_ids(pieces: Sequence[Piece], policy: str, draws: Draws, number: int) -> list[Piece]:
    made: list[Piece] = []
    for index, piece in enumerate(pieces):
        kept = policy == "kept" or (policy == "some" and draws.chance(50))
        other = f"x{number}_{index}" if policy == "minted" else None
        made.append(replace(piece, item_id=piece.item_id if kept else other))
    return made


def returned(draws: Draws, forest: Forest, *, rename: bool = False) -> Returned:
    """Hand back the truth of a forest in one of the forms that harnesses use; `rename` renames its tool-call ids."""
    truth = forest.truth
    one_message = all(_fits_one_message(forest.call(name).pieces) for name in truth)
    shapes = ["response", "response", "native", "harness", "chunks", "snapshots", "cumulative_snapshots", "references"]
    shapes += ["chat", "messages", "chat", "messages"] if one_message else []
    shapes += ["cumulative"] if draws.chance(30) else []
    shape = draws.pick(shapes)
    dialect = shape if shape in {"chat", "messages"} else "responses"
    kinds = ("dropped", "some") if forest.habits.terse else ("kept", "kept", "dropped", "some", "minted")
    ids = draws.pick(kinds)
    rename = rename or (draws.chance(6) and forest.habits.tool_ids == "unique")
    trail: list[tuple[str | None, list[Wire]]] = []
    last_tool = "t"
    for number, event in enumerate(forest.events):
        if event.call is None:
            trail.append((None, [environment(event.kind, dialect, last_tool)]))
            continue
        pieces = _returned_ids(forest.call(event.call).pieces, ids, draws, number)
        last_tool = next((piece.call_id for piece in pieces if piece.call_id), "t")
        if rename:
            pieces = [replace(p, call_id=f"n{number}_{p.call_id}") if p.call_id else p for p in pieces]
        trail.append((event.call, wire_items(pieces, dialect, draws)))
    made = Returned({}, shape, "", trail=trail)
    made.renamed = rename and any(p.kind == "tool" for name in truth for p in forest.call(name).pieces)
    _fill(draws, forest, made, identified=ids == "kept" and forest.habits.item_ids == "unique")
    return made


def _fill(draws: Draws, forest: Forest, made: Returned, *, identified: bool) -> None:
    truth, shape, result = forest.truth, made.shape, made.result
    named = draws.chance(30)
    scored = draws.pick(truth) if named and draws.chance(20) else truth[-1]
    made.terminal = forest.call(scored).response_id
    declared = draws.chance(25)
    items = [item for _, wire in made.trail for item in wire]
    if shape == "references":
        result.update(_references(draws, forest))
    elif shape in {"chat", "messages"}:
        result["messages"] = items
        if named and draws.chance(40):
            result["response"] = {"id": made.terminal}
    elif shape == "response":
        result["response"] = {"id": made.terminal if named else draws.pick(("h", None)), "output": items}
    elif shape.endswith("snapshots"):
        result["response"] = _snapshots(draws, made, shape.startswith("cumulative"))
        if named:
            result["response"]["id"] = made.terminal
    else:
        result["responses"] = _envelopes(draws, forest, made)
        if shape == "cumulative":
            made.faithful = identified and len(made.result["responses"]) > 1
        if named:
            result["response"] = {"id": made.terminal}
    said = shape != "references" and isinstance(result.get("response"), dict) and result["response"].get("id")
    if said != made.terminal and not declared and scored != truth[-1]:
        declared = True
    if declared:
        result["terminal_response_id"] = made.terminal
    if shape not in {"references", "cumulative"} and draws.chance(20):
        result.update(_references(draws, forest))


def _snapshots(draws: Draws, made: Returned, cumulative: bool) -> Wire:
    snapshots: list[list[Wire]] = []
    current: list[Wire] = []
    mint = cumulative and draws.chance(20)
    for call, wire in made.trail:
        current = [*current, *wire]
        if call is not None and draws.chance(60):
            snapshots.append(current)
            current = [_minted(item, draws) for item in current] if mint else current if cumulative else []
    if not cumulative or not snapshots or len(snapshots[-1]) < len(current):
        snapshots.append(current)
    return {"id": draws.pick(("h", None)), "contains_transitions": True, "output": snapshots}


def _minted(item: Wire, draws: Draws) -> Wire:
    """Give an item an id that no call served, as a harness does that stores every snapshot anew."""
    return {**item, "id": f"m{draws.count(0, 999)}"} if draws.chance(80) else item


def _envelopes(draws: Draws, forest: Forest, made: Returned) -> list[Wire]:
    groups: list[tuple[list[str], list[Wire]]] = [([], [])]
    for call, wire in made.trail:
        names, items = groups[-1]
        items.extend(wire)
        if call is not None:
            names.append(call)
            if made.shape in {"native", "harness"} or draws.chance(40):
                groups.append(([], []))
    if not groups[-1][0]:
        rest = groups.pop()[1]
        if groups and rest:
            groups[-1][1].extend(rest)
    envelopes: list[Wire] = []
    history: list[Wire] = []
    for number, (names, items) in enumerate(groups):
        history = [*history, *items]
        native = made.shape == "native" or (made.shape == "chunks" and draws.chance(40))
        response_id = forest.call(names[-1]).response_id if native else f"h{number}"
        output = history if made.shape == "cumulative" else items
        envelope: Wire = {"id": response_id, "output": list(output)}
        envelopes.append(envelope)
    if draws.chance(20):
        for envelope in envelopes:
            envelope["metadata"] = {"session_id": "s"}
    return envelopes


def _references(draws: Draws, forest: Forest) -> Wire:
    kind = draws.pick(("response", "call", "both"))
    turns: list[Wire] = []
    for name in forest.truth:
        call = forest.call(name)
        reference: Wire = {}
        if kind != "call":
            reference["response_id"] = call.response_id
            several = sum(other.response_id == call.response_id for other in forest.calls) > 1
            if several and (kind == "response" or draws.chance(50)):
                reference["choice_index"] = call.choice
        if kind != "response":
            reference["model_call_id"] = call.name
        if turns and draws.chance(25):
            turns[-1]["model_calls"].append(reference)
        else:
            turns.append({"model_calls": [reference]})
    where = draws.pick(("ng_trajectory", "trajectory", "both"))
    names = ("ng_trajectory", "trajectory") if where == "both" else (where,)
    return {key: {"turns": turns} for key in names}
