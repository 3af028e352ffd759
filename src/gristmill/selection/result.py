"""A harness's result, read once: what it names, and the envelopes that hold its history.

Invariant: every access to the result's JSON checks the type first; anything else than expected is `output_malformed`
with its path, never a Python error. Step numbers are those of docs/reference/selection.md.

Not here: what the items mean (atoms, history) and which calls they are (returned_history).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

import msgspec

from gristmill.canonical import JsonValue, RepeatedKeys, json_kind
from gristmill.errors import Code, SelectionError

__all__ = ["Envelope", "Reference", "ReturnedResult", "read_returned_result"]


_RESPONSE: Final = -1
_MESSAGES: Final = -2


class Reference(msgspec.Struct, frozen=True):
    """One captured call as the returned trajectory names it."""

    where: str
    response_id: str | None
    model_call_id: str | None
    choice_index: int | None

    def describe(self) -> str:
        """Name the reference by its keys, for messages."""
        keys = [
            f"{name} {value!r}"
            for name, value in (
                ("response_id", self.response_id),
                ("model_call_id", self.model_call_id),
                ("choice_index", self.choice_index),
            )
            if value is not None
        ]
        return ", ".join(keys) or "no key"


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """One response object inside a result, its items not yet read.

    Attributes:
        index: its place in `responses`; `_RESPONSE` or `_MESSAGES` for the other two forms.
        snapshots: one list of raw items, or several where the envelope holds transitions.
    """

    index: int
    response_id: str | None
    snapshots: tuple[Sequence[JsonValue], ...]
    transitions: bool = False

    @property
    def where(self) -> str:
        """The envelope's JSON path."""
        return _where(self.index)

    def item_where(self, snapshot: int, position: int) -> str:
        """Return the JSON path of an item."""
        if self.index == _MESSAGES:
            return f"$.messages[{position}]"
        middle = f"[{snapshot}]" if self.transitions else ""
        return f"{self.where}.output{middle}[{position}]"


def _where(index: int) -> str:
    return {_RESPONSE: "$.response", _MESSAGES: "$.messages"}.get(index, f"$.responses[{index}]")


class ReturnedResult(msgspec.Struct, frozen=True):
    """What a result says: the scored and declared ids, references (None if it has none), whether it has content."""

    body: Mapping[str, JsonValue]
    scored_response_id: str | None
    declared_response_id: str | None
    references: tuple[Reference, ...] | None
    has_content: bool

    def envelopes(self) -> tuple[Envelope, ...]:
        """Read the envelopes up to their raw items (step 5).

        Raises:
            SelectionError: `output_malformed`, `sessions_mixed`, `output_missing`.
        """
        return _envelopes(self.body)


def malformed(where: str, expected: str, got: object) -> SelectionError:
    """Build the refusal for a JSON value of the wrong type."""
    return SelectionError(Code.OUTPUT_MALFORMED, f"expected {expected}, got {json_kind(got)}", where=where)


def _object(value: JsonValue, where: str) -> Mapping[str, JsonValue]:
    kind = value.__class__
    if kind is dict:
        return value
    if isinstance(value, RepeatedKeys) or not isinstance(value, Mapping):
        raise malformed(where, "an object with unique keys", value)
    return cast(Mapping[str, JsonValue], value)


