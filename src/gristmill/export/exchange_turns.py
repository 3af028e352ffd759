"""A captured exchange as chat messages: what was asked, what was answered, and the tools.

Invariant: the reply is read by the code that made its record, and is refused where it is not what the record says;
every item of request and reply becomes part of a message, a named loss or a refusal. Ids of items, `cache_control`,
signatures, annotations and log-probabilities are transport and are left out, as in `atoms`.

Not here: how messages are put together (chat_turn), which calls share a conversation (messages).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, cast

import msgspec

from gristmill.atoms import strip_transport
from gristmill.canonical import JsonValue
from gristmill.captures.decode import decode_reply, decode_value
from gristmill.captures.reply import ReplyChoice
from gristmill.errors import Code, ReconstructionError
from gristmill.export.chat_turn import (
    Turn,
    TurnBuilder,
    joined_text,
    json_list,
    json_object,
    json_text,
    refused,
    text_of,
    tool_call,
)
from gristmill.fingerprint import FINGERPRINT_VERSION, output_items
from gristmill.records import CallRecord, Dialect, Exchange

__all__ = ["ChatExchange", "chat_exchange"]

_Object = Mapping[str, JsonValue]
_WRITTEN: Final = frozenset({"system", "developer", "user"})
_CHAT_FIELDS: Final = frozenset(
    {
        *("role", "type", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning", "reasoning_content"),
        *("function_call", "audio"),
    }
)


class ChatExchange(msgspec.Struct, frozen=True):
    """An exchange as chat messages.

    Attributes:
        request: the conversation that the model was asked to continue, system text first.
        reply: the assistant's message that it sampled.
        tools: the functions that it could call, as a JSON text, None where there were none.
        losses: of the request beside its messages, by name.
    """

    request: tuple[Turn, ...]
    reply: Turn
    tools: str | None
    losses: tuple[str, ...]


def chat_exchange(record: CallRecord, exchange: Exchange | None) -> ChatExchange:
    """Read the exchange of a call.

    Raises:
        ReconstructionError: `capture_incomplete` where request or reply were not kept, or the history is on a server;
            `item_type_unsupported` for what no chat message holds; `output_malformed`.
    """
    where = f"call={record.model_call_id}"
    if exchange is None or exchange.request is None or exchange.reply is None:
        absent = "request and reply" if exchange is None or exchange.request is None else "reply"
        raise _incomplete(f"expected the {absent} of call {record.model_call_id} to be kept, they were not", where)
    try:
        return _read(record, json_object(exchange.request, "$.request"), exchange)
    except ReconstructionError as error:
        place = error.where or "$"
        message = f"{record.model_call_id}: {error.message}"
        raise ReconstructionError(error.code, message, where=f"{where} {place}") from error


def _incomplete(message: str, where: str) -> ReconstructionError:
    return ReconstructionError(Code.CAPTURE_INCOMPLETE, message, where=where)


def _read(record: CallRecord, request: _Object, exchange: Exchange) -> ChatExchange:
    dialect = _dialect(record, request, exchange.reply)
    read = _READERS[dialect]
    losses: list[str] = []
    asked, answered = TurnBuilder(), TurnBuilder()
    read.request(request, asked)
    asked.end()
    choice = _choice(record, dialect, exchange)
    answered.begin()
    for index, item in enumerate(choice.items):
        read.item(json_object(item, f"$.reply[{index}]"), answered, f"$.reply[{index}]")
    answered.end()
    # A message that stayed empty because another was begun for the same reply says nothing.
    said = [turn for turn in answered.turns if not turn.empty or turn.losses] or answered.turns[:1]
    if len(said) != 1 or said[0].message["role"] != "assistant":
        raise refused("expected a reply that is one message: reasoning, text, tool calls in this order", "$.reply")
    return ChatExchange(tuple(asked.turns), said[0], read.tools(request, losses), tuple(losses))


def _dialect(record: CallRecord, request: _Object, reply: JsonValue) -> Dialect:
    if record.dialect in _READERS:
        return record.dialect
    if record.dialect is not Dialect.UNKNOWN:
        raise refused(f"expected chat messages, got a call of the dialect {record.dialect}", "$.request")
    if "input" in request:
        return Dialect.RESPONSES
    body: Mapping[str, JsonValue] = cast(_Object, reply) if isinstance(reply, Mapping) else {}
    if body.get("type") == "message" and "content" in body:
        return Dialect.MESSAGES
    if "messages" in request:
        return Dialect.CHAT
    raise refused("expected a request with messages or input, got neither", "$.request")


def _choice(record: CallRecord, dialect: Dialect, exchange: Exchange) -> ReplyChoice:
    """Decode the reply again and return the call's choice."""
    served, status = exchange.reply, exchange.status or 200
    if not isinstance(served, str):
        reply = decode_value(dialect, status, served)
    elif served.lstrip().startswith("{"):
        reply = decode_reply(dialect, status, served.encode("utf-8", "surrogatepass"))
    else:
        reply = decode_reply(dialect, status, sse=served)
    choice = next((choice for choice in reply.choices if choice.index == record.choice_index), None)
    if choice is None:
        raise _incomplete(f"expected choice {record.choice_index} in the reply, it is not there", "$.reply")
    fingerprints = [item.fingerprint for item in output_items(choice.items)]
    recorded = [item.fingerprint for item in record.output_items]
    if record.fingerprint_version == FINGERPRINT_VERSION and fingerprints != recorded:
        raise _incomplete("expected the reply that the record was made of, got another", "$.reply")
    return choice


