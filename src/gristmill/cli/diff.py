"""`gristmill diff`: what two policies, or two settings of one, decide differently.

JSON: `{"a": {policy, options}, "b": {…}, "rollouts": [{rollout_id, attempt, outcomes: [a, b], codes: [a, b],
terminals: [a, b], flips: [{model_call_id, included: [a, b], codes: [a, b], tokens}]}], "table": [{a, b, rollouts}],
"calls": {both, only_a, only_b, neither}, "flips": [{a, b, calls, tokens}], "compared": N, "bad_lines"}`.

`rollouts` holds those in which anything differs (with `--all`, every one). `outcomes` are `selected` or `rejected`,
`codes` the refusals', null where there is none. `table` counts rollouts by how they came out under both; `calls` maps
how a call came out to `[calls, tokens]`; `flips` counts the calls that flip by the codes of both verdicts.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from gristmill.cli.attempts import Attempt, Captures, takes_captures
from gristmill.cli.choice import Choice, policy_settings
from gristmill.errors import Code, ConfigError

if TYPE_CHECKING:
    from gristmill.selection import Rejected, Selection

__all__ = ["Compared", "Comparison", "Flip", "command", "compare", "comparison_json", "show_compared", "show_table"]

_SELECTED: Final = "selected"


class Flip(msgspec.Struct, frozen=True):
    """A call that one policy includes and the other does not."""

    model_call_id: str
    included: tuple[bool, bool]
    codes: tuple[str, str]
    tokens: int


class Compared(msgspec.Struct, frozen=True):
    """An attempt under both policies: refusal codes (None: selected), scored calls, and the calls that flip."""

    rollout_id: str
    attempt: int
    codes: tuple[str | None, str | None]
    terminals: tuple[str | None, str | None]
    flips: tuple[Flip, ...]

    @property
    def differs(self) -> bool:
        """Whether the policies disagree on anything."""
        return bool(self.flips) or self.codes[0] != self.codes[1] or self.terminals[0] != self.terminals[1]


class Comparison(msgspec.Struct):
    """Counts over attempts."""

    compared: int = 0
    differing: int = 0
    outcomes: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter[tuple[str, str]])
    calls: dict[str, list[int]] = msgspec.field(
        default_factory=lambda: {name: [0, 0] for name in ("both", "only_a", "only_b", "neither")}
    )
    flips: dict[tuple[str, str], list[int]] = msgspec.field(default_factory=dict[tuple[str, str], list[int]])


@click.command("diff")
@takes_captures()
@click.option("--policy", metavar="A", help="The one policy; returned_history by default.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="An option of A; may be repeated.")
@click.option("--against", metavar="B", help="The other policy; by default A, which then needs --set-against.")
@click.option(
    "--set-against", "settings_against", multiple=True, metavar="KEY=VALUE", help="An option of B; may be repeated."
)
@click.option("--train-model", metavar="NAME", help="Train only calls of this model; for both.")
@click.option("--all", "everything", is_flag=True, help="Show the rollouts without a difference too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(
    *,
    captures: Captures,
    policy: str | None,
    settings: tuple[str, ...],
    against: str | None,
    settings_against: tuple[str, ...],
    train_model: str | None,
    everything: bool,
    as_json: bool,
) -> int:
    """Compare two policies, call by call.

    Only selections are compared; whether rows can be made of them is told by `rows` and `ls`.
    """
    if against is None and not settings_against:
        raise ConfigError(
            "expected a policy to compare with, got none",
            code=Code.USAGE,
            where="--against",
            hint="for example --against all_captured, or --set-against reasoning=optional",
        )
    one = Choice(policy, policy_settings(settings) or None, train_model)
    other = Choice(policy if against is None else against, policy_settings(settings_against) or None, train_model)
    one.load()
    other.load()
    if as_json:
        _write_json(captures, (one, other), everything)
    else:
        _write_text(captures, (one, other), everything)
    return 0


def compare(attempt: Attempt, choices: tuple[Choice, Choice], comparison: Comparison) -> Compared:
    """Decide about an attempt by both policies, and count what they decide."""
    one, other = (choice.select(attempt) for choice in choices)
    tokens = {record.model_call_id: record.cum_len - record.prompt_len for record in attempt.capture.records}
    flips: list[Flip] = []
    for first, second in zip(one.verdicts, other.verdicts, strict=True):
        sampled = tokens.get(first.model_call_id, 0)
        place = comparison.calls[_PLACES[first.included, second.included]]
        place[0] += 1
        place[1] += sampled
        if first.included is not second.included:
            codes = (str(first.code), str(second.code))
            flips.append(Flip(first.model_call_id, (first.included, second.included), codes, sampled))
            counts = comparison.flips.setdefault(codes, [0, 0])
            counts[0] += 1
            counts[1] += sampled
    compared = Compared(
        attempt.capture.rollout_id,
        attempt.capture.attempt,
        (_code(one), _code(other)),
        (_terminal(one), _terminal(other)),
        tuple(flips),
    )
    comparison.compared += 1
    comparison.differing += compared.differs
    comparison.outcomes[_outcome(compared.codes[0]), _outcome(compared.codes[1])] += 1
    return compared


_PLACES: Final = {(True, True): "both", (True, False): "only_a", (False, True): "only_b", (False, False): "neither"}


def _code(outcome: Selection | Rejected) -> str | None:
    from gristmill.selection import Rejected

    return str(outcome.code) if isinstance(outcome, Rejected) else None


def _terminal(outcome: Selection | Rejected) -> str | None:
    from gristmill.selection import Rejected

    return None if isinstance(outcome, Rejected) else outcome.terminal_call_id


def _outcome(code: str | None) -> str:
    return _SELECTED if code is None else code


def _write_json(captures: Captures, choices: tuple[Choice, Choice], everything: bool) -> None:
    from gristmill.cli.document import Document

    comparison = Comparison()
    with Document("rollouts") as document:
        for attempt in captures:
            compared = compare(attempt, choices, comparison)
            if everything or compared.differs:
                document.add(_compared_json(compared))
        document.finish({**comparison_json(choices, comparison), "bad_lines": captures.bad_lines})


def _compared_json(compared: Compared) -> dict[str, Any]:
    outcomes = ["selected" if code is None else "rejected" for code in compared.codes]
    told = msgspec.to_builtins(compared)
    return {name: told[name] for name in ("rollout_id", "attempt")} | {"outcomes": outcomes} | told


def comparison_json(choices: tuple[Choice, Choice], comparison: Comparison) -> dict[str, Any]:
    """Give the counts as documented in the module."""
    one, other = ({"policy": choice.policy, "options": dict(choice.options)} for choice in choices)
    return {
        "a": one,
        "b": other,
        "table": [
            {"a": first, "b": second, "rollouts": count}
            for (first, second), count in sorted(comparison.outcomes.items())
        ],
        "calls": comparison.calls,
        "flips": [
            {"a": first, "b": second, "calls": calls, "tokens": tokens}
            for (first, second), (calls, tokens) in sorted(comparison.flips.items())
        ],
        "compared": comparison.compared,
    }


def _write_text(captures: Captures, choices: tuple[Choice, Choice], everything: bool) -> None:
    import shlex

    from gristmill.cli.screen import remark, show

    comparison = Comparison()
    first: tuple[Compared, Attempt] | None = None
    for attempt in captures:
        compared = compare(attempt, choices, comparison)
        if everything or compared.differs:
            show_compared(compared)
        if first is None and compared.flips:
            first = compared, attempt
    if comparison.differing or everything:
        show("")
    show_table(choices, comparison)
    if first is not None:
        compared, attempt = first
        numbered = compared.attempt or captures.attempt is not None
        which = ["--rollout", compared.rollout_id, *(["--attempt", str(compared.attempt)] if numbered else [])]
        arguments = [
            str(attempt.source),
            compared.flips[0].model_call_id,
            *which,
            *captures.reading(),
            *choices[0].arguments(),
        ]
        remark("next", shlex.join(["gristmill", "explain", *arguments]))


def show_compared(compared: Compared) -> None:
    """Print how an attempt came out under both policies, and the calls that flip."""
    from gristmill.cli.screen import columns, marks, show, words

    arrow, signs = marks().arrow, marks()
    number = f" attempt {compared.attempt}" if compared.attempt else ""
    came = " | ".join(_outcome(code) for code in compared.codes)
    scored = ""
    if compared.terminals[0] != compared.terminals[1]:
        scored = f"  scored {compared.terminals[0] or 'nobody'} | {compared.terminals[1] or 'nobody'}"
    show(words(f"{compared.rollout_id}{number}  {came}{scored}", "bold"))
    if not compared.flips:
        return
    table = columns(("A", "B", "call", "verdicts", "sampled"), right=("sampled",))
    for flip in compared.flips:
        signed = [signs.included if included else signs.excluded for included in flip.included]
        style = "green" if flip.included[1] else "red"
        table.add_row(
            words(signed[0]),
            words(signed[1]),
            words(flip.model_call_id),
            words(f"{flip.codes[0]} {arrow} {flip.codes[1]}", style),
            words(str(flip.tokens)),
        )
    show(table)


def show_table(choices: tuple[Choice, Choice], comparison: Comparison) -> None:
    """Print the counts over all rollouts."""
    from gristmill.cli.screen import columns, show, words

    for name, choice in zip("AB", choices, strict=True):
        options = "".join(f" {key}={value}" for key, value in choice.options.items())
        show(words(f"{name}: {choice.policy}{options}"))
    table = columns(("A", "B", "rollouts"), right=("rollouts",))
    for (first, second), count in sorted(comparison.outcomes.items()):
        table.add_row(words(first), words(second), words(f"{count:,}"))
    show(table)
    table = columns(("calls included by", "calls", "tokens"), right=("calls", "tokens"))
    for name, (calls, tokens) in comparison.calls.items():
        table.add_row(words(_INCLUDED_BY[name]), words(f"{calls:,}"), words(f"{tokens:,}"))
    show(table)
    plural = "" if comparison.compared == 1 else "s"
    show(words(f"{comparison.differing:,} of {comparison.compared:,} rollout{plural} differ", "bold"))


_INCLUDED_BY: Final = {"both": "A and B", "only_a": "A only", "only_b": "B only", "neither": "neither"}
