from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import Code, DecodeError, ExportError
from gristmill.export import ROW_SCHEMA, decode_row, encode_row
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
from tests.export.rows_strategy import key as any_key
from tests.export.rows_strategy import rows


def row(**fields: Any) -> Row:
    """A row of four tokens with everything in it that a row can hold."""
    certificate = Certificate(Relation.FORKED, "p", 2, (1, 2), (3,), DriftCause.REASONING_DROPPED)
    return Row(
        **{
            "row_id": "id",
            "rollout_id": "r",
            "attempt": 1,
            "group_id": "g",
            "row_index": 0,
            "row_count": 1,
            "token_ids": np.array([1, 2, 2**31 - 1, 0], np.int32),
            "loss_mask": np.array([0, 0, 1, 1], np.uint8),
            "logprobs": np.array([0, 0, -0.1, -12.345678], np.float32),
            "prompt_len": 2,
            "spans": (
                Span("c", 0, 2, SpanRole.CONTEXT, certificate=certificate),
                Span("c", 2, 3, SpanRole.SAMPLED, None, "w1", LogprobsMode.RAW, 0.7),
                Span("c", 3, 4, SpanRole.SAMPLED_ELSEWHERE, "other"),
            ),
            "reward": 0.1,
            "advantage": None,
            "loss_weight": 1 / 3,
            "truncated": True,
            "finish_reason": "length",
            "extras": RowExtras(
                (SpanArray("experts", "c", 2, np.arange(8, dtype=np.int16).reshape(2, 2, 2)),),
                (MediaSpan("d", 0, 1),),
            ),
            **fields,
        }
    )


