"""Token-level generate replies (vLLM `/inference/v1/generate`): ids in, ids out.

Text is served only in `output_mode: text`; without it a call has tokens and no item that could be matched.
"""

from __future__ import annotations

from gristmill.canonical import JsonValue
from gristmill.captures import assembly, choices
from gristmill.captures.fields import JsonObject, text_at
from gristmill.captures.reply import Reply
from gristmill.records import Dialect

__all__ = ["read_body", "read_stream", "read_value"]


def _items(choice: JsonObject, where: str) -> tuple[JsonValue, ...]:
    text = text_at(choice, "text", where)
    return () if text is None else ({"role": "assistant", "content": text},)


def read_body(body: bytes, *, echo: bool = False) -> Reply:
    """Read a generate body."""
    return choices.read_body(body, Dialect.GENERATE, _items, echo=echo)


def read_value(value: JsonValue, *, echo: bool = False) -> Reply:
    """Read a body that is already decoded."""
    return choices.read_document(value, Dialect.GENERATE, _items, echo=echo)


def read_stream(stream: bytes | str, *, echo: bool = False) -> Reply:
    """Read a generate stream."""
    return assembly.read_stream(stream, Dialect.GENERATE, _items, echo=echo)
