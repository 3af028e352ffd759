"""pi's session files: `sessions/**/*.jsonl` in its agent folder.

A line is an entry with `id` and `parentId`; the first line is the session. The last entry and its ancestors are the
conversation. A reply is an entry of type `message` whose role is `assistant`: parts `text`, `thinking` and `toolCall`
with the arguments as JSON, `stopReason`, and `responseId`, the id it was served under.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, cast

from gristmill.canonical import JsonValue
from gristmill.captures.exact import dumps
from gristmill.service.histories.history import (
    JsonObject,
    ReturnedHistory,
    Unreadable,
    Written,
    history_of,
    json_lines,
    list_in,
    no_history,
    object_in,
    text_in,
)

__all__ = ["read_pi"]

_UNFINISHED: Final = frozenset({"error", "aborted"})


def read_pi(folder: Path) -> ReturnedHistory:
    """Read the sessions in a folder that was made for this run.

    Raises:
        Unreadable: a session file is not what pi writes.
    """
    found: dict[str, list[Written]] = {}
    sources: list[Path] = []
    for path in sorted(folder.glob("**/*.jsonl")):
        session_id, replies = _session(path)
        if replies:
            found.setdefault(session_id, []).extend(replies)
            sources.append(path)
    if not sources:
        return no_history(f"no session file below {folder}")
    return history_of(found, sources)


def _session(path: Path) -> tuple[str, list[Written]]:
    session_id: str | None = None
    entries: dict[str, tuple[str, JsonObject]] = {}
    last: str | None = None
    for where, line in json_lines(path):
        entry_id = text_in(line, "id", where)
        if line.get("type") == "session":
            session_id = entry_id
        elif entry_id is not None:
            entries[entry_id] = (where, line)
            last = entry_id
    if session_id is None:
        raise Unreadable(f"{path.name}: expected a session")
    conversation: list[tuple[str, JsonObject]] = []
    while last is not None and last in entries:
        entry = entries.pop(last)
        conversation.append(entry)
        last = text_in(entry[1], "parentId", entry[0])
    replies = [_reply(line, where) for where, line in reversed(conversation) if line.get("type") == "message"]
    return session_id, [reply for reply in replies if reply is not None]


def _reply(line: JsonObject, where: str) -> Written | None:
    message = object_in(line, "message", where)
    if message.get("role") != "assistant" or message.get("stopReason") in _UNFINISHED:
        return None
    reasoning, text, calls = "", "", list[JsonValue]()
    for part in list_in(message, "content", where):
        if not isinstance(part, dict):
            raise Unreadable(f"{where}: expected a part that is an object")
        held = cast(JsonObject, part)
        kind = text_in(held, "type", where)
        if kind == "thinking":
            reasoning += text_in(held, "thinking", where) or ""
        elif kind == "text":
            text += text_in(held, "text", where) or ""
        elif kind == "toolCall":
            arguments = dumps(dict(object_in(held, "arguments", where))).decode()
            function: JsonValue = {"name": held.get("name"), "arguments": arguments}
            calls.append({"id": held.get("id"), "type": "function", "function": function})
        else:
            raise Unreadable(f"{where}: expected text, thinking or toolCall, got {kind!r}")
    said: dict[str, JsonValue] = {"role": "assistant", "content": text}
    if reasoning:
        said["reasoning"] = reasoning
    if calls:
        said["tool_calls"] = calls
    return Written([said], text_in(message, "responseId", where))
