"""One door to the dialects: route or dialect, status and bytes to a `Reply`."""

from __future__ import annotations

from typing import cast

from gristmill.canonical import JsonValue, loads
from gristmill.captures import chat, completions, generate, messages, responses
from gristmill.captures.choices import error_text
from gristmill.captures.fields import JsonObject
from gristmill.captures.reply import Reply, failed_reply
from gristmill.errors import ConfigError, DecodeError
from gristmill.records import Dialect

__all__ = ["decode_reply", "decode_value", "dialect_of"]

_ROUTES = {
    "/chat/completions": Dialect.CHAT,
    "/completions": Dialect.COMPLETIONS,
    "/v1/responses": Dialect.RESPONSES,
    "/v1/messages": Dialect.MESSAGES,
    "/inference/v1/generate": Dialect.GENERATE,
}
_NAMES = {dialect.value: dialect for dialect in _ROUTES.values()}


def dialect_of(path: str) -> Dialect | None:
    """Name the dialect that a request path samples in, None for a route that samples nothing.

    A prefix before the route (`/r/ROLLOUT/v1/messages`) and a query are ignored;
    `/v1/chat/completions/batch`, `/render`, `count_tokens` and the like are other routes.
    """
    route = path.partition("?")[0].rstrip("/")
    found = [known for known in _ROUTES if route.endswith(known)]
    return _ROUTES[max(found, key=len)] if found else None


def decode_reply(
    path_or_dialect: str,
    status: int = 200,
    body: bytes | None = None,
    sse: bytes | str | None = None,
    *,
    echo: bool = False,
) -> Reply:
    """Read one engine reply, given as a body or as a raw event stream.

    Args:
        path_or_dialect: request path (`/v1/chat/completions`) or dialect name (`chat`).
        status: HTTP status; 400 and above is a failed call whatever the body says.
        body: whole body, UTF-8 JSON.
        sse: raw event stream.
        echo: the request asked for the prompt back (`echo`), so its log-probabilities stand in front.

    Returns:
        The reply. What cannot be read is a reply too, with the reason `reply_malformed`.

    Raises:
        ConfigError: the path or dialect is none that samples, or not exactly one of body and stream is given.
    """
    dialect = _NAMES.get(path_or_dialect) or dialect_of(path_or_dialect)
    if dialect is None:
        raise ConfigError(f"expected the path or the name of a dialect that samples, got {path_or_dialect!r}")
    if (body is None) == (sse is None):
        raise ConfigError("expected exactly one of a body and an event stream")
    if status >= 400:
        return failed_reply(dialect, _status_error(status, body, sse))
    if sse is not None:
        return _read_stream(dialect, sse, echo)
    return _read_body(dialect, body or b"", echo)


def decode_value(dialect: Dialect, status: int, value: JsonValue, *, echo: bool = False) -> Reply:
    """Read one engine reply whose body is already decoded; otherwise as `decode_reply`."""
    if status >= 400:
        message = error_text(cast(JsonObject, value)) if isinstance(value, dict) else None
        return failed_reply(dialect, _http_error(status, message))
    match dialect:
        case Dialect.CHAT:
            return chat.read_value(value, echo=echo)
        case Dialect.COMPLETIONS:
            return completions.read_value(value, echo=echo)
        case Dialect.GENERATE:
            return generate.read_value(value, echo=echo)
        case Dialect.RESPONSES:
            return responses.read_value(value)
        case _:
            return messages.read_value(value)


def _read_body(dialect: Dialect, body: bytes, echo: bool) -> Reply:
    match dialect:
        case Dialect.CHAT:
            return chat.read_body(body, echo=echo)
        case Dialect.COMPLETIONS:
            return completions.read_body(body, echo=echo)
        case Dialect.GENERATE:
            return generate.read_body(body, echo=echo)
        case Dialect.RESPONSES:
            return responses.read_body(body)
        case _:
            return messages.read_body(body)


def _read_stream(dialect: Dialect, stream: bytes | str, echo: bool) -> Reply:
    match dialect:
        case Dialect.CHAT:
            return chat.read_stream(stream, echo=echo)
        case Dialect.COMPLETIONS:
            return completions.read_stream(stream, echo=echo)
        case Dialect.GENERATE:
            return generate.read_stream(stream, echo=echo)
        case Dialect.RESPONSES:
            return responses.read_stream(stream)
        case _:
            return messages.read_stream(stream)


def _status_error(status: int, body: bytes | None, sse: bytes | str | None) -> str:
    try:
        value: JsonValue = loads(body if body is not None else sse or "")
    except DecodeError:
        return _http_error(status, None)
    return _http_error(status, error_text(cast(JsonObject, value)) if isinstance(value, dict) else None)


def _http_error(status: int, message: str | None) -> str:
    return f"HTTP {status}" if message is None else f"HTTP {status}: {message}"
