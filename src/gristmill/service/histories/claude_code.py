"""Claude Code's session files: `projects/*/<session>.jsonl` in its configuration folder.

A line is an event with `uuid` and `parentUuid`; one reply stands on several lines, a content block each, that share
`message.id`, which is the id the reply was served under, and `message.stop_reason`, null while the reply had not ended.
The last event and its ancestors are the conversation; what was rewound is not on that path. A compaction starts a new
root with `logicalParentUuid`. Sub-agents have files of their own. Lines of `<synthetic>` replies and of API errors are
the harness's words, not the model's.
"""

from __future__ import annotations

import re
from collections.abc import Collection
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
    list_in,
    no_history,
    object_in,
    seconds_of,
    text_in,
)

__all__ = ["read_claude_code"]

_SESSION: Final = re.compile(r"[0-9A-Za-z-]{8,64}")
_SYNTHETIC: Final = "<synthetic>"


class _Event(NamedTuple):
    where: str
    line: JsonObject
    parent: str | None


def read_claude_code(folder: Path, sessions: Collection[str], since_s: float) -> ReturnedHistory:
    """Read what the sessions wrote down since a time.

    Args:
        folder: Claude Code's configuration folder.
        sessions: ids that its calls carried.
        since_s: unix seconds; earlier events belong to other runs of a resumed session.

    Raises:
        Unreadable: a session file is not what Claude Code writes.
    """
    if not sessions:
        return no_history("no captured call carried a Claude Code session id")
    found: dict[str, list[Written]] = {}
    sources: list[Path] = []
    for session_id in sorted(sessions):
        if _SESSION.fullmatch(session_id) is None:
            raise Unreadable(f"expected a session id of letters, digits and -, got {session_id[:80]!r}")
        for path in sorted(folder.glob(f"projects/*/{session_id}.jsonl")):
            replies = _replies(path, since_s)
            if replies:
                found.setdefault(session_id, []).extend(replies)
                sources.append(path)
    if not sources:
        return no_history(f"no session file in {folder} holds a reply of this run")
    return history_of(found, sources)


def _replies(path: Path, since_s: float) -> list[Written]:
    events: dict[str, _Event] = {}
    last: str | None = None
    for where, line in json_lines(path):
        uuid = text_in(line, "uuid", where)
        if uuid is None or line.get("isSidechain") is True:
            continue
        parent = text_in(line, "parentUuid", where) or text_in(line, "logicalParentUuid", where)
        events[uuid] = _Event(where, line, parent)
        last = uuid
    path_back: set[str] = set()
    while last is not None and last in events and last not in path_back:
        path_back.add(last)
        last = events[last].parent
    blocks: dict[str, list[JsonValue]] = {}
    kept: set[str] = set()
    ended: set[str] = set()
    for uuid, event in events.items():
        message_id = _reply_id(event, since_s)
        if message_id is None:
            continue
        blocks.setdefault(message_id, []).extend(_content(event))
        if uuid in path_back:
            kept.add(message_id)
        if object_in(event.line, "message", event.where).get("stop_reason") is not None:
            ended.add(message_id)
    if ended:
        # Otherwise a version wrote the file that does not say it.
        kept &= ended
    return [
        Written([{"role": "assistant", "content": content}], message_id)
        for message_id, content in blocks.items()
        if message_id in kept
    ]


def _reply_id(event: _Event, since_s: float) -> str | None:
    """Return the id of the reply that a line holds a block of; None for a line that holds none."""
    line, where = event.line, event.where
    if line.get("type") != "assistant" or line.get("isApiErrorMessage") is True:
        return None
    message = object_in(line, "message", where)
    if text_in(message, "model", where) == _SYNTHETIC or seconds_of(line.get("timestamp"), where) < since_s:
        return None
    message_id = text_in(message, "id", where)
    if message_id is None:
        raise Unreadable(f"{where}: expected a reply with an id")
    return message_id


def _content(event: _Event) -> list[JsonValue]:
    return list(list_in(object_in(event.line, "message", event.where), "content", event.where))
