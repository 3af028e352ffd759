"""An attempt as rows of the three tables, and back.

Invariant: what is read back is equal to what was written, field by field, and has the same snapshot id. Records and
results are written as the structs that they are, so that a field that is added to them travels too. Rows that come from
a file are believed in nothing: lengths are compared with arrays before those are used, and texts are only put together
after it is known how large they become.

Not here: files (parquet_part, writer), and Arrow (parquet_tables).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec
import numpy as np

from gristmill.archive.texts import check_texts
from gristmill.canonical import JsonValue, loads
from gristmill.captures.exact import plain_numbers
from gristmill.captures.reply import Unexpected
from gristmill.errors import Code, DecodeError, LedgerError
from gristmill.ledger import AttemptKey, AttemptSetup, AttemptState, StoredCall, Summary, snapshot_id
from gristmill.ledger.bodies import Piece, written, written_plain
from gristmill.ledger.book import check_names
from gristmill.ledger.calls import check_delta, encode_record, exchange_checksum, pack_delta
from gristmill.ledger.exchanges import StoredExchanges, cut_exchange
from gristmill.ledger.imports import calls_of, own_capture
from gristmill.ledger.schema import ExchangeRow
from gristmill.records import RECORD_SCHEMA, CallRecord, Capture, Exchange, LostCall, Result, TokenDelta

__all__ = ["ArchivedAttempt", "Packed", "RowValues", "pack", "summary_of", "unpack", "without_places"]

RowValues = Mapping[str, Any]
"""A row by column; lists of numbers are numpy arrays."""

_CALL, _LATE, _LOST = "call", "late", "lost"
_PLACES: Final = ("first_call", "call_rows", "first_body", "body_rows")
StructT = TypeVar("StructT", bound=msgspec.Struct)


class ArchivedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt with everything that a ledger knows of it.

    Attributes:
        capture: records, tokens, lost calls and, where they were kept, exchanges.
        result: what the harness handed back.
        late: outcomes that came after it had finished.
        setup: what it was opened with.
        state: as in the ledger; captures in files are frozen.
        touched_at: when the ledger last wrote to it, unix seconds.
    """

    capture: Capture
    result: Result | None = None
    late: tuple[StoredCall, ...] = ()
    setup: AttemptSetup | None = None
    state: AttemptState = AttemptState.FROZEN
    touched_at: float | None = None

    @property
    def key(self) -> AttemptKey:
        """Which attempt it is."""
        return AttemptKey(self.capture.rollout_id, self.capture.attempt)

    def snapshot_id(self) -> str:
        """Digest it; `LedgerError` as `ledger.snapshot_id`."""
        return snapshot_id(self.capture, self.result, self.late, self.setup)


class Packed(NamedTuple):
    """An attempt as rows; `attempt` lacks the places of its rows in the other tables."""

    attempt: RowValues
    calls: list[RowValues]
    bodies: list[RowValues]


# Writing


def pack(given: ArchivedAttempt, *, exchanges: bool = True) -> Packed:
    """Turn an attempt into rows.

    Args:
        given: the attempt.
        exchanges: False leaves out what went over the wire; the snapshot id is then that of the rest.

    Raises:
        LedgerError: `option_invalid`, `token_count_mismatch`, `call_unknown`: it holds what no ledger can store;
            `item_too_large`: an exchange is larger than a reader takes.
    """
    check_names(given.key)
    capture = own_capture(given.capture)
    if not exchanges:
        capture = msgspec.structs.replace(capture, exchanges={})
        late = tuple(msgspec.structs.replace(call, exchange=None) for call in given.late)
        given = msgspec.structs.replace(given, late=late)
    given = msgspec.structs.replace(given, capture=capture)
    key = given.key
    texts = _Texts(capture.exchanges)
    calls = [_call_row(key, _CALL, call, texts) for call in _without_exchanges(capture)]
    calls += [_call_row(key, _LATE, call, texts) for call in given.late]
    calls += [_lost_row(key, call) for call in capture.lost]
    where = f"rollout={key.rollout_id}"
    try:
        check_texts(texts.by_number, [text for row in calls for text in _wire(row)], where)
    except DecodeError as error:
        raise LedgerError(error.message, code=Code.ITEM_TOO_LARGE, where=where) from error
    named = {"rollout_id": key.rollout_id, "attempt": key.attempt}
    pieces = sorted(texts.by_number.items())
    bodies: list[RowValues] = [{**named, "number": number, "text": text} for number, text in pieces]
    return Packed(_attempt_row(given), calls, bodies)


