"""What a request body says about its call: sampling settings, media, model, echo.

Invariant: only what the body states is recorded; an absent setting is None, never an engine's default.

Not here: the conversation (lineage).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from math import isfinite
from typing import cast

from gristmill.canonical import JsonValue
from gristmill.captures.fields import JsonObject, number
from gristmill.captures.reply import encodable
from gristmill.item_fields import word_of
from gristmill.records import Sampling

__all__ = ["asks_for_echo", "media_digests", "model_asked_for", "sampling_of"]

_CONVERSATION = ("messages", "input", "system")
_NESTED = ("content", "output")
_INLINE = frozenset({"data", "file_data"})


def _object(value: JsonValue) -> JsonObject:
    return cast(JsonObject, value) if isinstance(value, dict) else {}


def asks_for_echo(request: JsonValue) -> bool:
    """Tell whether the request wants the prompt, and its log-probabilities, in front of the reply."""
    return _object(request).get("echo") is True


def model_asked_for(request: JsonValue) -> str | None:
    """Return the model that the request names."""
    model = _object(request).get("model")
    return model if isinstance(model, str) and encodable(model) == model else None


def sampling_of(request: JsonValue) -> Sampling:
    """Read the sampling settings; those of a generate request stand under `sampling_params`."""
    body = _object(request)
    settings = {**body, **_object(body.get("sampling_params"))}
    return Sampling(
        temperature=_float(settings.get("temperature")),
        top_p=_float(settings.get("top_p")),
        top_k=_integer(settings.get("top_k")),
        seed=_integer(settings.get("seed")),
        presence_penalty=_float(settings.get("presence_penalty")),
        frequency_penalty=_float(settings.get("frequency_penalty")),
        repetition_penalty=_float(settings.get("repetition_penalty")),
    )


def _float(value: JsonValue) -> float | None:
    read = number(value)
    return read if isfinite(read) else None


def _integer(value: JsonValue) -> int | None:
    # Beyond 64 bits no engine takes it, and a stored record could not be read back by everyone.
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def media_digests(request: JsonValue) -> tuple[str, ...]:
    """Digest every medium of the conversation, in order: SHA-256 of its bytes, or of its address.

    `images`, a list of digests, is the short form that captures without bodies use.
    """
    body = _object(request)
    short = body.get("images")
    given = (
        [name for name in cast("list[JsonValue]", short) if isinstance(name, str)] if isinstance(short, list) else []
    )
    return (*given, *(_digest(medium) for key in _CONVERSATION for medium in _media(body.get(key))))


def _media(conversation: JsonValue) -> Iterator[str]:
    """Find the data or address of each medium, not looking into arguments and tool schemas."""
    waiting = [conversation]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting.extend(reversed(cast("list[JsonValue]", value)))
            continue
        holder = _object(value)
        medium = _medium(holder)
        if medium is not None:
            yield medium
        else:
            waiting.extend(holder[key] for key in _NESTED if key in holder)


def _medium(part: JsonObject) -> str | None:
    """Return the data or the address of a media part in any dialect, None for any other part."""
    kind = word_of(part.get("type"))
    if kind in {"image", "document"}:  # Anthropic
        source = _object(part.get("source"))
        if word_of(source.get("type")) in {"text", "content"}:
            return None
        return _first_text(source, "data", "url", "file_id")
    if kind in {"image_url", "video_url", "audio_url"}:  # Chat
        inner = part.get(kind)
        return inner if isinstance(inner, str) else _first_text(_object(inner), "url")
    if kind in {"input_image", "input_video"}:  # Responses
        return _first_text(part, "image_url", "video_url", "file_id")
    if kind == "input_audio":
        return _first_text(_object(part.get("input_audio")), "data")
    if kind in {"file", "input_file"}:
        return _first_text({**part, **_object(part.get("file"))}, "file_data", "file_url", "file_id")
    return None


def _first_text(holder: JsonObject, *keys: str) -> str:
    """Return the first of the fields that holds text, as an address; a medium without any still is one."""
    for key in keys:
        text = holder.get(key)
        if isinstance(text, str):
            return f"data:;base64,{text}" if key in _INLINE and not text.startswith("data:") else text
    return ""


def _digest(medium: str) -> str:
    """Digest the bytes of inline data, so that dialects agree; the text where there is no data to decode."""
    head, inline, encoded = medium.partition(";base64,")
    raw = medium.encode("utf-8", "surrogatepass")
    if inline and head.startswith("data:"):
        # What is no base64 after all is digested as the text that it is.
        with suppress(ValueError):
            raw = base64.b64decode(encoded, validate=True)
    return f"sha256:{sha256(raw).hexdigest()}"
