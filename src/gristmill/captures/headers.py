"""Headers of a request: which are kept, and what they say of the harness's session.

Invariant: headers are kept by an allow-list, so that no credential ever is, whatever it is called. What a session is
was said by the harness, in a header or in a body field that its own client fills; nothing is made up from an order of
calls.

Not here: what a call was for (purpose).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec

from gristmill.canonical import JsonValue
from gristmill.captures.reply import encodable
from gristmill.lineage import BILLING_TEXT

__all__ = ["KEPT_HEADERS", "KeptHeaders", "Session", "billing_text", "kept_headers", "session_of"]

ValueT = TypeVar("ValueT")

_SESSION: Final = ("x-claude-code-session-id", "x-session-id", "session-id", "session_id")
_PARENT: Final = ("x-parent-session-id", "x-codex-parent-thread-id", "x-claude-code-parent-agent-id")
_TURN: Final = "x-codex-turn-metadata"
_WINDOW: Final = "x-codex-window-id"

KEPT_HEADERS: Final = frozenset(
    {
        *_SESSION,
        *_PARENT,
        _TURN,
        _WINDOW,
        "anthropic-beta",
        "anthropic-version",
        "content-type",
        "openai-beta",
        "thread-id",
        "user-agent",
        "x-claude-code-agent-id",
        "x-client-request-id",
        "x-openai-subagent",
        "x-request-id",
        "x-retry-attempt",
        "x-retry-count",
        "x-session-affinity",
        "x-stainless-retry-count",
    }
)
"""Names, in lower case, of the headers that are kept."""

_MOST_CHARS: Final = 512
"""Longest name of a session; what is longer is none."""


class KeptHeaders(NamedTuple):
    """Headers that are kept, names in lower case, and the names of the others in their order."""

    kept: dict[str, str]
    dropped: tuple[str, ...]


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of where it belongs.

    Attributes:
        session_id: the harness's session; subagents may share their parent's.
        parent_session_id: session, thread or agent that this one was started by.
        agent_id: of a subagent.
        parent_agent_id: the subagent that this one was started by.
        thread_id: conversation inside a session.
        subagent: the harness's word for a subagent, None where it does not say that it is one.
        request_kind: the harness's word for what a request is for (`turn`, `compaction`).
        window: how often the conversation was compacted before.
        places: where each of these was read, for evidence.
    """

    session_id: str | None = None
    parent_session_id: str | None = None
    agent_id: str | None = None
    parent_agent_id: str | None = None
    thread_id: str | None = None
    subagent: str | None = None
    request_kind: str | None = None
    window: int | None = None
    places: Mapping[str, str] = {}


class _Turn(msgspec.Struct):
    """What codex says of a turn; a field of another type makes the whole text unreadable."""

    session_id: str | None = None
    thread_id: str | None = None
    parent_thread_id: str | None = None
    request_kind: str | None = None
    subagent_kind: str | None = None
    window_number: int | None = None


class _User(msgspec.Struct):
    """What Claude Code packs into `metadata.user_id`."""

    session_id: str | None = None


def kept_headers(headers: Mapping[str, str]) -> KeptHeaders:
    """Sort headers by the allow-list; of a name that occurs twice, in two spellings, the last one counts."""
    kept: dict[str, str] = {}
    dropped: list[str] = []
    for name, value in headers.items():
        lowered = name.lower()
        if lowered in KEPT_HEADERS:
            kept[lowered] = value
        else:
            dropped.append(lowered)
    return KeptHeaders(kept, tuple(dropped))


def billing_text(block: JsonValue) -> str | None:
    """Return the text of a system block that says what a request is billed as, which changes by the call."""
    text = cast("dict[str, JsonValue]", block).get("text") if isinstance(block, dict) else None
    return text if isinstance(text, str) and text.startswith(BILLING_TEXT) else None


