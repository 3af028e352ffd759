"""Completions replies: the served item is a choice's text, as an assistant message.

With `echo` and a text prompt the served text starts with the prompt; it is kept as it was served.
"""

from __future__ import annotations

from gristmill.canonical import JsonValue
from gristmill.captures import assembly, choices
from gristmill.captures.fields import JsonObject, text_at
from gristmill.captures.reply import Reply, Unexpected
from gristmill.records import Dialect

__all__ = ["read_body", "read_stream", "read_value", "stream_items"]


def _items(choice: JsonObject, where: str) -> tuple[JsonValue, ...]:
    text = text_at(choice, "text", where)
    if text is None:
        raise Unexpected("a string", "nothing", f"{where}.text")
    return ({"role": "assistant", "content": text},)


def stream_items(choice: JsonObject, where: str) -> tuple[JsonValue, ...]:
    """Return what was served of a choice that came as a stream."""
    return ({"role": "assistant", "content": text_at(choice, "text", where)},)


def read_body(body: bytes, *, echo: bool = False) -> Reply:
    """Read a `text_completion` body."""
    return choices.read_body(body, Dialect.COMPLETIONS, _items, echo=echo)


def read_value(value: JsonValue, *, echo: bool = False) -> Reply:
    """Read a body that is already decoded."""
    return choices.read_document(value, Dialect.COMPLETIONS, _items, echo=echo)


def read_stream(stream: bytes | str, *, echo: bool = False) -> Reply:
    """Read a stream of `text_completion` events."""
    return assembly.read_stream(stream, Dialect.COMPLETIONS, stream_items, echo=echo)
