"""Rows of any content, for round trips."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from gristmill.reconstruction import (
    Certificate,
    DriftCause,
    Relation,
    Row,
    RowExtras,
    Span,
    SpanArray,
    SpanRole,
    TokenCredit,
)
from gristmill.records import LogprobsMode, MediaSpan

__all__ = ["key", "rows"]

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_COUNTS = st.integers(0, 2**40)
_IDS = st.integers(-(2**31), 2**31 - 1)
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_LOGPROBS = st.floats(width=32, allow_nan=False, allow_infinity=False)
_DTYPES = ("bool", "int8", "int16", "uint8", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64")


def _maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


_CERTIFICATES = st.builds(
    Certificate,
    st.sampled_from(Relation),
    _TEXTS,
    _maybe(_COUNTS),
    st.lists(_IDS, max_size=3).map(tuple),
    st.lists(_IDS, max_size=3).map(tuple),
    _maybe(st.sampled_from(DriftCause)),
)
_SPANS = st.builds(
    Span,
    _TEXTS,
    _COUNTS,
    _COUNTS,
    st.sampled_from(SpanRole),
    _maybe(_TEXTS),
    _maybe(_TEXTS),
    _maybe(st.sampled_from(LogprobsMode)),
    _maybe(_FLOATS),
    _maybe(_CERTIFICATES),
)


_CREDITS = st.builds(TokenCredit, _TEXTS, _COUNTS, _COUNTS, _maybe(_FLOATS), _maybe(_FLOATS))


@st.composite
def _arrays(draw: st.DrawFn) -> SpanArray:
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    dtype = np.dtype(draw(st.sampled_from(_DTYPES)))
    size = int(np.prod(shape))
    if dtype.kind == "b":
        raw = bytes(draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)))
    else:
        raw = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    return SpanArray(draw(_TEXTS), draw(_TEXTS), draw(_COUNTS), np.frombuffer(raw, dtype).reshape(shape))


_EXTRAS = st.builds(
    RowExtras,
    st.lists(_arrays(), max_size=3).map(tuple),
    st.lists(st.builds(MediaSpan, _TEXTS, _COUNTS, _COUNTS), max_size=2).map(tuple),
)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """A row that holds anything its types allow; what a row means is not kept."""
    size = draw(st.integers(0, 6))

    def array(values: st.SearchStrategy[Any], dtype: Any) -> Any:
        return np.array(draw(st.lists(values, min_size=size, max_size=size)), dtype)

    return Row(
        row_id=draw(_TEXTS),
        rollout_id=draw(_TEXTS),
        attempt=draw(_COUNTS),
        group_id=draw(_maybe(_TEXTS)),
        row_index=draw(_COUNTS),
        row_count=draw(_COUNTS),
        token_ids=array(_IDS, np.int32),
        loss_mask=array(st.integers(0, 255), np.uint8),
        logprobs=array(_LOGPROBS, np.float32),
        prompt_len=draw(_COUNTS),
        spans=draw(st.lists(_SPANS, max_size=3).map(tuple)),
        reward=draw(_maybe(_FLOATS)),
        advantage=draw(_maybe(_FLOATS)),
        loss_weight=draw(_FLOATS),
        truncated=draw(st.booleans()),
        finish_reason=draw(_maybe(_TEXTS)),
        extras=draw(_EXTRAS),
        credits=draw(st.lists(_CREDITS, max_size=2).map(tuple)),
    )


def key(one: Row) -> list[Any]:
    """Everything in a row, comparable bit by bit."""
    fields = {name: getattr(one, name) for name in one.__struct_fields__ if name != "extras"}
    arrays = [(held.name, held.call_id, held.start, held.values) for held in one.extras.arrays]
    values = [*fields.values(), *[part for held in arrays for part in held], one.extras.media]
    return [
        (value.dtype.str, value.shape, value.tobytes())
        if isinstance(value, np.ndarray)
        else (type(value), value.hex())
        if isinstance(value, float)
        else value
        for value in values
    ]
