"""The content of messages and tool outputs, part by part, as Chat takes it.

Invariant: no part is dropped: what Chat cannot say is refused with its path. Media are inline.

Not here: which message a part belongs to (conversation).
"""

from __future__ import annotations

from typing import Final, cast

from gristmill.canonical import JsonValue
from gristmill.captures.fields import kind_of, object_at, text_at
from gristmill.captures.reply import Unexpected
from gristmill.errors import Code
from gristmill.gateway.front import JsonObject, RequestRefused

__all__ = ["AssistantText", "assistant_text", "content_of", "image_part", "system_text"]

AssistantText = list[tuple[str, str]]
"""Pieces of what an assistant said: `text` or `refusal`, and the piece."""

_TEXT: Final = frozenset({"input_text", "output_text", "text"})
_DATA: Final = "data:"


def _parts(value: JsonValue, where: str) -> list[tuple[str, JsonObject, str]]:
    """List the parts of a content array with their types and places."""
    if not isinstance(value, list):
        raise Unexpected("a string or an array of parts", kind_of(value), where)
    made: list[tuple[str, JsonObject, str]] = []
    for index, raw in enumerate(cast("list[JsonValue]", value)):
        place = f"{where}[{index}]"
        part = object_at(raw, place)
        kind = text_at(part, "type", place)
        if kind is None:
            raise Unexpected("the type of a part", "none", f"{place}.type")
        made.append((kind, part, place))
    return made


def _refused(kind: str, what: str, where: str) -> RequestRefused:
    shown = kind if len(kind) <= 40 else f"{kind[:40]}…"
    return RequestRefused(400, Code.PARAMETER_REFUSED, f"a part of type {shown!r} cannot be carried over {what}", where)


def _text(part: JsonObject, key: str, where: str) -> str:
    text = text_at(part, key, where)
    if text is None:
        raise Unexpected("a string", "null", f"{where}.{key}")
    return text


def content_of(value: JsonValue, where: str) -> str | list[JsonObject]:
    """Return the content of a user message or of a tool's output.

    Text alone becomes a string; several parts stay apart, since the engine decides how they are joined.

    Raises:
        RequestRefused: `parameter_refused`: a part that Chat cannot say, or a medium that is not inline.
        Unexpected: not content.
    """
    if value is None or isinstance(value, str):
        return value or ""
    made = [_part(kind, part, place) for kind, part, place in _parts(value, where)]
    if not made:
        return ""
    return made[0]["text"] if len(made) == 1 and made[0]["type"] == "text" else made


def _part(kind: str, part: JsonObject, where: str) -> JsonObject:
    if kind in _TEXT:
        return {"type": "text", "text": _text(part, "text", where)}
    if kind == "input_image":
        return image_part(part, where)
    if kind == "input_file":
        data = part.get("file_data")
        if not isinstance(data, str) or not data.startswith(_DATA):
            raise _inline("a file", f"{where}.file_data")
        filename = text_at(part, "filename", where)
        named: JsonObject = {} if filename is None else {"filename": filename}
        return {"type": "file", "file": {**named, "file_data": data}}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": object_at(part.get("input_audio"), f"{where}.input_audio")}
    raise _refused(kind, "to Chat", where)


def image_part(part: JsonObject, where: str) -> JsonObject:
    """Return an image as Chat takes it.

    Raises:
        RequestRefused: `parameter_refused`: it is not inline.
    """
    address = part.get("image_url")
    if not isinstance(address, str) or not address.startswith(_DATA):
        raise _inline("an image", f"{where}.image_url")
    detail = text_at(part, "detail", where)
    seen: JsonObject = {} if detail is None else {"detail": detail}
    return {"type": "image_url", "image_url": {"url": address, **seen}}


def _inline(what: str, where: str) -> RequestRefused:
    return RequestRefused(
        400, Code.PARAMETER_REFUSED, f"expected {what} inline (a data: URL), got an address, an id or nothing", where
    )


def system_text(value: JsonValue, where: str) -> str:
    """Return the text of a system or developer message; parts are joined by a line end, as engines do.

    Raises:
        RequestRefused: `parameter_refused`: a part that is no text.
        Unexpected: not content.
    """
    if value is None or isinstance(value, str):
        return value or ""
    pieces: list[str] = []
    for kind, part, place in _parts(value, where):
        if kind not in _TEXT:
            raise _refused(kind, "in a system message", place)
        pieces.append(_text(part, "text", place))
    return "\n".join(pieces)


def assistant_text(value: JsonValue, where: str) -> AssistantText:
    """Return what an assistant message says.

    Raises:
        RequestRefused: `parameter_refused`: a part that is neither text nor a refusal.
        Unexpected: not content.
    """
    if value is None or isinstance(value, str):
        return [("text", value)] if value else []
    pieces: AssistantText = []
    for kind, part, place in _parts(value, where):
        if kind in _TEXT:
            pieces.append(("text", _text(part, "text", place)))
        elif kind == "refusal":
            pieces.append(("refusal", _text(part, "refusal", place)))
        else:
            raise _refused(kind, "in an assistant message", place)
    return [piece for piece in pieces if piece[1]]