# Chat


def _chat_request(request: _Object, builder: TurnBuilder) -> None:
    for index, value in enumerate(json_list(request.get("messages"), "$.messages")):
        where = f"$.messages[{index}]"
        _chat_message(json_object(value, where), builder, where)


def _chat_message(message: _Object, builder: TurnBuilder, where: str) -> None:
    role = message.get("role")
    if role == "assistant":
        builder.begin()
        _chat_assistant(message, builder, where)
        builder.end()
    elif role == "tool":
        losses = _fields_dropped(message)
        content = joined_text(message.get("content"), f"{where}.content", losses)
        call_id = text_of(message.get("tool_call_id"), f"{where}.tool_call_id")
        builder.other({"role": "tool", "tool_call_id": call_id, **_name(message), "content": content}, losses)
    else:
        _written(message, builder, where)


def _written(message: _Object, builder: TurnBuilder, where: str) -> None:
    """Add a message of user, system or developer."""
    role = message.get("role")
    if role not in _WRITTEN:
        raise refused(f"expected a message of a known role, got {role!r}", f"{where}.role")
    losses = _fields_dropped(message)
    content = joined_text(message.get("content"), f"{where}.content", losses)
    builder.other({"role": role, **_name(message), "content": content}, losses)


def _name(message: _Object) -> dict[str, JsonValue]:
    return {} if message.get("name") is None else {"name": message["name"]}


def _fields_dropped(message: _Object) -> list[str]:
    """Note a message with fields that are on no list and hold something."""
    dropped = any(
        value not in ([], {}, "") for key, value in strip_transport(message).items() if key not in _CHAT_FIELDS
    )
    return ["fields_dropped"] if dropped else []


def _chat_assistant(message: _Object, builder: TurnBuilder, where: str) -> None:
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            raise refused(f"expected text and tool calls, got {name}", f"{where}.{name}")
    for loss in _fields_dropped(message):
        builder.lost(loss)
    reasoning = text_of(message.get("reasoning_content"), f"{where}.reasoning_content")
    builder.reasoning(reasoning or text_of(message.get("reasoning"), f"{where}.reasoning"))
    _blocks(message, builder, where)
    refusal = text_of(message.get("refusal"), f"{where}.refusal")
    builder.text(refusal, ["refusals"])
    for index, value in enumerate(json_list(message.get("tool_calls"), f"{where}.tool_calls")):
        place = f"{where}.tool_calls[{index}]"
        call = json_object(value, place)
        if call.get("type") not in {None, "function"}:
            raise refused(f"expected a function call, got a tool call of type {call.get('type')!r}", place)
        function = json_object(call.get("function"), f"{place}.function")
        noted: list[str] = []
        made = tool_call(call.get("id"), function.get("name"), function.get("arguments"), place, noted)
        builder.call(made, noted)


def _chat_tools(request: _Object, losses: list[str]) -> str | None:
    tools = [tool for tool in json_list(request.get("tools"), "$.tools") if _kept(tool, losses)]
    tools += [
        {"type": "function", "function": function} for function in json_list(request.get("functions"), "$.functions")
    ]
    return json_text(tools) if tools else None


def _kept(tool: JsonValue, losses: list[str]) -> bool:
    """Tell whether a tool is a function; others are run by a server or have no schema."""
    function = json_object(tool, "$.tools").get("type") in {None, "function"}
    if not function:
        losses.append("tools_dropped")
    return function


# Responses


def _responses_request(request: _Object, builder: TurnBuilder) -> None:
    for name in ("previous_response_id", "conversation"):
        if request.get(name) is not None:
            raise _incomplete("expected the whole history in the request, a server keeps its beginning", f"$.{name}")
    losses: list[str] = []
    instructions = joined_text(request.get("instructions"), "$.instructions", losses)
    if instructions:
        builder.other({"role": "system", "content": instructions}, losses)
    given = request.get("input")
    if isinstance(given, str):
        builder.other({"role": "user", "content": given}, ())
        return
    for index, value in enumerate(json_list(given, "$.input")):
        _responses_item(json_object(value, f"$.input[{index}]"), builder, f"$.input[{index}]")


