"""`gristmill show`: the calls of a rollout as a tree, with verdicts, retries, branches, drift and delivery.

JSON: `{"rollouts": [{rollout_id, attempt, state, outcome, code, where, message, policy, options, reward, group_id,
advantage, credits: [{model_call_id, start, end, reward, advantage}], failure: {reason, attribution}, terminal_call_id,
rows, calls: […], lost: [{model_call_id, parent_call_id, reason, maybe_received, code}], funnel}], "bad_lines"}`; an
element for each attempt; a credit has only what was given. A call is `{model_call_id, depth, parent_call_id,
parent_resolution, kind, purpose, included, code, evidence, scored, response_id, dialect, model, response_status,
finish_reason, served, usable, unusable_reason, prompt_tokens, sampled_tokens, context, continuation, delivery,
admitted_at, completed_at}`, in the order of the tree; `kind` is `start`, `continuation`, `retry`, `branch`, `subagent`,
`compaction` or `auxiliary`, `context` is `{relation, cause, position}`: how the prompt relates to the tokens of the
parent, null where there is none to tell; `continuation` is `{state, reason, parent_call_id, closed, suffix_len}`:
whether the engine was given the parent's tokens, null where that was not asked for.

With `--call`: that call's object and `rollout_id, attempt, text, items: [{kind, type, id, fingerprint, text}],
tokens: {prompt_len, prev_len, base_call_id, cum_len, before, sampled, logprobs, sequence_digest}, certificate,
weight_versions, sampling, request: {model, messages, tools, parameters, headers}, reply: {status, kind, bytes}`;
`before` and `sampled` are the ids on both sides of the prompt's end; what was not captured is null.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from gristmill.cli.attempts import Attempt, Captures, paths_and_name, takes_captures
from gristmill.cli.choice import Choice, takes_policy
from gristmill.errors import Code, ConfigError

if TYPE_CHECKING:
    from rich.text import Text

    from gristmill.cli.kinds import CallKind
    from gristmill.pipeline import RebuiltRollout
    from gristmill.reconstruction import Certificate
    from gristmill.records import CallRecord
    from gristmill.selection import Rejected, Selection, Verdict

__all__ = ["Shown", "call_json", "command", "look"]


class Shown(NamedTuple):
    """An attempt, what was decided about it, and what each of its calls is."""

    attempt: Attempt
    outcome: RebuiltRollout | Rejected
    verdicts: dict[str, Verdict]
    kinds: dict[str, CallKind]
    certificates: dict[str, Certificate]

    @property
    def selection(self) -> Selection | Rejected:
        """The selection, or the refusal."""
        from gristmill.selection import Rejected

        return self.outcome if isinstance(self.outcome, Rejected) else self.outcome.selection

    @property
    def terminal(self) -> str | None:
        """The scored call, if one is named."""
        from gristmill.selection import Rejected

        return None if isinstance(self.outcome, Rejected) else self.outcome.selection.terminal_call_id


@click.command("show")
@click.argument("arguments", nargs=-1, required=True, metavar="PATHS... [ROLLOUT]")
@takes_captures(argument=False)
@takes_policy
@click.option("--call", "call_id", metavar="ID", help="One call: request, reply, tokens around the prompt's end.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(
    *, arguments: tuple[str, ...], captures: Captures, choice: Choice, call_id: str | None, as_json: bool
) -> int:
    """Show the calls of a rollout as a tree, or one of them.

    The last argument is a rollout id if there is no file of that name and it is not the only argument; it may be left
    out where there is only one rollout. A conversation goes straight down; what leaves it stands deeper.
    """
    from gristmill.cli.one_call import show_call

    captures.paths, name = paths_and_name(arguments)
    if name is not None and captures.rollout not in {None, name}:
        raise ConfigError(f"expected one rollout, got {name!r} and --rollout {captures.rollout!r}", code=Code.USAGE)
    captures.rollout = captures.rollout if name is None else name
    captures.summaries, captures.exchanges = True, call_id is not None
    choice.load()
    attempts = _one_rollout(captures)
    if call_id is not None:
        show_call(attempts, choice, call_id, as_json)
    elif as_json:
        _write_json(captures, attempts, choice)
    else:
        for attempt in attempts:
            _show(look(attempt, choice), captures, choice)
    return 0


def _one_rollout(captures: Captures) -> Iterable[Attempt]:
    """Read the attempts of one rollout.

    Raises:
        ConfigError: `rollout_unknown`, there are several and none is named.
    """
    if captures.rollout is not None:
        return captures
    attempts: list[Attempt] = []
    for attempt in captures:
        attempts.append(attempt)
        first, last = attempts[0].capture.rollout_id, attempt.capture.rollout_id
        if first != last:
            raise ConfigError(
                f"expected the id of one rollout, there are several: {first!r}, {last!r}, …",
                code=Code.ROLLOUT_UNKNOWN,
                where="ROLLOUT",
                hint="name one behind the paths; `gristmill ls` lists them",
            )
    return attempts


def look(attempt: Attempt, choice: Choice) -> Shown:
    """Decide about an attempt and say what its calls are."""
    from gristmill.cli.certificates import certificates
    from gristmill.cli.kinds import call_kinds
    from gristmill.pipeline import outcome_verdicts
    from gristmill.reconstruction import RowMode

    outcome = choice.rebuild(attempt, RowMode.MERGED)
    return Shown(
        attempt,
        outcome,
        {verdict.model_call_id: verdict for verdict in outcome_verdicts(outcome)},
        call_kinds(attempt.capture),
        certificates(attempt.capture),
    )


# ---- JSON --------------------------------------------------------------------------------------------------


def _write_json(captures: Captures, attempts: Iterable[Attempt], choice: Choice) -> None:
    from gristmill.cli.document import Document

    with Document("rollouts") as document:
        for attempt in attempts:
            document.add(_rollout_json(look(attempt, choice)))
        document.finish({"bad_lines": captures.bad_lines})


def _rollout_json(shown: Shown) -> dict[str, Any]:
    from gristmill.cli.funnel import funnel_json
    from gristmill.cli.summary import summary_of
    from gristmill.cli.tree import placed_calls
    from gristmill.pipeline import funnel_of
    from gristmill.selection import Rejected

    attempt, outcome, decided = shown.attempt, shown.outcome, shown.selection
    rejected = outcome if isinstance(outcome, Rejected) else None
    records = attempt.capture.records
    return {
        "rollout_id": decided.rollout_id,
        "attempt": decided.attempt,
        "state": str(summary_of(attempt).state),
        "outcome": "selected" if rejected is None else "rejected",
        "code": None if rejected is None else str(rejected.code),
        "where": None if rejected is None else rejected.where,
        "message": None if rejected is None else rejected.message,
        "policy": decided.policy,
        "options": dict(decided.options),
        "reward": attempt.result.reward,
        "group_id": attempt.result.group_id,
        "advantage": attempt.result.advantage,
        "credits": msgspec.to_builtins(attempt.result.credits),
        "failure": msgspec.to_builtins(attempt.result.failure),
        "terminal_call_id": shown.terminal,
        "rows": 0 if isinstance(outcome, Rejected) else len(outcome.rows),
        "calls": [
            call_json(shown, records[placed.position], placed.depth)
            for placed in placed_calls(records, _included(shown))
        ],
        "lost": [
            {
                "model_call_id": lost.model_call_id,
                "parent_call_id": lost.parent_call_id,
                "reason": lost.reason,
                "maybe_received": lost.maybe_received,
                "code": str(Code.LOST),
            }
            for lost in attempt.capture.lost
        ],
        "funnel": funnel_json(funnel_of(attempt.capture, outcome)),
    }


def _included(shown: Shown) -> set[str]:
    return {call_id for call_id, verdict in shown.verdicts.items() if verdict.included}


def call_json(shown: Shown, record: CallRecord, depth: int) -> dict[str, Any]:
    """Give a call as documented in the module."""
    call_id = record.model_call_id
    verdict, certificate = shown.verdicts[call_id], shown.certificates.get(call_id)
    context = None
    if certificate is not None:
        cause = None if certificate.cause is None else str(certificate.cause)
        context = {"relation": str(certificate.relation), "cause": cause, "position": certificate.position}
    return {
        "model_call_id": call_id,
        "depth": depth,
        "parent_call_id": record.parent_call_id,
        "parent_resolution": None if record.parent_resolution is None else str(record.parent_resolution),
        "kind": str(shown.kinds[call_id]),
        "purpose": str(record.purpose.label),
        "included": verdict.included,
        "code": str(verdict.code),
        "evidence": verdict.evidence,
        "scored": call_id == shown.terminal,
        "response_id": record.response_id,
        "dialect": str(record.dialect),
        "model": record.model,
        "response_status": record.response_status,
        "finish_reason": record.finish_reason,
        "served": _served(record),
        "usable": record.usable,
        "unusable_reason": None if record.unusable_reason is None else str(record.unusable_reason),
        "prompt_tokens": record.prompt_len,
        "sampled_tokens": record.cum_len - record.prompt_len,
        "context": context,
        "continuation": _continuation_json(record),
        "delivery": str(record.delivery),
        "admitted_at": record.admitted_at,
        "completed_at": record.completed_at,
    }


def _continuation_json(record: CallRecord) -> dict[str, Any] | None:
    said = record.continuation
    if said is None:
        return None
    return {
        "state": str(said.state),
        "reason": None if said.reason is None else str(said.reason),
        "parent_call_id": said.parent_call_id,
        "closed": said.closed,
        "suffix_len": said.suffix_len,
    }


def _served(record: CallRecord) -> str:
    """Name what a reply holds: kinds of items, tools by name."""
    names: list[str] = []
    for item in record.output_items:
        tools = [atom.name or atom.tool for atom in item.atoms or () if atom.kind == "tool_call"]
        names += [f"call of {tool}" for tool in tools] or [str(item.kind).replace("_", " ")]
    return ", ".join(names) or "nothing"


# ---- text --------------------------------------------------------------------------------------------------


def _show(shown: Shown, captures: Captures, choice: Choice) -> None:
    from gristmill.cli.funnel import funnel_text
    from gristmill.cli.screen import marks, remark, show, words
    from gristmill.pipeline import funnel_of
    from gristmill.selection import Rejected

    attempt, outcome = shown.attempt, shown.outcome
    _show_tree(shown)
    for lost in attempt.capture.lost:
        parent = f" (continues {lost.parent_call_id})" if lost.parent_call_id else ""
        show(words(f"lost {lost.model_call_id}{parent}: {lost.reason}", "dim"))
    if isinstance(outcome, Rejected):
        show(words(f"{outcome.code} at {outcome.where}: {outcome.message}", "red"))
    show(words(funnel_text(funnel_of(attempt.capture, outcome), marks().arrow, trained=True)))
    if attempt.capture.records:
        numbered = attempt.capture.attempt or captures.attempt is not None
        which = ["--attempt", str(attempt.capture.attempt)] if numbered else []
        last = attempt.capture.records[-1].model_call_id
        arguments = [*map(str, captures.paths), attempt.capture.rollout_id, *which, "--call", last]
        remark("next", shlex.join(["gristmill", "show", *arguments, *captures.reading(), *choice.arguments()]))


def _title(shown: Shown) -> str:
    from gristmill.cli.summary import summary_of
    from gristmill.selection import Rejected

    attempt, decided = shown.attempt, shown.selection
    summary = summary_of(attempt)
    number = f" attempt {decided.attempt}" if decided.attempt else ""
    options = "".join(f" {name}={value}" for name, value in decided.options.items())
    reward = "no reward" if summary.reward is None else f"reward {summary.reward:.6g}"
    group = f", group {summary.group_id}" if summary.group_id else ""
    failure = attempt.result.failure
    failed = "" if failure is None else f", failed ({failure.attribution}): {failure.reason}"
    came = "rejected" if isinstance(decided, Rejected) else f"{len(decided.calls)} of {len(decided.verdicts)} calls"
    return f"{decided.rollout_id}{number}  {summary.state}, {reward}{group}{failed}  {decided.policy}{options}  {came}"


def _show_tree(shown: Shown) -> None:
    """Draw the tree on a terminal; elsewhere write it as indented lines."""
    from rich.tree import Tree

    from gristmill.cli.screen import show, terminal_width, words
    from gristmill.cli.tree import placed_calls

    records = shown.attempt.capture.records
    title = words(_title(shown), "bold")
    placed = placed_calls(records, _included(shown))
    if terminal_width() is None:
        show(title)
        for call in placed:
            sys.stdout.write(f"{'  ' * (call.depth + 1)}{_line(shown, records[call.position]).plain}\n")
        return
    tree = Tree(title, guide_style="dim")
    above = [tree]
    for call in placed:
        del above[call.depth + 1 :]
        above.append(above[-1].add(_line(shown, records[call.position])))
    show(tree)


def _line(shown: Shown, record: CallRecord) -> Text:
    from rich.text import Text

    from gristmill.cli.certificates import turn_text
    from gristmill.cli.screen import marks, words

    call_id = record.model_call_id
    verdict, signs = shown.verdicts[call_id], marks()
    sign, style = (signs.included, "green") if verdict.included else (signs.excluded, "dim")
    sign = signs.scored if call_id == shown.terminal else sign
    sampled = record.cum_len - record.prompt_len
    parts = [str(shown.kinds[call_id]), f"{record.prompt_len}+{sampled} tokens"]
    if record.parent_call_id is not None and record.parent_call_id not in shown.kinds:
        parts.append(f"continues {record.parent_call_id}, which was not captured")
    elif record.parent_call_id is None and record.parent_resolution in {"ambiguous", "unresolved"}:
        parts.append(f"parent {record.parent_resolution}")
    if not record.usable:
        parts.append(f"unusable: {record.unusable_reason}")
    said = record.continuation
    if said is not None and said.reason != "no_parent":
        parts.append("continued" if said.reason is None else f"not continued: {said.reason}")
    turn = turn_text(shown.certificates.get(call_id))
    parts += [_status(record), *([turn] if turn else []), f"served {_served(record)}"]
    if record.delivery != "unknown":
        parts.append(str(record.delivery))
    return Text.assemble(
        (sign, style), " ", words(call_id), "  ", words(str(verdict.code), style), "  ", words(", ".join(parts), "dim")
    )


def _status(record: CallRecord) -> str:
    status = record.response_status or "status unknown"
    return f"{status} ({record.finish_reason})" if record.finish_reason else status
