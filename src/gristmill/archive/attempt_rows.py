"""An attempt as rows of the three tables.

Invariant: records, results and setups are written as the structs that they are, so that a field that is added to them
travels too. What a reader would refuse is not written.

Not here: reading them back (attempt_reading), files (parquet_part, writer), and Arrow (parquet_tables).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from gristmill.archive.texts import check_texts
from gristmill.errors import Code, DecodeError, LedgerError
from gristmill.ledger import AttemptKey, AttemptSetup, AttemptState, StoredCall, snapshot_id
from gristmill.ledger.bodies import Piece, written, written_plain
from gristmill.ledger.book import check_names
from gristmill.ledger.calls import encode_record, pack_delta
from gristmill.ledger.exchanges import StoredExchanges, cut_exchange
from gristmill.ledger.imports import calls_of, own_capture
from gristmill.ledger.schema import ExchangeRow
from gristmill.records import CallRecord, Capture, Exchange, LostCall, Result

__all__ = ["CALL", "LATE", "LOST", "ArchivedAttempt", "Packed", "RowValues", "pack", "without_places"]

RowValues = Mapping[str, Any]
"""A row by column; lists of numbers are numpy arrays."""

CALL, LATE, LOST = "call", "late", "lost"
_PLACES: Final = ("first_call", "call_rows", "first_body", "body_rows")


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
    calls = [_call_row(key, CALL, call, texts) for call in _without_exchanges(capture)]
    calls += [_call_row(key, LATE, call, texts) for call in given.late]
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
    if kind == CALL:
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
    blank = _columns_of(key, LOST, CallRecord(model_call_id=call.model_call_id, response_id=""))
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


def without_places(row: RowValues) -> dict[str, Any]:
    """Return a row of `attempts` as `pack` makes it."""
    return {name: value for name, value in row.items() if name not in _PLACES}
