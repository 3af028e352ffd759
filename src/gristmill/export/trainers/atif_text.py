"""Steps of a trajectory, written in turn order: what was asked, what was observed, what the agent said.

Invariant: a message is a step once for the calls that share it: a request that begins with the conversation so far adds
only what is new. Messages of an assistant that no exported call sampled are marked as copied. The result of a tool
call stands with the step that made the call, else in a step of the system.

Not here: tokens, and what else is known of calls (atif).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import orjson

from gristmill.canonical import JsonValue, canonical_text, canonical_text_of_json
from gristmill.errors import SelectionError
from gristmill.export.chat_turn import Turn
from gristmill.export.exchange_turns import ChatExchange

__all__ = ["StepWriter"]

_SOURCES: Final = {"system": "system", "developer": "system", "user": "user"}
_OWN: Final = "gristmill"


class StepWriter:
    """Writes the steps of one trajectory.

    Attributes:
        steps: those so far, numbered from 1.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._conversation: list[bytes] = []
        self._tool_steps: dict[str, dict[str, Any]] = {}

    def reply(self, text: ChatExchange | None) -> dict[str, Any]:
        """Write what led to a call and the agent's step; return that, to be completed."""
        if text is None:
            return self._step("agent", "")
        said = [turn.text for turn in text.request]
        known = self._conversation
        shared = next((index for index, (a, b) in enumerate(zip(said, known, strict=False)) if a != b), len(known))
        for turn in text.request[min(shared, len(said)) :]:
            self._asked(turn)
        self._conversation = [*said, text.reply.text]
        return self._agent(text.reply)

    def refer(self, trajectory_id: str) -> None:
        """Write a step of the system that refers to a sub-agent's trajectory."""
        results = [{"subagent_trajectory_ref": [{"trajectory_id": trajectory_id}]}]
        self._step("system", "")["observation"] = {"results": results}

    def _step(self, source: str, message: str) -> dict[str, Any]:
        step: dict[str, Any] = {"step_id": len(self.steps) + 1, "source": source, "message": message}
        self.steps.append(step)
        return step

    def _asked(self, turn: Turn) -> None:
        role, content = turn.message["role"], turn.message.get("content") or ""
        if role == "assistant":
            self._agent(turn)["is_copied_context"] = True
        elif role == "tool":
            self._observed(turn.message.get("tool_call_id"), content)
        else:
            self._step(_SOURCES[role], content)

    def _observed(self, call_id: JsonValue, content: str) -> None:
        step = self._tool_steps.get(call_id) if isinstance(call_id, str) else None
        if step is None:
            step = self._step("system", "")
        results: list[dict[str, Any]] = step.setdefault("observation", {"results": []})["results"]
        results.append({"source_call_id": call_id, "content": content} if call_id else {"content": content})

    def _agent(self, turn: Turn) -> dict[str, Any]:
        message = turn.message
        step = self._step("agent", message.get("content") or "")
        if message.get("reasoning_content"):
            step["reasoning_content"] = message["reasoning_content"]
        calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
        if calls:
            step["tool_calls"] = [_tool_call(call) for call in calls]
            for call in step["tool_calls"]:
                self._tool_steps[call["tool_call_id"]] = step
        return step


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Write a tool call; arguments that are no object, or that an object would change, are kept as their text."""
    text = call["function"]["arguments"]
    made: dict[str, Any] = {"tool_call_id": call.get("id") or "", "function_name": call["function"]["name"]}
    arguments = _object(text)
    if arguments is None:
        return {**made, "arguments": {}, "extra": {_OWN: {"arguments": text}}}
    return {**made, "arguments": arguments}


def _object(text: str) -> dict[str, Any] | None:
    """Read arguments, None where they are no object that JSON of ordinary numbers holds without a change."""
    try:
        value = orjson.loads(text)
        if isinstance(value, dict) and canonical_text_of_json(text) == canonical_text(value):
            return cast(dict[str, Any], value)
    except (orjson.JSONDecodeError, SelectionError):
        # What is no JSON, or too deep to compare, stays the text that it is.
        pass
    return None
