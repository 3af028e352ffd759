"""Writes an attempt as capture lines that read back as the same attempt.

Invariant: a `call` line holds the call's whole prompt, expanded from its bases, so that each line stands
alone; the reader finds the same bases again. The reply's wire text is kept where an exchange was kept.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Final, cast

import msgspec
import numpy as np

from gristmill.canonical import JsonValue
from gristmill.captures.credit import CREDIT_KEYS, credit_json
from gristmill.captures.exact import dumps
from gristmill.captures.fields import JsonObject
from gristmill.records import CallRecord, Capture, Exchange, Int32Array, Purpose, Result, TokenDelta
from gristmill.tokens import expand

__all__ = ["write_lines"]

# fmt: off
_NOT_WRITTEN = (
    "prompt_len", "prev_len", "delta_len", "cum_len", "base_call_id", "sequence_digest",
    "logprobs_digest", "chain_digest", "usable",
)
# fmt: on
"""Fields that the reader derives from the tokens."""

_CREDIT_SCHEMA: Final = 3
"""Version of the format in which the credit of a result was new."""


def write_lines(capture: Capture, result: Result | None = None) -> Iterator[bytes]:
    """Write an attempt, one line at a time, each with its line end.

    Args:
        capture: the attempt.
        result: what the harness handed back, None where that is not known.

    Raises:
        ReconstructionError: `tokens_unusable`, a call's bases are not in the capture.
    """
    key: JsonObject = {"rollout_id": capture.rollout_id, "attempt": capture.attempt}
    by_id = {record.model_call_id: record for record in reversed(capture.records)}
    for record in capture.records:
        line = {"kind": "call", **_fields(record), **key}
        delta = capture.tokens.get(record.model_call_id)
        if delta is not None and by_id[record.model_call_id] is record:
            sequence_T = expand(by_id, capture.tokens, record.model_call_id)
            line |= _tokens(record, sequence_T, delta)
        exchange = capture.exchanges.get(record.model_call_id)
        if exchange is not None:
            line |= _exchange(exchange)
        yield dumps(line) + b"\n"
    for lost in capture.lost:
        stated = msgspec.to_builtins(lost)
        yield dumps({"kind": "lost", **key, **stated, "maybe_received": lost.maybe_received}) + b"\n"
    if result is not None:
        line = {"kind": "result", **key, "result": result.value, "reward": result.reward}
        line |= {"group_id": result.group_id, "metadata": result.metadata or None}
        credit = _credit(result)
        yield dumps({"schema": _CREDIT_SCHEMA, **line, **credit} if credit else line) + b"\n"


def _credit(result: Result) -> JsonObject:
    """Return the credit keys of a result; null where the reader would else take what the history holds under them."""
    inner = cast("JsonObject", result.value) if isinstance(result.value, dict) else {}
    return {name: None for name in sorted(CREDIT_KEYS) if inner.get(name) is not None} | credit_json(result)


def _fields(record: CallRecord) -> JsonObject:
    """Return the fields that are not at their defaults, under the keys that the reader knows."""
    fields: JsonObject = msgspec.to_builtins(record)
    for name in _NOT_WRITTEN:
        fields.pop(name, None)
    if record.purpose == Purpose():
        fields.pop("purpose", None)
    # Written even where it is null: without the key a reader works the parent out from the request.
    fields["parent_call_id"] = record.parent_call_id
    fields["sampling"] = msgspec.to_builtins(record.sampling)
    fields["request_media"] = list(record.request_media)
    fields["output_items"] = [msgspec.to_builtins(item) for item in record.output_items]
    return fields


def _tokens(record: CallRecord, sequence_T: Int32Array, delta: TokenDelta) -> JsonObject:
    prompt_len, sampled = record.prompt_len, record.cum_len - record.prompt_len
    logprobs_T = delta.logprobs_T[delta.logprobs_T.size - sampled :]
    line: JsonObject = {
        "prompt_token_ids": sequence_T[:prompt_len].tolist(),
        "generation_token_ids": sequence_T[prompt_len:].tolist(),
        # A float32 written as the double of equal value reads back as the same float32.
        "generation_log_probs": logprobs_T.astype(np.float64).tolist(),
    }
    if delta.extras:
        line["extras"] = _extras(delta.extras)
    return line


def _extras(extras: Mapping[str, np.ndarray]) -> JsonValue:
    packed: JsonObject = {}
    for name, values in extras.items():
        little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        data = base64.b64encode(little.tobytes()).decode()
        packed[name] = {"dtype": values.dtype.name, "shape": list(values.shape), "data": data}
    return packed


def _exchange(exchange: Exchange) -> JsonObject:
    return {
        "request": exchange.request,
        "reply": exchange.reply,
        "request_headers": dict(exchange.headers),
        "http_status": exchange.status,
    }
