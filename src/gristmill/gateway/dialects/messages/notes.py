"""Notes of what a request lost or had replaced on its way to the engine's route.

Invariant: each note is `verb:what` in ASCII without commas or spaces, said once; however many fields a client invents,
there are few notes.

Not here: what is removed (request, conversation, tools).
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["Notes"]

_MOST: Final = 24
_LONGEST: Final = 64
_unprintable = re.compile(r"[^A-Za-z0-9_.\-]")


class Notes:
    """Collects the notes of one request, in the order of their causes."""

    def __init__(self) -> None:
        self._made: dict[str, None] = {}
        self._more = 0

    def removed(self, what: str) -> None:
        """Note that something was left out."""
        self._add("removed", what)

    def replaced(self, what: str) -> None:
        """Note that something was said in another form that carries less."""
        self._add("replaced", what)

    def _add(self, verb: str, what: str) -> None:
        note = f"{verb}:{_unprintable.sub('_', what[:_LONGEST])}"
        if note in self._made:
            return
        if len(self._made) < _MOST:
            self._made[note] = None
        else:
            self._more += 1

    def all(self) -> tuple[str, ...]:
        """Return the notes; beyond two dozen, one that counts the rest."""
        return (*self._made, f"removed:{self._more}_more") if self._more else tuple(self._made)
