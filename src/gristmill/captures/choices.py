"""Replies that carry `choices` (Chat Completions, Completions, token-level generate) to the normal form.

Invariant: a body that the fast typed decoder accepts and a body that is read in full give equal replies. The
fast decoder skips what is rarely needed, so whatever it cannot prove complete is read again, exactly and
slowly.

Not here: joining a stream's chunks into such a body (assembly), what the client was served in each dialect
(chat, completions, generate).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from gristmill.canonical import JsonValue, loads
from gristmill.captures.fields import JsonObject, count_at, kind_of, list_at, name_at, object_at, usage_of
from gristmill.captures.reply import (
    ABORT_REASONS,
    Reply,
    ReplyChoice,
    Unexpected,
    Usage,
    chat_status,
    failed_reply,
    malformed_reply,
)
from gristmill.captures.reply_json import loads_reply
from gristmill.captures.sampled import FastLogprobs, logprob_values, prompt_ids, sampled_ids
from gristmill.errors import Code, DecodeError
from gristmill.records import Dialect, ResponseStatus, WeightSpan
from gristmill.tokens.check import IntList

__all__ = ["ItemsOf", "error_text", "read_body", "read_body_and_rest", "read_document"]

ItemsOf = Callable[[JsonObject, str], tuple[JsonValue, ...]]
"""From a choice and its place to what the client was served."""

_ABSENT = msgspec.Raw()


class _FastMeta(msgspec.Struct):
    weight_versions: msgspec.Raw = _ABSENT
    output_token_logprobs: msgspec.Raw = _ABSENT


class _Choice(msgspec.Struct):
    """What both views of a choice have."""

    index: msgspec.Raw = _ABSENT
    message: msgspec.Raw = _ABSENT
    text: msgspec.Raw = _ABSENT
    finish_reason: msgspec.Raw = _ABSENT
    stop_reason: msgspec.Raw = _ABSENT
    matched_stop: msgspec.Raw = _ABSENT
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: FastLogprobs | None = None


class _FastChoice(_Choice):
    weight_versions: msgspec.Raw = _ABSENT
    meta_info: _FastMeta | None = None
    response_token_ids: list[int] | None = None


class _FastBody(msgspec.Struct):
    choices: list[_FastChoice]
    id: msgspec.Raw = _ABSENT
    request_id: msgspec.Raw = _ABSENT
    model: msgspec.Raw = _ABSENT
    usage: msgspec.Raw = _ABSENT
    error: msgspec.Raw = _ABSENT
    prompt_token_ids: list[int] | None = None


class _WholeChoice(_Choice, forbid_unknown_fields=True):
    """What engines put into a choice; with no other field in it, what is no token is kept as it is written."""

    prompt_logprobs: msgspec.Raw = _ABSENT
    routed_experts: msgspec.Raw = _ABSENT


class _WholeBody(msgspec.Struct, forbid_unknown_fields=True):
    """The same of what stands around the choices."""

    choices: list[_WholeChoice]
    id: msgspec.Raw = _ABSENT
    object: msgspec.Raw = _ABSENT
    created: msgspec.Raw = _ABSENT
    model: msgspec.Raw = _ABSENT
    service_tier: msgspec.Raw = _ABSENT
    system_fingerprint: msgspec.Raw = _ABSENT
    usage: msgspec.Raw = _ABSENT
    metrics: msgspec.Raw = _ABSENT
    metadata: msgspec.Raw = _ABSENT
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: msgspec.Raw = _ABSENT
    prompt_text: msgspec.Raw = _ABSENT
    kv_transfer_params: msgspec.Raw = _ABSENT
    ec_transfer_params: msgspec.Raw = _ABSENT


_TOKEN_FIELDS = frozenset({"routed_experts", "kv_transfer_params", "ec_transfer_params"})
_fast_decoder = msgspec.json.Decoder(_FastBody)
_whole_decoder = msgspec.json.Decoder(_WholeBody)


def _plain(holder: msgspec.Struct, keys: tuple[str, ...]) -> JsonObject:
    """Turn fields of a fast view into what `loads` would give."""
    plain: JsonObject = {}
    for key in keys:
        value: Any = getattr(holder, key)
        if isinstance(value, msgspec.Raw):
            if value is _ABSENT:
                continue
            value = loads(bytes(value))
        elif isinstance(value, _FastMeta):
            value = _plain(value, value.__struct_fields__)
        elif isinstance(value, list):
            # Lists of the fast view are ids, and were decoded as integers.
            value = IntList(cast("list[int]", value))
        plain[key] = value
    return plain


def _fast_document(body: bytes) -> JsonObject | None:
    """Decode the usual fields of a body, None where that is not possible without loss."""
    try:
        fast = _fast_decoder.decode(body)
        document = _plain(fast, _FastBody.__struct_fields__)
        document["choices"] = [_plain(choice, _FastChoice.__struct_fields__) for choice in fast.choices]
    except (msgspec.DecodeError, DecodeError, RecursionError):
        return None
    return document


def read_body(body: bytes, dialect: Dialect, items_of: ItemsOf, *, echo: bool = False) -> Reply:
    """Read a whole reply body.

    Args:
        body: UTF-8 JSON.
        dialect: for the record.
        items_of: takes what was served out of a choice.
        echo: the request asked for the prompt's log-probabilities in front of the generation's.
    """
    document = _fast_document(body)
    if document is not None:
        reply = read_document(document, dialect, items_of, echo=echo)
        if all(choice.reason is None for choice in reply.choices):
            return reply
    try:
        value = loads_reply(body)
    except DecodeError as error:
        return malformed_reply(dialect, error.message)
    return read_document(value, dialect, items_of, echo=echo)


def read_body_and_rest(body: bytes, dialect: Dialect, items_of: ItemsOf) -> tuple[Reply, bytes] | None:
    """Read a whole reply body once, for its tokens and for everything else.

    Returns:
        The reply, equal to `read_body`'s, and the body without ids, log-probabilities and what belongs to them. None
        where the body is not of the usual form, or a choice may not be trained: then it is to be read in full.
    """
    try:
        whole = _whole_decoder.decode(body)
        document = _plain(whole, _WHOLE_ROOT)
        document["choices"] = [_plain(choice, _WHOLE_CHOICE) for choice in whole.choices]
    except (msgspec.DecodeError, DecodeError, RecursionError):
        return None
    reply = read_document(document, dialect, items_of)
    if reply.error is not None or any(choice.reason is not None for choice in reply.choices):
        return None
    rest: dict[str, Any] = _rest(whole)
    rest["choices"] = [_rest(choice) for choice in whole.choices]
    return reply, msgspec.json.encode(rest)


_WHOLE_ROOT = tuple(key for key in _FastBody.__struct_fields__ if key in _WholeBody.__struct_fields__)
_WHOLE_CHOICE = tuple(key for key in _FastChoice.__struct_fields__ if key in _WholeChoice.__struct_fields__)


def _rest(holder: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that are kept as they are written."""
    fields = ((key, getattr(holder, key)) for key in holder.__struct_fields__ if key not in _TOKEN_FIELDS)
    return {key: value for key, value in fields if isinstance(value, msgspec.Raw) and value is not _ABSENT}


