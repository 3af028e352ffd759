"""Codex's rollout files: `sessions/**/rollout-*.jsonl` in its home folder.

A line is `{timestamp, type, payload}`. `session_meta` comes first and names thread and session, equal in the main
thread and different in a sub-agent's. Every `response_item` is an item of the Responses dialect, with the id it was
served under. `token_usage_record` follows a reply and names its response.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from gristmill.canonical import JsonValue
from gristmill.service.histories.history import (
    JsonObject,
    ReturnedHistory,
    Unreadable,
    Written,
    history_of,
    json_lines,
    no_history,
    object_in,
    text_in,
)

__all__ = ["read_codex"]

_OF_THE_HARNESS: Final = frozenset({"ghost_snapshot"})
_ENVIRONMENT: Final = frozenset({"user", "system", "developer"})
_PRIVATE: Final = frozenset({"internal_chat_message_metadata_passthrough"})


class _Thread(NamedTuple):
    session_id: str
    items: list[JsonValue]
    scored: str | None


def read_codex(home: Path) -> ReturnedHistory:
    """Read the main threads in a home folder that was made for this run.

    Raises:
        Unreadable: a rollout file is not what Codex writes, or its conversation was rolled back.
    """
    found: dict[str, list[Written]] = {}
    sources: list[Path] = []
    scored: str | None = None
    for path in sorted(home.glob("sessions/**/rollout-*.jsonl")):
        thread = _main_thread(path)
        if thread is not None and thread.items:
            found.setdefault(thread.session_id, []).append(Written(thread.items))
            sources.append(path)
            scored = thread.scored
    if not sources:
        return no_history(f"no rollout file below {home}")
    return history_of(found, sources, scored if len(sources) == 1 else None)


def _main_thread(path: Path) -> _Thread | None:
    """Read a file; None where it is a sub-agent's."""
    session_id: str | None = None
    items: list[JsonValue] = []
    scored: str | None = None
    waiting = False
    for where, line in json_lines(path):
        kind = text_in(line, "type", where)
        if kind not in {"session_meta", "response_item", "token_usage_record", "event_msg"}:
            continue
        payload = object_in(line, "payload", where)
        if kind == "session_meta":
            thread_id = text_in(payload, "id", where)
            session_id = text_in(payload, "session_id", where) or thread_id
            if session_id is None:
                raise Unreadable(f"{where}: expected a session with an id")
            if thread_id != session_id:
                return None
        elif kind == "response_item":
            if payload.get("type") not in _OF_THE_HARNESS:
                items.append({name: member for name, member in payload.items() if name not in _PRIVATE})
                waiting = waiting or _authored(payload)
        elif kind == "token_usage_record":
            if waiting:
                scored, waiting = text_in(payload, "response_id", where), False
        elif text_in(payload, "type", where) == "thread_rolled_back":
            raise Unreadable(f"{where}: the conversation was rolled back, and the file does not say what is left")
    if session_id is None:
        raise Unreadable(f"{path.name}: expected a session")
    return _Thread(session_id, items, None if waiting else scored)


def _authored(item: JsonObject) -> bool:
    kind = item.get("type")
    if kind == "message":
        return item.get("role") not in _ENVIRONMENT
    return isinstance(kind, str) and not kind.endswith("_output")
