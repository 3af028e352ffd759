"""`--to` and `--mode`: the format of what is written, and how calls become rows.

Not here: the formats (gristmill.export), the rows (gristmill.reconstruction).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from gristmill.cli.nearest import OneOf

__all__ = ["takes_format", "takes_mode"]


def _formats() -> dict[str, str | None]:
    from gristmill.export.formats import FORMATS

    return {name: made.title for name, made in FORMATS.items()}


def takes_format(meaning: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--to`, whose help is `meaning`; the command gets it as `format_name`."""
    return click.option(
        "--to",
        "format_name",
        type=OneOf("format", _formats),
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
