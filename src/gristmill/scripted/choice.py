"""Finds the reply of a request: the first rule that matches, and of its replies the one for this turn and try.

Invariant: the answer depends on the request's content and on how often the same request was asked, on nothing else; so
rollouts that run at once do not disturb each other.

Not here: what the reply's texts become (composing).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from gristmill.scripted.asked import Asked, EngineRefused
from gristmill.scripted.script import Match, Reply, Rule, Script, Settings, Span, TextTest, When

__all__ = ["Chosen", "choose", "offered_name"]


class Chosen(NamedTuple):
    """The reply of a request.

    Attributes:
        rule: the rule it came from.
        reply: the reply.
        attempt: how often the same request was asked before.
        groups: groups of the regular expressions that matched, in the order of the conditions.
    """

    rule: Rule
    reply: Reply
    attempt: int
    groups: tuple[str, ...]


def choose(script: Script, asked: Asked, attempt: int) -> Chosen:
    """Find the reply.

    Raises:
        EngineRefused: 400, no rule matches.
    """
    for rule in script.rules:
        groups: list[str] = []
        if rule.by_turn and asked.turn >= len(rule.turns):
            continue
        if _holds(rule.when, asked, attempt, script.settings, groups):
            replies = rule.turns[asked.turn if rule.by_turn else 0]
            return Chosen(rule, replies[min(attempt, len(replies) - 1)], attempt, tuple(groups))
    raise EngineRefused(400, f"script: no rule matches a {asked.route} request of turn {asked.turn}")


def offered_name(names: str | Sequence[str], asked: Asked, settings: Settings) -> str | None:
    """Return the first of several tool names that the request offers, None where it offers none.

    `*` is any tool, and a name that begins with `@` stands for the names of that list in the script. A tool that a
    gateway gave a namespace (`functions__shell`) goes by its last part too.
    """
    offers = [tool.name for tool in asked.tools]
    for name in _expanded(names, settings):
        for offer in offers:
            if name in ("*", offer) or offer.endswith(f"__{name}"):
                return offer
    return None


def _expanded(names: str | Sequence[str], settings: Settings) -> list[str]:
    listed = [names] if isinstance(names, str) else names
    return [each for name in listed for each in (settings.tool_names[name[1:]] if name.startswith("@") else [name])]


_TEXTS: dict[str, Callable[[Asked], str]] = {
    "user": lambda asked: asked.user,
    "tool": lambda asked: asked.tool,
    "last": lambda asked: asked.last,
    "system": lambda asked: asked.system,
    "first_user": lambda asked: asked.first_user,
    "prompt": lambda asked: asked.prompt,
    "any": lambda asked: asked.everything,
    "model": lambda asked: asked.model,
}


def _holds(when: When, asked: Asked, attempt: int, settings: Settings, groups: list[str]) -> bool:
    for span, number in ((when.turn, asked.turn), (when.step, asked.step), (when.attempt, attempt)):
        if span is not None and not _within(span, number):
            return False
    for wanted, given in (
        (when.route, asked.route),
        (when.stream, asked.stream),
        (when.tools, bool(asked.tools)),
        (when.structured, asked.format_schema is not None),
        (when.tool_choice, asked.choice),
    ):
        if wanted is not None and wanted != given:
            return False
    if when.offers is not None and offered_name(when.offers, asked, settings) is None:
        return False
    for name, text in _TEXTS.items():
        test: TextTest | None = getattr(when, name)
        if test is not None and not _met(test, text(asked), groups):
            return False
    for name, test in (when.header or {}).items():
        if not _met(test, asked.headers.get(name.lower(), ""), groups):
            return False
    return when.without is None or not _holds(when.without, asked, attempt, settings, [])


def _within(span: Span, number: int) -> bool:
    return span[0] <= number <= span[1] if isinstance(span, tuple) else span == number


@lru_cache(1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _met(test: TextTest, text: str, groups: list[str]) -> bool:
    if isinstance(test, str):
        return test in text
    if isinstance(test, Match):
        found = _compiled(test.matches).search(text)
        if found is not None:
            groups.extend(group or "" for group in found.groups())
        return found is not None
    return any(one in text for one in test)
