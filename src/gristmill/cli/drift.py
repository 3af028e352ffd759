"""`gristmill drift`: which turns extend the tokens of the call that they continue, which fork, why, and at what cost.

JSON: `{"rollouts": [{rollout_id, attempt, outcome, exact, forked, unknown, causes, paid_again_tokens, turns: [{
model_call_id, parent_call_id, relation, cause, position, paid_again_tokens}]}], "turns": {exact, forked, unknown},
"causes": {CAUSE: {turns, in_prompt, in_reply, paid_again_tokens}}, "rows": {rows, context_tokens, repeated_tokens,
trained_tokens}, "continuation": {continued, closed, suffix_tokens, refused: {REASON: {calls, paid_again_tokens}},
saved: {turns, context_tokens}, could_save: {turns, context_tokens}}, "of", "bad_lines"}`.

A turn is a call with a recorded parent. `paid_again_tokens` counts the context that stands in a row once more because
the prompt forked: as many tokens as the parent's sequence would have lent it. `in_prompt` and `in_reply` count forks
whose first difference lies in the parent's own prompt, or in what it sampled. `repeated_tokens` counts the context of
all rows that another row of the rollout holds as well. `turns` of a rollout holds the forked and unknown ones (with
`--all`, every one). `continuation` counts calls that continuation was asked for (`continued`), and forks that it would
have prevented. `of` is `selected` (the calls that make rows; the forks are those of the manifest, `rows` is what the
rows hold) or, with `--captured`, `captured`: every usable call, whatever is selected; then `rows` is null and every
`outcome` too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gristmill.cli.attempts import Attempt, Captures, takes_captures
from gristmill.cli.choice import Choice, takes_policy
from gristmill.cli.continued import ContinuationCounts

if TYPE_CHECKING:
    from gristmill.reconstruction import Certificate
    from gristmill.records import CallRecord

__all__ = ["Drift", "Turn", "command"]


class Turn(msgspec.Struct, frozen=True):
    """A call with a recorded parent, and how its prompt relates to that call's tokens.

    `in_reply` says whether a fork lies in what the parent sampled; None where it has no position.
    """

    model_call_id: str
    certificate: Certificate
    paid_again_tokens: int
    in_reply: bool | None


class Drift(msgspec.Struct, frozen=True):
    """The turns of one attempt; `outcome` is None where nothing was selected."""

    rollout_id: str
    attempt: int
    outcome: str | None
    turns: tuple[Turn, ...]


class _Run(msgspec.Struct):
    """Counts over attempts."""

    rollouts: int = 0
    rejected: int = 0
    relations: Counter[str] = msgspec.field(default_factory=lambda: Counter(dict.fromkeys(_RELATIONS, 0)))
    causes: Counter[str] = msgspec.field(default_factory=Counter[str])
    in_prompt: Counter[str] = msgspec.field(default_factory=Counter[str])
    in_reply: Counter[str] = msgspec.field(default_factory=Counter[str])
    paid: Counter[str] = msgspec.field(default_factory=Counter[str])
    rows: int = 0
    context_tokens: int = 0
    repeated_tokens: int = 0
    trained_tokens: int = 0
    continuation: ContinuationCounts = msgspec.field(default_factory=ContinuationCounts)

    def add(self, drift: Drift) -> None:
        self.rollouts += 1
        self.rejected += drift.outcome == "rejected"
        for turn in drift.turns:
            certificate = turn.certificate
            self.relations[str(certificate.relation)] += 1
            if certificate.cause is not None:
                cause = str(certificate.cause)
                self.causes[cause] += 1
                self.in_prompt[cause] += turn.in_reply is False
                self.in_reply[cause] += turn.in_reply is True
                self.paid[cause] += turn.paid_again_tokens

    def cause(self, cause: str) -> dict[str, int]:
        """Return the counts of a cause."""
        return {
            "turns": self.causes[cause],
            "in_prompt": self.in_prompt[cause],
            "in_reply": self.in_reply[cause],
            "paid_again_tokens": self.paid[cause],
        }


_RELATIONS = ("exact", "forked", "unknown")


@click.command("drift")
@takes_captures()
@takes_policy
@click.option("--captured", is_flag=True, help="Every usable call, whatever is selected.")
@click.option("--all", "everything", is_flag=True, help="Show the exact turns too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(*, captures: Captures, choice: Choice, captured: bool, everything: bool, as_json: bool) -> int:
    """Count the turns that do not extend what was sampled, by cause.

    Each such turn costs a row of its own, and the context in it once more; no token is lost by it.
    """
    choice.load()
    run = _Run()
    drifts = (_drift(attempt, choice, captured, run) for attempt in captures)
    if as_json:
        _write_json(captures, drifts, run, captured, everything)
    else:
        _write_text(captures, drifts, run, choice, captured, everything)
    return 0


def _drift(attempt: Attempt, choice: Choice, captured: bool, run: _Run) -> Drift:
    """Certify the turns of an attempt, and count them."""
    from gristmill.cli.certificates import certificates
    from gristmill.cli.repeated import repeated_tokens
    from gristmill.reconstruction import RowMode
    from gristmill.selection import Rejected

    capture = attempt.capture
    found, outcome = certificates(capture), None
    records = {record.model_call_id: record for record in capture.records}
    calls: Sequence[str] = [call_id for call_id, record in records.items() if record.usable]
    if not captured:
        made = choice.rebuild(attempt, RowMode.MERGED)
        if isinstance(made, Rejected):
            found, outcome, calls = {}, "rejected", ()
        else:
            outcome = "selected"
            run.rows += len(made.rows)
            run.context_tokens += made.rebuilt.context_tokens
            run.repeated_tokens += repeated_tokens(made.rows, records)
            run.trained_tokens += made.rebuilt.trained_tokens
            calls = made.selection.calls
            found = {call_id: found[call_id] for call_id in calls if call_id in found}
    turns = tuple(_turn(call_id, certificate, records) for call_id, certificate in found.items())
    drift = Drift(capture.rollout_id, capture.attempt, outcome, turns)
    run.add(drift)
    run.continuation.add(calls, records, {turn.model_call_id: turn.paid_again_tokens for turn in turns})
    return drift


def _turn(call_id: str, certificate: Certificate, records: Mapping[str, CallRecord]) -> Turn:
    from gristmill.cli.certificates import paid_again

    parent, position = records.get(certificate.parent_call_id), certificate.position
    in_reply = None if parent is None or position is None else position >= parent.prompt_len
    return Turn(call_id, certificate, paid_again(certificate, records, call_id), in_reply)


def _shown(drift: Drift, everything: bool) -> list[Turn]:
    return [turn for turn in drift.turns if everything or turn.certificate.relation != "exact"]


def _write_json(captures: Captures, drifts: Iterator[Drift], run: _Run, captured: bool, everything: bool) -> None:
    from gristmill.cli.document import Document

    with Document("rollouts") as document:
        for drift in drifts:
            document.add(_drift_json(drift, everything))
        rows = {
            "rows": run.rows,
            "context_tokens": run.context_tokens,
            "repeated_tokens": run.repeated_tokens,
            "trained_tokens": run.trained_tokens,
        }
        causes = {cause: run.cause(cause) for cause in sorted(run.causes)}
        rest: dict[str, Any] = {
            "turns": dict(run.relations),
            "causes": causes,
            "rows": None if captured else rows,
            "continuation": run.continuation.as_json(),
        }
        document.finish({**rest, "of": "captured" if captured else "selected", "bad_lines": captures.bad_lines})


def _drift_json(drift: Drift, everything: bool) -> dict[str, Any]:
    relations = Counter(str(turn.certificate.relation) for turn in drift.turns)
    causes = Counter(str(turn.certificate.cause) for turn in drift.turns if turn.certificate.cause is not None)
    return {
        "rollout_id": drift.rollout_id,
        "attempt": drift.attempt,
        "outcome": drift.outcome,
        **{relation: relations[relation] for relation in _RELATIONS},
        "causes": dict(causes),
        "paid_again_tokens": sum(turn.paid_again_tokens for turn in drift.turns),
        "turns": [
            {
                "model_call_id": turn.model_call_id,
                "parent_call_id": turn.certificate.parent_call_id,
                "relation": str(turn.certificate.relation),
                "cause": None if turn.certificate.cause is None else str(turn.certificate.cause),
                "position": turn.certificate.position,
                "paid_again_tokens": turn.paid_again_tokens,
            }
            for turn in _shown(drift, everything)
        ],
    }


def _write_text(
    captures: Captures, drifts: Iterator[Drift], run: _Run, choice: Choice, captured: bool, everything: bool
) -> None:
    import shlex

    from gristmill.cli.certificates import turn_text
    from gristmill.cli.listing import Listing
    from gristmill.cli.plural import counted
    from gristmill.cli.screen import columns, remark, show, words

    listing = Listing(
        ("rollout", "attempt", "call", "continues", "paid again", "turn"),
        right=("attempt", "paid again"),
        optional=("attempt", "continues", "rollout"),
    )
    suggestion = ""
    for drift in drifts:
        for turn in _shown(drift, everything):
            certificate = turn.certificate
            style = "yellow" if certificate.relation == "forked" else "dim"
            named = (drift.rollout_id, str(drift.attempt), turn.model_call_id, certificate.parent_call_id)
            listing.add((*named, str(turn.paid_again_tokens), turn_text(certificate)), ("", "", "", "", "", style))
            which = [drift.rollout_id, *(["--attempt", str(drift.attempt)] if drift.attempt else [])]
            told = ["gristmill", "show", *map(str, captures.paths), *which, "--call", turn.model_call_id]
            suggestion = suggestion or shlex.join([*told, *captures.reading(), *choice.arguments()])
    listing.finish()
    show("")
    turns = sum(run.relations.values())
    of = "captured" if captured else "selected"
    counts = ", ".join(f"{count:,} {relation}" for relation, count in run.relations.items())
    show(words(f"{counted(turns, f'{of} turn')} in {counted(run.rollouts, 'rollout')}: {counts}", "bold"))
    if run.rejected:
        have = "has" if run.rejected == 1 else "have"
        show(words(f"{counted(run.rejected, 'rejected rollout')} {have} no selected turns"))
    if run.causes:
        headings = ("turns", "in prompt", "in reply", "context tokens paid again")
        table = columns(("cause", *headings), right=headings)
        for cause in sorted(run.causes):
            table.add_row(words(cause), *(words(f"{count:,}") for count in run.cause(cause).values()))
        show(table)
    if not captured:
        context = f"{counted(run.context_tokens, 'token')} of context, {run.repeated_tokens:,} of them repeated"
        show(words(f"{counted(run.rows, 'row')}: {counted(run.trained_tokens, 'trained token')}, {context}"))
    _show_continuation(run.continuation)
    if suggestion:
        remark("next", suggestion)


def _show_continuation(counts: ContinuationCounts) -> None:
    from gristmill.cli.plural import counted
    from gristmill.cli.screen import columns, show, words

    if counts.asked:
        closed = f", {counts.closed:,} of them behind a turn that was cut" if counts.closed else ""
        show(words(f"{counted(counts.continued, 'call')} continued by tokens{closed}"))
    if counts.refused:
        table = columns(
            ("not continued", "calls", "context tokens paid again"), right=("calls", "context tokens paid again")
        )
        for reason, count in sorted(counts.refused.items()):
            table.add_row(words(reason), words(f"{count:,}"), words(f"{counts.refused_tokens[reason]:,}"))
        show(table)
    if counts.saved:
        context = counted(counts.saved_tokens, "token")
        show(words(f"continuation saved {counted(counts.saved, 'row')} and {context} of context", "bold"))
    if counts.could_save:
        context = counted(counts.could_save_tokens, "token")
        could = f"continuation would save up to {counted(counts.could_save, 'row')} and {context} of context"
        show(words(could, "bold"))
