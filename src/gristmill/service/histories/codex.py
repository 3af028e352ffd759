"""Codex's rollout files: `sessions/**/rollout-*.jsonl` in its home folder.

A line is `{timestamp, type, payload, metadata}`. `session_meta` comes first and names thread and session, equal in the
main thread and different in a sub-agent's. Every `response_item` is an item of the Responses dialect, with the id it
was served under; items of one reply share `metadata.sampled_through_sequence`. `token_usage_record` follows a reply
that is complete and names its response. Items of a reply that broke off stay in the file, without such a record.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, cast

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
_READ: Final = frozenset({"session_meta", "response_item", "token_usage_record", "event_msg"})
_SAMPLED_AFTER: Final = "sampled_through_sequence"


class _Thread:
    """A main thread, read line by line."""

    def __init__(self) -> None:
        self.session_id: str | None = None
        self.replies: list[Written] = []
        self.items: list[JsonValue] = []
        self.authored = 0
        self._reply: list[JsonValue] = []
        self._sampled_after: JsonValue = None

    def add(self, item: dict[str, JsonValue], metadata: JsonValue) -> None:
        """Take an item: of a new reply, where it was sampled after another one."""
        self.items.append(item)
        if not _authored(item):
            return
        self.authored += 1
        after = cast(JsonObject, metadata).get(_SAMPLED_AFTER) if isinstance(metadata, dict) else None
        if self._reply and after != self._sampled_after:
            self._reply = []
        self._sampled_after = after
        self._reply.append(item)

    def complete(self, response_id: str | None) -> None:
        """Take note that a reply is complete."""
        if self._reply:
            self.replies.append(Written(self._reply, response_id))
            self._reply = []


def read_codex(home: Path) -> ReturnedHistory:
    """Read the main threads in a home folder that was made for this run.

    Raises:
        Unreadable: a rollout file is not what Codex writes, or its conversation was rolled back.
    """
    found: dict[str, list[Written]] = {}
    sources: list[Path] = []
    for path in sorted(home.glob("sessions/**/rollout-*.jsonl")):
        thread = _main_thread(path)
        if thread is not None and thread.session_id is not None and thread.replies:
            found.setdefault(thread.session_id, []).extend(thread.replies)
            sources.append(path)
    if not sources:
        return no_history(f"no rollout file with a reply below {home}")
    return history_of(found, sources)


def _main_thread(path: Path) -> _Thread | None:
    """Read a file; None where it is a sub-agent's."""
    thread = _Thread()
    counted = False
    for where, line in json_lines(path):
        kind = text_in(line, "type", where)
        if kind not in _READ:
            continue
        payload = object_in(line, "payload", where)
        if kind == "session_meta":
            thread_id = text_in(payload, "id", where)
            thread.session_id = text_in(payload, "session_id", where) or thread_id
            if thread_id != thread.session_id:
                return None
        elif kind == "response_item":
            if payload.get("type") not in _OF_THE_HARNESS:
                item = {name: member for name, member in payload.items() if name not in _PRIVATE}
                thread.add(item, line.get("metadata"))
        elif kind == "token_usage_record":
            counted = True
            thread.complete(text_in(payload, "response_id", where))
        elif text_in(payload, "type", where) == "thread_rolled_back":
            raise Unreadable(f"{where}: the conversation was rolled back, and the file does not say what is left")
    if thread.session_id is None:
        raise Unreadable(f"{path.name}: expected a session with an id")
    if not counted and thread.authored:
        # Written by a version that does not say which reply an item is of.
        thread.replies = [Written(thread.items)]
    return thread


def _authored(item: JsonObject) -> bool:
    kind = item.get("type")
    if kind == "message":
        return item.get("role") not in _ENVIRONMENT
    return isinstance(kind, str) and not kind.endswith("_output")
