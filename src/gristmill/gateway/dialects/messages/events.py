"""The bytes of the events of a Messages stream.

Invariant: an event is one `event:` line, one `data:` line of JSON and an empty line; its `type` is its name.

Not here: which event comes when (encoder, replay).
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from gristmill.captures.exact import dumps
from gristmill.gateway.front import JsonObject

__all__ = ["DELTAS", "STOPPED", "block_start", "block_stop", "delta_head", "event", "quoted"]

DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "signature": ("signature_delta", "signature"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""By what grows: the type of its delta and the field that holds the piece."""


def _encoded(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return dumps(value)  # a lone surrogate, or a number that is kept as text


def event(data: JsonObject) -> bytes:
    """Write one event."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), _encoded(data))


def block_start(index: int, block: JsonObject) -> bytes:
    """Write the event that begins a content block; `block` is the block with nothing in it."""
    return event({"type": "content_block_start", "index": index, "content_block": block})


def block_stop(index: int) -> bytes:
    """Write the event that ends a content block."""
    return b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n' % index


def delta_head(index: int, kind: str) -> bytes:
    """Write the beginning of an event that adds a piece to a block; `quoted` and `}}` and the empty line follow."""
    name, field = DELTAS[kind]
    return b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":' % (
        index,
        name.encode(),
        field.encode(),
    )


def quoted(text: str) -> bytes:
    """Write the end of an event that `delta_head` began, with the piece in it."""
    return _encoded(text) + b"}}\n\n"


STOPPED: Final = event({"type": "message_stop"})
"""The last event of a complete stream."""
