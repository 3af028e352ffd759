"""Rows as Arrow columns, and back.

Invariant: a row that was made into columns reads back equal: ids, mask and log-probabilities bit by bit, spans,
certificates and extras in every field. The three arrays of a row are joined with those of its neighbours as numpy
buffers and never become Python objects; only spans and extras, some tens a row, do.

Lists have 32-bit offsets, as every reader expects: a batch holds fewer than 2^31 tokens (parquet_writer bounds it by
bytes), and one row cannot hold more, since its lengths are int32 in every trainer. The bytes of extra arrays have
64-bit offsets in memory; one array takes less than 2 GiB, because a Parquet page can hold no more.

Not here: files and row groups (parquet_writer, parquet_reader).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from gristmill.errors import Code, DecodeError, ExportError
from gristmill.export.arrow import pa
from gristmill.export.row_json import OLDEST_ROW_SCHEMA, ROW_SCHEMA, check_finite
from gristmill.export.span_array import little_endian, values_of
from gristmill.reconstruction import Certificate, Row, RowExtras, Span, SpanArray, TokenCredit
from gristmill.records import MediaSpan

__all__ = ["ARRAYS", "SCHEMA", "SCHEMAS", "SCHEMA_KEY", "batch_of", "row_bytes", "rows_of"]

SCHEMA_KEY: Final = b"gristmill.row_schema"
"""Key of the version of the row in the metadata of a file."""

ARRAYS: Final = (("token_ids", "int32"), ("loss_mask", "uint8"), ("logprobs", "float32"))
"""The columns of a row's arrays, and their type in numpy and in Arrow."""

_LARGEST_ARRAY: Final = 2**31 - 2**16
_SPAN_BYTES: Final = 200


def _field(name: str, kind: Any, *, null: bool = False) -> Any:
    return pa.field(name, kind, nullable=null)


def _list(kind: Any) -> Any:
    return pa.list_(_field("element", kind))


_STRING, _COUNT, _FLOAT, _IDS = pa.string(), pa.int64(), pa.float64(), _list(pa.int32())
_CERTIFICATE: Final = pa.struct(
    [
        _field("relation", _STRING),
        _field("parent_call_id", _STRING),
        _field("position", _COUNT, null=True),
        _field("parent_ids", _IDS),
        _field("call_ids", _IDS),
        _field("cause", _STRING, null=True),
    ]
)
_SPAN: Final = pa.struct(
    [
        _field("call_id", _STRING),
        _field("start", _COUNT),
        _field("end", _COUNT),
        _field("role", _STRING),
        _field("owner", _STRING, null=True),
        _field("weight_version", _STRING, null=True),
        _field("logprobs_mode", _STRING, null=True),
        _field("temperature", _FLOAT, null=True),
        _field("certificate", _CERTIFICATE, null=True),
    ]
)
_ARRAY: Final = pa.struct(
    [
        _field("name", _STRING),
        _field("call_id", _STRING),
        _field("start", _COUNT),
        _field("dtype", _STRING),
        _field("shape", _list(_COUNT)),
        _field("data", pa.large_binary()),
    ]
)
_MEDIUM: Final = pa.struct([_field("digest", _STRING), _field("offset", _COUNT), _field("length", _COUNT)])
_EXTRAS: Final = pa.struct([_field("arrays", _list(_ARRAY)), _field("media", _list(_MEDIUM))])
_CREDIT: Final = pa.struct(
    [
        _field("call_id", _STRING),
        _field("start", _COUNT),
        _field("end", _COUNT),
        _field("reward", _FLOAT, null=True),
        _field("advantage", _FLOAT, null=True),
    ]
)

SCHEMA: Final[Any] = pa.schema(
    [
        _field("row_id", _STRING),
        _field("rollout_id", _STRING),
        _field("attempt", _COUNT),
        _field("group_id", _STRING, null=True),
        _field("row_index", _COUNT),
        _field("row_count", _COUNT),
        *(_field(name, _list(getattr(pa, kind)())) for name, kind in ARRAYS),
        _field("prompt_len", _COUNT),
        _field("spans", _list(_SPAN)),
        _field("reward", _FLOAT, null=True),
        _field("advantage", _FLOAT, null=True),
        _field("loss_weight", _FLOAT),
        _field("truncated", pa.bool_()),
        _field("finish_reason", _STRING, null=True),
        _field("extras", _EXTRAS),
        _field("credits", _list(_CREDIT)),
    ],
    metadata={SCHEMA_KEY: str(ROW_SCHEMA).encode()},
)
"""The columns, in the order of the fields of `Row`."""