def _without_exchanges(capture: Capture) -> list[StoredCall]:
    """Join records and tokens; exchanges are looked at as texts, so that none is decoded for this."""
    bare = msgspec.structs.replace(capture, exchanges={})
    known = {record.model_call_id for record in capture.records}
    for call_id in capture.exchanges:
        if call_id not in known:
            message = f"expected exchanges of calls that have a record, got that of {call_id}"
            raise LedgerError(message, code=Code.CALL_UNKNOWN, where=f"call={call_id}")
    return calls_of(bare)


def _wire(row: RowValues) -> list[bytes]:
    return [row["request"], row["reply"], row["headers"]] if row["request"] is not None else []


class _Texts:
    """The pieces of an attempt's exchanges by number, and the texts that refer to them."""

    def __init__(self, exchanges: Mapping[str, Exchange]) -> None:
        self.by_number: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}
        self._stored: Mapping[str, ExchangeRow] = {}
        self._given: dict[str, Exchange] = {}
        if isinstance(exchanges, StoredExchanges):
            self._stored, pieces = exchanges.stored()
            self.by_number.update(pieces)
        else:
            self._given = dict(exchanges)
        self._next = max(self.by_number, default=-1) + 1

    def take(self, call_id: str) -> dict[str, Any]:
        """Give the columns of a call's exchange, once: the last record of an id has it."""
        row = self._stored.get(call_id)
        if row is not None:
            return {"request": row.request, "reply": row.reply, "headers": row.headers, "status": row.status}
        exchange = self._given.pop(call_id, None)
        return _NO_EXCHANGE if exchange is None else self.cut(exchange)

    def cut(self, exchange: Exchange) -> dict[str, Any]:
        """Give the columns of an exchange."""
        parts = cut_exchange(exchange)
        request, reply, headers = (piece.text(self._number) for piece in parts[:3])
        return {"request": request, "reply": reply, "headers": headers, "status": parts.status}

    def _number(self, piece: Piece) -> int:
        number = self._numbers.get(piece.digest)
        if number is None:
            text = piece.text(self._number)
            number = self._numbers[piece.digest] = self._next
            self.by_number[number] = text
            self._next += 1
        return number


_NO_EXCHANGE: Final[dict[str, Any]] = dict.fromkeys(("request", "reply", "headers", "status"))
_NO_TOKENS: Final[dict[str, Any]] = dict.fromkeys(("token_ids", "logprobs", "extras"))


def _call_row(key: AttemptKey, kind: str, call: StoredCall, texts: _Texts) -> RowValues:
    record = call.record
    if kind == _CALL:
        exchange = texts.take(record.model_call_id)
    else:
        exchange = _NO_EXCHANGE if call.exchange is None else texts.cut(call.exchange)
    tokens = _NO_TOKENS
    if call.tokens is not None:
        blobs = pack_delta(record, call.tokens)
        tokens = {
            "token_ids": np.frombuffer(blobs.ids, "<i4"),
            "logprobs": np.frombuffer(blobs.logprobs, "<f4"),
            "extras": blobs.extras,
        }
    encoded = encode_record(key, record)
    return {**_columns_of(key, kind, record), **tokens, **exchange, "record": encoded}


def _columns_of(key: AttemptKey, kind: str, record: CallRecord) -> dict[str, Any]:
    """Repeat what queries ask for."""
    reason = record.unusable_reason
    return {
        "rollout_id": key.rollout_id,
        "attempt": key.attempt,
        "kind": kind,
        "model_call_id": record.model_call_id,
        "parent_call_id": record.parent_call_id,
        "response_id": record.response_id,
        "ordinal": record.ordinal,
        "dialect": str(record.dialect),
        "model": record.model,
        "response_status": record.response_status,
        "finish_reason": record.finish_reason,
        "delivery": str(record.delivery),
        "purpose": str(record.purpose.label),
        "usable": record.usable,
        "unusable_reason": None if reason is None else str(reason),
        "admitted_at": record.admitted_at,
        "completed_at": record.completed_at,
        "prompt_len": record.prompt_len,
        "prev_len": record.prev_len,
        "cum_len": record.cum_len,
        "sampled_tokens": record.cum_len - record.prompt_len,
        "base_call_id": record.base_call_id,
    }