def read_document(value: JsonValue, dialect: Dialect, items_of: ItemsOf, *, echo: bool = False) -> Reply:
    """Read a decoded reply; `echo` as in `read_body`."""
    try:
        document = object_at(value, "$")
        error = error_text(document)
        if error is not None:
            return failed_reply(dialect, error)
        return _read(document, dialect, items_of, echo)
    except Unexpected as error:
        return malformed_reply(dialect, str(error))


def error_text(document: Mapping[str, JsonValue]) -> str | None:
    """Return what an error body says, None where the body is no error."""
    error = document.get("error")
    if error is None:
        return str(document.get("message")) if document.get("object") == "error" else None
    message = cast(JsonObject, error).get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else "the engine gave no message"


def _read(document: JsonObject, dialect: Dialect, items_of: ItemsOf, echo: bool) -> Reply:
    listed = list_at(document, "choices", "$")
    if not listed:
        raise Unexpected("choices", "none", "$.choices")
    usage = usage_of(document)
    expected = usage.completion_tokens if len(listed) == 1 else None
    choices = [
        _choice(object_at(value, f"$.choices[{position}]"), position, document, expected, items_of, echo)
        for position, value in enumerate(listed)
    ]
    indexes = {choice.index for choice in choices}
    if len(indexes) != len(choices):
        raise Unexpected("each choice index once", "one repeated", "$.choices")
    choices = _check_usage(choices, usage)
    statuses = {choice.response_status for choice in choices}
    return Reply(
        response_id=name_at(document, "id", "$") or name_at(document, "request_id", "$"),
        model=name_at(document, "model", "$"),
        dialect=dialect,
        status=statuses.pop() if len(statuses) == 1 else ResponseStatus.UNKNOWN,
        choices=tuple(sorted(choices, key=lambda choice: choice.index)),
        usage=usage,
    )


