"""Renderings that are kept, by what was rendered.

Invariant: bounded by tokens; the one that was used longest ago goes first. A failure is never kept.

Not here: what renders.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from gristmill.records import Int32Array

__all__ = ["RenderingCache"]


class RenderingCache:
    """Renderings by digest.

    Args:
        most_T: how many tokens are kept together.
    """

    def __init__(self, most_T: int = 4 * 1024 * 1024) -> None:
        self._most_T: Final = most_T
        self._kept: OrderedDict[str, Int32Array] = OrderedDict()
        self.size_T = 0

    def get(self, digest: str) -> Int32Array | None:
        """Return a rendering, None where it is not kept."""
        found = self._kept.get(digest)
        if found is not None:
            self._kept.move_to_end(digest)
        return found

    def put(self, digest: str, ids_T: Int32Array) -> None:
        """Keep int32[T] ids, unless they are more than all that is kept."""
        if ids_T.size > self._most_T or digest in self._kept:
            return
        self._kept[digest] = ids_T
        self.size_T += ids_T.size
        while self.size_T > self._most_T:
            _, dropped_T = self._kept.popitem(last=False)
            self.size_T -= dropped_T.size
