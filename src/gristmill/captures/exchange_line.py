"""The `exchange` line of a capture file: one recorded HTTP request with its reply.

Invariant: the reply is read by the dialect of the request's path. Headers are kept by an allow-list, because
recorded ones hold keys and cookies; the names of the others are reported.
"""

from __future__ import annotations

from typing import cast

import msgspec

from gristmill.canonical import JsonValue
from gristmill.captures.call import CallContext
from gristmill.captures.call_line import id_at, parse_delivery, time_at
from gristmill.captures.decode import decode_reply, decode_value, dialect_of
from gristmill.captures.fields import JsonObject, count_at, kind_of, name_at, object_at, text_at
from gristmill.captures.headers import KEPT_HEADERS, KeptHeaders, kept_headers, session_of
from gristmill.captures.reply import Reply, Unexpected
from gristmill.captures.request import asks_for_echo
from gristmill.records import Delivery, Dialect, Exchange

__all__ = ["EXCHANGE_KEYS", "ExchangeLine", "parse_exchange"]

# fmt: off
EXCHANGE_KEYS = frozenset(
    {
        "kind", "schema", "rollout_id", "attempt", "model_call_id", "parent_call_id", "ordinal",
        "request", "status", "body", "sse_raw", "delivered", "delivery", "session_id",
        "parent_session_id", "admitted_at", "completed_at", "name", "note", "server", "response_headers",
        "seconds", "events",
    }
)
# fmt: on
"""Keys of an `exchange` line; the last six only describe a recording."""


class ExchangeLine(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed line: the reply in normal form, what is known beside it, and the exchange as it was."""

    reply: Reply
    context: CallContext
    ordinal: int | None
    parent_stated: bool
    exchange: Exchange
    dropped_headers: tuple[str, ...]


def parse_exchange(line: JsonObject, rollout_id: str, attempt: int, default_id: str) -> ExchangeLine | str:
    """Read one `exchange` line; a string says why it holds no model call.

    Raises:
        Unexpected: a key has another type than documented.
    """
    request = object_at(line.get("request"), "$.request")
    path = text_at(request, "path", "$.request")
    if path is None:
        raise Unexpected("a string", "nothing", "$.request.path")
    method = text_at(request, "method", "$.request") or "POST"
    dialect = dialect_of(path)
    if dialect is None or method.upper() != "POST":
        return f"{method} {path} samples nothing: passed over"
    status = count_at(line, "status", "$")
    if status is None:
        raise Unexpected("an HTTP status", "nothing", "$.status")
    body = request.get("body")
    reply = _reply(line, dialect, status, echo=asks_for_echo(body))
    headers, dropped = _headers(request)
    session = session_of(headers, body)
    call_id = id_at(line, "model_call_id") or default_id
    context = CallContext(
        model_call_id=call_id,
        rollout_id=rollout_id,
        attempt=attempt,
        parent_call_id=id_at(line, "parent_call_id"),
        request=body,
        session_id=name_at(line, "session_id", "$") or session.session_id,
        parent_session_id=name_at(line, "parent_session_id", "$") or session.parent_session_id,
        delivery=parse_delivery(line) or Delivery.UNKNOWN,
        admitted_at=time_at(line, "admitted_at"),
        completed_at=time_at(line, "completed_at"),
    )
    served: JsonValue = line.get("body") if line.get("sse_raw") is None else line["sse_raw"]
    return ExchangeLine(
        reply=reply,
        context=context,
        ordinal=count_at(line, "ordinal", "$"),
        parent_stated="parent_call_id" in line,
        exchange=Exchange(model_call_id=call_id, request=body, reply=served, headers=headers, status=status),
        dropped_headers=dropped,
    )


def _reply(line: JsonObject, dialect: Dialect, status: int, *, echo: bool) -> Reply:
    body, stream = line.get("body"), text_at(line, "sse_raw", "$")
    if body is not None and stream is not None:
        raise Unexpected("one of body and sse_raw", "both", "$")
    if stream is not None:
        return decode_reply(dialect, status, sse=stream, echo=echo)
    if body is None and status < 400:
        raise Unexpected("body or sse_raw", "nothing", "$")
    if body is None or isinstance(body, str):
        return decode_reply(dialect, status, (body or "").encode("utf-8", "surrogatepass"), echo=echo)
    return decode_value(dialect, status, body, echo=echo)


def _headers(request: JsonObject) -> KeptHeaders:
    given = request.get("headers")
    headers = object_at({} if given is None else given, "$.request.headers")
    for name, value in headers.items():
        if name.lower() in KEPT_HEADERS:
            if not isinstance(value, str):
                raise Unexpected("a string", kind_of(value), f"$.request.headers.{name}")
            name_at({name: value}, name, "$.request.headers")
    return kept_headers(cast("dict[str, str]", headers))
