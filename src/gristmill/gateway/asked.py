"""One request as the gateway understands it: read, checked, translated, and placed in its attempt's history.

Invariant: evidence is what the client sent (with `previous_response_id` written out), decoded exactly; what is sent on
to an engine is made from it and every difference is noted.

Not here: sending it, and what comes back (call).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec

from gristmill.canonical import JsonValue, loads
from gristmill.captures.headers import Session, kept_headers, session_of
from gristmill.captures.purpose import first_label
from gristmill.captures.reply import encodable
from gristmill.captures.retry import request_digest, says_retry
from gristmill.errors import Code, DecodeError, SelectionError
from gristmill.gateway.attempts import Attempt, PastCall
from gristmill.gateway.config import ANY_MODEL
from gristmill.gateway.dialects.responses import responses_named
from gristmill.gateway.front import Front, HistoryOf, JsonObject, RequestRefused, Translated
from gristmill.gateway.json_text import parse
from gristmill.gateway.parameters import apply_overrides, permitted
from gristmill.lineage import ParentLink
from gristmill.records import Delivery, Dialect, ParentResolution, Purpose

__all__ = ["Asked", "ask_engine_for", "engine_model", "marked_retry", "read_request"]

ReadHistory = Callable[[Sequence[str]], Awaitable[Mapping[str, Sequence[Any]]]]
"""From response ids of the attempt to their conversations, input then output; those that were captured."""

ValueT = TypeVar("ValueT")

_LARGE_bytes: Final = 512 * 1024
_UNDELIVERED: Final = frozenset({Delivery.PARTIAL, Delivery.ABORTED})


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can be admitted.

    Attributes:
        body: the client's, without what it may not set.
        translated: for the engine.
        evidence: the client's body decoded exactly, written out.
        model: the name that was asked for.
        digest: what a repetition of the request has in common with it.
        parent: which call it continues.
        retry_of: an earlier call that asked the same.
        headers: those that are kept.
        session: what they say of the harness's session.
        purpose: label by what is known now.
        notes: what was changed so far.
        large: what is done with it takes long enough for others to notice.
    """

    body: JsonObject
    translated: Translated
    evidence: JsonValue
    model: str
    digest: str
    parent: ParentLink
    retry_of: str | None
    headers: Mapping[str, str]
    session: Session
    purpose: Purpose
    notes: tuple[str, ...]
    large: bool = False


async def read_request(
    raw: bytes,
    headers: Mapping[str, str],
    front: Front,
    attempt: Attempt,
    history: ReadHistory,
) -> Asked:
    """Understand a request.

    Args:
        raw: its body, decompressed.
        headers: names in lower case.
        front: of its dialect.
        attempt: whose it is.
        history: reads captured conversations back.

    Raises:
        RequestRefused: it is not served.
    """
    large = len(raw) > _LARGE_bytes
    parsed = await _aside(large, _decoded, raw)
    found = await _history_of(parsed.body, front, history)
    return await _aside(large, _understood, parsed, headers, front, attempt, found, large)


async def _aside(large: bool, work: Callable[..., ValueT], *arguments: Any) -> ValueT:
    """Do what takes long in a thread, so that other calls go on meanwhile."""
    return await asyncio.to_thread(work, *arguments) if large else work(*arguments)


class _Decoded(NamedTuple):
    """A body: fast, for what is sent on, without what a harness may not set; exactly, for evidence."""

    body: JsonObject
    exact: JsonValue
    removed: tuple[str, ...]


def _decoded(raw: bytes) -> _Decoded:
    try:
        parsed = parse(raw)
        exact = loads(raw)
    except DecodeError as error:
        raise RequestRefused(400, Code.REQUEST_MALFORMED, f"expected a JSON body: {error.message}") from error
    if not isinstance(parsed, dict):
        raise RequestRefused(400, Code.REQUEST_MALFORMED, "expected a JSON object")
    body, removed = permitted(cast(JsonObject, parsed))
    return _Decoded(body, exact, removed)


