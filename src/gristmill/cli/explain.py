"""`gristmill explain`: why a call was, or was not, selected, on which evidence, and what would change it.

JSON with CALL_ID: `{rollout_id, attempt, model_call_id, included, code, meaning, evidence, would_change, text}`;
`meaning` is the rule behind `code`, `would_change` a list of sentences, `text` one paragraph that says all of it,
and of a refused rollout `evidence.refusal` holds the refusal's `code`, `where` and evidence. An included call without
usable tokens, of which no row can be made, has `unusable_reason` too. Without CALL_ID:
`{"rollouts": [{rollout_id, attempt, outcome, text, calls: […]}], "bad_lines": [{where, message}]}`, each call in
the form above.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gristmill.cli.attempts import Attempt, Captures, paths_and_name, takes_captures
from gristmill.cli.choice import Choice, takes_policy
from gristmill.cli.wanted import Wanted, takes_outcomes
from gristmill.errors import Code, ConfigError

if TYPE_CHECKING:
    from gristmill.cli.prose import Explanation

__all__ = ["command", "explain_one", "explanation_json"]


@click.command("explain")
@click.argument("arguments", nargs=-1, required=True, metavar="PATHS... [CALL_ID]")
@takes_captures(argument=False)
@takes_policy
@takes_outcomes
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(*, arguments: tuple[str, ...], captures: Captures, choice: Choice, wanted: Wanted, as_json: bool) -> int:
    """Say why a call was selected or not, and what would change it.

    The last argument is a call id if there is no file of that name and it is not the only argument; without one, the
    whole rollout is explained, a paragraph a call.
    """
    captures.paths, call_id = paths_and_name(arguments)
    choice.load()
    if call_id is not None:
        explanation = _find(captures, choice, call_id)
        _show_one(explanation, as_json)
    elif as_json:
        _write_json(captures, choice, wanted)
    else:
        _write_text(captures, choice, wanted)
    return 0


def explain_one(attempt: Attempt, choice: Choice, call_id: str) -> Explanation | None:
    """Explain one call of an attempt; None where the attempt has no such call."""
    from gristmill.cli.prose import Explainer

    known = {record.model_call_id for record in attempt.capture.records}
    known |= {call.model_call_id for call in attempt.capture.lost}
    if call_id not in known:
        return None
    outcome = choice.select(attempt)
    verdict = next(verdict for verdict in outcome.verdicts if verdict.model_call_id == call_id)
    return Explainer(attempt.capture, outcome).call(verdict)


def _find(captures: Captures, choice: Choice, call_id: str) -> Explanation:
    from gristmill.cli.nearest import did_you_mean

    found: list[Explanation] = []
    known: dict[str, None] = {}
    for attempt in captures:
        explanation = explain_one(attempt, choice, call_id)
        if explanation is not None:
            found.append(explanation)
        elif not found:
            known |= dict.fromkeys(record.model_call_id for record in attempt.capture.records)
    if not found:
        message = f"no call {call_id!r} in the capture, and no file of that name"
        raise ConfigError(message, code=Code.CALL_UNKNOWN, where=call_id, hint=did_you_mean(call_id, known))
    if len(found) > 1:
        places = [f"{one.rollout_id} attempt {one.attempt}" for one in found]
        more = f" and {len(places) - 5} more" if len(places) > 5 else ""
        raise ConfigError(
            f"expected a call of one attempt, {call_id!r} is in {len(found)}: {', '.join(places[:5])}{more}",
            code=Code.CALL_UNKNOWN,
            where=call_id,
            hint=f"name one of them: --rollout {found[0].rollout_id} --attempt {found[0].attempt}",
        )
    return found[0]


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    """Give an explanation as documented in the module."""
    told = {name: getattr(explanation, name) for name in explanation.__struct_fields__}
    if told["unusable_reason"] is None:
        del told["unusable_reason"]
    return {**told, "code": str(explanation.code)}


def _show_one(explanation: Explanation, as_json: bool) -> None:
    if as_json:
        import sys

        from gristmill.cli.document import json_text

        sys.stdout.write(json_text(explanation_json(explanation)) + "\n")
        return
    from gristmill.cli.screen import show, words

    show(words(explanation.text))


def _write_json(captures: Captures, choice: Choice, wanted: Wanted) -> None:
    from gristmill.cli.document import Document
    from gristmill.cli.prose import Explainer, rollout_text
    from gristmill.selection import Rejected

    with Document("rollouts") as document:
        for attempt in captures:
            outcome = choice.select(attempt)
            if outcome not in wanted:
                continue
            calls = [explanation_json(explanation) for explanation in Explainer(attempt.capture, outcome).calls()]
            document.add(
                {
                    "rollout_id": outcome.rollout_id,
                    "attempt": outcome.attempt,
                    "outcome": "rejected" if isinstance(outcome, Rejected) else "selected",
                    "text": rollout_text(outcome),
                    "calls": calls,
                }
            )
        document.finish({"bad_lines": captures.bad_lines})


def _write_text(captures: Captures, choice: Choice, wanted: Wanted) -> None:
    from gristmill.cli.prose import Explainer, rollout_text
    from gristmill.cli.screen import show, words

    for attempt in captures:
        outcome = choice.select(attempt)
        if outcome not in wanted:
            continue
        show(words(rollout_text(outcome), "bold"), "")
        for explanation in Explainer(attempt.capture, outcome).calls():
            show(words(explanation.text), "")
