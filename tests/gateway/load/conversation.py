"""The history of one conversation as the harness of a dialect keeps it: request bodies, and the result in the end.

Invariant: what came back is sent back as it came; a request differs from the one before by what was added alone.

Not here: reading replies (replies), when what is asked (harness).
"""

from __future__ import annotations

from typing import Any, Protocol

from gristmill.records import Dialect
from tests.gateway.load.replies import Said, SaidReply

__all__ = ["MODEL", "PATHS", "Conversation", "aside", "conversation"]

Json = dict[str, Any]

PATHS = {
    Dialect.CHAT: "/v1/chat/completions",
    Dialect.COMPLETIONS: "/v1/completions",
    Dialect.RESPONSES: "/v1/responses",
    Dialect.MESSAGES: "/v1/messages",
}
MODEL = "any-model"
_SYSTEM = "You are one of many agents that work at once. Answer what you are asked last."
_SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}, "said": {"type": "string"}}, "required": ["at"]}
_ABOUT = {"name": "look", "description": "Look at a place."}
_MOST_TOKENS = 2048


class Conversation(Protocol):
    """What a harness keeps of a conversation."""

    def ask(self, text: str) -> None:
        """Add what is asked next: the result of the tool that was called, else what the user says."""
        ...

    def ask_instead(self, text: str) -> None:
        """Put something else in the place of what was asked last."""
        ...

    def hear(self, reply: SaidReply, said: Said) -> None:
        """Add the choice that the harness goes on with."""
        ...

    def body(self, *, stream: bool, n: int) -> Json:
        """Return the body of a request for the next reply."""
        ...

    def result(self) -> Json:
        """Return what the harness hands back when it is done."""
        ...


def conversation(dialect: Dialect, *, reasoning: bool, by_id: bool) -> Conversation:
    """Begin a conversation.

    Args:
        dialect: how it is spoken.
        reasoning: a Chat harness sends reasoning back.
        by_id: a Responses harness names the last response and does not repeat the history.
    """
    match dialect:
        case Dialect.CHAT:
            return _Chat(reasoning)
        case Dialect.COMPLETIONS:
            return _Completions()
        case Dialect.RESPONSES:
            return _Responses(by_id)
        case _:
            return _Messages()


def aside(dialect: Dialect, text: str, *, stream: bool) -> Json:
    """Return the body of a request that stands outside of the conversation, as a harness makes them for titles."""
    body: Json = {"model": MODEL, "stream": stream}
    match dialect:
        case Dialect.COMPLETIONS:
            return {**body, "prompt": text, "max_tokens": _MOST_TOKENS}
        case Dialect.RESPONSES:
            return {**body, "input": text, "store": False}
        case _:
            return {**body, "messages": [{"role": "user", "content": text}], "max_tokens": _MOST_TOKENS}


class _Chat:
    def __init__(self, reasoning: bool) -> None:
        self._reasoning = reasoning
        self._messages: list[Json] = [{"role": "system", "content": _SYSTEM}]
        self._tool: str | None = None

    def ask(self, text: str) -> None:
        if self._tool is not None:
            self._messages.append({"role": "tool", "tool_call_id": self._tool, "content": text})
        else:
            self._messages.append({"role": "user", "content": text})

    def ask_instead(self, text: str) -> None:
        self._messages[-1] = {**self._messages[-1], "content": text}

    def hear(self, reply: SaidReply, said: Said) -> None:
        self._messages += said.echo
        self._tool = said.tools[0].id if said.tools else None

    def body(self, *, stream: bool, n: int) -> Json:
        body: Json = {"model": MODEL, "messages": self._messages, "stream": stream}
        if not self._reasoning:
            body["messages"] = [
                {name: value for name, value in message.items() if name != "reasoning"} for message in self._messages
            ]
        body["tools"] = [{"type": "function", "function": {**_ABOUT, "parameters": _SCHEMA}}]
        return {**body, "n": n} if n > 1 else body

    def result(self) -> Json:
        return {"messages": self._messages}


class _Completions:
    def __init__(self) -> None:
        self._prompt = ""
        self._asked = ""
        self._messages: list[Json] = []

    def ask(self, text: str) -> None:
        self._asked = text

    def ask_instead(self, text: str) -> None:
        self._asked = text

    def hear(self, reply: SaidReply, said: Said) -> None:
        self._prompt += f"{self._asked}\n{said.text}\n\n"
        self._messages.append({"role": "user", "content": self._asked})
        self._messages.append({"role": "assistant", "content": said.text})

    def body(self, *, stream: bool, n: int) -> Json:
        body: Json = {"model": MODEL, "prompt": f"{self._prompt}{self._asked}\n", "stream": stream}
        body["max_tokens"] = _MOST_TOKENS
        return {**body, "n": n} if n > 1 else body

    def result(self) -> Json:
        return {"messages": self._messages}


class _Responses:
    def __init__(self, by_id: bool) -> None:
        self._by_id = by_id
        self._input: list[Json] = []
        self._tool: str | None = None
        self._last: str | None = None

    def ask(self, text: str) -> None:
        if self._tool is not None:
            self._input.append({"type": "function_call_output", "call_id": self._tool, "output": text})
        else:
            part = {"type": "input_text", "text": text}
            self._input.append({"type": "message", "role": "user", "content": [part]})

    def ask_instead(self, text: str) -> None:
        self._input.pop()
        self.ask(text)

    def hear(self, reply: SaidReply, said: Said) -> None:
        self._input += said.echo
        self._tool = said.tools[0].id if said.tools else None
        self._last = reply.response_id

    def body(self, *, stream: bool, n: int) -> Json:
        del n
        body: Json = {"model": MODEL, "instructions": _SYSTEM, "input": self._input, "stream": stream}
        if self._by_id and self._last is not None:
            body |= {"input": self._input[-1:], "previous_response_id": self._last}
        tool = {"type": "function", **_ABOUT, "parameters": _SCHEMA, "strict": False}
        return {**body, "tools": [tool], "store": self._by_id}

    def result(self) -> Json:
        return {"response": {"id": self._last, "object": "response", "output": self._input}}


class _Messages:
    def __init__(self) -> None:
        self._messages: list[Json] = []
        self._tool: str | None = None

    def ask(self, text: str) -> None:
        block: Json = {"type": "text", "text": text}
        if self._tool is not None:
            block = {"type": "tool_result", "tool_use_id": self._tool, "content": [block]}
        self._messages.append({"role": "user", "content": [block]})

    def ask_instead(self, text: str) -> None:
        self._messages.pop()
        self.ask(text)

    def hear(self, reply: SaidReply, said: Said) -> None:
        self._messages += said.echo
        self._tool = said.tools[0].id if said.tools else None

    def body(self, *, stream: bool, n: int) -> Json:
        del n
        body: Json = {"model": MODEL, "system": _SYSTEM, "messages": self._messages, "stream": stream}
        body["tools"] = [{**_ABOUT, "input_schema": _SCHEMA}]
        return {**body, "max_tokens": _MOST_TOKENS}

    def result(self) -> Json:
        return {"messages": self._messages}
