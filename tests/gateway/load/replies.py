"""What a client of each dialect makes of an answer: whether it is complete, what it says, what goes into its history.

Invariant: only the protocol's own end completes a reply; what is read here is read from bytes alone, by code that
shares nothing with the gateway's.

Not here: sending requests (harness), keeping a history (conversation).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import orjson

from gristmill.records import Dialect

__all__ = ["Said", "SaidReply", "ToolUse", "read_body", "read_reply"]

Json = dict[str, Any]


class ToolUse(NamedTuple):
    """A tool call: its id, the tool, and the arguments as JSON; as text where they broke off."""

    id: str
    name: str
    arguments: Any

    @classmethod
    def read(cls, id: str, name: str, arguments: str) -> ToolUse:
        """Read one whose arguments are written out."""
        try:
            return cls(id, name, orjson.loads(arguments))
        except orjson.JSONDecodeError:
            return cls(id, name, arguments)


class Said(msgspec.Struct, frozen=True):
    """What one choice says, the same for all dialects, and `echo`: how its dialect's client sends it back."""

    text: str = ""
    reasoning: str = ""
    tools: tuple[ToolUse, ...] = ()
    finish: str | None = None
    echo: tuple[Json, ...] = ()

    @property
    def content(self) -> tuple[str, str, tuple[ToolUse, ...]]:
        """What is compared with a record."""
        return self.text, self.reasoning, self.tools


