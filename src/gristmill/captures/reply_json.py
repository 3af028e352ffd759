"""JSON of engines: as strict as any, but for log-probabilities that are no numbers.

Invariant: `NaN` and `Infinity`, which some engines write among log-probabilities, are read as such, so that one of them
spoils its call's tokens and not the reply around them. In what a client is served, and in every other departure from
JSON, they are refused.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any, Final, cast

from gristmill.canonical import JsonValue, loads
from gristmill.errors import DecodeError

__all__ = ["loads_reply"]

_NO_NUMBERS: Final = ("NaN", "Infinity")
_SERVED: Final = ("message", "delta", "text")


def loads_reply(text: bytes | str) -> JsonValue:
    """Decode what an engine sent; log-probabilities that are no numbers become floats that are not finite.

    Raises:
        DecodeError: it is no JSON even so.
    """
    try:
        return loads(text)
    except DecodeError as refused:
        try:
            plain = text.decode() if isinstance(text, bytes) else text
            value = json.loads(plain) if any(word in plain for word in _NO_NUMBERS) else None
        except (ValueError, RecursionError):
            raise refused from None
        if not isinstance(value, dict) or not _served_is_finite(cast(dict[str, Any], value)):
            raise
        return cast(JsonValue, value)


def _served_is_finite(reply: dict[str, Any]) -> bool:
    """Tell whether what a reply serves is JSON."""
    choices = reply.get("choices")
    if not isinstance(choices, list):
        return False
    held = [cast(dict[str, Any], choice) for choice in cast("list[Any]", choices) if isinstance(choice, dict)]
    waiting: list[Any] = [choice[key] for choice in held for key in _SERVED if key in choice]
    while waiting:
        part = waiting.pop()
        if isinstance(part, float) and not isfinite(part):
            return False
        if isinstance(part, dict):
            waiting.extend(cast(dict[str, Any], part).values())
        elif isinstance(part, list):
            waiting.extend(cast("list[Any]", part))
    return True
