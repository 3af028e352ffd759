"""Sampled token ids, prompt ids and log-probabilities of one choice, wherever an engine puts them.

Invariant: ids come from the first place that has a complete list (capture.md §3), whole and unchanged. A list
with a hole, or an entry that is no integer, is no list. There is no tokenisation here, and none anywhere
else.

Not here: whether ids, log-probabilities and reported counts agree (choices), whether values are in range
(tokens).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from gristmill.canonical import JsonValue
from gristmill.captures.fields import JsonObject, number
from gristmill.errors import Code
from gristmill.tokens.check import FloatList, IntList

__all__ = ["FastLogprobs", "IdSearch", "SlimLogprobs", "logprob_values", "prompt_ids", "sampled_ids"]

_PLACEHOLDER: Final = "token_id:"
_token_placeholder = re.compile(rf"{_PLACEHOLDER}(\d{{1,18}})\Z", re.ASCII)


class _FastLogprob(msgspec.Struct, gc=False):
    logprob: float


class FastLogprobs(msgspec.Struct):
    """A `logprobs` field decoded for its numbers alone."""

    content: list[_FastLogprob] | None = None
    token_logprobs: list[float | None] | None = None


class SlimLogprobs:
    """The entries of a `logprobs.content` list reduced to what is read of them: a number and, where given, an id."""

    __slots__ = ("ids", "values")

    def __init__(self) -> None:
        self.values: list[float] = []
        self.ids: list[JsonValue] = []

    def extend(self, entries: list[JsonValue]) -> None:
        """Add entries; one that is no object, or whose number is none, becomes NaN."""
        for entry in entries:
            said: JsonObject = entry if entry.__class__ is dict else _object(entry)
            value = said.get("logprob")
            self.values.append(value if type(value) is float else number(value))
            stated = said.get("token_id")
            self.ids.append(_entry_id(said.get("token")) if stated is None else stated)


class IdSearch(msgspec.Struct, frozen=True):
    """Outcome of looking for ids: the list, or why there is none."""

    ids: Sequence[int] | None = None
    reason: Code | None = None
    detail: str | None = None


def _member(value: JsonValue, key: str) -> JsonValue:
    return cast(JsonObject, value).get(key) if isinstance(value, dict) else None


def _object(value: JsonValue) -> JsonObject:
    return cast(JsonObject, value) if isinstance(value, dict) else {}


def _elements(value: JsonValue) -> list[JsonValue]:
    return cast("list[JsonValue]", value) if isinstance(value, list) else []


def _entry_id(entry: JsonValue) -> JsonValue:
    """Return the id in `token: "token_id:N"`, None where it is a token's text."""
    if not isinstance(entry, str) or not entry.startswith(_PLACEHOLDER):
        return None
    match = _token_placeholder.match(entry)
    return int(match.group(1)) if match else None


def _all_ints(values: list[Any]) -> bool:
    """Tell whether every value is an integer, booleans not counted; a set of the types would take twice as long."""
    return type(values) is IntList or list(map(type, values)).count(int) == len(values)


def _places(choice: Mapping[str, JsonValue], root: Mapping[str, JsonValue], index: int) -> Iterator[tuple[str, Any]]:
    """Name every place that may hold sampled ids, in order of precedence."""
    yield "token_ids", choice.get("token_ids")
    yield "response_token_ids", choice.get("response_token_ids")
    per_choice = _elements(_member(root.get("sglext"), "output_ids"))
    yield "sglext.output_ids", per_choice[index] if 0 <= index < len(per_choice) else None
    for holder in (choice, choice.get("message")):
        extra = _member(holder, "provider_specific_fields")
        for key in ("token_ids", "response_token_ids", "completion_token_ids", "output_token_ids"):
            yield f"provider_specific_fields.{key}", _member(extra, key)
    raw = choice.get("raw_output")
    yield "raw_output.completion_token_ids", _member(raw, "completion_token_ids")
    yield "raw_output.token_ids", _member(raw, "token_ids")
    scored = _member(choice.get("meta_info"), "output_token_logprobs")
    # An empty list of entries proves nothing: that nothing was sampled is for ids or usage to say.
    if isinstance(scored, list) and scored:
        yield "meta_info.output_token_logprobs", [_at(entry, 1) for entry in _elements(scored)]
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, SlimLogprobs):
        if logprobs.ids:
            yield "logprobs.content", logprobs.ids
        return
    content = _member(logprobs, "content")
    if isinstance(content, list) and content:
        entries = _elements(content)
        yield "logprobs.content[].token_id", [_member(entry, "token_id") for entry in entries]
        yield "logprobs.content[].token", [_entry_id(_member(entry, "token")) for entry in entries]
    tokens = _member(logprobs, "tokens")
    if isinstance(tokens, list) and tokens:
        yield "logprobs.tokens", [_entry_id(token) for token in _elements(tokens)]