def _understood(
    decoded: _Decoded,
    headers: Mapping[str, str],
    front: Front,
    attempt: Attempt,
    history_of: HistoryOf,
    large: bool,
) -> Asked:
    body = decoded.body
    model = body.get("model")
    if not isinstance(model, str) or not model or len(model) > 512:
        raise RequestRefused(400, Code.REQUEST_MALFORMED, "expected the name of a model", "$.model")
    translated = front.translate(body, history_of)
    evidence = decoded.exact if translated.understood is body else translated.understood
    session = session_of(headers, evidence)
    digest = request_digest(evidence, session)
    parent = _parent(attempt, evidence)
    return Asked(
        body=body,
        translated=translated,
        evidence=evidence,
        model=model,
        digest=digest,
        parent=parent,
        retry_of=_retry_of(attempt, digest, parent),
        headers=kept_headers(headers)[0],
        session=session,
        purpose=first_label(session, evidence),
        notes=(*decoded.removed, *translated.notes),
        large=large,
    )


async def _history_of(body: JsonObject, front: Front, history: ReadHistory) -> HistoryOf:
    """Read the conversations that a request refers to before it is translated, which cannot wait."""
    named = responses_named(body) if front.dialect is Dialect.RESPONSES else ()
    found: Mapping[str, Sequence[Any]] = await history(named) if named else {}
    return found.get


def _parent(attempt: Attempt, evidence: JsonValue) -> ParentLink:
    try:
        return attempt.index.parent_of(evidence)
    except SelectionError:
        # What cannot be read as a conversation continues nothing that could be proved.
        return ParentLink(None, ParentResolution.UNRESOLVED)


def _retry_of(attempt: Attempt, digest: str, parent: ParentLink) -> str | None:
    earlier = [past for past in attempt.past.get(digest, ()) if past.parent_call_id == parent.parent_call_id]
    return earlier[-1].call_id if earlier else None


def marked_retry(asked: Asked, headers: Mapping[str, str], attempt: Attempt) -> PastCall | None:
    """Return the call whose record answers a request, None where a new call has to.

    That is a request that says it is a retry, or that asks for a body after a stream, and repeats exactly one call that
    completed and whose reply was not written to the end.
    """
    fitting = [
        past
        for past in attempt.past.get(asked.digest, ())
        if past.completed and attempt.deliveries.get(past.call_id) in _UNDELIVERED
    ]
    if len(fitting) != 1:
        return None
    fallback = fitting[0].stream and not asked.translated.stream
    return fitting[0] if fallback or says_retry(headers) else None


def engine_model(models: Mapping[str, str | None], asked: str, known: Sequence[str]) -> str:
    """Return the engine's name of a model.

    Args:
        models: as configured; empty serves every name.
        asked: the harness's name.
        known: names that the engines list.

    Raises:
        RequestRefused: 404 `model_unknown`.
    """
    if asked in models:
        name = models[asked]
    elif not models or ANY_MODEL in models:
        name = models.get(ANY_MODEL)
    else:
        served = ", ".join(sorted(models))
        raise RequestRefused(
            404,
            Code.MODEL_UNKNOWN,
            f"expected one of {served}, got {encodable(asked[:100])!r} (setting models: `*=NAME` serves every name)",
            "$.model",
        )
    if name is not None:
        return name
    return asked if asked in known or not known else known[0]


def ask_engine_for(
    asked: Asked, model: str, overrides: Mapping[str, Any], max_model_len: int | None
) -> tuple[JsonObject, tuple[str, ...]]:
    """Return the body for the engine, and all notes: its model, settings over the harness's, bounded lengths."""
    body, overridden = apply_overrides({**asked.translated.body, "model": model}, overrides)
    notes = [*asked.notes, *overridden]
    if max_model_len is not None:
        for name in ("max_tokens", "max_completion_tokens"):
            wanted = body.get(name)
            if type(wanted) is int and wanted > max_model_len:
                body[name] = max_model_len
                notes.append(f"clamped:{name}={wanted}->{max_model_len}")
    return body, tuple(notes)
