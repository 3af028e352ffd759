"""The `call` line of a capture file: one captured call, its tokens whole.

Invariant: what a line states is taken as stated and type-checked; what it does not state is unknown, never
guessed. The keys are documented in docs/reference/capture-format.md.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from gristmill.canonical import JsonValue
from gristmill.captures.exact import plain_numbers
from gristmill.captures.fields import (
    JsonObject,
    count_at,
    kind_of,
    list_at,
    name_at,
    number,
    object_at,
    usage_of,
)
from gristmill.captures.reply import ABORT_REASONS, ReplyChoice, Unexpected
from gristmill.captures.request import media_digests, model_asked_for, sampling_of
from gristmill.errors import Code
from gristmill.fingerprint import FINGERPRINT_VERSION, output_items
from gristmill.lineage import RequestDigests, request_digests
from gristmill.records import (
    OLDEST_SCHEMA,
    UNLABELLED,
    CallRecord,
    Continuation,
    Delivery,
    Dialect,
    Exchange,
    MediaSpan,
    OutputItem,
    ParentResolution,
    Purpose,
    Sampling,
    WeightSpan,
    schema_of,
)

__all__ = ["CALL_KEYS", "CallLine", "id_at", "parse_call", "parse_delivery", "time_at"]

T = TypeVar("T")
AbsentT = TypeVar("AbsentT")

# fmt: off
CALL_KEYS = frozenset(
    {
        "kind", "schema", "rollout_id", "attempt", "model_call_id", "response_id", "choice_index",
        "ordinal", "parent_call_id", "parent_resolution", "dialect", "model", "requested_model",
        "adapter", "tokenizer", "session_id", "parent_session_id", "response_status", "finish_reason",
        "output_items", "prompt_token_ids", "generation_token_ids", "generation_log_probs", "usage",
        "usable", "unusable_reason", "unusable_detail", "weight_versions", "sampling", "media",
        "request_media", "request", "reply", "request_headers", "http_status", "delivered", "delivery",
        "admitted_at", "completed_at", "purpose", "context_digest", "continuation_digest",
        "continuation_digest_bare", "system_digest", "tools_digest", "fingerprint_version", "extras",
        "upstream", "upstream_id", "engine_epoch", "weights_at_start", "weights_at_end", "changes",
        "retry_of", "request_digest", "continuation",
    }
)
# fmt: on
"""Keys of a `call` line."""

_DTYPES = frozenset(f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)) - {"float8"} | {
    "bool"
}
_DIGESTS = tuple(RequestDigests.__struct_fields__)


class CallLine(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed line: the record without its token fields, and the tokens as they were given."""

    record: CallRecord
    tokens: ReplyChoice
    completion_tokens: int | None
    ordinal: int | None
    parent_stated: bool
    exchange: Exchange | None
    extras: Mapping[str, npt.NDArray[Any]]


def id_at(line: JsonObject, key: str) -> str | None:
    """Return an id: a string that is not empty."""
    name = name_at(line, key, "$")
    if name == "":
        raise Unexpected("an id", "an empty string", f"$.{key}")
    return name


def time_at(line: JsonObject, key: str) -> float | None:
    """Return a time in seconds since 1970."""
    value = line.get(key)
    return None if value is None else _convert(plain_numbers(value, f"$.{key}"), float, f"$.{key}")


