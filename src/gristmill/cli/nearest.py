"""Nearest names, for ids and commands that were mistyped."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]

_SHOWN = 8


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say what was probably meant, or what there is; empty where nothing is known."""
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"Did you mean {near[0]!r}?"
    if not names:
        return ""
    rest = len(names) - _SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    return f"There is {', '.join(names[:_SHOWN])}{more}."
