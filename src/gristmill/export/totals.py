"""The counts of an export while attempts come, for its manifest.

Invariant: counts are the core's, added up over attempts; nothing is counted here that a funnel does not hold.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from gristmill.pipeline import Funnel, RebuiltRollout, funnel_of
from gristmill.records import Capture
from gristmill.selection import Rejected, Selection

__all__ = ["Totals"]


class Totals(msgspec.Struct):
    """Attempts selected and rejected, the funnel, refusals by code, forks by cause, and context tokens of the rows."""

    selected: int = 0
    rejected: int = 0
    funnel: Funnel = Funnel()
    codes: Counter[str] = msgspec.field(default_factory=Counter[str])
    forks: Counter[str] = msgspec.field(default_factory=Counter[str])
    context_tokens: int = 0

    def add(self, capture: Capture, outcome: RebuiltRollout | Selection | Rejected) -> None:
        """Count one attempt."""
        self.funnel = self.funnel.plus(funnel_of(capture, outcome))
        if isinstance(outcome, Rejected):
            self.rejected += 1
            self.codes[str(outcome.code)] += 1
            return
        self.selected += 1
        if isinstance(outcome, RebuiltRollout):
            self.context_tokens += outcome.rebuilt.context_tokens
            for cause, count in outcome.rebuilt.forks.items():
                self.forks[str(cause)] += count
