"""An attempt out of the rows of the three tables.

Invariant: what is read back is equal to what was written, field by field, and has the same snapshot id. Rows that come
from a file are believed in nothing: lengths are compared with arrays before those are used, and texts are only put
together after it is known how large they become.

Not here: an attempt as rows (attempt_rows), files (parquet_part).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import msgspec
import numpy as np

from gristmill.archive.attempt_rows import CALL, LATE, LOST, ArchivedAttempt, RowValues
from gristmill.archive.texts import check_texts
from gristmill.canonical import JsonValue, loads
from gristmill.captures.exact import plain_numbers
from gristmill.captures.reply import Unexpected
from gristmill.errors import Code, DecodeError, LedgerError
from gristmill.ledger import AttemptKey, AttemptSetup, AttemptState, StoredCall, Summary
from gristmill.ledger.calls import check_delta, exchange_checksum
from gristmill.ledger.exchanges import StoredExchanges
from gristmill.ledger.schema import ExchangeRow
from gristmill.records import RECORD_SCHEMA, CallRecord, Capture, LostCall, Result, TokenDelta

__all__ = ["summary_of", "unpack"]

StructT = TypeVar("StructT", bound=msgspec.Struct)


_decode_record: Final = msgspec.msgpack.Decoder(CallRecord).decode
_decode_lost: Final = msgspec.msgpack.Decoder(LostCall).decode
_decode_result: Final = msgspec.msgpack.Decoder(Result).decode
_decode_setup: Final = msgspec.msgpack.Decoder(AttemptSetup).decode


class _Extra(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Schema(msgspec.Struct):
    schema: int = 1


_decode_extras: Final = msgspec.msgpack.Decoder(dict[str, _Extra]).decode


def _decoded(decode: Callable[[bytes], StructT], data: bytes, where: str) -> StructT:
    """Decode a struct of ours; one of a newer schema is told as such."""
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            schema = msgspec.msgpack.decode(data, type=_Schema).schema
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            schema = 0
        if schema > RECORD_SCHEMA:
            raise DecodeError(
                f"expected a record of schema {RECORD_SCHEMA} or older, got {schema}",
                code=Code.SCHEMA_UNSUPPORTED,
                where=where,
                hint="read it with the version of gristmill that wrote it, or a newer one",
            ) from error
        raise DecodeError(f"expected a record: {error}", where=where) from error


def unpack(
    attempt: RowValues, calls: Sequence[RowValues], bodies: Iterable[RowValues], where: str, *, tokens: bool = True
) -> ArchivedAttempt:
    """Read an attempt back.

    Args:
        attempt: its row of `attempts`.
        calls: its rows of `calls`.
        bodies: its rows of `bodies`; without them it has no exchanges.
        where: names it, for errors.
        tokens: False leaves them out.

    Raises:
        DecodeError: `file_malformed`, `schema_unsupported`.
    """
    key = AttemptKey(attempt["rollout_id"], attempt["attempt"])
    bodies = list(bodies)
    for row in (*calls, *bodies):
        if (row["rollout_id"], row["attempt"]) != key:
            got = f"a row of {row['rollout_id']}/{row['attempt']}"
            raise DecodeError(f"expected rows of {key.rollout_id}/{key.attempt}, got {got}", where=where)
    records: list[CallRecord] = []
    deltas: dict[str, TokenDelta] = {}
    wires: dict[str, ExchangeRow] = {}
    late: list[tuple[CallRecord, TokenDelta | None, ExchangeRow | None]] = []
    lost: list[LostCall] = []
    for row in calls:
        kind = row["kind"]
        if kind == LOST:
            lost.append(_decoded(_decode_lost, row["record"], where))
            continue
        if kind not in {CALL, LATE}:
            raise DecodeError(f"expected a call, or a late or lost one, got {kind!r}", where=where)
        record = _decoded(_decode_record, row["record"], where)
        place = f"{where} call={record.model_call_id}"
        delta = _delta(record, row, place) if tokens and row["token_ids"] is not None else None
        wire = _exchange_row(row, place) if row.get("request") is not None else None
        if kind == LATE:
            late.append((record, delta, wire))
            continue
        records.append(record)
        if delta is not None:
            deltas[record.model_call_id] = delta
        if wire is not None:
            wires[record.model_call_id] = wire
    texts = {row["number"]: row["text"] for row in bodies}
    rows = [*wires.values(), *(wire for _, _, wire in late if wire is not None)]
    check_texts(texts, [text for row in rows for text in (row.request, row.reply, row.headers)], where)
    return ArchivedAttempt(
        capture=Capture(
            rollout_id=key.rollout_id,
            attempt=key.attempt,
            records=tuple(records),
            tokens=deltas,
            lost=tuple(lost),
            exchanges=StoredExchanges(wires, texts) if wires else {},
        ),
        result=_result(attempt, where),
        late=tuple(_late(late, texts)),
        setup=_setup(attempt, where),
        state=_state(attempt, where),
        touched_at=attempt["touched_at"],
    )


def _state(attempt: RowValues, where: str) -> AttemptState:
    try:
        return AttemptState(attempt["state"])
    except ValueError as error:
        raise DecodeError(f"expected a state of an attempt, got {attempt['state']!r}", where=where) from error


def _late(
    late: Iterable[tuple[CallRecord, TokenDelta | None, ExchangeRow | None]], texts: Mapping[int, bytes]
) -> Iterator[StoredCall]:
    for record, delta, wire in late:
        call_id = record.model_call_id
        exchange = None if wire is None else StoredExchanges({call_id: wire}, texts)[call_id]
        yield StoredCall(record=record, tokens=delta, exchange=exchange)


def _exchange_row(row: RowValues, where: str) -> ExchangeRow:
    texts = (row["request"], row["reply"], row["headers"])
    if None in texts:
        raise DecodeError("expected an exchange with request, reply and headers, got a part of one", where=where)
    status = row["status"]
    return ExchangeRow(0, *texts, status, exchange_checksum(*texts, status))


def _delta(record: CallRecord, row: RowValues, where: str) -> TokenDelta:
    ids_T, sampled_T = row["token_ids"], row["logprobs"]
    sampled = record.cum_len - record.prompt_len
    if sampled_T is None or sampled_T.size != sampled or not 0 <= sampled <= ids_T.size == record.delta_len:
        got = f"{ids_T.size} ids and {0 if sampled_T is None else sampled_T.size} log-probabilities"
        message = f"expected {record.delta_len} ids and {sampled} log-probabilities, got {got}"
        raise DecodeError(message, where=where)
    mask_T = np.zeros(ids_T.size, np.uint8)
    logprobs_T = np.zeros(ids_T.size, np.float32)
    mask_T[ids_T.size - sampled :] = 1
    logprobs_T[ids_T.size - sampled :] = sampled_T
    mask_T.flags.writeable = logprobs_T.flags.writeable = False
    delta = TokenDelta(ids_T, mask_T, logprobs_T, _extras(row["extras"], where))
    try:
        check_delta(record, delta)
    except LedgerError as error:
        raise DecodeError(error.message, where=where) from error
    return delta


def _extras(data: bytes | None, where: str) -> dict[str, np.ndarray[Any, Any]]:
    if data is None:
        return {}
    try:
        return {name: _array(extra) for name, extra in _decode_extras(data).items()}
    # numpy has errors of all kinds for a type or shape that is none.
    except (ValueError, TypeError, SyntaxError, OverflowError, msgspec.DecodeError) as error:
        raise DecodeError(f"expected arrays beside the tokens: {error}", where=where) from error


def _array(extra: _Extra) -> np.ndarray[Any, Any]:
    # numpy works out a negative length by itself.
    if min(extra.shape, default=0) < 0:
        raise ValueError(f"a shape of {extra.shape}")
    return np.frombuffer(extra.data, np.dtype(extra.dtype)).reshape(extra.shape)


def _plain(data: bytes | None, where: str) -> dict[str, Any]:
    """Read metadata, with plain numbers as a ledger gives them."""
    try:
        value = plain_numbers(_json(data, where), where)
    except Unexpected as error:
        raise DecodeError(str(error), where=where) from error
    if not isinstance(value, dict):
        raise DecodeError("expected a JSON object as metadata", where=where)
    return cast("dict[str, Any]", value)


def _json(data: bytes | None, where: str) -> JsonValue:
    if data is None:
        raise DecodeError("expected JSON beside a result or a setup, got none", where=where)
    return loads(data, where)


def _result(attempt: RowValues, where: str) -> Result | None:
    if attempt["result"] is None:
        return None
    return msgspec.structs.replace(
        _decoded(_decode_result, attempt["result"], where),
        value=_json(attempt["result_value"], f"{where} result"),
        metadata=_plain(attempt["result_metadata"], f"{where} metadata"),
    )


def _setup(attempt: RowValues, where: str) -> AttemptSetup | None:
    if attempt["setup"] is None:
        return None
    return msgspec.structs.replace(
        _decoded(_decode_setup, attempt["setup"], where),
        metadata=_plain(attempt["setup_metadata"], f"{where} setup"),
        overrides=_plain(attempt["setup_overrides"], f"{where} setup"),
    )


def summary_of(attempt: RowValues, where: str) -> Summary:
    """Read an attempt's line of `ls`.

    Raises:
        DecodeError: `file_malformed`.
    """
    names = ("calls", "lost", "usable_calls", "sampled_tokens", "prompt_tokens", "reward", "group_id", "has_result")
    fields = {name: attempt[name] for name in (*names, "first_at", "last_at", "touched_at")}
    key = AttemptKey(attempt["rollout_id"], attempt["attempt"])
    return Summary(key=key, state=_state(attempt, where), models=tuple(attempt["models"]), **fields)
