"""Selection policies by name: the built-in ones, and anybody's by `package.module:function`.

A policy is a callable `(records, result) -> (selected, terminal_response_id)`. Invariant: a name that cannot be
resolved is refused with a code of its own and the cause kept; nothing here needs more than the core.

Not here: what is checked after a policy answered (pipeline).
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, cast

from gristmill.canonical import JsonValue
from gristmill.errors import Code, ConfigError, PolicyError
from gristmill.selection.all_captured import AllCaptured
from gristmill.selection.final_context import FinalContext
from gristmill.selection.returned_history import ReturnedHistory

__all__ = [
    "DEFAULT_POLICY",
    "SELECTION_POLICIES",
    "SelectionPolicy",
    "policy_name",
    "resolve_selection_policy",
    "select_all_captured",
    "select_captured_calls",
]

DEFAULT_POLICY: Final = "returned_history"


class SelectionPolicy(Protocol):
    """Chooses which captured calls of one attempt are trained.

    It returns unique, unchanged records out of `records`, in the order that gives rows their priority, and the
    response id of the scored call (None if it cannot name one). It raises `SelectionError` to refuse the rollout.
    """

    def __call__(self, records: Sequence[Any], result: JsonValue, /) -> tuple[Sequence[Any], str | None]: ...


_BUILT_IN: Final[Mapping[str, Callable[..., SelectionPolicy]]] = {
    "returned_history": ReturnedHistory,
    "all_captured": AllCaptured,
    "final_context": FinalContext,
}

SELECTION_POLICIES: Final[Mapping[str, SelectionPolicy]] = {name: make() for name, make in _BUILT_IN.items()}
"""The built-in policies with their default options."""

select_captured_calls: Final = ReturnedHistory()
"""`returned_history` with its default options."""

select_all_captured: Final = AllCaptured()
"""`all_captured` with its default options."""


def resolve_selection_policy(name: str = DEFAULT_POLICY, options: Mapping[str, str] | None = None) -> SelectionPolicy:
    """Find a policy.

    Args:
        name: a built-in name or `package.module:function` (a class is instantiated).
        options: keyword arguments of the policy.

    Raises:
        PolicyError: `policy_unknown`, `policy_load_failed` (cause kept), `policy_not_callable`.
        ConfigError: `policy_option_invalid`.
    """
    given = dict(options or {})
    make = _BUILT_IN.get(name)
    if make is not None:
        return _with_options(name, make, given)
    if ":" not in name:
        near = difflib.get_close_matches(name, _BUILT_IN, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise PolicyError(
            f"expected one of {', '.join(_BUILT_IN)} or package.module:function, got {name!r}",
            code=Code.POLICY_UNKNOWN,
            where=name,
            hint=f"{meant}a policy of your own is named package.module:function",
        )
    found = _load(name)
    if inspect.isclass(found):
        found = _with_options(name, found, given)
        given = {}
    if not callable(found):
        raise PolicyError(
            f"expected a callable (records, result), got {type(found).__name__}",
            code=Code.POLICY_NOT_CALLABLE,
            where=name,
            hint="name a function (records, result) -> (selected records, terminal response id), or a class of such",
        )
    policy = cast(SelectionPolicy, found)
    _check_options(name, policy, given)
    return functools.partial(policy, **given) if given else policy


def _with_options(name: str, make: Callable[..., Any], options: Mapping[str, str]) -> Any:
    _check_options(name, make, options)
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(
            f"expected options that {name} has, got {', '.join(options) or 'none'}: {error}",
            code=Code.POLICY_OPTION_INVALID,
            where=name,
            hint=f"it takes {', '.join(_option_names(make) or ()) or 'no options'}",
        ) from error


def _option_names(make: Callable[..., Any]) -> list[str] | None:
    """Return the options that a policy takes by name; None where it takes any, or does not tell."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    named = [one for one in parameters if one.kind in {one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD}]
    return [one.name for one in named]


def _check_options(name: str, make: Callable[..., Any], options: Mapping[str, str]) -> None:
    known = _option_names(make)
    if known is None:
        return
    for option in options:
        if option not in known:
            # A function takes records and result by position.
            told = known if inspect.isclass(make) else known[2:]
            near = difflib.get_close_matches(option, told, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"expected options that {name} has, got {option}",
                code=Code.POLICY_OPTION_INVALID,
                where=name,
                hint=f"{meant}it takes {', '.join(told) or 'no options'}",
            )


def _load(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    found: Any = None
    try:
        found = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except MemoryError:
        raise
    except (Exception, SystemExit, GeneratorExit) as error:
        hint = "the module must be importable from where the command runs"
        if found is not None:
            near = difflib.get_close_matches(attribute.rpartition(".")[2], dir(found), n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            hint = f"{module_name} was imported, it has no {attribute or 'nameless attribute'}{meant}"
        elif not isinstance(error, ModuleNotFoundError) or error.name != module_name.partition(".")[0]:
            hint = (
                f"{module_name} failed while it was imported{_raised_at(error)}; GRISTMILL_DEBUG=1 shows the traceback"
            )
        raise PolicyError(
            f"expected to load {attribute or 'an attribute'!r} from {module_name or 'a module'!r}, "
            f"got {type(error).__name__}: {error}",
            code=Code.POLICY_LOAD_FAILED,
            where=name,
            hint=hint,
        ) from error
    return found


def _raised_at(error: BaseException) -> str:
    """Say where an exception came from: ` (FILE:LINE)`; empty where that is not in a file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if frame.filename not in {__file__, importlib.__file__}]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def policy_name(policy: SelectionPolicy) -> str:
    """Name a policy for people: its own name, or module and function."""
    named = getattr(policy, "name", None)
    if isinstance(named, str):
        return named
    target: Any = policy.func if isinstance(policy, functools.partial) else policy
    return f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', type(target).__qualname__)}"