class SaidReply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply as far as it came.

    Attributes:
        complete: the protocol's end came.
        finishes: for how many choices the client was told why they ended, which is what clients act on.
        failed: the client was told that the reply failed.
    """

    response_id: str = ""
    choices: tuple[Said, ...] = ()
    complete: bool = False
    finishes: int = 0
    failed: bool = False


def read_reply(dialect: Dialect, raw: bytes, *, streamed: bool, whole: bool) -> SaidReply:
    """Read an answer of status 200.

    Args:
        dialect: of the client.
        raw: the bytes of its body.
        streamed: it is an event stream.
        whole: the HTTP answer ended in good order.
    """
    if streamed:
        return _STREAMS[dialect](list(_events(raw)), raw)
    if not whole:
        return SaidReply()
    return read_body(dialect, orjson.loads(raw))


def read_body(dialect: Dialect, body: Mapping[str, Any]) -> SaidReply:
    """Read a whole reply, as a client gets it or as it is stored."""
    return _BODIES[dialect](body)


def _events(raw: bytes) -> Iterator[Json]:
    # The last piece is no event: it is empty, or was cut off.
    for event in raw.split(b"\n\n")[:-1]:
        data = b"".join(line[6:] for line in event.split(b"\n") if line.startswith(b"data: "))
        if data and data != b"[DONE]":
            yield orjson.loads(data)


# ---- Chat and Completions --------------------------------------------------------------------------------------------


def _chat_said(message: Json, finish: str | None) -> Said:
    calls = [
        ToolUse.read(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    echo = {"role": "assistant", "content": message.get("content")}
    echo.update({name: message[name] for name in ("reasoning", "tool_calls") if message.get(name)})
    return Said(message.get("content") or "", message.get("reasoning") or "", tuple(calls), finish, (echo,))


def _chat_body(body: Mapping[str, Any]) -> SaidReply:
    choices = tuple(_chat_said(choice["message"], choice["finish_reason"]) for choice in body["choices"])
    return SaidReply(response_id=body["id"], choices=choices, complete=True, finishes=len(choices))


def _chat_stream(events: Iterable[Json], raw: bytes) -> SaidReply:
    messages: dict[int, Json] = {}
    finishes: dict[int, str] = {}
    response_id, failed = "", False
    for event in events:
        failed |= "error" in event
        response_id = event.get("id") or response_id
        for choice in event.get("choices", ()):
            message = messages.setdefault(choice["index"], {})
            _join_delta(message, choice["delta"])
            if choice.get("finish_reason"):
                finishes[choice["index"]] = choice["finish_reason"]
    done = raw.endswith(b"data: [DONE]\n\n")
    finished = bool(messages) and messages.keys() == finishes.keys()
    choices = tuple(_chat_said(messages[index], finishes[index]) for index in sorted(messages)) if finished else ()
    return SaidReply(
        response_id=response_id,
        choices=choices,
        complete=done and finished and not failed,
        finishes=len(finishes),
        failed=failed,
    )


def _join_delta(message: Json, delta: Json) -> None:
    for name in ("content", "reasoning"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    for piece in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            calls.append({"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}})
        for name, value in piece.get("function", {}).items():
            calls[piece["index"]]["function"][name] += value or ""


def _completions_body(body: Mapping[str, Any]) -> SaidReply:
    choices = tuple(Said(choice["text"], finish=choice["finish_reason"]) for choice in body["choices"])
    return SaidReply(response_id=body["id"], choices=choices, complete=True, finishes=len(choices))


def _completions_stream(events: Iterable[Json], raw: bytes) -> SaidReply:
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    response_id, failed = "", False
    for event in events:
        failed |= "error" in event
        response_id = event.get("id") or response_id
        for choice in event.get("choices", ()):
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice.get("finish_reason"):
                finishes[choice["index"]] = choice["finish_reason"]
    done = raw.endswith(b"data: [DONE]\n\n")
    return SaidReply(
        response_id=response_id,
        choices=tuple(Said(texts[index], finish=finishes.get(index)) for index in sorted(texts)),
        complete=done and bool(texts) and texts.keys() == finishes.keys() and not failed,
        finishes=len(finishes),
        failed=failed,
    )


# ---- Responses -------------------------------------------------------------------------------------------------------


def _responses_body(body: Mapping[str, Any]) -> SaidReply:
    text, reasoning, tools = "", "", []
    for item in body["output"]:
        match item["type"]:
            case "message":
                text += "".join(part["text"] for part in item["content"])
            case "reasoning":
                reasoning += "".join(part["text"] for part in item.get("content") or ())
            case "function_call":
                tools.append(ToolUse.read(item["call_id"], item["name"], item["arguments"]))
            case other:
                raise ValueError(f"an item of type {other} was not asked for")
    said = Said(text, reasoning, tuple(tools), body["status"], tuple(body["output"]))
    ended = body["status"] in {"completed", "incomplete"}
    return SaidReply(
        response_id=body["id"], choices=(said,), complete=ended, finishes=int(ended), failed=body["status"] == "failed"
    )


def _responses_stream(events: Iterable[Json], raw: bytes) -> SaidReply:
    response_id = ""
    for event in events:
        if event["type"] == "response.created":
            response_id = event["response"]["id"]
        if event["type"] in {"response.completed", "response.incomplete", "response.failed"}:
            return _responses_body(event["response"])
    return SaidReply(response_id=response_id)


# ---- Messages --------------------------------------------------------------------------------------------------------


def _messages_body(body: Mapping[str, Any]) -> SaidReply:
    text, reasoning, tools = "", "", []
    for block in body["content"]:
        match block["type"]:
            case "text":
                text += block["text"]
            case "thinking":
                reasoning += block["thinking"]
            case "tool_use":
                tools.append(ToolUse(block["id"], block["name"], block["input"]))
            case other:
                raise ValueError(f"a block of type {other} was not asked for")
    echo = {"role": "assistant", "content": body["content"]}
    said = Said(text, reasoning, tuple(tools), body["stop_reason"], (echo,))
    ended = body["stop_reason"] is not None
    return SaidReply(response_id=body["id"], choices=(said,), complete=ended, finishes=int(ended))


def _messages_stream(events: Iterable[Json], raw: bytes) -> SaidReply:
    body: Json = {"id": "", "content": [], "stop_reason": None}
    complete = failed = finished = False
    for event in events:
        match event["type"]:
            case "message_start":
                body["id"] = event["message"]["id"]
            case "content_block_start":
                block = event["content_block"]
                body["content"].append({**block, "input": ""} if block["type"] == "tool_use" else dict(block))
            case "content_block_delta":
                _join_block(body["content"][event["index"]], event["delta"])
            case "content_block_stop":
                block = body["content"][event["index"]]
                if block["type"] == "tool_use":
                    block["input"] = orjson.loads(block["input"] or "{}")
            case "message_delta":
                body["stop_reason"] = event["delta"]["stop_reason"]
                finished = body["stop_reason"] is not None
            case "message_stop":
                complete = True
            case "error":
                failed = True
            case _:
                pass
    if not complete or not finished:
        return SaidReply(response_id=body["id"], finishes=int(finished or complete), failed=failed)
    return _messages_body(body)


def _join_block(block: Json, delta: Json) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "input_json_delta":
            block["input"] += delta["partial_json"]


_BODIES = {
    Dialect.CHAT: _chat_body,
    Dialect.COMPLETIONS: _completions_body,
    Dialect.RESPONSES: _responses_body,
    Dialect.MESSAGES: _messages_body,
}
_STREAMS = {
    Dialect.CHAT: _chat_stream,
    Dialect.COMPLETIONS: _completions_stream,
    Dialect.RESPONSES: _responses_stream,
    Dialect.MESSAGES: _messages_stream,
}
