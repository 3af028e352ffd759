"""`gristmill ls`: what there is, one line a rollout.

JSON: `{"rollouts": [{rollout_id, attempt, state, outcome, code, where, reward, group_id, has_result, calls, lost,
usable_calls, selected_calls, sampled_tokens, prompt_tokens, trained_tokens, rows, models, first_at, last_at,
touched_at, source}], "totals": {rollouts, calls, lost, usable_calls, sampled_tokens, prompt_tokens}, "tally":
{selected, rejected, codes}, "funnel", "forks", "context_tokens", "bad_lines"}`.

`outcome` is `selected` or `rejected`; `code` and `where` are those of a rejected one. The verdicts are those of
`rows`: a selection whose rows cannot be made counts as rejected, so the funnel is the one of `verify` and of the
manifest. With `--no-verdicts` `outcome`, `rows`, the selected and the trained counts, `tally`, `funnel` and `forks`
are null. Times are unix seconds, `touched_at` is when a ledger last wrote to the attempt; a reward of null is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from gristmill.cli.attempts import Attempt, Captures, takes_captures
from gristmill.cli.choice import Choice, takes_policy
from gristmill.cli.wanted import Wanted, takes_outcomes
from gristmill.cli.work import answers, takes_jobs
from gristmill.errors import ConfigError

if TYPE_CHECKING:
    from gristmill.ledger import LedgerAddress, Summary
    from gristmill.pipeline import Funnel

__all__ = ["Line", "ListJob", "command"]

_HEADINGS: Final = (
    "rollout",
    "attempt",
    "state",
    "verdict",
    "reward",
    "group",
    "calls",
    "lost",
    "tokens",
    "rows",
    "models",
    "time",
)
_NUMBERS: Final = ("attempt", "reward", "calls", "lost", "tokens", "rows")
_OPTIONAL: Final = ("time", "models", "group", "attempt", "lost", "state", "tokens", "reward")
"""Columns that a narrow terminal goes without, in this order."""
_MISSING: Final = "-"


class Verdict(msgspec.Struct, frozen=True):
    """How a rollout came out: None as code is a selected one, whose rows were made."""

    code: str | None
    where: str | None
    rows: int
    forks: dict[str, int]
    context_tokens: int
    funnel: Funnel


class Line(msgspec.Struct, frozen=True):
    """What `ls` says of one attempt; no verdict where none was asked for."""

    summary: Summary
    source: LedgerAddress
    verdict: Verdict | None


class ListJob(msgspec.Struct):
    """Makes the line of an attempt; None where its outcome is not wanted."""

    choice: Choice
    wanted: Wanted

    def __call__(self, attempt: Attempt, /) -> Line | None:
        from gristmill.cli.summary import summary_of

        verdict = self._verdict(attempt)
        return None if verdict is None else Line(summary_of(attempt), attempt.source, verdict)

    def _verdict(self, attempt: Attempt) -> Verdict | None:
        from gristmill.pipeline import funnel_of
        from gristmill.reconstruction import RowMode
        from gristmill.selection import Rejected

        outcome = self.choice.rebuild(attempt, RowMode.MERGED)
        if outcome not in self.wanted:
            return None
        funnel = funnel_of(attempt.capture, outcome)
        if isinstance(outcome, Rejected):
            return Verdict(str(outcome.code), outcome.where, 0, {}, 0, funnel)
        forks = {str(cause): count for cause, count in outcome.rebuilt.forks.items()}
        return Verdict(None, None, len(outcome.rows), forks, outcome.rebuilt.context_tokens, funnel)


class _Sums(msgspec.Struct):
    """Totals over the lines."""

    rollouts: int = 0
    calls: int = 0
    lost: int = 0
    usable_calls: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0

    def add(self, summary: Summary) -> None:
        self.rollouts += 1
        for name in self.__struct_fields__[1:]:
            setattr(self, name, getattr(self, name) + getattr(summary, name))


@click.command("ls")
@takes_captures()
@takes_policy
@takes_outcomes
@click.option("--no-verdicts", is_flag=True, help="Select nothing: a large ledger is listed at once.")
@takes_jobs
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(*, captures: Captures, choice: Choice, wanted: Wanted, no_verdicts: bool, jobs: int, as_json: bool) -> int:
    """List what there is, one line a rollout.

    The verdict is that of the policy, and whether rows can be made; rollouts stand in the order in which they began.
    """
    if no_verdicts and not wanted.everything:
        raise ConfigError("--no-verdicts leaves no verdict for --selected, --rejected or --code", where="--no-verdicts")
    captures.summaries = True
    if no_verdicts:
        lines = _summaries(captures)
    else:
        choice.load()
        lines = answers(captures, ListJob(choice.unloaded(), wanted), jobs)
    shown = (line for line in lines if line is not None)
    if as_json:
        _write_json(captures, shown, not no_verdicts)
    else:
        _write_lines(captures, shown, choice, not no_verdicts)
    return 0


def _summaries(captures: Captures) -> Iterator[Line]:
    """Give the lines without verdicts; of a ledger nothing but its summaries is read."""
    from gristmill.cli.summary import summary_of

    for attempt in captures.without_calls():
        yield Line(summary_of(attempt), attempt.source, None)


def _write_json(captures: Captures, lines: Iterator[Line], verdicts: bool) -> None:
    from gristmill.cli.document import Document
    from gristmill.cli.funnel import Tally, funnel_json

    sums, tally, forks, context = _Sums(), Tally(), dict[str, int](), 0
    with Document("rollouts") as document:
        for line in lines:
            sums.add(line.summary)
            if line.verdict is not None:
                tally.count(line.verdict.code, line.verdict.funnel)
                context += line.verdict.context_tokens
                for cause, count in line.verdict.forks.items():
                    forks[cause] = forks.get(cause, 0) + count
            document.add(_line_json(line))
        rest: dict[str, Any] = {"totals": msgspec.to_builtins(sums)}
        rest |= {
            "tally": tally.json() if verdicts else None,
            "funnel": funnel_json(tally.funnel) if verdicts else None,
            "forks": forks if verdicts else None,
            "context_tokens": context if verdicts else None,
            "bad_lines": captures.bad_lines,
        }
        document.finish(rest)


def _line_json(line: Line) -> dict[str, Any]:
    summary, verdict = line.summary, line.verdict
    told: dict[str, Any] = {
        "rollout_id": summary.key.rollout_id,
        "attempt": summary.key.attempt,
        "state": str(summary.state),
        "outcome": None if verdict is None else "selected" if verdict.code is None else "rejected",
        "code": None if verdict is None else verdict.code,
        "where": None if verdict is None else verdict.where,
    }
    for name in ("reward", "group_id", "has_result", "calls", "lost", "usable_calls"):
        told[name] = getattr(summary, name)
    told["selected_calls"] = None if verdict is None else verdict.funnel.selected_calls
    told["sampled_tokens"], told["prompt_tokens"] = summary.sampled_tokens, summary.prompt_tokens
    told["trained_tokens"] = None if verdict is None else verdict.funnel.trained_tokens
    told["rows"] = None if verdict is None else verdict.rows
    told["models"] = list(summary.models)
    for name in ("first_at", "last_at", "touched_at"):
        told[name] = getattr(summary, name)
    told["source"] = str(line.source)
    return told


def _write_lines(captures: Captures, lines: Iterator[Line], choice: Choice, verdicts: bool) -> None:
    import shlex

    from gristmill.cli.funnel import Tally, funnel_text
    from gristmill.cli.listing import Listing
    from gristmill.cli.plural import counted
    from gristmill.cli.screen import marks, remark, show, words

    sums, tally, first = _Sums(), Tally(), None
    listing = Listing(_HEADINGS, right=_NUMBERS, optional=_OPTIONAL)
    for line in lines:
        first = first or line
        sums.add(line.summary)
        if line.verdict is not None:
            tally.count(line.verdict.code, line.verdict.funnel)
        style = "" if line.verdict is None else "green" if line.verdict.code is None else "red"
        listing.add(_cells(line), ("", "", "", style))
    listing.finish()
    if verdicts:
        show("", words(tally.text()), words(funnel_text(tally.funnel, marks().arrow, trained=True)))
    else:
        lost = f" (and {sums.lost:,} lost)" if sums.lost else ""
        calls, tokens = counted(sums.calls, "call"), counted(sums.sampled_tokens, "token")
        show("", words(f"{counted(sums.rollouts, 'rollout')}: {calls}{lost}, {tokens}"))
    if first is not None:
        key = first.summary.key
        which = ["--attempt", str(key.attempt)] if key.attempt else []
        arguments = [*map(str, captures.paths), key.rollout_id, *which, *captures.reading(), *choice.arguments()]
        remark("next", shlex.join(["gristmill", "show", *arguments]))


def _cells(line: Line) -> list[str]:
    summary, verdict = line.summary, line.verdict
    calls, rows = str(summary.calls), _MISSING
    said = _MISSING
    if verdict is not None:
        said = verdict.code or "selected"
        rows = str(verdict.rows)
        calls = f"{verdict.funnel.selected_calls}/{calls}"
    return [
        summary.key.rollout_id,
        str(summary.key.attempt),
        str(summary.state),
        said,
        _MISSING if summary.reward is None else f"{summary.reward:.6g}",
        summary.group_id or _MISSING,
        calls,
        str(summary.lost),
        str(summary.sampled_tokens),
        rows,
        ",".join(summary.models) or _MISSING,
        _time(summary),
    ]


def _time(summary: Summary) -> str:
    """Say when the first call was made, or else when the ledger last wrote, in universal time."""
    at = summary.first_at if summary.first_at is not None else summary.touched_at
    if at is None:
        return _MISSING
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        # Recorded times are whatever somebody recorded.
        return f"{at:g}"
