"""`gristmill select`: choose the calls that are trained, with a reason for every call.

JSON: `{"rollouts": […], "tally": {selected, rejected, codes}, "funnel": {…}, "bad_lines": [{where, message}]}`. A
rollout is `{rollout_id, attempt, outcome, policy, options, verdicts}` with, where `outcome` is `selected`, `calls,
terminal_call_id, terminal_response_id, truncated, lost, notes`, and where it is `rejected`, `code, where, message,
evidence, would_settle`. A verdict is `{model_call_id, included, code, evidence}`; that of an included call
without usable tokens, of which no row can be made, has `unusable_reason` too. The funnel counts calls and
sampled tokens: `captured_calls, captured_tokens`, the same for `usable`, `selected` and `trained` (0 here: no rows
are made), `lost_calls`, and `excluded`, which maps codes to `[calls, tokens]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from gristmill.cli.attempts import Attempt, Captures, takes_captures
from gristmill.cli.choice import Choice, takes_policy
from gristmill.cli.failure import DATA_FAILED
from gristmill.cli.wanted import Wanted, takes_outcomes
from gristmill.cli.work import answers, takes_jobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gristmill.cli.funnel import Tally
    from gristmill.ledger import LedgerAddress
    from gristmill.pipeline import Funnel
    from gristmill.selection import Rejected, Selection, Verdict

__all__ = ["SelectJob", "Selected", "command", "outcome_json", "selected", "show_outcome"]


class Fact(NamedTuple):
    """What a table says of a call beside its verdict."""

    parent: str
    sampled: int
    unusable: str | None = None


class Selected(NamedTuple):
    """What was decided about one attempt; `json` is the outcome's, where that was asked for."""

    source: LedgerAddress
    outcome: Selection | Rejected
    funnel: Funnel
    facts: dict[str, Fact]
    json: str = ""


class SelectJob(msgspec.Struct):
    """Selects the calls of an attempt; None where its outcome is not wanted."""

    choice: Choice
    wanted: Wanted
    as_json: bool

    def __call__(self, attempt: Attempt, /) -> Selected | None:
        made = selected(attempt, self.choice)
        if made.outcome not in self.wanted:
            return None
        if not self.as_json:
            return made
        from gristmill.cli.document import json_text

        return made._replace(json=json_text(outcome_json(made.outcome, made.facts)), facts={})


def selected(attempt: Attempt, choice: Choice) -> Selected:
    """Choose the calls of an attempt."""
    from gristmill.pipeline import funnel_of

    outcome = choice.select(attempt)
    facts = {
        record.model_call_id: Fact(
            record.parent_call_id or "",
            record.cum_len - record.prompt_len,
            None if record.usable else str(record.unusable_reason),
        )
        for record in attempt.capture.records
    }
    return Selected(attempt.source, outcome, funnel_of(attempt.capture, outcome), facts)


@click.command("select")
@takes_captures()
@takes_policy
@takes_outcomes
@takes_jobs
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(*, captures: Captures, choice: Choice, wanted: Wanted, jobs: int, as_json: bool) -> int:
    """Choose the calls that are trained, with a reason for every call.

    PATHS are captures: a ledger, a .jsonl file, a recorded exchange (.json), a folder with capture.jsonl and
    result.json, or a folder of such files and folders. Ends with exit code 1 if every rollout was rejected.
    """
    from gristmill.cli.funnel import Tally

    choice.load()
    tally = Tally()
    made = answers(captures, SelectJob(choice.unloaded(), wanted, as_json), jobs)
    shown = (one for one in made if one is not None)
    if as_json:
        _write_json(captures, shown, tally)
    else:
        _write_tables(captures, shown, choice, tally)
    return DATA_FAILED if tally.failed else 0


def _count(one: Selected, tally: Tally) -> None:
    from gristmill.selection import Rejected

    tally.count(str(one.outcome.code) if isinstance(one.outcome, Rejected) else None, one.funnel)


def _write_json(captures: Captures, made: Iterator[Selected], tally: Tally) -> None:
    from gristmill.cli.document import Document
    from gristmill.cli.funnel import funnel_json

    with Document("rollouts") as document:
        for one in made:
            _count(one, tally)
            document.add_text(one.json)
        rest = {"tally": tally.json(), "funnel": funnel_json(tally.funnel), "bad_lines": captures.bad_lines}
        document.finish(rest)


def _write_tables(captures: Captures, made: Iterator[Selected], choice: Choice, tally: Tally) -> None:
    from gristmill.cli.funnel import funnel_text
    from gristmill.cli.screen import marks, remark, show, words

    first: Selected | None = None
    attempts = 0
    for one in made:
        _count(one, tally)
        show_outcome(one)
        show("")
        first = first or one
        attempts += one.outcome.rollout_id == first.outcome.rollout_id
    show(words(tally.text()), words(funnel_text(tally.funnel, marks().arrow, trained=False)))
    if first is not None:
        remark("next", _suggestion(captures, first, attempts, choice))


