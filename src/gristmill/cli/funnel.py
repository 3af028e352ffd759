"""The funnel of a run: captured, usable, selected, trained, in calls and sampled tokens.

Invariant: counts are the core's, added up over attempts; nothing is counted here.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from gristmill.cli.plural import counted
from gristmill.pipeline import Funnel, RebuiltRollout, funnel_of
from gristmill.records import Capture
from gristmill.selection import Rejected, Selection

__all__ = ["Tally", "funnel_json", "funnel_text"]


class Tally(msgspec.Struct):
    """Counts over attempts: how many were selected and rejected, why, and the funnel."""

    selected: int = 0
    rejected: int = 0
    funnel: Funnel = Funnel()
    codes: Counter[str] = msgspec.field(default_factory=Counter[str])

    def add(self, capture: Capture, outcome: Selection | RebuiltRollout | Rejected) -> None:
        """Count one attempt."""
        code = str(outcome.code) if isinstance(outcome, Rejected) else None
        self.count(code, funnel_of(capture, outcome))

    def count(self, code: str | None, funnel: Funnel) -> None:
        """Count one attempt by the code of its refusal, None for a selected one, and its own funnel."""
        self.funnel = self.funnel.plus(funnel)
        if code is None:
            self.selected += 1
        else:
            self.rejected += 1
            self.codes[code] += 1

    def json(self) -> dict[str, Any]:
        """Give the counts as JSON, without the funnel."""
        return {"selected": self.selected, "rejected": self.rejected, "codes": dict(self.codes)}

    @property
    def failed(self) -> bool:
        """Whether every attempt was rejected."""
        return self.selected == 0

    def text(self) -> str:
        """Say how many rollouts were selected and rejected, and why."""
        total = self.selected + self.rejected
        why = ", ".join(f"{count} {code}" for code, count in sorted(self.codes.items()))
        return f"{counted(total, 'rollout')}: {self.selected} selected, {self.rejected} rejected" + (
            f" ({why})" if why else ""
        )


def funnel_json(funnel: Funnel) -> dict[str, Any]:
    """Give a funnel as JSON: `excluded` maps codes to `[calls, tokens]`."""
    return msgspec.to_builtins(funnel)


def funnel_text(funnel: Funnel, arrow: str, *, trained: bool) -> str:
    """Write a funnel on one line, `calls/tokens` a stage.

    Args:
        funnel: the counts.
        arrow: between stages.
        trained: whether rows were rebuilt, so that the last stage says something.
    """
    stages = ["captured", "usable", "selected"] + (["trained"] if trained else [])
    parts = [
        f"{stage} {counted(getattr(funnel, f'{stage}_calls'), 'call')} "
        f"{counted(getattr(funnel, f'{stage}_tokens'), 'token')}"
        for stage in stages
    ]
    lost = f" (and {funnel.lost_calls:,} lost)" if funnel.lost_calls else ""
    parts[0] += lost
    return f" {arrow} ".join(parts)
