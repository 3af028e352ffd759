"""`--to` and `--mode`: the format of what is written, and how calls become rows.

Not here: the formats (gristmill.export), the rows (gristmill.reconstruction).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from gristmill.cli.nearest import did_you_mean

__all__ = ["FormatName", "takes_format", "takes_mode"]


class FormatName(click.ParamType[str]):
    """The name of an export format."""

    name = "format"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Take a format, or say which one was probably meant."""
        from gristmill.export.formats import FORMATS

        if value not in FORMATS:
            self.fail(f"no format {value!r}. {did_you_mean(value, FORMATS)}", param, ctx)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete a format."""
        from gristmill.export.formats import FORMATS

        return [CompletionItem(name, help=made.title) for name, made in FORMATS.items() if name.startswith(incomplete)]


def takes_format(meaning: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--to`, whose help is `meaning`; the command gets it as `format_name`."""
    return click.option(
        "--to",
        "format_name",
        type=FormatName(),
        default="parquet",
        show_default=True,
        metavar="FORMAT",
        help=meaning,
    )


def takes_mode(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--mode`; the command gets it as `mode`."""
    option = click.option(
        "--mode",
        type=click.Choice(["merged", "per_call", "tree"]),
        default="merged",
        show_default=True,
        help="One row per path of the token tree, one per call, or a tree (written as its flattened rows).",
    )
    return option(command)