def _lost_row(key: AttemptKey, call: LostCall) -> RowValues:
    try:
        encoded = msgspec.msgpack.encode(call)
    except UnicodeEncodeError as error:
        raise LedgerError(
            f"expected a lost call that can be stored, got one with {error}", code=Code.OPTION_INVALID
        ) from error
    return {**_lost_columns(key, call), **_NO_TOKENS, **_NO_EXCHANGE, "record": encoded}


def _lost_columns(key: AttemptKey, call: LostCall) -> dict[str, Any]:
    blank = _columns_of(key, _LOST, CallRecord(model_call_id=call.model_call_id, response_id=""))
    nothing = dict.fromkeys(("response_id", "ordinal", "dialect", "delivery", "purpose"))
    return {**blank, **nothing, "parent_call_id": call.parent_call_id}


def _attempt_row(given: ArchivedAttempt) -> RowValues:
    result, setup = given.result, given.setup
    row: dict[str, Any] = {**_attempt_columns(given), "snapshot_id": given.snapshot_id(), "state": str(given.state)}
    row["touched_at"] = given.touched_at
    row |= dict.fromkeys(("result", "result_value", "result_metadata", "setup", "setup_metadata", "setup_overrides"))
    if result is not None:
        row["result"] = _encoded(msgspec.structs.replace(result, value=None, metadata={}))
        row["result_value"] = written(result.value, "$.result")
        row["result_metadata"] = written_plain(result.metadata, "$.metadata")
    if setup is not None:
        row["setup"] = _encoded(msgspec.structs.replace(setup, metadata={}, overrides={}))
        row["setup_metadata"] = written_plain(setup.metadata, "$.metadata")
        row["setup_overrides"] = written_plain(setup.overrides, "$.overrides")
    return row


def _encoded(value: msgspec.Struct) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise LedgerError(
            f"expected a result and a setup that can be stored, got {error}", code=Code.OPTION_INVALID
        ) from error


def _attempt_columns(given: ArchivedAttempt) -> dict[str, Any]:
    """Repeat what queries ask for, as `ls` counts it."""
    records = given.capture.records
    admitted = [record.admitted_at for record in records if record.admitted_at is not None]
    completed = [record.completed_at for record in records if record.completed_at is not None]
    result = given.result
    group_id = None if given.setup is None else given.setup.group_id
    return {
        "rollout_id": given.capture.rollout_id,
        "attempt": given.capture.attempt,
        "group_id": group_id if result is None else result.group_id,
        "reward": None if result is None or result.reward is None else float(result.reward),
        "has_result": result is not None,
        "calls": len(records),
        "lost": len(given.capture.lost),
        "usable_calls": sum(record.usable for record in records),
        "sampled_tokens": sum(record.cum_len - record.prompt_len for record in records),
        "prompt_tokens": sum(record.prompt_len for record in records),
        "models": list(dict.fromkeys(record.model for record in records if record.model is not None)),
        "first_at": min(admitted, default=None),
        "last_at": max(completed, default=None),
    }


# Reading


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
        if kind == _LOST:
            lost.append(_decoded(_decode_lost, row["record"], where))
            continue
        if kind not in {_CALL, _LATE}:
            raise DecodeError(f"expected a call, or a late or lost one, got {kind!r}", where=where)
        record = _decoded(_decode_record, row["record"], where)
        place = f"{where} call={record.model_call_id}"
        delta = _delta(record, row, place) if tokens and row["token_ids"] is not None else None
        wire = _exchange_row(row, place) if row.get("request") is not None else None
        if kind == _LATE:
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


def without_places(row: RowValues) -> dict[str, Any]:
    """Return a row of `attempts` as `pack` makes it."""
    return {name: value for name, value in row.items() if name not in _PLACES}
