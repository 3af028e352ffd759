"""The engine's routes, and what every engine's sampling request has in common.

Invariant: a path that is sent to an engine is one of these constants; nothing of a client's address gets into it.

Not here: the fields that ask for tokens, which are each engine's own (vllm, sglang, generic).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, cast

from gristmill.errors import InternalError
from gristmill.gateway.upstream.protocol import Ask
from gristmill.records import Dialect

__all__ = [
    "HEALTH",
    "METRICS",
    "MODELS",
    "SAMPLING",
    "TOKENIZE",
    "VERSION",
    "completions_logprobs",
    "has_room",
    "picked",
    "sampling_ask",
]

JsonObject = dict[str, Any]

SAMPLING: Final[Mapping[Dialect, str]] = MappingProxyType(
    {Dialect.CHAT: "/v1/chat/completions", Dialect.COMPLETIONS: "/v1/completions"}
)
"""The routes that sample, stream, and can carry exact ids with log-probabilities."""

HEALTH: Final = "/health"
METRICS: Final = "/metrics"
MODELS: Final = "/v1/models"
TOKENIZE: Final = "/tokenize"
VERSION: Final = "/version"


def sampling_ask(
    route: Dialect, body: Mapping[str, Any], call_id: str, fields: Mapping[str, Any], *, stream: bool
) -> Ask:
    """Return a sampling request: the body, an engine's own fields over it, and usage asked for in a stream.

    Args:
        route: `chat` or `completions`.
        body: of the request; not changed.
        call_id: sent as `X-Request-Id`.
        fields: replace those of the body.
        stream: an event stream is wanted; other stream options that the body has are kept.
    """
    path = SAMPLING.get(route)
    if path is None:
        raise InternalError(f"expected the chat or the completions route of an engine, got {route.value}")
    asked = {**body, **fields, "stream": stream}
    if stream:
        given = body.get("stream_options")
        options = cast(JsonObject, given) if isinstance(given, dict) else {}
        asked["stream_options"] = {**options, "include_usage": True}
    return Ask(path, asked, {"x-request-id": call_id})


def completions_logprobs(body: Mapping[str, Any]) -> Any:
    """Return how many log-probabilities a Completions request must ask for: what it asks itself, else the token's own.

    Zero means the sampled token's alone. A value of another type is the client's mistake, for the engine to refuse.
    """
    asked = body.get("logprobs")
    return 0 if asked is None or asked is False else asked


def has_room(prompt_len: int, max_model_len: int | None, wanted: int = 1) -> bool:
    """Say whether so many tokens fit behind a prompt; yes where the engine does not say how long it may be."""
    return max_model_len is None or prompt_len + wanted <= max_model_len


def picked(body: Mapping[str, Any], names: Iterable[str]) -> JsonObject:
    """Return the named fields that a body has."""
    return {name: body[name] for name in names if body.get(name) is not None}