def _optional_string(value: JsonValue, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise malformed(where, "a string or null", value)


def read_returned_result(result: JsonValue) -> ReturnedResult:
    """Read what a result names (steps 2 and 3); its envelopes are read on demand.

    Raises:
        SelectionError: `output_malformed`, `references_partial`, `reference_contradictory`.
    """
    body = _object(result, "$")
    response = body.get("response")
    scored = None
    if response is not None:
        scored = _optional_string(_object(response, "$.response").get("id"), "$.response.id")
    declared = _optional_string(body.get("terminal_response_id"), "$.terminal_response_id")
    has_content = any(key in body for key in ("response", "responses", "messages"))
    return ReturnedResult(body, scored, declared, _references(body), has_content)


# References


def _references(body: Mapping[str, JsonValue]) -> tuple[Reference, ...] | None:
    trajectory = body.get("ng_trajectory")
    first = None
    if trajectory is not None:
        named = _object(trajectory, "$.ng_trajectory")
        first = _trajectory_references(named.get("turns"), "$.ng_trajectory.turns")
    other = body.get("trajectory")
    second = None
    if isinstance(other, Mapping):
        turns = cast(Mapping[str, JsonValue], other).get("turns")
        if isinstance(turns, list):
            second = _trajectory_references(cast(JsonValue, turns), "$.trajectory.turns")
    if first is not None and second is not None and _keys(first) != _keys(second):
        raise SelectionError(
            Code.REFERENCE_CONTRADICTORY,
            "expected `ng_trajectory` and `trajectory` to reference the same calls, got two lists",
            where="$.trajectory",
            evidence={
                "ng_trajectory": [reference.describe() for reference in first],
                "trajectory": [reference.describe() for reference in second],
            },
        )
    return first if first is not None else second


def _keys(references: Sequence[Reference]) -> list[tuple[str | None, str | None, int | None]]:
    return [(item.response_id, item.model_call_id, item.choice_index) for item in references]


def _trajectory_references(turns: JsonValue, where: str) -> tuple[Reference, ...] | None:
    if turns is None:
        return None
    if not isinstance(turns, list):
        raise malformed(where, "an array of turns", turns)
    references: list[Reference] = []
    silent: list[str] = []
    for index, raw in enumerate(cast(list[JsonValue], turns)):
        place = f"{where}[{index}]"
        calls = _object(raw, place).get("model_calls")
        if calls is None:
            calls = []
        if not isinstance(calls, list):
            raise malformed(place + ".model_calls", "an array of references", calls)
        if not calls:
            silent.append(place)
        for number, call in enumerate(cast(list[JsonValue], calls)):
            references.append(_reference(call, f"{place}.model_calls[{number}]"))
    if not references:
        return None
    if silent:
        raise SelectionError(
            Code.REFERENCES_PARTIAL,
            f"expected every turn to reference its model calls, got {len(silent)} turn(s) without references",
            where=silent[0],
            evidence={"turns_without": silent},
        )
    return tuple(references)


def _reference(raw: JsonValue, where: str) -> Reference:
    value = _object(raw, where)
    choice = value.get("choice_index")
    if choice is not None and (not isinstance(choice, int) or isinstance(choice, bool) or not 0 <= choice < 2**31):
        raise malformed(where + ".choice_index", "an index or null", choice)
    return Reference(
        where,
        _optional_string(value.get("response_id"), where + ".response_id"),
        _optional_string(value.get("model_call_id"), where + ".model_call_id"),
        choice,
    )


# Envelopes


def _envelopes(body: Mapping[str, JsonValue]) -> tuple[Envelope, ...]:
    responses = body.get("responses")
    if responses is not None and not isinstance(responses, list):
        raise malformed("$.responses", "an array of envelopes", responses)
    response, messages = body.get("response"), body.get("messages")
    if responses:
        sources = list(enumerate(cast(list[JsonValue], responses)))
    elif response is not None and ("output" in response or messages is None):
        sources = [(_RESPONSE, response)]
    elif messages is not None:
        if not isinstance(messages, list):
            raise malformed("$.messages", "an array of messages", messages)
        return (Envelope(_MESSAGES, None, (cast(list[JsonValue], messages),)),)
    else:
        raise SelectionError(
            Code.OUTPUT_MISSING, "expected `response`, `responses`, `messages` or references, got none of them"
        )
    _check_sessions(sources)
    return tuple([_envelope(value, index) for index, value in sources])


def _check_sessions(sources: Sequence[tuple[int, JsonValue]]) -> None:
    sessions: dict[str | None, int] = {}
    for index, raw in sources:
        kind = raw.__class__
        value: Mapping[str, JsonValue] = raw if kind is dict else _object(raw, _where(index))
        metadata = value.get("metadata")
        session = None if metadata is None else _session(metadata, _where(index) + ".metadata")
        if session not in sessions:
            sessions[session] = index
    if len(sessions) > 1:
        named = [f"{_where(index)} has {session!r}" for session, index in sessions.items()]
        raise SelectionError(
            Code.SESSIONS_MIXED,
            f"expected one session over all envelopes, got {len(sessions)}: {', '.join(named[:4])}",
            where=_where(list(sessions.values())[1]),
            evidence={"sessions": list(sessions)},
        )


def _session(metadata: JsonValue, where: str) -> str | None:
    return _optional_string(_object(metadata, where).get("session_id"), where + ".session_id")


def _envelope(value: Mapping[str, JsonValue], index: int) -> Envelope:
    response_id, output = value.get("id"), value.get("output")
    if response_id is not None and type(response_id) is not str:
        raise malformed(_where(index) + ".id", "a string or null", response_id)
    if not isinstance(output, list):
        found = "no `output`" if "output" not in value else malformed("", "", output).message.partition("got ")[2]
        raise SelectionError(
            Code.OUTPUT_MISSING, f"expected an array of items, got {found}", where=_where(index) + ".output"
        )
    items = cast(list[JsonValue], output)
    transitions = value.get("contains_transitions")
    if transitions is None or transitions is False:
        return Envelope(index, response_id, (items,))
    if transitions is not True:
        raise malformed(_where(index) + ".contains_transitions", "a boolean or null", transitions)
    for number, snapshot in enumerate(items):
        if not isinstance(snapshot, list):
            raise malformed(f"{_where(index)}.output[{number}]", "an array of items (a snapshot)", snapshot)
    return Envelope(index, response_id, tuple(cast(list[list[JsonValue]], items)), True)
