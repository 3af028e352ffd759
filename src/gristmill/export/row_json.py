"""One row as one line of JSON, and back.

Invariant: a row that was written reads back equal: ids, mask, spans and extras exactly, log-probabilities as the
same float32 (each is written as its shortest decimal text). Reading is strict: unknown fields, wrong types and
values out of range are refused with line and path.

Not here: files and folders (jsonl), and whether a row is right (check).
"""

from __future__ import annotations

import base64
import binascii
import json
from contextlib import suppress
from math import isfinite
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from gristmill.errors import Code, DecodeError, ExportError
from gristmill.export.span_array import little_endian, values_of
from gristmill.reconstruction import Row, RowExtras, Span, SpanArray, TokenCredit
from gristmill.records import Float32Array, MediaSpan

__all__ = ["OLDEST_ROW_SCHEMA", "ROW_SCHEMA", "check_finite", "decode_row", "encode_row", "exactly_written"]

OLDEST_ROW_SCHEMA: Final = 1
ROW_SCHEMA: Final = 2
"""Version of the row; readers refuse newer ones. New in 2: credits; a line states 2 exactly if it has some."""

_ROUNDED_TWICE: Final = np.array([0x15AE43FD], np.uint32).view(np.float32)[0]
"""7.038531e-26, the one magnitude whose shortest text, read as a double, rounds to another float32.

Every other finite float32 was written and read back. This one is written with the digits of its double.
"""

