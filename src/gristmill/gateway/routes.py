"""The closed table of routes: what a harness may ask, and nothing else.

Invariant: a path is served only if it is literally in the table, below nothing or below `/r/<rollout>[/<attempt>]`.
Nothing of a client's path ever becomes part of an address that the gateway asks.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, NamedTuple

from gristmill.records import Dialect

__all__ = ["ROUTES", "Found", "Purpose", "Route", "find_route", "is_rollout_id", "messages_shaped"]


class Purpose(StrEnum):
    """What a route does."""

    SAMPLE = "sample"
    COUNT = "count"
    TOKENIZE = "tokenize"
    MODELS = "models"
    ALIVE = "alive"
    HEALTH = "health"
    METRICS = "metrics"


class Route(NamedTuple):
    """One route: what it does, in which dialect, and by which methods."""

    purpose: Purpose
    dialect: Dialect = Dialect.CHAT
    methods: frozenset[str] = frozenset({"POST"})


_GET: Final = frozenset({"GET", "HEAD"})

ROUTES: Final = {
    "/v1/chat/completions": Route(Purpose.SAMPLE, Dialect.CHAT),
    "/v1/completions": Route(Purpose.SAMPLE, Dialect.COMPLETIONS),
    "/v1/responses": Route(Purpose.SAMPLE, Dialect.RESPONSES),
    "/v1/messages": Route(Purpose.SAMPLE, Dialect.MESSAGES),
    "/v1/messages/count_tokens": Route(Purpose.COUNT, Dialect.MESSAGES),
    "/tokenize": Route(Purpose.TOKENIZE, Dialect.CHAT),
    "/v1/models": Route(Purpose.MODELS, Dialect.CHAT, _GET),
    "/": Route(Purpose.ALIVE, Dialect.CHAT, _GET),
    "": Route(Purpose.ALIVE, Dialect.CHAT, _GET),
    "/healthz": Route(Purpose.HEALTH, Dialect.CHAT, _GET),
    "/health": Route(Purpose.HEALTH, Dialect.CHAT, _GET),
    "/metrics": Route(Purpose.METRICS, Dialect.CHAT, _GET),
}
"""By path. `/metrics` is the administrator's."""

_PREFIX: Final = re.compile(r"/r/(?P<rollout>[A-Za-z0-9._-]{1,128})(?:/(?P<attempt>0|[1-9]\d{0,8}))?(?=/|\Z)", re.ASCII)
_ROLLOUT_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}\Z", re.ASCII)


class Found(NamedTuple):
    """A route, and the rollout and attempt that the path names, None where it names none."""

    route: Route
    path: str
    rollout_id: str | None = None
    attempt: int | None = None


def is_rollout_id(text: str) -> bool:
    """Tell whether a text can name a rollout: letters, digits, `._-`, at most 128, and not only dots."""
    return _ROLLOUT_ID.match(text) is not None and text.strip(".") != ""


def find_route(path: str) -> Found | None:
    """Find the route of a decoded request path; None where there is none."""
    direct = ROUTES.get(path)
    if direct is not None:
        return Found(direct, path)
    prefix = _PREFIX.match(path)
    if prefix is None or not is_rollout_id(prefix["rollout"]):
        return None
    rest = path[prefix.end() :]
    route = ROUTES.get(rest)
    if route is None or route.purpose in {Purpose.HEALTH, Purpose.METRICS}:
        return None
    attempt = prefix["attempt"]
    return Found(route, rest, prefix["rollout"], None if attempt is None else int(attempt))


def messages_shaped(path: str) -> bool:
    """Tell whether a path, known or not, is answered in the shape of the Messages dialect."""
    return "/v1/messages" in path