def session_of(headers: Mapping[str, str], body: JsonValue) -> Session:
    """Read what a request says of its session.

    Args:
        headers: names in lower case.
        body: the decoded request body.
    """
    said = _Said(headers, cast("Mapping[str, JsonValue]", body) if isinstance(body, Mapping) else {})
    turn, turn_place = said.turn()
    said.first("session_id", *(said.header(name) for name in _SESSION))
    said.first(
        "session_id",
        said.metadata("session_id"),
        (turn.session_id, turn_place),
        said.user(),
        said.field("prompt_cache_key"),
    )
    said.first("parent_session_id", *(said.header(name) for name in _PARENT))
    said.first("parent_session_id", said.metadata("x-codex-parent-thread-id"), (turn.parent_thread_id, turn_place))
    said.first("agent_id", said.header("x-claude-code-agent-id"))
    said.first("parent_agent_id", said.header("x-claude-code-parent-agent-id"))
    said.first("thread_id", said.header("thread-id"), said.metadata("thread_id"), (turn.thread_id, turn_place))
    said.first(
        "subagent",
        said.header("x-openai-subagent"),
        said.metadata("x-openai-subagent"),
        (turn.subagent_kind, turn_place),
        said.billed_subagent(),
    )
    said.first("request_kind", (turn.request_kind, turn_place))
    said.window(turn.window_number, turn_place)
    return msgspec.convert({**said.found, "places": said.places}, Session)


class _Said:
    """One request while it is searched: the first place that says a thing counts."""

    def __init__(self, headers: Mapping[str, str], body: Mapping[str, JsonValue]) -> None:
        self.headers = headers
        self.body = body
        self.found: dict[str, Any] = {}
        self.places: dict[str, str] = {}

    def first(self, field: str, *stated: tuple[JsonValue, str]) -> None:
        if field in self.found:
            return
        for value, place in stated:
            if isinstance(value, str) and 0 < len(value) <= _MOST_CHARS and encodable(value) == value:
                self.found[field], self.places[field] = value, place
                return

    def header(self, name: str) -> tuple[JsonValue, str]:
        return self.headers.get(name), f"header {name}"

    def field(self, name: str) -> tuple[JsonValue, str]:
        return self.body.get(name), f"$.{name}"

    def metadata(self, name: str) -> tuple[JsonValue, str]:
        """Look into the metadata that codex repeats in the body, for proxies that drop headers."""
        value = self.body.get("client_metadata")
        inner = cast("dict[str, JsonValue]", value).get(name) if isinstance(value, dict) else None
        return inner, f"$.client_metadata.{name}"

    def user(self) -> tuple[JsonValue, str]:
        value = self.body.get("metadata")
        text = cast("dict[str, JsonValue]", value).get("user_id") if isinstance(value, dict) else None
        return _decoded(text, _User).session_id, "$.metadata.user_id"

    def turn(self) -> tuple[_Turn, str]:
        for text, place in (self.header(_TURN), self.metadata(_TURN)):
            turn = _decoded(text, _Turn)
            if turn != _Turn():
                return turn, place
        return _Turn(), ""

    def billed_subagent(self) -> tuple[JsonValue, str]:
        system = self.body.get("system")
        for index, block in enumerate(cast("list[JsonValue]", system) if isinstance(system, list) else ()):
            if "cc_is_subagent=true" in (billing_text(block) or ""):
                return "cc_is_subagent", f"$.system[{index}]"
        return None, ""

    def window(self, number: int | None, place: str) -> None:
        """Read how often a conversation was compacted: codex counts at the end of its window's id."""
        for value, name in (self.header(_WINDOW), self.metadata(_WINDOW)):
            count = value.rpartition(":")[2] if isinstance(value, str) and ":" in value else ""
            if count.isascii() and count.isdigit() and len(count) < 10:
                number, place = int(count), name
                break
        if number is not None and number >= 0:
            self.found["window"], self.places["window"] = number, place


def _decoded(text: JsonValue, kind: type[ValueT]) -> ValueT:
    """Decode JSON that a client packs into a string; blank where it is none."""
    if isinstance(text, str):
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
            # A name that cannot be read names nothing.
            return kind()
    return kind()
