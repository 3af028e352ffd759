"""Numbers with the noun that they count."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """Write a number and its noun: `1 call`, `1,064 tokens`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
