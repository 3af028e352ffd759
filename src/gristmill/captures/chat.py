"""Chat Completions replies: the served item is the assistant message of a choice."""

from __future__ import annotations

from gristmill.canonical import JsonValue
from gristmill.captures import assembly, choices
from gristmill.captures.fields import JsonObject, object_at
from gristmill.captures.reply import Reply
from gristmill.records import Dialect

__all__ = ["read_body", "read_body_and_rest", "read_stream", "read_value", "stream_items"]


def _items(choice: JsonObject, where: str) -> tuple[JsonValue, ...]:
    return (object_at(choice.get("message"), f"{where}.message"),)


def stream_items(choice: JsonObject, where: str) -> tuple[JsonValue, ...]:
    """Return what was served of a choice that came as a stream."""
    # A stream may finish a choice without ever having sent a delta: an assistant message with nothing in it.
    return (choice.get("message", {"role": "assistant", "content": None}),)


def read_body(body: bytes, *, echo: bool = False) -> Reply:
    """Read a `chat.completion` body."""
    return choices.read_body(body, Dialect.CHAT, _items, echo=echo)


def read_body_and_rest(body: bytes) -> tuple[Reply, bytes] | None:
    """Read a `chat.completion` body once; see `choices.read_body_and_rest`."""
    return choices.read_body_and_rest(body, Dialect.CHAT, _items)


def read_value(value: JsonValue, *, echo: bool = False) -> Reply:
    """Read a body that is already decoded."""
    return choices.read_document(value, Dialect.CHAT, _items, echo=echo)


def read_stream(stream: bytes | str, *, echo: bool = False) -> Reply:
    """Read a stream of `chat.completion.chunk` events."""
    return assembly.read_stream(stream, Dialect.CHAT, stream_items, echo=echo)
