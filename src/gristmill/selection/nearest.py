"""Which captured call comes nearest to a returned item that nothing explains, and how it differs.

This is for people only: a nearest call is never taken as a match. The first difference is one of the canonical form,
with a class that names the usual cause.

Not here: matching (candidates).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from gristmill.atoms import EMPTY
from gristmill.records import Atom
from gristmill.selection.candidates import NO_OWNER, Matcher

__all__ = ["Miss", "describe_atom", "miss_evidence", "nearest_miss"]

_EXCERPT: Final = 40
_COMPARED_TEXT: Final = 400
_LIKE_ENOUGH: Final = 0.3
_WORDS: Final = frozenset({"text", "refusal", "reasoning"})


class Miss(msgspec.Struct, frozen=True):
    """The nearest captured call and its first difference from the returned items.

    `difference` is one of `text_edited whitespace_only unicode_form arguments_changed call_id_changed
    reasoning_missing reasoning_changed call_incomplete order_changed identity_conflict not_captured`.
    """

    difference: str
    model_call_id: str | None = None
    item_index: int | None = None
    returned: str | None = None
    captured: str | None = None


def describe_atom(atom: Atom) -> str:
    """Name an atom in a few words."""
    if atom.kind == "tool_call":
        named = f" {atom.name}" if atom.name else ""
        identity = f" (call id {atom.call_id})" if atom.call_id else ""
        return f"tool call{named}{identity} {_excerpt(atom.text, 0)}"
    if atom.kind == "empty":
        return "an assistant message that shows nothing"
    return f"{atom.kind.replace('_', ' ')} {_excerpt(atom.text, 0)}"


def _excerpt(text: str, around: int) -> str:
    start = max(0, around - _EXCERPT // 2)
    piece = text[start : start + _EXCERPT]
    return ("…" if start else "") + repr(piece) + ("…" if start + _EXCERPT < len(text) else "")


def _first_difference(first: str, second: str) -> int:
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def nearest_miss(matcher: Matcher, index: int, expected: Sequence[int] = ()) -> Miss:
    """Find the captured call nearest to the items from `index` on.

    Args:
        matcher: the matcher that found no option there.
        index: the first item that nothing explains.
        expected: the calls that a reference expected there.
    """
    end = matcher.history.run_ends_I[index]
    returned = [
        (item, atom) for item in range(index, end) for atom in matcher.history.items[item].atoms if atom != EMPTY
    ] or [(index, EMPTY)]
    owner = matcher.owners_I[index]
    pool: Iterable[int] = range(len(matcher.contents))
    if owner != NO_OWNER:
        pool = [owner]
    elif expected:
        pool = expected
    best: tuple[float, int] | None = None
    for position in pool:
        content = matcher.contents[position]
        if content is None or isinstance(content[0], str):
            continue
        score = _likeness(content, returned)
        if best is None or score > best[0]:
            best = (score, position)
    if best is None or (best[0] < _LIKE_ENOUGH and owner == NO_OWNER and not expected):
        return Miss("not_captured", None, index, describe_atom(returned[0][1]))
    return _compare(matcher, best[1], returned)


def _likeness(content: Sequence[Atom], returned: Sequence[tuple[int, Atom]]) -> float:
    """Score how much a call looks like the returned atoms: equal leading atoms, then the first that differs."""
    equal = 0
    for captured, (_, atom) in zip(content, returned, strict=False):
        if captured != atom:
            break
        equal += 1
    if equal == len(content) or equal == len(returned):
        return float(equal) + 1.0
    first, rest = content[equal], [atom for _, atom in returned[equal:]]
    later = sum(captured == atom for captured, atom in zip(content[equal + 1 :], rest[1:], strict=False))
    score = equal + max(_atom_likeness(first, rest[0]), 0.9 * later / len(content))
    if first.kind == "reasoning" and equal + 1 < len(content):
        score = max(score, equal + 0.9 * _atom_likeness(content[equal + 1], rest[0]))
    if rest[0].kind == "reasoning" and len(rest) > 1:
        score = max(score, equal + 0.9 * _atom_likeness(first, rest[1]))
    there = {atom for _, atom in returned}
    if len(content) > 1 and set(content) <= there:
        score = max(score, equal + 0.95)
    if any(atom.call_id and atom in there for atom in content if atom.kind == "tool_call"):
        # Nothing looks more like a call than its own tool call, id and all.
        score += 1.0
    return score


def _atom_likeness(first: Atom, second: Atom) -> float:
    if first == second:
        return 1.0
    score = _text_likeness(first.text, second.text)
    if first.kind != second.kind:
        return 0.6 * score if {first.kind, second.kind} <= _WORDS else 0.0
    if first.kind == "tool_call":
        if first.call_id and first.call_id == second.call_id:
            return 0.8 + 0.2 * score
        return 0.75 * score if first.name == second.name else 0.0
    return score


def _text_likeness(first: str, second: str) -> float:
    """Share of characters that two texts have in common at their beginning and end."""
    if first == second:
        return 1.0
    if unicodedata.normalize("NFKC", first) == unicodedata.normalize("NFKC", second):
        return 0.95
    first, second = first[:_COMPARED_TEXT], second[:_COMPARED_TEXT]
    longest = max(len(first), len(second))
    head = _first_difference(first, second)
    tail = _first_difference(first[head:][::-1], second[head:][::-1])
    stripped = 0.9 if first.strip() and first.strip() == second.strip() else 0.0
    return max(stripped, (head + tail) / longest)


def _compare(matcher: Matcher, position: int, returned: Sequence[tuple[int, Atom]]) -> Miss:
    call_id = matcher.captured.ids[position]
    content = matcher.contents[position]
    assert content is not None
    for number, captured in enumerate(content):
        if number >= len(returned):
            return Miss("call_incomplete", call_id, returned[-1][0], "nothing", describe_atom(captured))
        item, atom = returned[number]
        if captured == atom:
            continue
        shown = [other for _, other in returned]
        if captured.kind != "reasoning" and len(content) > 1 and set(content) <= set(shown):
            return Miss("order_changed", call_id, item, describe_atom(atom), describe_atom(captured))
        if number and captured.kind not in {atom.kind, "reasoning"}:
            return Miss("call_incomplete", call_id, item, describe_atom(atom), describe_atom(captured))
        return _classified(call_id, item, atom, captured)
    return Miss("identity_conflict", call_id, returned[0][0], describe_atom(returned[0][1]))


def _classified(call_id: str, item: int, atom: Atom, captured: Atom) -> Miss:
    at = _first_difference(atom.text, captured.text)
    returned_text, captured_text = _excerpt(atom.text, at), _excerpt(captured.text, at)
    if "reasoning" in captured.kind or "reasoning" in atom.kind:
        kind = "reasoning_changed" if "reasoning" in atom.kind else "reasoning_missing"
        return Miss(kind, call_id, item, describe_atom(atom), describe_atom(captured))
    if captured.kind == atom.kind == "tool_call":
        if captured.name != atom.name or captured.tool != atom.tool:
            return Miss("text_edited", call_id, item, describe_atom(atom), describe_atom(captured))
        if captured.text == atom.text and captured.form == atom.form:
            return Miss("call_id_changed", call_id, item, atom.call_id, captured.call_id)
        return Miss("arguments_changed", call_id, item, returned_text, captured_text)
    if captured.kind == atom.kind:
        return Miss(_text_class(atom.text, captured.text), call_id, item, returned_text, captured_text)
    return Miss("text_edited", call_id, item, describe_atom(atom), describe_atom(captured))


def _text_class(returned: str, captured: str) -> str:
    if "".join(returned.split()) == "".join(captured.split()):
        folded = returned.replace("\r\n", "\n"), captured.replace("\r\n", "\n")
        return "unicode_form" if folded[0] == folded[1] else "whitespace_only"
    if unicodedata.normalize("NFKC", returned) == unicodedata.normalize("NFKC", captured):
        return "unicode_form"
    return "text_edited"


def miss_evidence(miss: Miss) -> dict[str, Any]:
    """Give a miss as JSON-able evidence, absent fields left out."""
    return {key: value for key, value in msgspec.structs.asdict(miss).items() if value is not None}
