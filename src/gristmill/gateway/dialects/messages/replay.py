"""A served message as an event stream again.

Invariant: the stream adds up to the message that it is made of; one without a stop reason fails as its stream did.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, cast

from gristmill.captures.exact import dumps
from gristmill.gateway.dialects.messages.errors import error_body
from gristmill.gateway.dialects.messages.events import STOPPED, block_start, block_stop, delta_head, event, quoted
from gristmill.gateway.front import JsonObject

__all__ = ["events_of"]

_EMPTY: Final[JsonObject] = {"text": "", "thinking": "", "signature": "", "input": {}}


def events_of(message: JsonObject) -> Iterator[bytes]:
    """Yield the events of a message that was served before."""
    usage = cast(JsonObject, message["usage"])
    usage_before = {**usage, "output_tokens": 0}
    unsaid: JsonObject = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage_before}
    yield event({"type": "message_start", "message": {**message, **unsaid}})
    for index, block in enumerate(cast("list[JsonObject]", message["content"])):
        yield block_start(index, {key: _EMPTY.get(key, value) for key, value in block.items()})
        for kind, text in _pieces(block):
            if text:
                yield delta_head(index, kind) + quoted(text)
        yield block_stop(index)
    if message["stop_reason"] is None:
        yield event(error_body(500, "the reply is not complete"))
        return
    delta = {key: message[key] for key in ("stop_reason", "stop_sequence")}
    yield event({"type": "message_delta", "delta": delta, "usage": usage})
    yield STOPPED


def _pieces(block: JsonObject) -> Iterator[tuple[str, str]]:
    kind = cast(str, block["type"])
    if kind == "tool_use":
        yield kind, dumps(block["input"]).decode() if block["input"] else ""
        return
    yield kind, cast(str, block[kind])
    if kind == "thinking":
        yield "signature", cast(str, block["signature"])
