"""What goes wrong between an agent and its trainer: each mutation breaks a faithful case in one way.

A broken case has no known answer of its own; it is for the oracle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec

from gristmill.records import CallRecord
from tests.strategies.draws import Draws

__all__ = ["MUTATIONS", "mutate"]

Records = list[CallRecord]
Wire = dict[str, Any]


def mutate(draws: Draws, records: Records, result: Wire) -> tuple[str, Records, Wire]:
    """Break a case; return the name of what was done, and the new records and result."""
    name = draws.pick(tuple(MUTATIONS))
    broken = copy.deepcopy(result)
    records = list(records)
    MUTATIONS[name](draws, records, broken)
    return name, records, broken


def _lists(result: Wire) -> list[list[Any]]:
    """Find the lists that hold items."""
    found: list[list[Any]] = []
    envelopes = result.get("responses") or [result.get("response")]
    for envelope in envelopes:
        if isinstance(envelope, dict) and isinstance(envelope.get("output"), list):
            output = envelope["output"]
            found.extend([output] if not envelope.get("contains_transitions") else output)
    if isinstance(result.get("messages"), list):
        found.append(result["messages"])
    return [items for items in found if items]


def _items(draws: Draws, result: Wire) -> tuple[list[Any], int] | None:
    lists = _lists(result)
    if not lists:
        return None
    items = draws.pick(lists)
    return items, draws.count(0, len(items) - 1)


def _drop(draws: Draws, records: Records, result: Wire) -> None:
    if (place := _items(draws, result)) is not None:
        del place[0][place[1]]


def _repeat(draws: Draws, records: Records, result: Wire) -> None:
    if (place := _items(draws, result)) is not None:
        place[0].insert(draws.count(0, len(place[0])), copy.deepcopy(place[0][place[1]]))


def _swap(draws: Draws, records: Records, result: Wire) -> None:
    if (place := _items(draws, result)) is not None:
        items, first = place
        second = draws.count(0, len(items) - 1)
        items[first], items[second] = items[second], items[first]


def _edit(draws: Draws, records: Records, result: Wire) -> None:
    if (place := _items(draws, result)) is not None:
        item = place[0][place[1]]
        for key in ("arguments", "content"):
            if key in item:
                item[key] = draws.pick(("a", "b", "edited", " a "))
                break


def _synthetic(draws: Draws, records: Records, result: Wire) -> None:
    if (place := _items(draws, result)) is not None:
        said = {"role": "assistant", "content": draws.pick(("a", "b", "", "made up"))}
        place[0].insert(place[1], said)


def _bound(draws: Draws, records: Records, result: Wire) -> None:
    if (place := _items(draws, result)) is not None:
        place[0].insert(place[1], {"role": "user", "content": "and?"})


def _unsupported(draws: Draws, records: Records, result: Wire) -> None:
    if (place := _items(draws, result)) is not None:
        place[0].insert(place[1], {"type": draws.pick(("web_search_call", "brand_new")), "id": "w"})


def _item_id(draws: Draws, records: Records, result: Wire) -> None:
    ids = [item.id for record in records for item in record.output_items if item.id] or ["i"]
    if (place := _items(draws, result)) is not None:
        place[0][place[1]]["id"] = draws.pick(ids)


def _envelope(draws: Draws, records: Records, result: Wire) -> None:
    envelopes = result.get("responses") or [result.get("response")]
    envelope = draws.pick(envelopes)
    if isinstance(envelope, dict):
        what = draws.pick(("id", "session", "output", "empty"))
        if what == "id":
            envelope["id"] = draws.pick(records).response_id
        elif what == "session":
            envelope["metadata"] = {"session_id": "another"}
        elif what == "output":
            envelope["output"] = None
        else:
            envelope["output"] = []


def _envelope_twice(draws: Draws, records: Records, result: Wire) -> None:
    if result.get("responses"):
        result["responses"].append(copy.deepcopy(draws.pick(result["responses"])))


def _scored(draws: Draws, records: Records, result: Wire) -> None:
    response_id = draws.pick([*(record.response_id for record in records), "unknown"])
    if draws.chance(50):
        result["terminal_response_id"] = response_id
    else:
        result["response"] = {**(result.get("response") or {"output": []}), "id": response_id}


def _reference(draws: Draws, records: Records, result: Wire) -> None:
    turns = [
        turn
        for key in ("ng_trajectory", "trajectory")
        if isinstance(result.get(key), dict)
        for turn in result[key].get("turns", [])
    ]
    if not turns:
        picked = [draws.pick(records) for _ in range(draws.count(1, 3))]
        calls = [{"model_call_id": record.model_call_id} for record in picked]
        result["trajectory"] = {"turns": [{"model_calls": calls}]}
        return
    turn = draws.pick(turns)
    record = draws.pick(records)
    what = draws.pick(("unknown", "empty", "keyless", "other", "more", "choice"))
    changed = {
        "unknown": [{"response_id": "nobody"}],
        "empty": [],
        "keyless": [{}],
        "other": [{"response_id": record.response_id, "model_call_id": draws.pick(records).model_call_id}],
        "more": [*turn["model_calls"], {"model_call_id": record.model_call_id}],
        "choice": [{"response_id": record.response_id, "choice_index": draws.count(0, 1)}],
    }
    turn["model_calls"] = changed[what]


def _change(records: Records, index: int, **fields: Any) -> None:
    records[index] = msgspec.structs.replace(records[index], **fields)


def _parent(draws: Draws, records: Records, result: Wire) -> None:
    index = draws.count(0, len(records) - 1)
    _change(records, index, parent_call_id=draws.pick([*(record.model_call_id for record in records), "gone"]))


def _identity(draws: Draws, records: Records, result: Wire) -> None:
    index, other = draws.count(0, len(records) - 1), draws.pick(records)
    if draws.chance(50):
        _change(records, index, response_id=other.response_id)
    else:
        _change(records, index, model_call_id=other.model_call_id)


def _lost(draws: Draws, records: Records, result: Wire) -> None:
    if len(records) > 1:
        del records[draws.count(0, len(records) - 1)]


def _served(draws: Draws, records: Records, result: Wire) -> None:
    """Let a call have served what another call served."""
    index, other = draws.count(0, len(records) - 1), draws.pick(records)
    _change(records, index, output_items=other.output_items)


Mutation = Callable[[Draws, Records, Wire], None]

MUTATIONS: dict[str, Mutation] = {
    "drop": _drop,
    "repeat": _repeat,
    "swap": _swap,
    "edit": _edit,
    "synthetic": _synthetic,
    "bound": _bound,
    "unsupported": _unsupported,
    "item_id": _item_id,
    "envelope": _envelope,
    "envelope_twice": _envelope_twice,
    "scored": _scored,
    "reference": _reference,
    "parent": _parent,
    "identity": _identity,
    "lost": _lost,
    "served": _served,
}
