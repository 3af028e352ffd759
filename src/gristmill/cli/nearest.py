"""Nearest names, for ids and commands that were mistyped, and options whose value is one of many names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping

import click
from click.shell_completion import CompletionItem

__all__ = ["OneOf", "did_you_mean"]

_SHOWN = 8


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say what was probably meant, or what there is; empty where nothing is known."""
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"Did you mean {near[0]!r}?"
    if not names:
        return ""
    rest = len(names) - _SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    return f"There is {', '.join(names[:_SHOWN])}{more}."


class OneOf(click.ParamType[str]):
    """One of many names, which a shell completes.

    Args:
        name: what they are names of.
        titles: gives the names and what each means, once one is asked for.
    """

    def __init__(self, name: str, titles: Callable[[], Mapping[str, str | None]]) -> None:
        self.name = name
        self._titles = titles

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Take a name, or say which one was probably meant."""
        titles = self._titles()
        if value not in titles:
            self.fail(f"no {self.name} {value!r}. {did_you_mean(value, titles)}", param, ctx)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete a name."""
        titles = self._titles()
        return [CompletionItem(name, help=title) for name, title in titles.items() if name.startswith(incomplete)]
