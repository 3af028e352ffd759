"""The `gristmill` command: its sub-commands by name, imported when they run, and the one boundary for errors.

Invariant: whatever happens, a caller gets a documented exit code and, with `--json`, one JSON document; a traceback
only if it was asked for (`GRISTMILL_DEBUG=1`).

Not here: what commands do (one module each), and how errors are written (failure).
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Final

import click

from gristmill.cli.failure import (
    Failure,
    exit_code_of,
    failure_of,
    internal_failure,
    interrupted,
    memory_failure,
    print_failure,
    usage_failure,
)
from gristmill.cli.nearest import did_you_mean
from gristmill.errors import GristmillError

__all__ = ["COMMANDS", "COMPLETION_VARIABLE", "application", "run"]

COMMANDS: Final[Mapping[str, str]] = {
    "import": "Put captures into a ledger, all of them or none.",
    "ls": "List what there is, one line a rollout.",
    "show": "Show the calls of a rollout as a tree, or one of them.",
    "select": "Choose the calls that are trained, with a reason for every call.",
    "explain": "Say why a call was selected or not, and what would change it.",
    "diff": "Compare two policies, call by call.",
    "drift": "Count the turns that do not extend what was sampled, by cause.",
    "rows": "Rebuild the training rows of the selected calls.",
    "verify": "Prove captures, rows and a manifest against each other.",
    "groups": "Say how groups of rollouts did: solved, without a signal.",
    "export": "Write training data in a format of your choice.",
    "archive": "Write captures as a partition of a Parquet data set.",
    "build": "Make the rows of a whole archive, one partition for each part.",
    "ledger": "Look after a ledger: info, migrate, freeze, retire, copy.",
    "serve": "Capture model calls: a gateway in front of your engines.",
    "run": "Run a harness against a gateway and keep its rollout.",
    "doctor": "Ask an engine what it returns, and say what capture lacks.",
    "engine": "Serve scripted replies with true token ids.",
    "cases": "Run conformance cases.",
    "demo": "Do the main job on a live agent and on recorded rollouts.",
    "completion": "Print the completion script of a shell.",
}
"""Every command and its one-line help; the module of the same name holds it as `command`."""

_MODULES: Final[Mapping[str, str]] = {"import": "importing"}
"""Modules with another name than their command, which is a word of the language."""

COMPLETION_VARIABLE: Final = "_GRISTMILL_COMPLETE"
"""Set by the script of a shell that asks what may come next."""

_DEBUG: Final = "GRISTMILL_DEBUG"


class _Commands(click.Group):
    """A group that imports a command only when it is run or its own help is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"gristmill.cli.{_MODULES.get(cmd_name, cmd_name)}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS:
            raise click.UsageError(f"no command {name!r}. {did_you_mean(name, COMMANDS)}".rstrip(), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        number = version("gristmill")
    except PackageNotFoundError:
        number = "(not installed)"
    click.echo(f"gristmill {number}")
    ctx.exit()


@click.group(
    name="gristmill",
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done · 1 the data failed a check · 2 usage · 3 environment · 130 interrupted.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
@click.pass_context
def application(ctx: click.Context) -> None:
    """Your agent's model calls in, exact training rows out.

    PATHS are captures: a ledger, a file of capture lines (.jsonl), a recorded engine exchange (.json), a folder with
    capture.jsonl and result.json, or a folder of such files and folders.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets an escape, not a crash.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    try:
        failure = _invoke(given) if os.environ.get(COMPLETION_VARIABLE) is None else _complete()
        return failure if isinstance(failure, int) else _fail(given, failure)
    except BrokenPipeError:
        _close_output()
        return 0


def _invoke(given: list[str]) -> int | Failure:
    try:
        # Not `main`, which has exit codes of its own for interrupts and closed pipes.
        with application.make_context("gristmill", list(given)) as context:
            returned = application.invoke(context)
        sys.stdout.flush()
        return returned if isinstance(returned, int) else 0
    except BrokenPipeError:
        raise
    except click.exceptions.Exit as done:
        return done.exit_code
    except (click.Abort, KeyboardInterrupt):
        return interrupted()
    except click.ClickException as error:
        return usage_failure(error)
    except (GristmillError, OSError) as error:
        if os.environ.get(_DEBUG) == "1" and error.__cause__ is not None:
            traceback.print_exc()
        return failure_of(error)
    except MemoryError:
        return memory_failure()
    except (Exception, SystemExit) as error:  # noqa: BLE001  the named boundary: a bug becomes one line and a code
        if os.environ.get(_DEBUG) == "1":
            traceback.print_exc()
        return internal_failure(error, _DEBUG)


def _complete() -> int:
    from gristmill.cli.completion import answer

    return answer()


def _fail(given: Sequence[str], failure: Failure) -> int:
    end = given.index("--") if "--" in given else len(given)
    try:
        print_failure(failure, as_json="--json" in given[:end])
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:
        # Standard output is what failed, a full disk behind it for example.
        _close_output()
        print_failure(failure, as_json=False)
    return exit_code_of(failure.code)


def _close_output() -> None:
    """Let whatever is left to be flushed go nowhere: the reader has gone, as `| head` does."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        sys.stdout = None
