"""`gristmill completion`: the script that makes a shell complete commands, options, codes and formats.

The script asks this program what may come next, by the variable `_GRISTMILL_COMPLETE`; `answer` replies.
"""

from __future__ import annotations

import os
import sys
from typing import Final

import click

__all__ = ["answer", "command"]

_NAME: Final = "gristmill"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.option("--json", "as_json", is_flag=True, help="Errors as JSON.")
def command(*, shell: str, as_json: bool) -> int:
    """Print the completion script of a shell.

    bash: add `eval "$(gristmill completion bash)"` to ~/.bashrc. zsh: the same in ~/.zshrc. fish: write it to
    ~/.config/fish/completions/gristmill.fish.
    """
    from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

    from gristmill.cli.app import COMPLETION_VARIABLE, application

    kinds: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
    # Not the shell's own method, which runs a shell to look at its version.
    sys.stdout.write(ShellComplete.source(kinds[shell](application, {}, _NAME, COMPLETION_VARIABLE)) + "\n")
    return 0


def answer() -> int:
    """Reply to a shell that asks what may come next."""
    from click.shell_completion import shell_complete

    from gristmill.cli.app import COMPLETION_VARIABLE, application

    return shell_complete(application, {}, _NAME, COMPLETION_VARIABLE, os.environ[COMPLETION_VARIABLE])