def _at(entry: JsonValue, position: int) -> JsonValue:
    elements = _elements(entry)
    return elements[position] if position < len(elements) else None


def sampled_ids(
    choice: Mapping[str, JsonValue], root: Mapping[str, JsonValue], index: int, expected: int | None
) -> IdSearch:
    """Find the sampled ids of one choice.

    Args:
        choice: the choice's own object.
        root: the reply it stands in.
        index: the choice's index.
        expected: how many there must be, where the reply says so: a list of another length is not complete,
            and is taken only if no place has one of this length, so that the disagreement can be reported.
    """
    other_length: Sequence[int] | None = None
    reason, detail = Code.TOKEN_IDS_MISSING, "the reply has no token_ids"
    for place, value in _places(choice, root, index):
        if not isinstance(value, list):
            continue
        ids = cast("list[Any]", value)
        if _all_ints(ids):
            if expected is None or len(ids) == expected:
                return IdSearch(ids)
            other_length = ids if other_length is None else other_length
        elif set(map(type, ids)) <= {int, type(None)}:
            if ids.count(None) < len(ids) and reason is Code.TOKEN_IDS_MISSING:
                detail = f"the token_ids under {place} have holes: {ids.count(None)} of {len(ids)} are missing"
        elif reason is Code.TOKEN_IDS_MISSING:
            reason, detail = Code.TOKEN_ID_INVALID, f"{place} holds something that is not an integer"
    if other_length is not None:
        return IdSearch(other_length)
    return IdSearch(None, reason, detail)


def prompt_ids(choice: Mapping[str, JsonValue], root: Mapping[str, JsonValue]) -> Sequence[int] | None:
    """Find the prompt's ids: root, `sglext.input_ids`, choice, `raw_output`; None where none is complete."""
    places = (
        root.get("prompt_token_ids"),
        _member(root.get("sglext"), "input_ids"),
        choice.get("prompt_token_ids"),
        _member(choice.get("raw_output"), "prompt_token_ids"),
        _member(root.get("raw_output"), "prompt_token_ids"),
    )
    for value in places:
        if isinstance(value, list):
            ids = cast("list[Any]", value)
            if _all_ints(ids):
                return ids
    return None


def logprob_values(choice: Mapping[str, JsonValue]) -> Sequence[float] | None:
    """Return one choice's log-probabilities in nats, NaN where an entry is no number, None without any."""
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, FastLogprobs):
        if logprobs.content is not None:
            return FloatList([entry.logprob for entry in logprobs.content])
        values = logprobs.token_logprobs
        return None if values is None else [number(value) for value in values]
    if isinstance(logprobs, SlimLogprobs):
        return logprobs.values
    content = _member(logprobs, "content")
    if isinstance(content, list):
        return [number(_member(entry, "logprob")) for entry in _elements(content)]
    flat = _member(logprobs, "token_logprobs")
    if isinstance(flat, list):
        return [number(value) for value in _elements(flat)]
    scored = _member(choice.get("meta_info"), "output_token_logprobs")
    if isinstance(scored, list):
        return [number(_at(entry, 0)) for entry in _elements(scored)]
    return None
