"""`gristmill run`: a harness as one rollout, captured, finished and counted.

JSON: `{"rollout_id", "attempt", "gateway", "ledger", "harness", "exit_code", "signal", "reward", "reward_error",
"failure": {reason, attribution}, "history_sources": […], "history_missing", "aborted", "unusable": [{reason, detail,
calls}], "policy", "outcome": {policy, outcome, code, where, message, evidence, rows, funnel}}`; `unusable` is empty
unless no call could be trained, `failure` is null unless `--on-failure` says how it counts. What the harness writes on
standard output then goes to standard error. The exit code is the harness's, 128 + N where signal N ended it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gristmill.cli.serve import read_overrides, takes_settings
from gristmill.errors import Code, ConfigError

if TYPE_CHECKING:
    from gristmill.gateway.config import GatewayConfig
    from gristmill.service.outcome import Outcome
    from gristmill.service.place import Begun
    from gristmill.service.run import Report

__all__ = ["command"]

_NAMES = ("claude-code", "codex", "opencode", "pi", "mini-swe-agent", "openai")


@click.command("run", context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option(
    "--for",
    "harness",
    type=click.Choice(_NAMES),
    help="Kind of the harness; told by the name of its program, `openai` for any other.",
)
@takes_settings("ledger", "upstreams", "models", "continue", "tokenizer", "admin_key_file")
@click.option("--gateway", metavar="URL", help="A gateway that runs, instead of one started for this run.")
@click.option(
    "--override",
    "overrides",
    multiple=True,
    metavar="NAME=JSON",
    help="A sampling setting of this rollout over what is asked for; may be repeated.",
)
@click.option(
    "--rollout-id",
    metavar="ID",
    help="Letters, digits, `._-`; a random one by default. One that is there already gets its next attempt.",
)
@click.option("--group", metavar="NAME", help="Rollouts of one prompt that are compared with each other.")
@click.option("--reward-file", type=click.Path(path_type=Path), metavar="FILE", help="Holds one number, the reward.")
@click.option("--reward-command", metavar="CMD", help="Shell command whose last line of output is the reward.")
@click.option(
    "--result-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSON that the harness hands back, instead of its own session files.",
)
@click.option(
    "--on-failure",
    type=click.Choice(["mask", "score"]),
    help="How a run counts whose exit code is not 0: `mask`, not the agent's fault, is not trained; `score`, its own "
    "fault, is trained as rewarded. By default it counts as any other.",
)
@click.option("--policy", metavar="NAME", help="How calls are counted as selected; by what is handed back by default.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
@click.argument("harness_command", nargs=-1, required=True, metavar="-- COMMAND...")
def command(
    *,
    settings: Callable[..., GatewayConfig],
    harness: str | None,
    gateway: str | None,
    overrides: tuple[str, ...],
    rollout_id: str | None,
    group: str | None,
    reward_file: Path | None,
    reward_command: str | None,
    result_file: Path | None,
    on_failure: str | None,
    policy: str | None,
    as_json: bool,
    harness_command: tuple[str, ...],
) -> int:
    """Run a harness against a gateway and keep its rollout.

    Without --gateway, one is started over --ledger (run.gristmill by default) for the run, in front of the engines
    that --upstream names; if another process has the ledger open, its gateway is joined. Ends with the harness's own
    exit code.
    """
    if reward_file is not None and reward_command is not None:
        raise ConfigError("expected one of --reward-file and --reward-command", code=Code.USAGE, where="--reward-file")
    from gristmill.service.packages import packages_of

    with packages_of("gateway"):
        from gristmill.service.child import check_program
        from gristmill.service.harnesses import HARNESSES, harness_of
        from gristmill.service.run import Asked, run_harness

    from gristmill.cli.choice import Choice
    from gristmill.records import Attribution

    loaded = Choice(policy).load() if policy is not None else None
    own_policy = loaded if policy is not None and ":" in policy else None
    kind = HARNESSES[harness] if harness is not None else harness_of(harness_command)
    check_program(harness_command, os.environ)
    opening = {"rollout_id": rollout_id, "group_id": group, "overrides": _overridden(overrides)}
    with _begun(settings, opening, gateway, needs_ledger=own_policy is not None) as (begun, model):
        asked = Asked(
            command=harness_command,
            harness=kind,
            model=model,
            reward_file=reward_file,
            reward_command=reward_command,
            result_file=result_file,
            policy=None if own_policy is not None else policy,
            own_policy=own_policy,
            output_to_stderr=as_json,
            on_failure=None if on_failure is None else Attribution(on_failure),
        )
        report = run_harness(asked, begun)
        _tell(report, as_json=as_json)
    return report.exit_code


@contextlib.contextmanager
def _begun(
    settings: Callable[..., GatewayConfig], opening: Mapping[str, Any], gateway: str | None, *, needs_ledger: bool
) -> Generator[tuple[Begun, str | None]]:
    """Open the rollout, and say which model name the harness is told, None where the settings do not say."""
    from gristmill.cli.plural import counted
    from gristmill.cli.screen import remark
    from gristmill.gateway.config import ANY_MODEL
    from gristmill.service.place import begin

    models: list[str] = []

    def read(**more: Any) -> GatewayConfig:
        config = settings(log_level="warning", **more)
        models[:] = [name for name in config.models if name != ANY_MODEL]
        return config

    def waiting(others: int) -> None:
        remark("note", f"waiting for {counted(others, 'rollout')} of others on this gateway; Ctrl-C ends it")

    with begin(read, opening, gateway=gateway, needs_ledger=needs_ledger, waiting=waiting) as begun:
        if not begun.place.own:
            remark("note", f"joined the gateway at {begun.place.client.base_url}; {_used()}")
        yield begun, models[0] if models else None


def _overridden(texts: tuple[str, ...]) -> dict[str, Any] | None:
    """Read the rollout's own sampling settings."""
    from gristmill.gateway.config import check_overrides

    overrides = read_overrides(texts)
    check_overrides(overrides, "--override")
    return overrides or None


