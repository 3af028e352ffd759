"""What a request only refers to: an earlier response, or single items of earlier replies.

Invariant: everything that is referred to is written out, in its place, or the request is refused; a client's own
request is never changed.

Not here: what the items mean (conversation), where captured conversations come from (the gateway).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from gristmill.canonical import JsonValue
from gristmill.captures.fields import list_at, text_at
from gristmill.captures.reply import Unexpected
from gristmill.errors import Code
from gristmill.gateway.dialects.responses.items import reply_token, response_id
from gristmill.gateway.front import HistoryOf, JsonObject, RequestRefused

__all__ = ["Referred", "referred", "responses_named"]

_PREVIOUS = "previous_response_id"


class Referred(NamedTuple):
    """The items of a request with what it refers to written out.

    Attributes:
        items: each with its place in the client's request.
        understood: the request that says so itself; the client's own where it refers to nothing.
        notes: what was written out.
    """

    items: Sequence[tuple[JsonValue, str]]
    understood: JsonObject
    notes: tuple[str, ...] = ()


def responses_named(body: JsonObject) -> tuple[str, ...]:
    """List the responses whose conversations `referred` may ask for, so that they can be read before."""
    given = body.get("input")
    items = cast("list[JsonValue]", given) if isinstance(given, list) else []
    tokens = [reply_token(name) for item in items if (name := _reference(item)) is not None]
    named = [body.get(_PREVIOUS), *(response_id(token) for token in tokens if token is not None)]
    return tuple(dict.fromkeys(name for name in named if isinstance(name, str)))


def referred(body: JsonObject, history_of: HistoryOf) -> Referred:
    """Write out what a request refers to.

    Raises:
        RequestRefused: `parameter_refused`: something is referred to that was not captured in this attempt.
        Unexpected: the input is none.
    """
    given: JsonValue = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    listed = list_at({"input": given}, "input", "$")
    previous = text_at(body, _PREVIOUS, "$")
    if listed is None and previous is None:
        raise Unexpected("a string or an array of items", "none", "$.input")
    placed = [(item, f"$.input[{index}]") for index, item in enumerate(listed or ())]
    notes: list[str] = []
    if previous is not None:
        history = history_of(previous)
        if history is None:
            message = f"no response {previous[:80]!r} was captured in this attempt"
            raise RequestRefused(400, Code.PARAMETER_REFUSED, message, f"$.{_PREVIOUS}")
        placed = [(item, f"$.{_PREVIOUS}[{index}]") for index, item in enumerate(history)] + placed
        notes.append(f"expanded:{_PREVIOUS}")
    if any(_is_reference(item) for item, _ in placed):
        placed = _resolved(placed, history_of)
        notes.append("expanded:item_reference")
    if not notes:
        return Referred(placed, body)
    kept = {name: value for name, value in body.items() if name != _PREVIOUS}
    return Referred(placed, {**kept, "input": [item for item, _ in placed]}, tuple(notes))


def _is_reference(item: JsonValue) -> bool:
    if not isinstance(item, dict):
        return False
    entry = cast(JsonObject, item)
    # The type may be left out: an id alone says nothing else.
    return entry.get("type") == "item_reference" or entry.keys() == {"id"}


def _reference(item: JsonValue) -> str | None:
    name = cast(JsonObject, item).get("id") if _is_reference(item) else None
    return name if isinstance(name, str) else None


def _resolved(placed: Iterable[tuple[JsonValue, str]], history_of: HistoryOf) -> list[tuple[JsonValue, str]]:
    """Put items in the place of their references: of the request itself, of its history, of any earlier reply."""
    known: dict[str, JsonValue] = {}
    made: list[tuple[JsonValue, str]] = []
    for item, where in placed:
        if not _is_reference(item):
            made.append((item, where))
            _learn(known, (item,))
            continue
        name = _reference(item)
        if name is not None and name not in known:
            token = reply_token(name)
            _learn(known, (history_of(response_id(token)) if token else None) or ())
        if name is None or name not in known:
            message = "the item is neither in this request before the reference nor in a reply of this attempt"
            raise RequestRefused(400, Code.PARAMETER_REFUSED, message, f"{where}.id")
        made.append((known[name], where))
    return made


def _learn(known: dict[str, JsonValue], items: Iterable[JsonValue]) -> None:
    for item in items:
        name = cast(JsonObject, item).get("id") if isinstance(item, dict) else None
        if isinstance(name, str):
            known[name] = item