def _convert(value: JsonValue, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        name = getattr(kind, "__name__", "value")
        raise Unexpected(f"a valid {name}", message, where + place.rstrip("`")) from error
    except UnicodeEncodeError as error:
        raise Unexpected("valid Unicode", "a lone surrogate", where) from error


def parse_delivery(line: JsonObject) -> Delivery | None:
    """Read `delivery`, or `delivered` (true or false), None where neither is stated."""
    stated, flag = line.get("delivery"), line.get("delivered")
    if stated is not None:
        return _convert(stated, Delivery, "$.delivery")
    if flag is None:
        return None
    if not isinstance(flag, bool):
        raise Unexpected("true or false", kind_of(flag), "$.delivered")
    return Delivery.DELIVERED if flag else Delivery.ABORTED


def parse_call(line: JsonObject, rollout_id: str, attempt: int) -> CallLine:
    """Read one `call` line.

    Raises:
        Unexpected: a key has another type than documented.
    """
    call_id = id_at(line, "model_call_id")
    if call_id is None:
        raise Unexpected("a string", "nothing", "$.model_call_id")
    request = line.get("request")
    items, digests = _items_and_digests(line, request)
    finish = name_at(line, "finish_reason", "$")
    reason, detail = _reason(line, finish)
    record = CallRecord(
        model_call_id=call_id,
        response_id=id_at(line, "response_id") or call_id,
        rollout_id=rollout_id,
        attempt=attempt,
        choice_index=count_at(line, "choice_index", "$") or 0,
        dialect=_given(line, "dialect", Dialect, Dialect.UNKNOWN),
        model=name_at(line, "model", "$") or name_at(line, "requested_model", "$") or model_asked_for(request),
        response_status=name_at(line, "response_status", "$"),
        finish_reason=finish,
        output_items=items,
        context_digest=digests.context_digest,
        continuation_digest=digests.continuation_digest,
        continuation_digest_bare=digests.continuation_digest_bare,
        system_digest=digests.system_digest,
        tools_digest=digests.tools_digest,
        fingerprint_version=count_at(line, "fingerprint_version", "$") or FINGERPRINT_VERSION,
        unusable_reason=reason,
        unusable_detail=detail,
        schema=count_at(line, "schema", "$") or OLDEST_SCHEMA,
    )
    record = _with_gateway(_with_circumstances(record, line, request), line)
    return CallLine(
        record=msgspec.structs.replace(record, schema=schema_of(record)),
        tokens=_tokens(line),
        completion_tokens=usage_of(line).completion_tokens,
        ordinal=count_at(line, "ordinal", "$"),
        parent_stated="parent_call_id" in line or "parent_resolution" in line,
        exchange=_exchange(line, call_id),
        extras=_extras(line),
    )


def _given(line: JsonObject, key: str, kind: type[T], absent: AbsentT) -> T | AbsentT:
    """Return a field as a value of one of our types, `absent` where it is absent or null."""
    value = line.get(key)
    return absent if value is None else _convert(plain_numbers(value, f"$.{key}"), kind, f"$.{key}")


def _with_circumstances(record: CallRecord, line: JsonObject, request: JsonValue) -> CallRecord:
    """Add how the call was made: lineage, session, weights, sampling, media, delivery, times, purpose."""
    parent = id_at(line, "parent_call_id")
    resolution = _given(line, "parent_resolution", ParentResolution, ParentResolution.RESOLVED)
    return msgspec.structs.replace(
        record,
        parent_call_id=parent,
        parent_resolution=None if parent is None and line.get("parent_resolution") is None else resolution,
        adapter=name_at(line, "adapter", "$"),
        tokenizer=name_at(line, "tokenizer", "$"),
        session_id=name_at(line, "session_id", "$"),
        parent_session_id=name_at(line, "parent_session_id", "$"),
        weight_versions=_weight_versions(line),
        sampling=_given(line, "sampling", Sampling, sampling_of(request)),
        media=_given(line, "media", tuple[MediaSpan, ...], ()),
        request_media=_given(line, "request_media", tuple[str, ...], media_digests(request)),
        delivery=parse_delivery(line) or Delivery.UNKNOWN,
        admitted_at=time_at(line, "admitted_at"),
        completed_at=time_at(line, "completed_at"),
        purpose=_given(line, "purpose", Purpose, UNLABELLED),
    )


def _with_gateway(record: CallRecord, line: JsonObject) -> CallRecord:
    """Add what a gateway said of the call: names, engine, weights, changes, retry, continuation."""
    return msgspec.structs.replace(
        record,
        requested_model=name_at(line, "requested_model", "$"),
        upstream=name_at(line, "upstream", "$"),
        upstream_id=name_at(line, "upstream_id", "$"),
        engine_epoch=count_at(line, "engine_epoch", "$"),
        weights_at_start=name_at(line, "weights_at_start", "$"),
        weights_at_end=name_at(line, "weights_at_end", "$"),
        changes=_given(line, "changes", tuple[str, ...], ()),
        retry_of=id_at(line, "retry_of"),
        request_digest=name_at(line, "request_digest", "$"),
        continuation=_given(line, "continuation", Continuation, None),
    )


def _items_and_digests(line: JsonObject, request: JsonValue) -> tuple[tuple[OutputItem, ...], RequestDigests]:
    """Read the output items, as served in any dialect or in our stored form, and the lineage keys."""
    given = list_at(line, "output_items", "$") or []
    stored = [isinstance(item, dict) and "fingerprint" in item and "kind" in item for item in given]
    stated = RequestDigests(**{key: name_at(line, key, "$") for key in _DIGESTS})
    if any(stored):
        if not all(stored):
            raise Unexpected("items in one form", "stored and served ones", "$.output_items")
        items = _convert(given, tuple[OutputItem, ...], "$.output_items")
        return items, stated
    if stated == RequestDigests():
        stated = request_digests(request, given)
    return output_items(given), stated


def _reason(line: JsonObject, finish: str | None) -> tuple[Code | None, str | None]:
    reason = line.get("unusable_reason")
    if reason is not None:
        return _convert(reason, Code, "$.unusable_reason"), name_at(line, "unusable_detail", "$")
    usable = line.get("usable")
    if usable is not None and usable is not True:
        raise Unexpected("unusable_reason beside usable: false", "no reason", "$.usable")
    if finish in ABORT_REASONS:
        return Code.ABORTED, f"the engine ended with finish_reason {finish!r}"
    return None, None


def _weight_versions(line: JsonObject) -> tuple[WeightSpan, ...]:
    given = list_at(line, "weight_versions", "$") or []
    spans: list[JsonValue] = []
    for position, value in enumerate(given):
        span = object_at(value, f"$.weight_versions[{position}]")
        version = span.get("version")
        spans.append({**span, "version": str(version) if type(version) is int else version})
    return _convert(spans, tuple[WeightSpan, ...], "$.weight_versions")


def _tokens(line: JsonObject) -> ReplyChoice:
    logprobs = list_at(line, "generation_log_probs", "$")
    return ReplyChoice(
        prompt_ids=list_at(line, "prompt_token_ids", "$"),
        token_ids=list_at(line, "generation_token_ids", "$"),
        logprobs=None if logprobs is None else [number(value) for value in logprobs],
    )


def _exchange(line: JsonObject, call_id: str) -> Exchange | None:
    if all(line.get(key) is None for key in ("request", "reply", "request_headers", "http_status")):
        return None
    headers = _given(line, "request_headers", dict[str, str], dict[str, str]())
    return Exchange(
        model_call_id=call_id,
        request=line.get("request"),
        reply=line.get("reply"),
        headers=headers,
        status=count_at(line, "http_status", "$"),
    )


def _extras(line: JsonObject) -> Mapping[str, npt.NDArray[Any]]:
    """Read arrays that belong to the token delta: `{name: {dtype, shape, data}}`, base64, little-endian."""
    given = line.get("extras")
    if given is None:
        return {}
    made: dict[str, npt.NDArray[Any]] = {}
    for name, value in object_at(given, "$.extras").items():
        place = f"$.extras.{name}"
        packed = object_at(value, place)
        dtype, data = name_at(packed, "dtype", place), name_at(packed, "data", place)
        shape = _convert(packed.get("shape"), tuple[int, ...], f"{place}.shape")
        if dtype not in _DTYPES:
            raise Unexpected(f"one of {', '.join(sorted(_DTYPES))}", repr(dtype), f"{place}.dtype")
        kind = np.dtype(dtype).newbyteorder("<")
        try:
            made[name] = np.frombuffer(base64.b64decode(data or "", validate=True), kind).reshape(shape)
        except (ValueError, OverflowError) as error:
            raise Unexpected("dtype, shape and data of one array", str(error), place) from error
    return made
