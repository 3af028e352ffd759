"""Captures as JSON lines: the documented file format of calls, recorded exchanges, lost calls and results.

Invariant: every line ends up in an attempt, in `bad_lines`, or in `notes`. A line that cannot be read and is
skipped on request leaves a lost call behind, so that an attempt with a hole never looks complete.

The format is documented in docs/reference/capture-format.md. Not here: opening files (files), writing
(writer).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

import msgspec

from gristmill.canonical import JsonValue, RepeatedKeys, loads
from gristmill.captures.attempt import AttemptReader
from gristmill.captures.call_line import CALL_KEYS, id_at, parse_call
from gristmill.captures.credit import CREDIT_KEYS, finite_at, read_credit, with_credit
from gristmill.captures.exact import plain_numbers
from gristmill.captures.exchange_line import EXCHANGE_KEYS, parse_exchange
from gristmill.captures.fields import JsonObject, count_at, kind_of, name_at, object_at
from gristmill.captures.reply import Unexpected, encodable
from gristmill.errors import Code, DecodeError
from gristmill.records import OLDEST_SCHEMA, RECORD_SCHEMA, Capture, Delivery, LostCall, Result

__all__ = [
    "DEFAULT_ROLLOUT",
    "CaptureFile",
    "CapturedRollout",
    "Document",
    "Note",
    "nearest_key",
    "read_documents",
    "read_lines",
    "read_result",
    "unknown_keys",
]

DEFAULT_ROLLOUT = "rollout"
"""Rollout id of lines that name none."""

_COMMON = frozenset({"kind", "schema", "rollout_id", "attempt"})
_KEYS = {
    "call": CALL_KEYS,
    "exchange": EXCHANGE_KEYS,
    "lost": _COMMON | {"model_call_id", "parent_call_id", "reason", "maybe_received"},
    "delivery": _COMMON | {"model_call_id", "state"},
    "result": _COMMON | {"result", "reward", "group_id", "metadata"} | CREDIT_KEYS,
}


_EVERY_KEY: frozenset[str] = frozenset[str]().union(*_KEYS.values())
_UNKNOWN = "unknown keys: "


class Note(msgspec.Struct, frozen=True):
    """Something that was tolerated, and where."""

    where: str
    message: str


def unknown_keys(note: Note) -> list[str]:
    """Give the keys that a note says are unknown; none where it is about something else."""
    return note.message.removeprefix(_UNKNOWN).split(", ") if note.message.startswith(_UNKNOWN) else []


def nearest_key(key: str) -> str:
    """Give the key of a line that was probably meant; empty where none is near, or it is one of another kind."""
    near = [] if key in _EVERY_KEY else difflib.get_close_matches(key, sorted(_EVERY_KEY), n=1)
    return near[0] if near else ""


class CapturedRollout(NamedTuple):
    """One attempt and what its harness handed back, None where that is not known."""

    capture: Capture
    result: Result | None


class CaptureFile(msgspec.Struct, frozen=True):
    """Everything in a capture file.

    Attributes:
        rollouts: attempts by (rollout id, attempt), in the order of their first lines.
        notes: unknown keys, routes that sample nothing, call ids that occur twice.
        bad_lines: lines that could not be read and were skipped because that was asked for.
    """

    rollouts: Mapping[tuple[str, int], CapturedRollout]
    notes: tuple[Note, ...] = ()
    bad_lines: tuple[DecodeError, ...] = ()


class Document(NamedTuple):
    """One line: where it stands for errors, its bytes, and the call id of an exchange that has none."""

    where: str
    data: bytes
    default_id: str


def read_lines(lines: Iterable[bytes], *, skip_bad: bool = False) -> CaptureFile:
    """Read capture lines.

    Args:
        lines: one JSON object each; empty lines are passed over.
        skip_bad: collect lines that cannot be read instead of raising; each leaves a lost call in its
            attempt, or in every attempt where it does not even tell which is its own.

    Raises:
        DecodeError: `file_malformed` or `schema_unsupported`; `where` is the line and the JSON path in it.
    """
    documents = (Document(f"line {index}", data, f"line-{index}") for index, data in enumerate(lines, 1))
    return read_documents((document for document in documents if document.data.strip()), skip_bad=skip_bad)


def read_documents(documents: Iterable[Document], *, default_kind: str = "call", skip_bad: bool = False) -> CaptureFile:
    """Read capture lines that stand anywhere; otherwise as `read_lines`."""
    reader = _Reader(default_kind, skip_bad)
    for document in documents:
        reader.add(document)
    return reader.finish()


class _Reader:
    """The lines so far, by attempt."""

    def __init__(self, default_kind: str, skip_bad: bool) -> None:
        self.default_kind = default_kind
        self.skip_bad = skip_bad
        self.named: bool | None = None
        self.attempts: dict[tuple[str, int], AttemptReader] = {}
        self.notes: list[Note] = []
        self.bad: list[DecodeError] = []
        self.unplaced: list[LostCall] = []

    def add(self, document: Document) -> None:
        where, data, default_id = document
        line: JsonObject = {}
        try:
            value = loads(data, where)
            line = object_at(value, "$")
            if isinstance(value, RepeatedKeys):
                raise Unexpected("each key once", "one repeated", "$")
            self._take(line, where, default_id)
        except DecodeError as error:
            self._refuse(error, line, default_id)
        except Unexpected as error:
            self._refuse(DecodeError(error.message, where=f"{where} {error.where}"), line, default_id)

    def _refuse(self, error: DecodeError, line: JsonObject, default_id: str) -> None:
        if not self.skip_bad:
            raise error
        self.bad.append(error)
        if line.get("kind", self.default_kind) in ("delivery", "result"):
            return
        call_id = line.get("model_call_id")
        hole = LostCall(
            model_call_id=encodable(call_id) if isinstance(call_id, str) and call_id else default_id,
            reason=f"{error.where} could not be read",
            maybe_received=True,
        )
        try:
            self._attempt(line).lost.append(hole) if line else self.unplaced.append(hole)
        except Unexpected:
            self.unplaced.append(hole)

    def _attempt(self, line: JsonObject) -> AttemptReader:
        rollout_id = id_at(line, "rollout_id")
        attempt = count_at(line, "attempt", "$") or 0
        if self.named is None:
            self.named = rollout_id is not None
        if self.named is not (rollout_id is not None):
            expected = "rollout_id on every line or on none"
            raise Unexpected(expected, "it on some", "$.rollout_id")
        key = (rollout_id or DEFAULT_ROLLOUT, attempt)
        return self.attempts.setdefault(key, AttemptReader(*key))

    def _take(self, line: JsonObject, where: str, default_id: str) -> None:
        kind = line.get("kind", self.default_kind)
        if not isinstance(kind, str) or kind not in _KEYS:
            raise Unexpected("call, exchange, lost, delivery or result", repr(kind), "$.kind")
        schema = count_at(line, "schema", "$") or OLDEST_SCHEMA
        if schema > RECORD_SCHEMA:
            message = f"expected schema {RECORD_SCHEMA} or older, got {schema}"
            raise DecodeError(message, code=Code.SCHEMA_UNSUPPORTED, where=where)
        attempt = self._attempt(line)
        if kind == "call":
            attempt.add_call(parse_call(line, attempt.rollout_id, attempt.attempt))
        elif kind == "exchange":
            parsed = parse_exchange(line, attempt.rollout_id, attempt.attempt, default_id)
            if isinstance(parsed, str):
                self.notes.append(Note(where, encodable(parsed)))
                return
            attempt.add_exchange(parsed)
            if parsed.dropped_headers:
                names = ", ".join(map(encodable, parsed.dropped_headers))
                self.notes.append(Note(where, f"request headers not kept: {names}"))
        elif kind == "lost":
            attempt.lost.append(_lost(line))
        elif kind == "delivery":
            attempt.deliveries.append((where, _call_id(line), _state(line)))
        else:
            if "result" not in line:
                raise DecodeError(
                    "expected the key `result`, got a line of kind result without it",
                    where=f"{where} $.result",
                    hint='what the harness handed back goes under it: {"kind": "result", "result": {…}, "reward": 1.0}',
                )
            if attempt.result is not None:
                raise Unexpected("one result for each attempt", "a second one", "$")
            attempt.result = _result_of_line(line)
        unknown = [encodable(key) for key in line if key not in _KEYS[kind]]
        if unknown:
            self.notes.append(Note(where, f"{_UNKNOWN}{', '.join(unknown)}"))

    def finish(self) -> CaptureFile:
        rollouts: dict[tuple[str, int], CapturedRollout] = {}
        if self.unplaced and not self.attempts:
            self.attempts[DEFAULT_ROLLOUT, 0] = AttemptReader(DEFAULT_ROLLOUT, 0)
        for key, attempt in self.attempts.items():
            attempt.lost.extend(self.unplaced)
            for where, call_id in attempt.unknown_deliveries():
                error = DecodeError(f"expected a call of this attempt, got {call_id!r}", where=where)
                if not self.skip_bad:
                    raise error
                self.bad.append(error)
            rollouts[key] = CapturedRollout(attempt.capture(), attempt.result)
            self.notes.extend(
                Note(f"call={call_id}", "this call id occurs more than once") for call_id in attempt.repeated_ids()
            )
        return CaptureFile(rollouts, tuple(self.notes), tuple(self.bad))


def _call_id(line: JsonObject) -> str:
    call_id = id_at(line, "model_call_id")
    if call_id is None:
        raise Unexpected("a string", "nothing", "$.model_call_id")
    return call_id


def _lost(line: JsonObject) -> LostCall:
    received = line.get("maybe_received")
    if received is not None and not isinstance(received, bool):
        raise Unexpected("true or false", kind_of(received), "$.maybe_received")
    reason = name_at(line, "reason", "$")
    lost = LostCall(
        model_call_id=_call_id(line),
        parent_call_id=id_at(line, "parent_call_id"),
        maybe_received=received is not False,
    )
    return lost if reason is None else msgspec.structs.replace(lost, reason=reason)


def _state(line: JsonObject) -> Delivery:
    state = line.get("state")
    try:
        return Delivery(state)
    except ValueError as error:
        expected = "delivered, partial, aborted or unknown"
        got = repr(state) if isinstance(state, str) else kind_of(state)
        raise Unexpected(expected, got, "$.state") from error


def read_result(data: bytes) -> Result:
    """Read a result file: the whole JSON value, with the other fields of a result from its top level.

    Raises:
        DecodeError: `file_malformed`; `where` is the JSON path.
    """
    value = loads(data)
    try:
        return _result(value, cast(JsonObject, value) if isinstance(value, dict) else {})
    except Unexpected as error:
        raise DecodeError(error.message, where=error.where) from error


def _result_of_line(line: JsonObject) -> Result:
    value = line["result"]
    inner = cast(JsonObject, value) if isinstance(value, dict) else {}
    return _result(value, {**inner, **line})


def _result(value: JsonValue, holder: JsonObject) -> Result:
    metadata = holder.get("metadata")
    result = Result(
        value=value,
        reward=finite_at(holder, "reward", "$"),
        group_id=name_at(holder, "group_id", "$"),
        metadata={} if metadata is None else plain_numbers(object_at(metadata, "$.metadata"), "$.metadata"),
    )
    return with_credit(result, read_credit(holder))
