"""Outcomes of calls as rows, and back.

Invariant: tokens are stored only if their lengths agree with the record, their mask is the one that the lengths give,
and their context has no log-probabilities; what the lengths give is not stored. Every row carries a checksum of its
blobs, so that a damaged row is refused and never read as another call.

Not here: whether the base has the length that the record says (book), exchanges (exchanges).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from zlib import crc32

import msgspec
import numpy as np

from gristmill.errors import Code, LedgerError
from gristmill.ledger.protocol import AttemptKey
from gristmill.ledger.schema import CallRow, TokenRow
from gristmill.records import (
    OLDEST_SCHEMA,
    RECORD_SCHEMA,
    UNLABELLED,
    CallRecord,
    Delivery,
    Purpose,
    TokenDelta,
    schema_of,
)

__all__ = [
    "TokenBlobs",
    "as_read",
    "check_delta",
    "checksum",
    "encode_record",
    "exchange_checksum",
    "label_checksum",
    "own_purpose",
    "own_record",
    "pack_delta",
    "read_delta",
    "read_record",
    "result_checksum",
]

_IDS: Final = np.dtype("<i4")
_LOGPROBS: Final = np.dtype("<f4")

_decode_record = msgspec.msgpack.Decoder(CallRecord).decode


class _Extra(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Schema(msgspec.Struct):
    schema: int = OLDEST_SCHEMA


_decode_extras = msgspec.msgpack.Decoder(dict[str, _Extra]).decode


class TokenBlobs(NamedTuple):
    """A token row without its key."""

    ids: bytes
    logprobs: bytes
    extras: bytes | None
    checksum: int


def checksum(*blobs: bytes | None) -> int:
    """CRC-32 over blobs and their lengths."""
    value = 0
    for blob in blobs:
        value = crc32(b"-" if blob is None else b"%d:" % len(blob), value)
        value = crc32(blob or b"", value)
    return value


def exchange_checksum(request: bytes, reply: bytes, headers: bytes, status: int | None) -> int:
    """Checksum of all that an exchange row holds."""
    return checksum(request, reply, headers, None if status is None else b"%d" % status)


def label_checksum(call_id: str, purpose: Purpose) -> int:
    """Checksum of all that a label row says."""
    return checksum(call_id.encode(), purpose.label.encode(), purpose.evidence.encode())


def result_checksum(value: bytes, metadata: bytes, reward: float | None, group_id: str | None) -> int:
    """Checksum of all that a result row holds."""
    reward_text = None if reward is None else float(reward).hex().encode()
    return checksum(value, metadata, reward_text, None if group_id is None else group_id.encode())


def own_record(key: AttemptKey, record: CallRecord) -> CallRecord:
    """Return a record as one of this attempt, stating the schema that a reader has to know."""
    return msgspec.structs.replace(
        record,
        rollout_id=key.rollout_id,
        attempt=key.attempt,
        purpose=own_purpose(record.purpose),
        schema=schema_of(record),
    )


def own_purpose(purpose: Purpose) -> Purpose:
    """Return an equal purpose that is written alike: msgspec leaves out a default only if it is the same object."""
    return UNLABELLED if purpose == UNLABELLED else purpose


def encode_record(key: AttemptKey, record: CallRecord) -> bytes:
    """Encode a record as one of this attempt.

    Raises:
        LedgerError: `option_invalid`, a field holds what cannot be stored.
    """
    record = own_record(key, record)
    try:
        return msgspec.msgpack.encode(record)
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise LedgerError(
            f"expected a record that can be stored, got one with {error}",
            code=Code.OPTION_INVALID,
            where=f"call={record.model_call_id!r}",
        ) from error


def as_read(key: AttemptKey, record: CallRecord) -> CallRecord:
    """Return a record as one of this attempt, as it will be read back.

    Raises:
        LedgerError: `option_invalid`, a field holds what cannot be stored.
    """
    encoded = encode_record(key, record)
    try:
        return _decode_record(encoded)
    except msgspec.ValidationError as error:
        raise LedgerError(
            f"expected a record that can be stored, got one with {error}",
            code=Code.OPTION_INVALID,
            where=f"call={record.model_call_id!r}",
        ) from error


def read_record(row: CallRow, delivery: Delivery | None, label: Purpose | None = None) -> CallRecord:
    """Decode a record; delivery and label take the place of its own where there are any.

    Raises:
        LedgerError: `ledger_damaged`, or `schema_unsupported` where a newer version wrote it.
    """
    if checksum(row.record) != row.checksum:
        raise LedgerError(
            f"expected the record of call {row.call_id} as it was written, got other bytes",
            code=Code.LEDGER_DAMAGED,
            where=f"call={row.call_id}",
        )
    try:
        record = _decode_record(row.record)
    except msgspec.ValidationError:
        schema = msgspec.msgpack.decode(row.record, type=_Schema).schema
        if schema <= RECORD_SCHEMA:
            raise
        raise LedgerError(
            f"expected a record of schema {RECORD_SCHEMA} or older, got {schema}",
            code=Code.SCHEMA_UNSUPPORTED,
            where=f"call={row.call_id}",
            hint="read it with the version of gristmill that wrote it, or a newer one",
        ) from None
    state = record.delivery if delivery is None else delivery
    purpose = record.purpose if label is None else label
    return msgspec.structs.replace(record, ordinal=row.ordinal, delivery=state, purpose=purpose)


def check_delta(record: CallRecord, delta: TokenDelta) -> None:
    """Refuse tokens that are not what their record says.

    Raises:
        LedgerError: `token_count_mismatch`.
    """
    size, sampled = record.delta_len, record.cum_len - record.prompt_len
    shapes = (delta.ids_T.shape, delta.mask_T.shape, delta.logprobs_T.shape)
    if shapes != ((size,), (size,), (size,)):
        raise _mismatch(record, f"arrays of delta_len {size}", f"shapes {shapes}")
    dtypes = (delta.ids_T.dtype, delta.mask_T.dtype, delta.logprobs_T.dtype)
    if dtypes != (np.int32, np.uint8, np.float32):
        raise _mismatch(record, "int32 ids, uint8 mask, float32 log-probabilities", f"{[str(kind) for kind in dtypes]}")
    prev_len, prompt_len, cum_len = record.prev_len, record.prompt_len, record.cum_len
    if not 0 <= prev_len <= prompt_len <= cum_len or cum_len != prev_len + size:
        got = f"prev_len {prev_len}, prompt_len {prompt_len}, cum_len {cum_len}, delta_len {size}"
        raise _mismatch(record, "lengths that follow each other", got)
    if (record.base_call_id is None) is not (prev_len == 0):
        raise _mismatch(record, "a base exactly if tokens are shared", f"{record.base_call_id!r} with {prev_len}")
    context = size - sampled
    # As bytes: for some thousand tokens that is several times faster than in numpy, and -0.0 differs from 0.0.
    if delta.mask_T.tobytes() != bytes(context) + b"\x01" * sampled:
        raise _mismatch(record, f"a mask of {context} context and {sampled} sampled tokens", "another")
    if delta.logprobs_T[:context].tobytes() != bytes(4 * context):
        raise _mismatch(record, "log-probability 0.0 for context", "others")


def _mismatch(record: CallRecord, expected: str, got: str) -> LedgerError:
    call_id = record.model_call_id
    return LedgerError(
        f"call {call_id}: expected {expected}, got {got}", code=Code.TOKEN_COUNT_MISMATCH, where=f"call={call_id}"
    )


def pack_delta(record: CallRecord, delta: TokenDelta) -> TokenBlobs:
    """Turn a checked delta into blobs.

    Raises:
        LedgerError: `token_count_mismatch` as `check_delta`; `option_invalid` for extras that are no plain arrays.
    """
    check_delta(record, delta)
    ids = np.ascontiguousarray(delta.ids_T, _IDS).tobytes()
    sampled_T = delta.logprobs_T[delta.ids_T.size - (record.cum_len - record.prompt_len) :]
    logprobs = np.ascontiguousarray(sampled_T, _LOGPROBS).tobytes()
    extras = _pack_extras(record, delta.extras) if delta.extras else None
    return TokenBlobs(ids, logprobs, extras, checksum(ids, logprobs, extras))


def _pack_extras(record: CallRecord, extras: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    packed: dict[str, _Extra] = {}
    for name, values in extras.items():
        if values.dtype.hasobject or values.dtype.names is not None:
            raise LedgerError(
                f"extras.{name}: expected an array of numbers, got {values.dtype}",
                code=Code.OPTION_INVALID,
                where=f"call={record.model_call_id}",
            )
        little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        packed[name] = _Extra(little.dtype.str, values.shape, little.tobytes())
    return msgspec.msgpack.encode(packed)


def read_delta(record: CallRecord, row: TokenRow) -> TokenDelta:
    """Turn blobs into a delta; its arrays cannot be written to.

    Raises:
        LedgerError: `ledger_damaged`.
    """
    sampled = record.cum_len - record.prompt_len
    if checksum(row.ids, row.logprobs, row.extras) != row.checksum:
        raise LedgerError(
            f"expected the tokens of call {record.model_call_id} as they were written, got other bytes",
            code=Code.LEDGER_DAMAGED,
            where=f"call={record.model_call_id}",
        )
    ids_T = np.frombuffer(row.ids, _IDS)
    mask_T = np.zeros(ids_T.size, np.uint8)
    mask_T[ids_T.size - sampled :] = 1
    logprobs_T = np.zeros(ids_T.size, np.float32)
    logprobs_T[ids_T.size - sampled :] = np.frombuffer(row.logprobs, _LOGPROBS)
    mask_T.flags.writeable = logprobs_T.flags.writeable = False
    if row.extras is None:
        return TokenDelta(ids_T, mask_T, logprobs_T)
    extras = {
        name: np.frombuffer(extra.data, np.dtype(extra.dtype)).reshape(extra.shape)
        for name, extra in _decode_extras(row.extras).items()
    }
    return TokenDelta(ids_T, mask_T, logprobs_T, extras)