_TokenId = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
_MaskBit = Annotated[int, msgspec.Meta(ge=0, le=255)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An extra array: little-endian bytes in base64."""

    name: str
    call_id: str
    start: int
    dtype: str
    shape: tuple[_Count, ...]
    data: str


class _Extras(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    arrays: tuple[_Array, ...] = ()
    media: tuple[MediaSpan, ...] = ()


class _Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a row line, in their order."""

    schema: int
    row_id: str
    rollout_id: str
    attempt: int
    group_id: str | None
    row_index: int
    row_count: int
    token_ids: list[_TokenId]
    loss_mask: list[_MaskBit]
    logprobs: list[float]
    prompt_len: int
    spans: tuple[Span, ...]
    reward: float | None
    advantage: float | None
    loss_weight: float
    truncated: bool
    finish_reason: str | None
    extras: _Extras
    credits: tuple[TokenCredit, ...] = ()


class _Schema(msgspec.Struct):
    schema: int


class _RepeatedKey(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


_line_decoder: Final = msgspec.json.Decoder(_Line)
_schema_decoder: Final = msgspec.json.Decoder(_Schema)


def encode_row(row: Row) -> bytes:
    """Write a row as one line of JSON, without the line end.

    Raises:
        ExportError: `row_malformed`: a number is not finite, or a text cannot be written as UTF-8.
    """
    check_finite(row)
    line = {name: getattr(row, name) for name in row.__struct_fields__ if name != "credits" or row.credits}
    line["spans"] = msgspec.to_builtins(row.spans)
    line["extras"] = {
        "arrays": [_packed(array) for array in row.extras.arrays],
        "media": msgspec.to_builtins(row.extras.media),
    }
    if row.credits:
        line["credits"] = msgspec.to_builtins(row.credits)
    for name in ("token_ids", "loss_mask"):
        line[name] = np.ascontiguousarray(line[name])
    line["logprobs"] = exactly_written(np.ascontiguousarray(row.logprobs))
    schema = ROW_SCHEMA if row.credits else OLDEST_ROW_SCHEMA
    try:
        return orjson.dumps({"schema": schema, **line}, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError as error:
        message = f"cannot write row {row.row_id} as JSON: {error}"
        raise ExportError(message, code=Code.ROW_MALFORMED, where=f"row={row.row_id}") from error


def check_finite(row: Row) -> None:
    """Refuse log-probabilities and credits that no trainer should get, in any format.

    Raises:
        ExportError: `row_malformed`.
    """
    if not np.isfinite(row.logprobs).all():
        message = f"expected finite log-probabilities in row {row.row_id}, got others"
        raise ExportError(message, code=Code.ROW_MALFORMED, where=f"row={row.row_id}")
    for credit in row.credits:
        if not (isfinite(credit.reward or 0.0) and isfinite(credit.advantage or 0.0)):
            message = f"expected finite credits in row {row.row_id}, got others"
            raise ExportError(message, code=Code.ROW_MALFORMED, where=f"row={row.row_id}")


def exactly_written(logprobs_T: Float32Array) -> npt.NDArray[Any]:
    """Return float32[T] or float64[T] whose shortest texts, read as doubles and rounded, give the same float32."""
    if (np.abs(logprobs_T) == _ROUNDED_TWICE).any():
        return logprobs_T.astype(np.float64)
    return logprobs_T


def _packed(array: SpanArray) -> dict[str, Any]:
    values = array.values
    return {
        "name": array.name,
        "call_id": array.call_id,
        "start": array.start,
        "dtype": values.dtype.name,
        "shape": list(values.shape),
        "data": base64.b64encode(little_endian(values).tobytes()).decode("ascii"),
    }


def decode_row(data: bytes, where: str) -> Row:
    """Read one row line.

    Args:
        data: the line.
        where: file and line, for errors.

    Raises:
        DecodeError: `file_malformed` (not JSON), `row_malformed` (not a row; `where` ends with the JSON path),
            `schema_unsupported` (written by a newer version).
    """
    try:
        line = _line_decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _refused(data, where, error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"expected a JSON object, got something else: {error}", where=where) from error
    if not (ROW_SCHEMA if line.credits else OLDEST_ROW_SCHEMA) <= line.schema <= ROW_SCHEMA:
        raise _other_schema(line.schema, where)
    fields = {name: getattr(line, name) for name in line.__struct_fields__ if name != "schema"}
    arrays = enumerate(line.extras.arrays)
    fields |= {
        "token_ids": np.array(line.token_ids, np.int32),
        "loss_mask": np.array(line.loss_mask, np.uint8),
        "logprobs": _float32(line.logprobs, where),
        "extras": RowExtras(
            tuple(_unpacked(array, f"{where} $.extras.arrays[{index}]") for index, array in arrays),
            line.extras.media,
        ),
    }
    row = Row(**fields)
    _refuse_repeated_keys(row, data, where)
    return row


def _unique(pairs: list[tuple[str, Any]]) -> None:
    seen = set[str]()
    for key, _ in pairs:
        if key in seen:
            raise _RepeatedKey(key)
        seen.add(key)


# Only keys are of interest: numbers stay texts.
_unique_decoder: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_int=str, parse_float=str)


def _refuse_repeated_keys(row: Row, data: bytes, where: str) -> None:
    """Refuse a line in which a key occurs twice: some readers see the first value, some the last."""
    with suppress(ExportError):
        # A line as it was written repeats none, and this is many times faster than looking for it.
        if encode_row(row) == data.strip():
            return
    try:
        _unique_decoder.decode(data.decode())
    except _RepeatedKey as error:
        message = f"expected a row whose keys are unique, got {error.key!r} twice"
        raise DecodeError(message, code=Code.ROW_MALFORMED, where=where) from error


def _float32(values: list[float], where: str) -> Float32Array:
    with np.errstate(over="ignore"):
        logprobs_T = np.array(values, np.float64).astype(np.float32)
    beyond_T = np.flatnonzero(~np.isfinite(logprobs_T))
    if beyond_T.size:
        at = int(beyond_T[0])
        message = f"expected a 32-bit float, got {values[at]}"
        raise DecodeError(message, code=Code.ROW_MALFORMED, where=f"{where} $.logprobs[{at}]")
    return logprobs_T


def _refused(data: bytes, where: str, error: msgspec.ValidationError) -> DecodeError:
    """Tell a line of a newer version from a malformed one."""
    try:
        schema = _schema_decoder.decode(data).schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        schema = ROW_SCHEMA
    if schema > ROW_SCHEMA:
        return _other_schema(schema, where)
    message, _, path = str(error).partition(" - at `")
    place = f"{where} {path.rstrip('`') or '$'}"
    return DecodeError(f"expected a row: {message}", code=Code.ROW_MALFORMED, where=place)


def _other_schema(schema: int, where: str) -> DecodeError:
    newer = schema > ROW_SCHEMA
    return DecodeError(
        f"expected row schema {ROW_SCHEMA} or, without credits, older, got {schema}",
        code=Code.SCHEMA_UNSUPPORTED if newer else Code.ROW_MALFORMED,
        where=where,
        hint="it was written by a newer version of Gristmill" if newer else None,
    )


def _unpacked(array: _Array, where: str) -> SpanArray:
    try:
        raw = base64.b64decode(array.data, validate=True)
    except (ValueError, binascii.Error) as error:
        message = f"expected dtype, shape and data of one array: {error}"
        raise DecodeError(message, code=Code.ROW_MALFORMED, where=where) from error
    return SpanArray(array.name, array.call_id, array.start, values_of(array.dtype, array.shape, raw, where))
