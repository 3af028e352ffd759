"""Placeholders in a script's texts: `{{turn}}`, `{{header.x-session}}`, `{{match.1}}`.

Invariant: the names are closed; an unknown one is refused when the script is read, and never sent as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

__all__ = ["filled", "filled_value", "unknown_placeholders"]

PLAIN: Final = frozenset(
    {"turn", "step", "try", "choice", "model", "last", "user", "first_user", "tool", "system", "tools", "prompt"}
)
KEYED: Final = frozenset({"header", "match"})

_PLACEHOLDER: Final = re.compile(r"\{\{\s*([a-z_]+)(?:\.([A-Za-z0-9_-]+))?\s*\}\}")

ValueOf = Callable[[str, str], str]
"""From a name and a key (empty for the plain ones) to the text that stands for it."""


def unknown_placeholders(text: str) -> Iterator[str]:
    """Yield the placeholders in a text that do not exist."""
    for found in _PLACEHOLDER.finditer(text):
        name, key = found[1], found[2]
        if name not in (KEYED if key else PLAIN) or (name == "match" and not key.isdigit()):
            yield found[0]


def filled(text: str, value_of: ValueOf) -> str:
    """Replace the placeholders in a text."""
    if "{{" not in text:
        return text
    return _PLACEHOLDER.sub(lambda found: value_of(found[1], found[2] or ""), text)


def filled_value(value: Any, value_of: ValueOf) -> Any:
    """Replace the placeholders in every string inside a JSON value; keys are left alone."""
    if isinstance(value, str):
        return filled(value, value_of)
    if isinstance(value, list):
        return [filled_value(part, value_of) for part in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: filled_value(part, value_of) for key, part in cast("dict[str, Any]", value).items()}
    return value
