"""Scripts from files, from the package, and from Python values.

Invariant: what is refused is refused with its path in the script, `$.rules[2].turns[0]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec

from gristmill.errors import Code, DecodeError
from gristmill.scripted.placeholders import unknown_placeholders
from gristmill.scripted.script import Match, Reply, Rule, Script, Settings, Span, TextTest, When

__all__ = ["SHIPPED", "read_script", "script_from"]

SHIPPED: Final = ("agent", "demo")
"""Scripts in the package, by the name that stands for their file."""

_Kind = TypeVar("_Kind", bound=msgspec.Struct)

_HINT: Final = "docs/reference/engine-script.md describes the format"


def read_script(source: str | Path) -> Script:
    """Read a script.

    Args:
        source: a `.json` or `.jsonl` file, or the name of a script that ships with the package.

    Raises:
        DecodeError: `file_unreadable`, or `file_malformed` with the path of what is refused.
    """
    if isinstance(source, str) and source in SHIPPED and not Path(source).exists():
        return _read(
            files(__name__.rpartition(".")[0]).joinpath("data", f"{source}.json").read_bytes(), source, lines=False
        )
    path = Path(source)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DecodeError(
            f"cannot read {path}: {error.strerror or error}",
            code=Code.FILE_UNREADABLE,
            where=str(path),
            hint=f"name a file, or one of the scripts that ship: {', '.join(SHIPPED)}",
        ) from error
    return _read(data, str(path), lines=path.suffix == ".jsonl")


def _read(data: bytes, name: str, *, lines: bool) -> Script:
    try:
        value = _lines(data) if lines else msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise DecodeError(f"expected JSON in {name}: {error}", where=name, hint=_HINT) from error
    try:
        return script_from(value)
    except DecodeError as error:
        raise DecodeError(f"{name}: {error.message}", where=error.where, hint=error.hint) from error


def _lines(data: bytes) -> Any:
    """Make one script of lines: the first holds the settings, each further one a rule."""
    values = [msgspec.json.decode(line) for line in data.splitlines() if line.strip()]
    if not values or not isinstance(values[0], dict):
        return values
    return {**cast("dict[str, Any]", values[0]), "rules": values[1:]}


def script_from(value: Any) -> Script:
    """Make a script of a decoded JSON value.

    Raises:
        DecodeError: `file_malformed` with the path of what is refused.
    """
    whole = _object(value, "$")
    rules = whole.pop("rules", None)
    if not isinstance(rules, list) or not rules:
        raise _refused("expected a list of rules with at least one", "$.rules")
    settings = _converted(whole, Settings, "$")
    _check_texts(settings.behaviour, "$.behaviour")
    read = [_rule(rule, f"$.rules[{number}]", number, settings) for number, rule in enumerate(cast("list[Any]", rules))]
    return Script(settings=settings, rules=tuple(read), counts_tries=any(map(_counts_tries, read)))


def _counts_tries(rule: Rule) -> bool:
    when: When | None = rule.when
    while when is not None:
        if when.attempt is not None:
            return True
        when = when.without
    return any(len(replies) > 1 for replies in rule.turns) or "{{try}}" in repr(rule.turns)


def _rule(value: Any, where: str, number: int, settings: Settings) -> Rule:
    given = _object(value, where)
    when = _converted(given.pop("when", {}), When, f"{where}.when")
    _check_when(when, f"{where}.when", settings)
    name = given.pop("name", f"rule {number}")
    if not isinstance(name, str):
        raise _refused("expected a string", f"{where}.name")
    if ("reply" in given) == ("turns" in given):
        raise _refused("expected either `reply` or `turns`", where)
    if len(given) > 1:
        unknown = next(key for key in given if key not in ("reply", "turns"))
        raise _refused(f"expected no key {unknown!r}", where)
    if "reply" in given:
        return Rule(name=name, when=when, turns=(_replies(given["reply"], f"{where}.reply", settings),), by_turn=False)
    turns = given["turns"]
    if not isinstance(turns, list) or not turns:
        raise _refused("expected a list of replies with at least one", f"{where}.turns")
    lists = [_replies(turn, f"{where}.turns[{at}]", settings) for at, turn in enumerate(cast("list[Any]", turns))]
    return Rule(name=name, when=when, turns=tuple(lists), by_turn=True)


def _replies(value: Any, where: str, settings: Settings) -> tuple[Reply, ...]:
    if not isinstance(value, list):
        return (_reply(value, where, settings),)
    if not value:
        raise _refused("expected a reply, or a list with at least one", where)
    return tuple(_reply(one, f"{where}[{at}]", settings) for at, one in enumerate(cast("list[Any]", value)))


def _reply(value: Any, where: str, settings: Settings) -> Reply:
    reply = _converted(value, Reply, where)
    said = [name for name in ("content", "json") if getattr(reply, name) is not None]
    if len(said) > 1:
        raise _refused("expected only one of `content` and `json`", where)
    if reply.raw is not None and (said or reply.tool_calls or reply.reasoning is not None):
        raise _refused("expected `raw` alone, it is the whole of what is sampled", where)
    if reply.reasoning is not None and not settings.thinking:
        raise _refused('expected no reasoning, the script\'s model does not think (`"thinking": true`)', where)
    for at, call in enumerate(reply.tool_calls):
        _names(call.name, settings, f"{where}.tool_calls[{at}].name")
    _check_texts(reply, where)
    return reply


def _names(given: str | list[str], settings: Settings, where: str) -> None:
    for name in [given] if isinstance(given, str) else given:
        if name.startswith("@") and name[1:] not in settings.tool_names:
            raise _refused(f"expected a list in `tool_names` called {name[1:]!r}", where)


def _check_texts(value: msgspec.Struct, where: str) -> None:
    for text in _strings(msgspec.to_builtins(value)):
        for unknown in unknown_placeholders(text):
            raise _refused(f"expected a known placeholder, got {unknown}", where)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in cast("list[Any]", value):
            yield from _strings(part)
    elif isinstance(value, dict):
        for part in cast("dict[str, Any]", value).values():
            yield from _strings(part)


def _check_when(when: When, where: str, settings: Settings) -> None:
    tests: dict[str, TextTest | None] = {
        name: getattr(when, name) for name in ("user", "tool", "last", "system", "first_user", "prompt", "any", "model")
    }
    tests |= {f"header.{name}": test for name, test in (when.header or {}).items()}
    for name, test in tests.items():
        if isinstance(test, Match):
            try:
                re.compile(test.matches)
            except re.error as error:
                raise _refused(f"expected a regular expression: {error}", f"{where}.{name}.matches") from error
    for name, label in (("turn", "turn"), ("step", "step"), ("attempt", "try")):
        span = getattr(when, name)
        if span is not None and not _good_span(span):
            raise _refused("expected a count, or the first and the last of several", f"{where}.{label}")
    if when.offers is not None:
        _names(when.offers, settings, f"{where}.offers")
    if when.without is not None:
        _check_when(when.without, f"{where}.not", settings)


def _good_span(span: Span) -> bool:
    return 0 <= span[0] <= span[1] if isinstance(span, tuple) else span >= 0


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _refused("expected an object", where)
    return dict(cast("Mapping[str, Any]", value))


def _converted(value: Any, kind: type[_Kind], where: str) -> _Kind:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        raise _refused(message[:1].lower() + message[1:], where + place.rstrip("`")) from error


def _refused(message: str, where: str) -> DecodeError:
    return DecodeError(f"{message} at {where}", where=where, hint=_HINT)