def _suggestion(captures: Captures, one: Selected, attempts: int, choice: Choice) -> str:
    """Name a command that says more about the first rollout."""
    import shlex

    from gristmill.selection import Rejected

    outcome = one.outcome
    excluded = [verdict.model_call_id for verdict in outcome.verdicts if not verdict.included]
    call = [] if isinstance(outcome, Rejected) else excluded[:1]
    alone = isinstance(one.source, Path) and one.source.is_dir() and captures.whole
    which = [] if alone else ["--rollout", outcome.rollout_id]
    if outcome.attempt or attempts > 1 or captures.attempt is not None:
        which += ["--attempt", str(outcome.attempt)]
    arguments = [str(one.source), *call, *which, *captures.reading(), *choice.arguments()]
    return shlex.join(["gristmill", "explain", *arguments])


def outcome_json(outcome: Selection | Rejected, facts: Mapping[str, Fact]) -> dict[str, Any]:
    """Give a selection or a refusal as documented in the module."""
    from gristmill.cli.remedies import refusal_remedies
    from gristmill.selection import Rejected

    head: dict[str, Any] = {
        "rollout_id": outcome.rollout_id,
        "attempt": outcome.attempt,
        "outcome": "rejected" if isinstance(outcome, Rejected) else "selected",
        "policy": outcome.policy,
        "options": dict(outcome.options),
    }
    if isinstance(outcome, Rejected):
        head |= {
            "code": str(outcome.code),
            "where": outcome.where,
            "message": outcome.message,
            "evidence": outcome.evidence,
            "would_settle": list(refusal_remedies(outcome.code, outcome.evidence)),
        }
    else:
        head |= {
            "calls": list(outcome.calls),
            "terminal_call_id": outcome.terminal_call_id,
            "terminal_response_id": outcome.terminal_response_id,
            "truncated": outcome.truncated,
            "lost": list(outcome.lost),
            "notes": list(outcome.notes),
        }
    head["verdicts"] = [_verdict_json(verdict, facts.get(verdict.model_call_id)) for verdict in outcome.verdicts]
    return head


def _verdict_json(verdict: Verdict, fact: Fact | None) -> dict[str, Any]:
    told = {
        "model_call_id": verdict.model_call_id,
        "included": verdict.included,
        "code": str(verdict.code),
        "evidence": verdict.evidence,
    }
    unusable = _unusable(verdict, fact)
    return told if unusable is None else {**told, "unusable_reason": unusable}


def _unusable(verdict: Verdict, fact: Fact | None) -> str | None:
    """Say why no row can be made of an included call; None where one can, or none is wanted."""
    return fact.unusable if verdict.included and fact is not None else None


def show_outcome(made: Selected) -> None:
    """Print the table of a selection, or a refusal."""
    from gristmill.cli.remedies import refusal_remedies
    from gristmill.cli.screen import columns, marks, show, words
    from gristmill.selection import Rejected

    outcome = made.outcome
    options = "".join(f" {name}={value}" for name, value in outcome.options.items())
    attempt_number = f" attempt {outcome.attempt}" if outcome.attempt else ""
    title = f"{outcome.rollout_id}{attempt_number}  {outcome.policy}{options}"
    if isinstance(outcome, Rejected):
        show(words(f"{title}  rejected", "bold"))
        show(words(f"  {outcome.code} at {outcome.where}", "red"), words(f"  {outcome.message}"))
        show(*(words(f"  {remedy}", "dim") for remedy in refusal_remedies(outcome.code, outcome.evidence)))
        return
    show(words(f"{title}  {len(outcome.calls)} of {len(outcome.verdicts)} calls", "bold"))
    signs = marks()
    table = columns(("", "call", "parent", "verdict", "sampled", "evidence"), right=("sampled",), fold=("evidence",))
    for verdict in outcome.verdicts:
        sign, style = (signs.included, "green") if verdict.included else (signs.excluded, "dim")
        if verdict.model_call_id == outcome.terminal_call_id:
            sign = signs.scored
        fact = made.facts.get(verdict.model_call_id)
        parent, sampled = ("", "") if fact is None else (fact.parent, str(fact.sampled))
        evidence, unusable = words(_evidence(verdict), "dim"), _unusable(verdict, fact)
        if unusable is not None:
            sampled = signs.nothing
            evidence = words(" · " if evidence.plain else "", "dim").join(
                [evidence, words(f"no rows: {unusable}", "red")]
            )
        table.add_row(
            words(sign, style),
            words(verdict.model_call_id),
            words(parent, "dim"),
            words(str(verdict.code), style),
            words(sampled),
            evidence,
        )
    show(table, *(words(f"  note: {note}", "dim") for note in outcome.notes))
    for line in _facts(outcome):
        show(words(f"  {line}", "dim"))


def _evidence(verdict: Verdict) -> str:
    from gristmill.cli.prose import brief

    return brief(verdict)


def _facts(selection: Selection) -> list[str]:
    facts: list[str] = []
    if selection.truncated:
        facts.append("truncated: a selected call was cut at its length")
    if selection.lost:
        facts.append(f"lost and of no concern to the selection: {', '.join(selection.lost)}")
    return facts
