"""Text from models, files and harnesses, made safe for a terminal.

Invariant: what leaves here holds no control character, no bidirectional override, no invisible or unencodable
character: each stands as an escape that a reader can see. Nothing is dropped.
"""

from __future__ import annotations

import unicodedata
from typing import Final

__all__ = ["visible"]

_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
_SHORT: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str) -> str:
    """Escape everything that a terminal would act on, or not show."""
    if text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN:
        return character
    short = _SHORT.get(character)
    if short is not None:
        return short
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
