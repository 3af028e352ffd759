"""JSON of any shape, and valid documents spoiled at one place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from gristmill.canonical import loads

__all__ = ["any_json", "spoiled"]

Path = tuple[Any, ...]


def _nested(depth: int) -> Any:
    value: Any = []
    for level in range(depth):
        value = [value] if level % 2 else {"content": value}
    return value


ODD = (
    loads("1e999999999"),
    loads("9" * 5000),
    loads('{"type":"message","type":"message"}'),
    loads('[{"role":"assistant","content":{"a":1,"a":2}}]'),
    _nested(90),
    _nested(3000),
    10**5000,
    "\ud800",
    float("nan"),
    float("inf"),
    -0.0,
    True,
)
"""What breaks a careless reader: huge numbers, repeated keys, depth, a lone surrogate, what is not JSON at all."""

_WORDS = ("", "assistant", "message", "function_call", "user", "reasoning", "output_text", "id", "content", "role")
_KEYS = (*_WORDS, "type", "output", "response", "messages", "turns", "model_calls", "call_id", "arguments", "text")


def any_json() -> st.SearchStrategy[Any]:
    """Draw any JSON value, and some that only Python takes for JSON."""
    text = st.text(max_size=4) | st.sampled_from(_WORDS)
    leaves = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | text
        | st.integers(0, len(ODD) - 1).map(ODD.__getitem__)
    )
    keys = st.sampled_from(_KEYS) | st.text(max_size=3)
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=8
    )


def _places(value: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield from _places(member, (*path, key))


def _replaced(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    key, *rest = path
    if isinstance(value, dict):
        return {**value, key: _replaced(value[key], tuple(rest), new)}
    return [_replaced(member, tuple(rest), new) if index == key else member for index, member in enumerate(value)]


def spoiled(draw: st.DrawFn, value: Any) -> Any:
    """Put any JSON value in place of any node of a document."""
    places = list(_places(value))
    return _replaced(value, places[draw(st.integers(0, len(places) - 1))], draw(any_json()))
