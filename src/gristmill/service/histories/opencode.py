"""opencode's database: tables `session`, `message` and `part` of `opencode.db` in its data folder.

Columns `data` hold JSON. In a message of role `assistant` a reply is what stands between parts `step-start` and
`step-finish`, parts in the order of their ids: `text`, `reasoning` and `tool` (`callID`, `state.input`). A step without
an end broke off, and what had arrived by then is no reply. Sub-agents have sessions with a parent.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection, Iterable
from contextlib import closing
from pathlib import Path
from typing import Final

from gristmill.canonical import JsonValue
from gristmill.captures.exact import dumps
from gristmill.service.histories.history import (
    JsonObject,
    ReturnedHistory,
    Unreadable,
    Written,
    history_of,
    json_object,
    no_history,
    object_in,
    seconds_of,
    text_in,
)

__all__ = ["read_opencode"]

_SESSION: Final = re.compile(r"[0-9A-Za-z_-]{1,128}")
_WAIT_s: Final = 10.0


def read_opencode(database: Path, sessions: Collection[str], since_s: float) -> ReturnedHistory:
    """Read what the sessions wrote down since a time.

    Args:
        database: opencode's.
        sessions: ids that its calls carried.
        since_s: unix seconds; earlier messages belong to other runs of a resumed session.

    Raises:
        Unreadable: the database is not what opencode writes, or a session was reverted.
    """
    if not sessions:
        return no_history("no captured call carried an opencode session id")
    if not database.is_file():
        return no_history(f"there is no {database}")
    found: dict[str, list[Written]] = {}
    try:
        # Not read-only: a log that another process left behind has to be recovered before it can be read.
        with closing(sqlite3.connect(database, timeout=_WAIT_s)) as connection:
            connection.execute("PRAGMA query_only = ON")
            for session_id in sorted(sessions):
                items = _conversation(connection, session_id, since_s)
                if items:
                    found[session_id] = [Written(items)]
    except sqlite3.Error as error:
        raise Unreadable(f"{database}: {error}") from error
    if not found:
        return no_history(f"{database} holds no reply of this run")
    return history_of(found, [database])


def _conversation(connection: sqlite3.Connection, session_id: str, since_s: float) -> list[JsonValue]:
    if _SESSION.fullmatch(session_id) is None:
        raise Unreadable(f"expected a session id of letters, digits, - and _, got {session_id[:80]!r}")
    row = connection.execute("SELECT parent_id, revert FROM session WHERE id = ?", (session_id,)).fetchone()
    if row is None or row[0] is not None:
        return []
    if row[1] is not None:
        raise Unreadable(f"session {session_id} was reverted, and what was taken back still stands in it")
    items: list[JsonValue] = []
    authored = False
    select = "SELECT id, data FROM message WHERE session_id = ? ORDER BY id"
    for message_id, data in connection.execute(select, (session_id,)).fetchall():
        message = json_object(_encoded(data), message_id)
        if seconds_of(object_in(message, "time", message_id).get("created"), message_id) < since_s:
            continue
        parts = connection.execute("SELECT id, data FROM part WHERE message_id = ? ORDER BY id", (message_id,))
        held = [(part_id, json_object(_encoded(part), part_id)) for part_id, part in parts]
        if message.get("role") != "assistant":
            items.append({"role": "user", "content": _texts(held)})
        else:
            for step in _steps(held):
                items.extend(_reply(step))
                authored = True
    return items if authored else []


def _encoded(data: str | bytes) -> bytes:
    return data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data


def _texts(parts: Iterable[tuple[str, JsonObject]]) -> str:
    return "\n".join(text_in(part, "text", part_id) or "" for part_id, part in parts if part.get("type") == "text")


def _steps(parts: Iterable[tuple[str, JsonObject]]) -> list[list[tuple[str, JsonObject]]]:
    """Return the parts of each step that has an end."""
    steps: list[list[tuple[str, JsonObject]]] = []
    step: list[tuple[str, JsonObject]] = []
    for part_id, part in parts:
        kind = part.get("type")
        if kind == "step-start":
            step = []
        elif kind == "step-finish":
            steps.append(step)
            step = []
        else:
            step.append((part_id, part))
    return steps


def _reply(parts: Iterable[tuple[str, JsonObject]]) -> list[JsonValue]:
    """Return a reply, and the results of its tool calls behind it."""
    reasoning, text = "", ""
    calls: list[JsonValue] = []
    results: list[JsonValue] = []
    for part_id, part in parts:
        kind = part.get("type")
        if kind == "reasoning":
            reasoning += text_in(part, "text", part_id) or ""
        elif kind == "text":
            text += text_in(part, "text", part_id) or ""
        elif kind == "tool":
            state = object_in(part, "state", part_id)
            arguments = dumps(dict(object_in(state, "input", part_id))).decode()
            call_id = text_in(part, "callID", part_id)
            function: JsonValue = {"name": part.get("tool"), "arguments": arguments}
            calls.append({"id": call_id, "type": "function", "function": function})
            output = text_in(state, "output", part_id) or text_in(state, "error", part_id) or ""
            results.append({"role": "tool", "tool_call_id": call_id, "content": output})
    said: dict[str, JsonValue] = {"role": "assistant", "content": text}
    if reasoning:
        said["reasoning"] = reasoning
    if calls:
        said["tool_calls"] = calls
    return [said, *results]