def _responses_item(item: _Object, builder: TurnBuilder, where: str) -> None:
    """Add one item; items of one turn that follow each other are one message."""
    kind = item.get("type")
    losses: list[str] = []
    if kind in {None, "message"} and item.get("role") == "assistant":
        text = joined_text(item.get("content"), f"{where}.content", losses)
        builder.text(text, losses)
    elif kind in {None, "message"}:
        _written(item, builder, where)
    elif kind == "reasoning":
        _responses_reasoning(item, builder, where)
    elif kind == "function_call":
        if item.get("namespace"):
            raise refused("expected a function without a namespace, got one with it", f"{where}.namespace")
        call = tool_call(item.get("call_id"), item.get("name"), item.get("arguments"), where, losses)
        builder.call(call, losses)
    elif kind == "function_call_output":
        content = joined_text(item.get("output"), f"{where}.output", losses)
        call_id = text_of(item.get("call_id"), f"{where}.call_id")
        builder.other({"role": "tool", "tool_call_id": call_id, "content": content}, losses)
    else:
        raise refused(f"expected messages, reasoning, function calls and their outputs, got {kind!r}", where)


def _responses_reasoning(item: _Object, builder: TurnBuilder, where: str) -> None:
    parts = json_list(item.get("content"), f"{where}.content")
    for index, part in enumerate(parts):
        place = f"{where}.content[{index}]"
        builder.reasoning(text_of(json_object(part, place).get("text"), f"{place}.text"))
    if not parts and (item.get("summary") or item.get("encrypted_content")):
        # A summary is not what was sampled, and what is encrypted cannot be read.
        builder.lost("reasoning_hidden")


def _responses_tools(request: _Object, losses: list[str]) -> str | None:
    tools: list[JsonValue] = []
    for tool in json_list(request.get("tools"), "$.tools"):
        if _kept(tool, losses):
            function = {key: value for key, value in json_object(tool, "$.tools").items() if key != "type"}
            tools.append({"type": "function", "function": function})
    return json_text(tools) if tools else None


# Anthropic Messages


def _messages_request(request: _Object, builder: TurnBuilder) -> None:
    losses: list[str] = []
    system = joined_text(request.get("system"), "$.system", losses)
    if system:
        builder.other({"role": "system", "content": system}, losses)
    for index, value in enumerate(json_list(request.get("messages"), "$.messages")):
        where = f"$.messages[{index}]"
        message = json_object(value, where)
        if message.get("role") == "assistant":
            builder.begin()
            _blocks(message, builder, where)
            builder.end()
        else:
            _results(message, builder, where)


def _blocks(message: _Object, builder: TurnBuilder, where: str) -> None:
    """Add the blocks of an assistant's message."""
    content = message.get("content")
    if isinstance(content, str):
        builder.text(content)
        return
    for index, value in enumerate(json_list(content, f"{where}.content")):
        place = f"{where}.content[{index}]"
        block = json_object(value, place)
        kind = block.get("type")
        losses: list[str] = []
        if kind == "thinking":
            builder.reasoning(text_of(block.get("thinking"), f"{place}.thinking"))
        elif kind == "redacted_thinking":
            builder.lost("reasoning_hidden")
        elif kind == "tool_use":
            builder.call(tool_call(block.get("id"), block.get("name"), block.get("input"), place, losses), losses)
        else:
            builder.text(joined_text([block], place, losses), losses)


def _results(message: _Object, builder: TurnBuilder, where: str) -> None:
    """Add a user's message: results of tool calls are messages of their own, the texts between them one each."""
    content = message.get("content")
    if not isinstance(content, list):
        _written(message, builder, where)
        return
    texts: list[JsonValue] = []
    for index, value in enumerate(cast("list[JsonValue]", content)):
        place = f"{where}.content[{index}]"
        block = json_object(value, place)
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        if texts:
            _written({**message, "content": texts}, builder, where)
            texts = []
        losses = ["error_flags"] if block.get("is_error") else []
        result = joined_text(block.get("content"), f"{place}.content", losses)
        call_id = text_of(block.get("tool_use_id"), f"{place}.tool_use_id")
        builder.other({"role": "tool", "tool_call_id": call_id, "content": result}, losses)
    if texts or not content:
        _written({**message, "content": texts}, builder, where)


def _messages_tools(request: _Object, losses: list[str]) -> str | None:
    tools: list[JsonValue] = []
    for value in json_list(request.get("tools"), "$.tools"):
        tool = json_object(value, "$.tools")
        if "input_schema" not in tool:
            losses.append("tools_dropped")
            continue
        function = {key: tool[key] for key in ("name", "description") if tool.get(key) is not None}
        tools.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    return json_text(tools) if tools else None


class _Reader(msgspec.Struct, frozen=True):
    """How a dialect is read: a request's messages, an item of a reply, and the tools."""

    request: Callable[[_Object, TurnBuilder], None]
    item: Callable[[_Object, TurnBuilder, str], None]
    tools: Callable[[_Object, list[str]], str | None]


_READERS: Final[Mapping[Dialect, _Reader]] = {
    Dialect.CHAT: _Reader(_chat_request, _chat_assistant, _chat_tools),
    Dialect.RESPONSES: _Reader(_responses_request, _responses_item, _responses_tools),
    Dialect.MESSAGES: _Reader(_messages_request, _blocks, _messages_tools),
}
