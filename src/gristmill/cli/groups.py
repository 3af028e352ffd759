"""`gristmill groups`: how the groups of a run did, in rollouts.

JSON: `{"groups": [{group_id, size, rewarded, missing, masked, solved, repeated, mean, std, degenerate}], "totals":
{groups, rollouts, rewarded, missing, masked, solved, repeated, solved_groups, degenerate_groups, ungrouped,
solved_share, degenerate_share}, "solved_above", "bad_lines"}`; groups stand in the order of their ids. `mean` and `std`
are null where no reward counts, `solved_share` (of rewarded rollouts) and `degenerate_share` (of groups) where there is
nothing to share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from gristmill.cli.attempts import Attempt, Captures, takes_captures

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gristmill.credit import Facts, GroupStatistics, GroupTotals

__all__ = ["command"]

_HEADINGS: Final = ("group", "rollouts", "rewarded", "missing", "masked", "solved", "mean", "std", "signal")
_NUMBERS: Final = _HEADINGS[1:-1]
_OPTIONAL: Final = ("std", "masked", "missing", "rewarded")


@click.command("groups")
@takes_captures()
@click.option(
    "--solved-above",
    type=float,
    default=0.0,
    show_default=True,
    metavar="X",
    help="A rollout is solved by a reward above this.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(*, captures: Captures, solved_above: float, as_json: bool) -> int:
    """Say how the groups of rollouts did: sizes, rewards, how many are solved, and how many give no signal.

    A rollout counts once, by the last of its attempts whose reward counts; one whose failure is masked does not count.
    A group is degenerate, and gives no signal, if its rewards are all equal or fewer than two. No token is read.
    """
    from gristmill.credit import Groups, totals_of

    captures.tokens, captures.summaries = False, True
    groups = Groups.of(_facts(attempt) for attempt in captures)
    made = list(groups.statistics(solved_above))
    totals = totals_of(made, groups.ungrouped)
    if as_json:
        _write_json(captures, made, totals, solved_above)
    else:
        _write_lines(captures, made, totals)
    return 0


def _facts(attempt: Attempt) -> Facts:
    """Return what counts of an attempt; one that is not finished is in the group that it was opened in."""
    from gristmill.credit import facts_of

    facts = facts_of(attempt.capture.rollout_id, attempt.capture.attempt, attempt.result)
    if attempt.has_result or attempt.summary is None:
        return facts
    return facts._replace(group_id=attempt.summary.group_id)


def _write_json(
    captures: Captures, groups: Iterable[GroupStatistics], totals: GroupTotals, solved_above: float
) -> None:
    import msgspec

    from gristmill.cli.document import Document

    with Document("groups") as document:
        for group in groups:
            document.add(msgspec.to_builtins(group))
        shares = {"solved_share": totals.solved_share, "degenerate_share": totals.degenerate_share}
        rest: dict[str, Any] = {"totals": {**msgspec.to_builtins(totals), **shares}, "solved_above": solved_above}
        document.finish({**rest, "bad_lines": captures.bad_lines})


def _write_lines(captures: Captures, groups: Iterable[GroupStatistics], totals: GroupTotals) -> None:
    import shlex

    from gristmill.cli.listing import Listing
    from gristmill.cli.plural import counted
    from gristmill.cli.screen import remark, show, words

    listing = Listing(_HEADINGS, right=_NUMBERS, optional=_OPTIONAL)
    for group in groups:
        counts = (group.size, group.rewarded, group.missing, group.masked, group.solved)
        numbers = ("-" if number is None else f"{number:.6g}" for number in (group.mean, group.std))
        signal = "none: degenerate" if group.degenerate else "yes"
        styles = ("",) * (len(_HEADINGS) - 1)
        listing.add((group.group_id, *map(str, counts), *numbers, signal), (*styles, "dim" if group.degenerate else ""))
    listing.finish()
    solved = (
        f"{totals.solved:,} of {counted(totals.rewarded, 'rewarded rollout')} solved{_percent(totals.solved_share)}"
    )
    none = f"{totals.degenerate_groups:,} of {counted(totals.groups, 'group')} without a signal"
    show("", words(f"{solved}; {none}{_percent(totals.degenerate_share)}"))
    for count, what in (
        (totals.missing, "{} without a reward"),
        (totals.masked, "{} with a masked failure"),
        (totals.ungrouped, "{} without a group"),
    ):
        if count:
            remark("note", what.format(counted(count, "rollout")))
    if totals.repeated:
        remark("note", f"{counted(totals.repeated, 'more attempt')} with a reward: the last of a rollout counts")
    if totals.groups:
        arguments = [*map(str, captures.paths), "--advantage", "group_norm", "--out", "rows", *captures.arguments()]
        remark("next", shlex.join(["gristmill", "export", *arguments]))


def _percent(share: float | None) -> str:
    return "" if share is None else f" ({share:.1%})"