def _used() -> str:
    """Say which settings on the command line a gateway that was joined has no use for."""
    given = click.get_current_context().params
    flags = {"upstreams": "--upstream", "models": "--model", "continue": "--continue", "tokenizer": "--tokenizer"}
    idle = [flag for name, flag in flags.items() if given.get(name)]
    if not idle:
        return "its engines and models are used"
    return f"its own engines and models are used, and {' and '.join(idle)} not"


def _tell(report: Report, *, as_json: bool) -> None:
    if as_json:
        import msgspec

        from gristmill.cli.document import json_text

        sys.stdout.write(json_text(msgspec.to_builtins(report)) + "\n")
        return
    from gristmill.cli.funnel import funnel_text
    from gristmill.cli.plural import counted
    from gristmill.cli.screen import remark

    outcome, arrow = report.outcome, "→"
    verdict = f"selected, {counted(outcome.rows, 'row')}" if outcome.code is None else f"rejected: {outcome.code}"
    remark("rollout", f"{report.rollout_id}  attempt {report.attempt}  {report.policy}  {verdict}")
    if outcome.message is not None:
        remark("note", f"{outcome.message} (at {outcome.where})")
    for remedy in _remedies(outcome):
        remark("hint", remedy)
    if not outcome.funnel.usable_calls:
        remark("warning", _nothing_usable(report))
    remark("funnel", funnel_text(outcome.funnel, arrow, trained=True))
    if report.history_missing is not None:
        remark("note", f"no returned history: {report.history_missing}; counted by {report.policy}")
    if report.reward_error is not None:
        remark("warning", f"no reward: {report.reward_error}")
    elif report.reward is not None:
        remark("reward", f"{report.reward:g}")
    if report.exit_code:
        remark("note", f"the harness ended with exit code {report.exit_code}")
    if report.failure is not None:
        remark("failure", f"{report.failure.attribution}: {report.failure.reason}")
    if report.ledger is not None:
        remark("next", shlex.join(_next(report, report.ledger)))


def _remedies(outcome: Outcome) -> tuple[str, ...]:
    from gristmill.cli.remedies import refusal_remedies

    return () if outcome.code is None else refusal_remedies(Code(outcome.code), outcome.evidence)


def _nothing_usable(report: Report) -> str:
    from gristmill.cli.plural import counted

    captured = report.outcome.funnel.captured_calls
    if not captured:
        return "no call was captured: did the harness use the address and key it was given?"
    reasons = (
        f"{each.calls} × {each.reason}" + (f" ({each.detail})" if each.detail else "") for each in report.unusable
    )
    return f"{counted(captured, 'call')}, none usable: {', '.join(reasons)}"


def _next(report: Report, ledger: str) -> list[str]:
    chosen = ["--policy", report.policy]
    if report.outcome.code is None:
        return ["gristmill", "rows", ledger, "--rollout", report.rollout_id, *chosen, "--out", "rows"]
    return ["gristmill", "explain", ledger, "--rollout", report.rollout_id, *chosen]
