"""Which outcomes a command shows: selected or rejected ones, or those in which a code stands.

Invariant: what is not shown is not counted either, so that the counts below a list are those of the list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from gristmill.cli.nearest import OneOf
from gristmill.errors import Code

if TYPE_CHECKING:
    from gristmill.pipeline import RebuiltRollout
    from gristmill.selection import Rejected, Selection

__all__ = ["Wanted", "takes_outcomes"]


_CODE: Final = OneOf("code", lambda: dict.fromkeys(map(str, Code)))


class Wanted(msgspec.Struct, frozen=True):
    """What is asked for; None is everything.

    Attributes:
        selected: True for selected rollouts only, False for rejected ones.
        code: of the refusal, or of a verdict on any call.
    """

    selected: bool | None = None
    code: str | None = None

    @property
    def everything(self) -> bool:
        """Whether nothing is left out."""
        return self.selected is None and self.code is None

    def __contains__(self, outcome: Selection | RebuiltRollout | Rejected) -> bool:
        from gristmill.pipeline import outcome_verdicts
        from gristmill.selection import Rejected

        rejected = isinstance(outcome, Rejected)
        if self.selected is not None and self.selected is rejected:
            return False
        if self.code is None or (rejected and outcome.code == self.code):
            return True
        return any(verdict.code == self.code for verdict in outcome_verdicts(outcome))


def takes_outcomes(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that narrow outcomes down; the command gets them as `wanted`."""

    @functools.wraps(command)
    def run(*, selected: bool, rejected: bool, code: str | None, **rest: Any) -> Any:
        if selected and rejected:
            raise click.UsageError("--selected and --rejected leave nothing to show")
        return command(wanted=Wanted(True if selected else False if rejected else None, code), **rest)

    wrapped: Any = run
    for option in (
        click.option("--code", type=_CODE, metavar="CODE", help="Only where this code stands, of a refusal or a call."),
        click.option("--rejected", is_flag=True, help="Only rollouts that were rejected."),
        click.option("--selected", is_flag=True, help="Only rollouts that were not rejected."),
    ):
        wrapped = option(wrapped)
    return wrapped