SCHEMAS: Final[dict[int, Any]] = {
    OLDEST_ROW_SCHEMA: pa.schema([field for field in SCHEMA if field.name != "credits"]),
    ROW_SCHEMA: SCHEMA,
}
"""The columns of every version that is read; a row without credits is the same in all of them."""


def row_bytes(row: Row) -> int:
    """Return about how much memory a row takes in a batch."""
    extras = sum(array.values.nbytes + _SPAN_BYTES for array in row.extras.arrays)
    held = row.token_ids.nbytes + row.loss_mask.nbytes + row.logprobs.nbytes
    return held + extras + _SPAN_BYTES * (len(row.spans) + len(row.extras.media) + len(row.credits) + 1)


# Rows to columns


def batch_of(rows: Sequence[Row]) -> Any:
    """Make a record batch of rows.

    Raises:
        ExportError: `row_malformed`: a log-probability is not finite, an array has another type, a text cannot be
            written as UTF-8, a number or an extra array is too large.
    """
    try:
        return _batch(rows)
    except (ValueError, TypeError, OverflowError) as error:
        if len(rows) > 1:
            for row in rows:
                batch_of([row])
        message = f"cannot write row {rows[0].row_id} to Parquet: {error}"
        raise ExportError(message, code=Code.ROW_MALFORMED, where=f"row={rows[0].row_id}") from error


def _batch(rows: Sequence[Row]) -> Any:
    for row in rows:
        check_finite(row)
    columns: list[Any] = []
    for field in SCHEMA:
        values = [getattr(row, field.name) for row in rows]
        if field.name in _COLUMN_MAKERS:
            columns.append(_COLUMN_MAKERS[field.name](values, field.type))
        else:
            columns.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _offsets(lengths: Iterable[int], count: int, kind: type[np.integer[Any]] = np.int32) -> npt.NDArray[Any]:
    """Return the offsets of lists of these lengths.

    Raises:
        OverflowError: they do not fit their type.
    """
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(np.fromiter(lengths, np.int64, count), out=offsets[1:])
    if offsets[-1] > np.iinfo(kind).max:
        raise OverflowError(f"{offsets[-1]} elements in one column")
    return offsets.astype(kind)


def _lists(lengths: Iterable[int], count: int, elements: Any, kind: Any) -> Any:
    return pa.ListArray.from_arrays(pa.array(_offsets(lengths, count)), elements, type=kind)


def _array_column(dtype: str) -> Callable[[list[npt.NDArray[Any]], Any], Any]:
    def make(arrays: list[npt.NDArray[Any]], kind: Any) -> Any:
        wrong = next((array for array in arrays if array.dtype != dtype or array.ndim != 1), None)
        if wrong is not None:
            raise TypeError(f"expected {dtype}[T], got {wrong.dtype} of shape {wrong.shape}")
        elements = np.concatenate(arrays) if arrays else np.empty(0, dtype)
        return _lists((array.size for array in arrays), len(arrays), pa.array(elements), kind)

    return make


def _structs(kind: Any, columns: Iterable[Any], mask: Any = None) -> Any:
    return pa.StructArray.from_arrays(list(columns), fields=list(kind), mask=mask)


def _flat(objects: Sequence[Any], kind: Any, names: Iterable[str]) -> Iterator[Any]:
    """Make a column of each attribute."""
    for name in names:
        yield pa.array([getattr(held, name) for held in objects], kind.field(name).type)


def _spans(spans: list[tuple[Span, ...]], kind: Any) -> Any:
    flat = list(chain.from_iterable(spans))
    names = [field.name for field in _SPAN if field.name != "certificate"]
    columns = [*_flat(flat, _SPAN, names), _certificates([span.certificate for span in flat])]
    return _lists(map(len, spans), len(spans), _structs(_SPAN, columns), kind)


_NO_CERTIFICATE: Final = msgspec.convert({"relation": "unknown", "parent_call_id": ""}, Certificate)


def _certificates(given: list[Certificate | None]) -> Any:
    held = [_NO_CERTIFICATE if one is None else one for one in given]
    columns = [
        _id_lists([getattr(one, field.name) for one in held], field.type)
        if field.type == _IDS
        else next(_flat(held, _CERTIFICATE, [field.name]))
        for field in _CERTIFICATE
    ]
    return _structs(_CERTIFICATE, columns, pa.array([one is None for one in given], pa.bool_()))


def _id_lists(ids: list[tuple[int, ...]], kind: Any) -> Any:
    flat = pa.array(list(chain.from_iterable(ids)), kind.value_type)
    return _lists(map(len, ids), len(ids), flat, kind)