def key(one: Row) -> list[Any]:
    """Everything in a row, comparable."""
    fields = {name: getattr(one, name) for name in one.__struct_fields__ if name != "extras"}
    arrays = [(held.name, held.call_id, held.start, held.values) for held in one.extras.arrays]
    values = [*fields.values(), *[part for held in arrays for part in held], one.extras.media]
    return [
        (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value for value in values
    ]


def test_a_row_reads_back_equal() -> None:
    """What is trained must be what was rebuilt, to the last bit."""
    assert key(decode_row(encode_row(row()), "line 1")) == key(row())
    bare = row(group_id=None, reward=None, finish_reason=None, extras=RowExtras(), spans=())
    assert key(decode_row(encode_row(bare), "line 1")) == key(bare)


def test_log_probs_are_short() -> None:
    """Nine digits a token are enough; seventeen double the file."""
    line = json.loads(encode_row(row()))
    assert line["logprobs"] == [0.0, 0.0, -0.1, -12.345678]
    assert list(line)[:2] == ["schema", "row_id"]


CREDITS = (TokenCredit("c", 2, 3, 0.1), TokenCredit("d", 3, 4, None, -0.3))


def test_a_row_states_what_a_reader_has_to_know() -> None:
    """A reader that does not know credits must refuse a row that has some, and no other."""
    assert "credits" not in json.loads(encode_row(row()))
    assert json.loads(encode_row(row()))["schema"] == 1
    line = json.loads(encode_row(row(credits=CREDITS)))
    assert line["schema"] == ROW_SCHEMA == 2
    assert line["credits"] == [
        {"call_id": "c", "start": 2, "end": 3, "reward": 0.1},
        {"call_id": "d", "start": 3, "end": 4, "advantage": -0.3},
    ]
    assert key(decode_row(json.dumps(line).encode(), "line 1")) == key(row(credits=CREDITS))
    with pytest.raises(DecodeError) as caught:
        decode_row(json.dumps({**line, "schema": 1}).encode(), "line 1")
    assert caught.value.code is Code.ROW_MALFORMED


@pytest.mark.parametrize("credit", [TokenCredit("c", 2, 3, np.nan), TokenCredit("c", 2, 3, 0.0, np.inf)])
def test_credits_are_finite(credit: TokenCredit) -> None:
    """JSON has no such number: it would be written as null, which is another thing."""
    with pytest.raises(ExportError, match="finite credits"):
        encode_row(row(credits=(credit,)))


@settings(deadline=None)
@given(rows())
def test_any_row_reads_back_equal(held: Row) -> None:
    """Whatever a row holds."""
    assert any_key(decode_row(encode_row(held), "line 1")) == any_key(held)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_every_float32_reads_back_as_itself(values: list[float]) -> None:
    """A log-probability that is off by one bit is not the one that was sampled with."""
    logprobs = np.array(values, np.float32)
    read = decode_row(encode_row(row(logprobs=logprobs)), "line 1").logprobs
    assert read.tobytes() == logprobs.tobytes()


@pytest.mark.parametrize("bits", [0x15AE43FD, 0x95AE43FD, 0x00000001, 0x7F7FFFFF, 0x80000000, 0x33800000, 0x42FFFFFF])
def test_float32_texts_that_round_twice(bits: int) -> None:
    """The shortest text of 7.038531e-26 is another float32 when it is read as a double first."""
    logprobs = np.array([bits], np.uint32).view(np.float32)
    assert decode_row(encode_row(row(logprobs=logprobs)), "line 1").logprobs.tobytes() == logprobs.tobytes()


@pytest.mark.parametrize(
    "values",
    [
        np.array([[True, False]]),
        np.arange(6, dtype=">i4").reshape(3, 2),
        np.array([1.5, np.nan], np.float16),
        np.zeros((0, 3), np.uint64),
        np.arange(8, dtype=np.int64)[::2],
    ],
)
def test_extras_of_every_kind(values: np.ndarray) -> None:
    """Routed experts are replayed in training: shape and type must survive."""
    extras = RowExtras((SpanArray("x", "c", 0, values),))
    read = decode_row(encode_row(row(extras=extras)), "line 1").extras.arrays[0].values
    assert read.dtype == values.dtype.newbyteorder("=")
    np.testing.assert_array_equal(read, values)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_log_probs_that_no_json_has_are_refused(value: float) -> None:
    """NaN would be written as null and trained as nobody knows what."""
    with pytest.raises(ExportError, match="finite") as caught:
        encode_row(row(logprobs=np.array([value], np.float32)))
    assert caught.value.code is Code.ROW_MALFORMED


def test_text_that_no_json_has_is_refused() -> None:
    """A lone surrogate must give a code, not a Python error."""
    with pytest.raises(ExportError, match="cannot write row") as caught:
        encode_row(row(finish_reason="\ud800"))
    assert caught.value.code is Code.ROW_MALFORMED


def changed(**fields: Any) -> bytes:
    line = json.loads(encode_row(row()))
    return json.dumps({**line, **fields}).encode()


ARRAY = {"name": "x", "call_id": "c", "start": 0, "dtype": "int8", "shape": [1], "data": "AA=="}
OBJECTS, TORN = {**ARRAY, "dtype": "object"}, {**ARRAY, "data": "A"}
HUGE = {**ARRAY, "shape": [2**62, 2**62]}


@pytest.mark.parametrize(
    ("data", "code", "where"),
    [
        (b"", Code.FILE_MALFORMED, "f line 3"),
        (b"\xff", Code.FILE_MALFORMED, "f line 3"),
        (b'{"schema": 1, "row_id": "\xff"}', Code.FILE_MALFORMED, "f line 3"),
        (b"[" * 100_000, Code.ROW_MALFORMED, "f line 3 $"),
        (b'{"schema":1,"extras":' + b"[" * 100_000, Code.ROW_MALFORMED, "f line 3 $.extras"),
        (b"[]", Code.ROW_MALFORMED, "f line 3 $"),
        (b"{}", Code.ROW_MALFORMED, "f line 3 $"),
        (changed(token_ids=[2**31]), Code.ROW_MALFORMED, "f line 3 $.token_ids[0]"),
        (changed(token_ids="x"), Code.ROW_MALFORMED, "f line 3 $.token_ids"),
        (changed(loss_mask=[256]), Code.ROW_MALFORMED, "f line 3 $.loss_mask[0]"),
        (changed(loss_mask=[True]), Code.ROW_MALFORMED, "f line 3 $.loss_mask[0]"),
        (changed(logprobs=[None]), Code.ROW_MALFORMED, "f line 3 $.logprobs[0]"),
        (changed(logprobs=[-1e39]), Code.ROW_MALFORMED, "f line 3 $.logprobs[0]"),
        (changed(spans=[{"call_id": "c", "start": 0, "end": 1, "role": "guest"}]), Code.ROW_MALFORMED, None),
        (changed(more=1), Code.ROW_MALFORMED, "f line 3 $"),
        (changed(schema=0), Code.ROW_MALFORMED, "f line 3"),
        (changed(schema=3), Code.SCHEMA_UNSUPPORTED, "f line 3"),
        (changed(schema=3, more=1), Code.SCHEMA_UNSUPPORTED, "f line 3"),
        (changed(schema="x"), Code.ROW_MALFORMED, "f line 3 $.schema"),
        (changed(extras={"arrays": [OBJECTS]}), Code.ROW_MALFORMED, "f line 3 $.extras.arrays[0].dtype"),
        (changed(extras={"arrays": [ARRAY, TORN]}), Code.ROW_MALFORMED, "f line 3 $.extras.arrays[1]"),
        (changed(extras={"arrays": [{**ARRAY, "shape": [2]}]}), Code.ROW_MALFORMED, "f line 3 $.extras.arrays[0]"),
        (changed(extras={"arrays": [HUGE]}), Code.ROW_MALFORMED, "f line 3 $.extras.arrays[0]"),
        (changed(extras={"arrays": [{**ARRAY, "shape": [-1]}]}), Code.ROW_MALFORMED, None),
    ],
)  # fmt: skip
def test_lines_that_are_no_row(data: bytes, code: Code, where: str | None) -> None:
    """Any bytes give a code and a place; nothing is guessed into a row."""
    with pytest.raises(DecodeError) as caught:
        decode_row(data, "f line 3")
    assert caught.value.code is code
    assert caught.value.where is not None
    assert caught.value.where.startswith("f line 3")
    if where is not None:
        assert caught.value.where == where


@given(st.binary(max_size=60))
def test_any_bytes_give_a_code(data: bytes) -> None:
    """A file from elsewhere must not end in a traceback."""
    with pytest.raises(DecodeError):
        decode_row(data, "f")


_LINE = msgspec.json.decode(encode_row(row()))


_SCALARS = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
_VALUES = st.recursive(_SCALARS, lambda held: st.lists(held, max_size=3) | st.dictionaries(st.text(), held, max_size=3))


@given(st.sampled_from(sorted(_LINE)), _VALUES)
def test_any_value_in_any_place_gives_a_row_or_a_code(name: str, value: Any) -> None:
    """Wrong types at every place are refused by name."""
    data = json.dumps({**_LINE, name: value}).encode()
    try:
        assert isinstance(decode_row(data, "f"), Row)
    except DecodeError:
        with pytest.raises(DecodeError, match="expected"):
            decode_row(data, "f")
