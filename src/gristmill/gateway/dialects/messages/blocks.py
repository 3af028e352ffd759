"""Content blocks that any message or tool result may hold: text, images, documents.

Invariant: a block becomes parts of a Chat message that show the model the same, or it is refused with its path; a field
of a block that is left out is noted, except those that only transport.

Not here: which role may hold which block (conversation).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from gristmill.captures.fields import name_at, object_at, text_at
from gristmill.captures.reply import Unexpected
from gristmill.errors import Code
from gristmill.gateway.dialects.messages.notes import Notes
from gristmill.gateway.front import JsonObject, RequestRefused

__all__ = ["block_objects", "content_parts", "note_left_out", "refused", "refused_block", "required_text"]

_TRANSPORT: Final = frozenset({"type", "cache_control"})
_SERVER_BLOCKS: Final = re.compile(r"server_tool_use|mcp_tool_(use|result)|container_upload|.+_tool_result")
_media_type = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*/[A-Za-z0-9][A-Za-z0-9.+-]*")


def refused(message: str, where: str) -> RequestRefused:
    """A request with something that cannot be carried over to the engine's route."""
    return RequestRefused(400, Code.PARAMETER_REFUSED, message, where)


def refused_block(kind: str, where: str) -> RequestRefused:
    """A block of a type that cannot be carried over where it stands."""
    if _SERVER_BLOCKS.fullmatch(kind):
        return refused(f"{kind} belongs to a tool that a server runs, and no engine runs tools", where)
    return refused(f"expected a block that can be carried over here, got type {kind!r}", where)


def required_text(holder: Mapping[str, Any], key: str, where: str) -> str:
    """Return a string field that must be there."""
    text = text_at(holder, key, where)
    if text is None:
        raise Unexpected("a string", "nothing", f"{where}.{key}")
    return text


def block_objects(value: Any, where: str) -> Iterator[tuple[JsonObject, str, str]]:
    """Yield each block of an array of blocks with its type and its path."""
    if not isinstance(value, list):
        raise Unexpected("a string or an array of blocks", "something else", where)
    for index, raw in enumerate(cast("list[Any]", value)):
        place = f"{where}[{index}]"
        block = object_at(raw, place)
        kind = name_at(block, "type", place)
        if kind is None:
            raise Unexpected("a string", "nothing", f"{place}.type")
        yield block, kind, place


def note_left_out(holder: Mapping[str, Any], carried: frozenset[str], name: str, notes: Notes) -> None:
    """Note the fields that say something and are not carried over, each as `name.field`."""
    for key, value in holder.items():
        if key in carried or key in _TRANSPORT or value is None or value is False or value in ([], {}):
            continue
        notes.removed(f"{name}.{key}" if name else key)


def _text_part(text: str) -> JsonObject:
    """Make a text part of a Chat message."""
    return {"type": "text", "text": text}


def content_parts(block: JsonObject, kind: str, where: str, notes: Notes) -> list[JsonObject]:
    """Turn a text, image or document block into parts of a Chat message; empty text gives none.

    Raises:
        RequestRefused: `parameter_refused` for a block that cannot be carried over.
        Unexpected: the block is not what its type says.
    """
    if kind == "text":
        note_left_out(block, frozenset({"text"}), "text", notes)
        text = required_text(block, "text", where)
        return [_text_part(text)] if text else []
    if kind == "image":
        note_left_out(block, frozenset({"source"}), "image", notes)
        return [{"type": "image_url", "image_url": {"url": _image_url(block, where)}}]
    if kind == "document":
        return _document(block, where, notes)
    raise refused_block(kind, where)


def _image_url(block: JsonObject, where: str) -> str:
    place = f"{where}.source"
    source = object_at(block.get("source"), place)
    kind = text_at(source, "type", place)
    if kind == "base64":
        media_type = required_text(source, "media_type", place)
        if not _media_type.fullmatch(media_type):
            raise Unexpected("a media type", repr(media_type[:40]), f"{place}.media_type")
        return f"data:{media_type};base64,{required_text(source, 'data', place)}"
    if kind == "url" and required_text(source, "url", place).startswith("data:"):
        return required_text(source, "url", place)
    raise refused(f"expected an image given inline (source type base64), got {kind!r}", place)


def _document(block: JsonObject, where: str, notes: Notes) -> list[JsonObject]:
    """Say a document as text: its title, what is said about it, and what is in it."""
    note_left_out(block, frozenset({"source", "title", "context"}), "document", notes)
    place = f"{where}.source"
    source = object_at(block.get("source"), place)
    kind = text_at(source, "type", place)
    parts = [_text_part(text) for key in ("title", "context") if (text := text_at(block, key, where))]
    if kind == "text":
        parts.append(_text_part(required_text(source, "data", place)))
    elif kind == "content":
        content = source.get("content")
        if isinstance(content, str):
            parts.append(_text_part(content))
        else:
            for inner, inner_kind, inner_place in block_objects(content, f"{place}.content"):
                if inner_kind not in {"text", "image"}:
                    raise refused(f"expected text or an image in a document, got {inner_kind!r}", inner_place)
                parts.extend(content_parts(inner, inner_kind, inner_place, notes))
    else:
        raise refused(f"expected a document given as text (source type text or content), got {kind!r}", place)
    notes.replaced("document")
    return [part for part in parts if part.get("text") != ""]
