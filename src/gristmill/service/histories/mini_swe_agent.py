"""mini-swe-agent's trajectory files: `*.traj.json`.

`messages` is the conversation in the Chat dialect. `extra.response` of a reply is the whole response with the id it was
served under. Replies without a tool call are not kept by the harness: it answers them with an error message.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

from gristmill.canonical import JsonValue
from gristmill.service.histories.history import (
    JsonObject,
    ReturnedHistory,
    Unreadable,
    Written,
    file_object,
    history_of,
    list_in,
    no_history,
    object_in,
    text_in,
)

__all__ = ["read_mini_swe_agent"]

_SPOKEN: Final = ("role", "content", "tool_calls", "function_call", "reasoning_content", "refusal")


def read_mini_swe_agent(files: Sequence[Path]) -> ReturnedHistory:
    """Read the trajectory that stands in the first of some files that is there.

    Raises:
        Unreadable: it is not what mini-swe-agent writes.
    """
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        return no_history("no trajectory file; mini-swe-agent writes one where -o says, or by default")
    replies: list[Written] = []
    for index, value in enumerate(list_in(file_object(path), "messages", path.name)):
        where = f"{path.name}:$.messages[{index}]"
        if not isinstance(value, dict):
            raise Unreadable(f"{where}: expected an object")
        message = cast(JsonObject, value)
        if message.get("role") == "assistant":
            said: JsonValue = {name: message[name] for name in _SPOKEN if message.get(name) is not None}
            replies.append(Written([said], _response_id(message, where)))
    return history_of({path.name: replies}, [path])


def _response_id(message: JsonObject, where: str) -> str | None:
    if message.get("extra") is None:
        return None
    extra = object_in(message, "extra", where)
    if not isinstance(extra.get("response"), dict):
        return None
    return text_in(object_in(extra, "response", where), "id", where)
