"""Advantages on a command line: the option, the first pass over results, and whether they changed until the second.

Invariant: advantages are computed over every rollout that the paths hold, whatever filters say: a group is one, also
where only a part of it is looked at. No token is read for it.

Not here: what an advantage is (gristmill.credit).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from gristmill.errors import Code, ExportError

if TYPE_CHECKING:
    from gristmill.cli.attempts import Captures
    from gristmill.credit import AdvantageNote, Advantages, Groups, RewardsDigest

__all__ = ["advantage_lines", "advantages_of", "groups_of", "refuse_changed", "takes_advantage"]


def takes_advantage(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--advantage`; the command gets it as `advantage`."""
    option = click.option(
        "--advantage",
        type=click.Choice(["given", "group_mean", "group_norm"]),
        help="Advantages that rows carry: as results hold them, or the reward less the mean of its group, or that over "
        "the group's deviation. Without it rows have none.",
    )
    return option(command)


def groups_of(captures: Captures) -> Groups:
    """Collect the rewards of all rollouts of the paths.

    Raises:
        GristmillError: as reading the captures.
    """
    from gristmill.credit import Groups, facts_of

    return Groups.of(
        facts_of(attempt.capture.rollout_id, attempt.capture.attempt, attempt.result) for attempt in captures.results()
    )


def advantages_of(captures: Captures, kind: str) -> Advantages:
    """Compute the advantages of all rollouts of the paths.

    Args:
        captures: what is read.
        kind: an `AdvantageKind`.

    Raises:
        GristmillError: as reading the captures.
    """
    from gristmill.credit import AdvantageKind, Advantages

    if kind == AdvantageKind.GIVEN:
        return Advantages.given()
    return groups_of(captures).advantages(AdvantageKind(kind))


def advantage_lines(note: AdvantageNote | None) -> list[str]:
    """Say how the advantages of a folder were made; nothing where it has none."""
    from gristmill.cli.plural import counted

    if note is None:
        return []
    over = f" over {counted(note.rewards, 'reward')} in {counted(note.groups, 'group')}" if note.rewards_digest else ""
    return [f"advantages: {note.kind}{over}"]


def refuse_changed(captures: Captures, advantages: Advantages | None, seen: RewardsDigest) -> None:
    """Refuse advantages whose rewards are not those that were read with the tokens.

    Raises:
        ExportError: `attempt_differs`; where only a part of the attempts was read, nothing can be said.
    """
    if advantages is None or not advantages.groups or not captures.whole:
        return
    if (advantages.note.rewards, advantages.note.rewards_digest) != (seen.count, seen.hexdigest()):
        raise ExportError(
            f"expected the {advantages.note.rewards} rewards that the advantages were made of, got {seen.count}: "
            "results came in while the captures were read",
            code=Code.ATTEMPT_DIFFERS,
            where="--advantage",
            hint="run it again when no rollout is being finished, or on an archive of the ledger",
        )
