"""The command line: one file per command, and the few nouns that commands share. See README.md in this folder."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `gristmill` and return its exit code.

    0 done · 1 the data failed a check · 2 usage · 3 environment · 130 interrupted.

    Args:
        arguments: without the program's name; `sys.argv` by default.
    """
    from gristmill.cli.app import run

    return run(arguments)