def _extras(extras: list[RowExtras], kind: Any) -> Any:
    arrays = list(chain.from_iterable(held.arrays for held in extras))
    media = list(chain.from_iterable(held.media for held in extras))
    shapes = [array.values.shape for array in arrays]
    columns = [
        *_flat(arrays, _ARRAY, ("name", "call_id", "start")),
        pa.array([array.values.dtype.name for array in arrays], _STRING),
        _id_lists(shapes, _ARRAY.field("shape").type),
        _binaries([little_endian(array.values) for array in arrays]),
    ]
    count = len(extras)
    return _structs(
        _EXTRAS,
        (
            _lists((len(held.arrays) for held in extras), count, _structs(_ARRAY, columns), kind.field("arrays").type),
            _lists(
                (len(held.media) for held in extras),
                count,
                _structs(_MEDIUM, _flat(media, _MEDIUM, ("digest", "offset", "length"))),
                kind.field("media").type,
            ),
        ),
    )


def _credits(credits: list[tuple[TokenCredit, ...]], kind: Any) -> Any:
    flat = list(chain.from_iterable(credits))
    columns = _flat(flat, _CREDIT, [field.name for field in _CREDIT])
    return _lists(map(len, credits), len(credits), _structs(_CREDIT, columns), kind)


def _binaries(arrays: list[npt.NDArray[Any]]) -> Any:
    largest = max((array.nbytes for array in arrays), default=0)
    if largest > _LARGEST_ARRAY:
        raise OverflowError(f"an extra array of {largest} bytes, a Parquet page holds less than 2 GiB")
    offsets = _offsets((array.nbytes for array in arrays), len(arrays), np.int64)
    raw = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays]) if arrays else np.empty(0, np.uint8)
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(arrays), [None, pa.py_buffer(offsets), pa.py_buffer(raw)]
    )


_COLUMN_MAKERS: Final[dict[str, Callable[[list[Any], Any], Any]]] = {
    **{name: _array_column(dtype) for name, dtype in ARRAYS},
    "spans": _spans,
    "extras": _extras,
    "credits": _credits,
}


# Columns to rows


class _ReadArray(msgspec.Struct):
    name: str
    call_id: str
    start: int
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _ReadExtras(msgspec.Struct):
    arrays: tuple[_ReadArray, ...]
    media: tuple[MediaSpan, ...]


def rows_of(batch: Any, where: Callable[[int], str]) -> Iterator[Row | DecodeError]:
    """Read the rows of a record batch of one of the `SCHEMAS`, one by one; an error stands for a row that is none.

    Args:
        batch: the columns.
        where: names the place of a row of the batch, for errors.
    """
    plain = [name for name in SCHEMA.names if name not in _COLUMN_MAKERS]
    columns = {name: batch.column(name).to_pylist() for name in (*plain, "spans", "extras")}
    credited = "credits" in batch.schema.names
    columns["credits"] = batch.column("credits").to_pylist() if credited else [()] * batch.num_rows
    arrays = {name: _views(batch.column(name)) for name, _ in ARRAYS}
    for index in range(batch.num_rows):
        fields: dict[str, Any] = {name: columns[name][index] for name in plain}
        # Copies: a row that is kept must not keep the whole batch.
        fields |= {name: views[index].copy() for name, views in arrays.items()}
        try:
            yield Row(
                **fields,
                spans=_converted(columns["spans"][index], tuple[Span, ...], f"{where(index)} $.spans"),
                extras=_extras_of(columns["extras"][index], f"{where(index)} $.extras"),
                credits=_converted(columns["credits"][index], tuple[TokenCredit, ...], f"{where(index)} $.credits"),
            )
        except DecodeError as error:
            yield error


def _views(lists: Any) -> list[npt.NDArray[Any]]:
    offsets, values = lists.offsets.to_numpy(), lists.values.to_numpy()
    return [values[start:end] for start, end in pairwise(offsets)]


def _converted(value: Any, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        raise DecodeError(
            f"expected a row: {message}", code=Code.ROW_MALFORMED, where=where + place.rstrip("`")
        ) from error


def _extras_of(value: Any, where: str) -> RowExtras:
    if not value["arrays"] and not value["media"]:
        return RowExtras()
    read = _converted(value, _ReadExtras, where)
    arrays = (
        SpanArray(
            array.name,
            array.call_id,
            array.start,
            values_of(array.dtype, array.shape, array.data, f"{where}.arrays[{index}]"),
        )
        for index, array in enumerate(read.arrays)
    )
    return RowExtras(tuple(arrays), read.media)
