"""The items of a request as Chat messages.

Invariant: what one reply said becomes one assistant message again. Items of one reply are told by their ids; without
them, a message or a thought that follows a message begins a new one, unless a call between them waits for its result.
System text at the start is one message, as engines with one place for it need. No item is passed over.

Not here: content (content), settings and tools (request).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final

from gristmill.canonical import JsonValue
from gristmill.captures import exact
from gristmill.captures.fields import list_at, object_at, text_at
from gristmill.captures.reply import Unexpected
from gristmill.errors import Code
from gristmill.gateway.dialects.responses.actions import ACTION_CALLS, arguments_of, is_plain
from gristmill.gateway.dialects.responses.content import (
    AssistantText,
    assistant_text,
    content_of,
    image_part,
    system_text,
)
from gristmill.gateway.dialects.responses.items import reply_token
from gristmill.gateway.dialects.responses.tools import CUSTOM_FIELD, flat_name
from gristmill.gateway.front import JsonObject, RequestRefused

__all__ = ["Conversation", "arguments_text"]

_SYSTEM: Final = frozenset({"system", "developer"})


def arguments_text(value: JsonValue) -> str:
    """Write a value as the arguments of a call, exactly."""
    if is_plain(value):
        return json.dumps(value, ensure_ascii=False)
    return exact.dumps(value).decode()


class _Turn:
    """One assistant message that is being put together."""

    def __init__(self, token: str | None) -> None:
        self.token = token
        self.reasoning: list[str] = []
        self.said: AssistantText = []
        self.has_message = False
        self.calls: list[JsonObject] = []

    def takes(self, token: str | None, *, call: bool) -> bool:
        """Tell whether an item that follows belongs to the same reply."""
        if token is not None and self.token is not None:
            return token == self.token
        return call or not self.has_message or bool(self.calls)

    def message(self) -> JsonObject:
        content: str | list[JsonObject] | None = "".join(text for _, text in self.said)
        if any(kind == "refusal" for kind, _ in self.said):
            content = [{"type": kind, kind: text} for kind, text in self.said]
        elif not content and self.calls:
            content = None
        made: JsonObject = {"role": "assistant", "content": content}
        if self.reasoning:
            made["reasoning"] = "".join(self.reasoning)
        if self.calls:
            made["tool_calls"] = self.calls
        return made


class Conversation:
    """Puts the messages of a request together, item by item.

    Args:
        instructions: the system text that a request states apart.
    """

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[JsonObject] = []
        self.notes: list[str] = []
        self._system: list[str] = [instructions] if instructions else []
        self._turn: _Turn | None = None

    def add(self, value: JsonValue, where: str) -> None:
        """Add one item.

        Raises:
            RequestRefused: `parameter_refused`: an item that Chat cannot say.
            Unexpected: not an item.
        """
        item = object_at(value, where)
        kind = text_at(item, "type", where) or "message"
        reader = _READERS.get(kind)
        if reader is not None:
            reader(self, item, where)
        elif kind in ACTION_CALLS:
            action = ACTION_CALLS[kind]
            given = arguments_of(action, item)
            if given is None:
                raise Unexpected("the input of a call", "none", f"{where}.{action.fields[0]}")
            self._call(item, action.tool, given if isinstance(given, str) else arguments_text(given), where)
        else:
            shown = kind if len(kind) <= 40 else f"{kind[:40]}…"
            message = f"an item of type {shown!r} cannot be carried over to Chat"
            raise RequestRefused(400, Code.PARAMETER_REFUSED, message, where)

    def finished(self) -> list[JsonObject]:
        """Return the messages."""
        self._end_turn()
        self._end_system()
        return self.messages

    def _end_system(self) -> None:
        if self._system:
            self.messages.append({"role": "system", "content": "\n\n".join(self._system)})
            self._system = []

    def _end_turn(self) -> None:
        if self._turn is not None:
            self.messages.append(self._turn.message())
            self._turn = None

    def _environment(self, message: JsonObject) -> None:
        self._end_turn()
        self._end_system()
        self.messages.append(message)

    def _authored(self, item: JsonObject, *, call: bool = False) -> _Turn:
        """Return the turn that an item of the model's belongs to."""
        self._end_system()
        token = reply_token(item.get("id"))
        if self._turn is None or not self._turn.takes(token, call=call):
            self._end_turn()
            self._turn = _Turn(token)
        if self._turn.token is None:
            self._turn.token = token
        return self._turn

    def message(self, item: JsonObject, where: str) -> None:
        role = text_at(item, "role", where)
        content, place = item.get("content"), f"{where}.content"
        if role == "assistant":
            turn = self._authored(item)
            turn.said.extend(assistant_text(content, place))
            turn.has_message = True
        elif role in _SYSTEM:
            text = system_text(content, place)
            if not self.messages and self._turn is None:
                self._system.extend([text] if text else [])
            else:
                self._environment({"role": "system", "content": text})
        elif role == "user":
            self._environment({"role": "user", "content": content_of(content, place)})
        else:
            raise Unexpected("user, assistant, system or developer", repr(role)[:60], f"{where}.role")

    def reasoning(self, item: JsonObject, where: str) -> None:
        text = _joined(item, "content", where) or _joined(item, "summary", where)
        if text:
            self._authored(item).reasoning.append(text)
        elif item.get("encrypted_content"):
            self.notes.append("removed:reasoning.encrypted_content")

    def function_call(self, item: JsonObject, where: str) -> None:
        self._call(item, _named(item, where), text_at(item, "arguments", where) or "", where)

    def custom_call(self, item: JsonObject, where: str) -> None:
        given = text_at(item, "input", where) or ""
        self._call(item, _named(item, where), arguments_text({CUSTOM_FIELD: given}), where)

    def _call(self, item: JsonObject, name: str, arguments: str, where: str) -> None:
        call_id = text_at(item, "call_id", where) or text_at(item, "id", where) or ""
        function = {"name": name, "arguments": arguments}
        self._authored(item, call=True).calls.append({"id": call_id, "type": "function", "function": function})

    def output(self, item: JsonObject, where: str) -> None:
        self._result(item, content_of(item.get("output"), f"{where}.output"), where)

    def action_output(self, item: JsonObject, where: str) -> None:
        """Add what an action did: text as it is, anything else as JSON; a patch has a status beside its output."""
        output = item.get("output")
        if item["type"] == "apply_patch_call_output":
            output = {"status": item.get("status"), "output": output}
        self._result(item, output if isinstance(output, str) else arguments_text(output), where)

    def screenshot(self, item: JsonObject, where: str) -> None:
        place = f"{where}.output"
        self._result(item, [image_part(object_at(item.get("output"), place), place)], where)

    def _result(self, item: JsonObject, content: str | list[JsonObject], where: str) -> None:
        call_id = text_at(item, "call_id", where) or text_at(item, "id", where)
        if call_id is None:
            raise Unexpected("the call_id of an output", "none", f"{where}.call_id")
        self._environment({"role": "tool", "tool_call_id": call_id, "content": content})


def _joined(item: JsonObject, key: str, where: str) -> str:
    pieces: list[str] = []
    for index, raw in enumerate(list_at(item, key, where) or ()):
        place = f"{where}.{key}[{index}]"
        pieces.append(text_at(object_at(raw, place), "text", place) or "")
    return "".join(pieces)


def _named(item: JsonObject, where: str) -> str:
    name = text_at(item, "name", where)
    if not name:
        raise Unexpected("the name of a tool", "none", f"{where}.name")
    return flat_name(name, item.get("namespace"))


_READERS: Final[Mapping[str, Callable[[Conversation, JsonObject, str], None]]] = {
    "message": Conversation.message,
    "reasoning": Conversation.reasoning,
    "function_call": Conversation.function_call,
    "custom_tool_call": Conversation.custom_call,
    "function_call_output": Conversation.output,
    "custom_tool_call_output": Conversation.output,
    "local_shell_call_output": Conversation.action_output,
    "shell_call_output": Conversation.action_output,
    "apply_patch_call_output": Conversation.action_output,
    "computer_call_output": Conversation.screenshot,
}