def _choice(
    choice: JsonObject,
    position: int,
    root: JsonObject,
    expected: int | None,
    items_of: ItemsOf,
    echo: bool,
) -> ReplyChoice:
    where = f"$.choices[{position}]"
    stated = count_at(choice, "index", where)
    index = position if stated is None else stated
    finish = name_at(choice, "finish_reason", where)
    logprobs = logprob_values(choice)
    if expected is None and logprobs is not None and not echo:
        expected = len(logprobs)
    search = sampled_ids(choice, root, index, expected)
    prompt = prompt_ids(choice, root)
    if echo and logprobs and search.ids and prompt and len(logprobs) == len(prompt) + len(search.ids):
        # The prompt's entries stand in front; any other length is a disagreement, to be reported as it is.
        logprobs = logprobs[len(prompt) :]
    reason = Code.TOKEN_COUNT_MISMATCH
    try:
        spans, misfit = _weight_spans(choice, where, search.ids)
    except Unexpected as error:
        # Spoils the tokens, not the reply around them.
        spans, misfit, reason = (), str(error), Code.REPLY_MALFORMED
    made = ReplyChoice(
        index=index,
        finish_reason=finish,
        response_status=chat_status(finish),
        items=items_of(choice, where),
        prompt_ids=prompt,
        token_ids=search.ids,
        logprobs=logprobs,
        weight_versions=spans,
        stop_reason=choice.get("stop_reason", choice.get("matched_stop")),
        reason=search.reason,
        detail=search.detail,
    )
    made = _with_reason(made)
    if misfit is not None and made.reason is None:
        return msgspec.structs.replace(made, reason=reason, detail=misfit)
    return made


def _with_reason(choice: ReplyChoice) -> ReplyChoice:
    """Give a choice the first reason that keeps its tokens from being trained, as far as the reply tells."""
    reason, detail = choice.reason, choice.detail
    ids, logprobs = choice.token_ids, choice.logprobs
    if choice.finish_reason in ABORT_REASONS:
        reason, detail = Code.ABORTED, f"the engine ended with finish_reason {choice.finish_reason!r}"
    elif choice.response_status is ResponseStatus.FAILED:
        reason, detail = Code.CALL_FAILED, f"the engine ended with finish_reason {choice.finish_reason!r}"
    elif ids is None:
        pass
    elif choice.prompt_ids is None:
        reason, detail = Code.PROMPT_IDS_MISSING, "the reply has no prompt_token_ids"
    elif logprobs is None:
        reason, detail = Code.LOGPROBS_MISSING, f"{len(ids)} token ids, no logprobs"
    elif len(logprobs) != len(ids):
        reason = Code.LOGPROB_COUNT_MISMATCH
        detail = f"{len(ids)} token ids, {len(logprobs)} logprobs"
    return msgspec.structs.replace(choice, reason=reason, detail=detail)


def _check_usage(choices: list[ReplyChoice], usage: Usage) -> list[ReplyChoice]:
    """Compare the reported count with the sum over choices; a wrong sum spoils every choice."""
    reported = usage.completion_tokens
    lengths = [len(choice.token_ids) for choice in choices if choice.token_ids is not None]
    total = sum(lengths)
    if reported is None or total == reported or (total < reported and len(lengths) < len(choices)):
        return choices
    detail = f"{total} token ids over {len(choices)} choices, the engine reported {reported}"
    return [_count_mismatch(choice, detail) for choice in choices]


def _count_mismatch(choice: ReplyChoice, detail: str) -> ReplyChoice:
    if choice.reason in {None, Code.LOGPROBS_MISSING, Code.PROMPT_IDS_MISSING}:
        return msgspec.structs.replace(choice, reason=Code.TOKEN_COUNT_MISMATCH, detail=detail)
    if choice.reason is Code.LOGPROB_COUNT_MISMATCH:
        return msgspec.structs.replace(choice, detail=f"{choice.detail}; {detail}")
    return choice


def _weight_spans(choice: JsonObject, where: str, ids: Any) -> tuple[tuple[WeightSpan, ...], str | None]:
    """Read the engine's own weight spans; a version alone names no token and is not made into one.

    Spans that do not fit the sampled ids are none, with a sentence that says so.
    """
    made: list[WeightSpan] = []
    holder, inside = choice, where
    if choice.get("weight_versions") is None and isinstance(choice.get("meta_info"), dict):
        holder, inside = cast(JsonObject, choice["meta_info"]), f"{where}.meta_info"
    for position, value in enumerate(list_at(holder, "weight_versions", inside) or ()):
        place = f"{inside}.weight_versions[{position}]"
        span = object_at(value, place)
        start, end, version = (
            count_at(span, "start", place),
            count_at(span, "end", place),
            span.get("version"),
        )
        if start is None or end is None or start > end:
            raise Unexpected("start ≤ end", f"{start} and {end}", place)
        if ids is not None and end > len(ids):
            return (), f"{len(ids)} token ids, a span of weights that ends at {end}"
        version = name_at(span, "version", place) if isinstance(version, str) else version
        if type(version) is not str and type(version) is not int:
            raise Unexpected("a string or an integer", kind_of(version), f"{place}.version")
        made.append(WeightSpan(str(version), start, end))
    return tuple(made), None
