"""The selection policy that a command line names, its options, and the model that is trained.

Invariant: a policy of one's own is imported only when it was named on the command line; what it prints goes to
standard error, so that standard output stays data.

Not here: finding policies (selection.policies) and running them (pipeline).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from gristmill.errors import ConfigError

if TYPE_CHECKING:
    from gristmill.cli.attempts import Attempt
    from gristmill.credit import Advantages
    from gristmill.pipeline import RebuiltRollout
    from gristmill.reconstruction import RowMode
    from gristmill.selection import Rejected, Selection, SelectionPolicy

__all__ = ["DEFAULT_POLICY_NAME", "Choice", "policy_settings", "takes_policy"]

DEFAULT_POLICY_NAME: Final = "returned_history"


class Choice(msgspec.Struct):
    """How calls are chosen; None is what the command line does not say.

    Attributes:
        named: built-in name or `package.module:function`.
        settings: options of the policy.
        train_model: calls of other models become context.
        advantages: that rows carry; None leaves them without.
    """

    named: str | None = None
    settings: Mapping[str, str] | None = None
    train_model: str | None = None
    loaded: SelectionPolicy | None = None
    advantages: Advantages | None = None

    @property
    def policy(self) -> str:
        """The policy's name."""
        return DEFAULT_POLICY_NAME if self.named is None else self.named

    @property
    def options(self) -> Mapping[str, str]:
        """The policy's options, as they were given."""
        return self.settings or {}

    def arguments(self) -> list[str]:
        """Write the choice as it is given on a command line."""
        written = [] if self.named is None else ["--policy", self.named]
        for name, value in self.options.items():
            written += ["--set", f"{name}={value}"]
        return written if self.train_model is None else [*written, "--train-model", self.train_model]

    def unloaded(self) -> Choice:
        """Return the same choice as it was before `load`, which can be sent to another process."""
        return msgspec.structs.replace(self, loaded=None)

    def load(self) -> SelectionPolicy:
        """Find the policy; a module of one's own may lie in the current directory.

        Raises:
            PolicyError, ConfigError: as `resolve_selection_policy`.
        """
        from gristmill.selection import resolve_selection_policy

        if self.loaded is None:
            if ":" in self.policy and os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            with contextlib.redirect_stdout(sys.stderr):
                self.loaded = resolve_selection_policy(self.policy, self.options)
        return self.loaded

    def select(self, attempt: Attempt) -> Selection | Rejected:
        """Choose the calls of an attempt."""
        from gristmill.pipeline import select_rollout

        policy = self.load()
        with contextlib.redirect_stdout(sys.stderr):
            return select_rollout(attempt.capture, attempt.result, policy, train_model=self.train_model)

    def rebuild(self, attempt: Attempt, mode: RowMode) -> RebuiltRollout | Rejected:
        """Choose the calls of an attempt and rebuild their rows."""
        from gristmill.pipeline import run_rollout

        policy = self.load()
        with contextlib.redirect_stdout(sys.stderr):
            return run_rollout(
                attempt.capture,
                attempt.result,
                policy,
                mode=mode,
                train_model=self.train_model,
                advantage=self.advantages,
            )


def policy_settings(settings: tuple[str, ...]) -> dict[str, str]:
    """Read `KEY=VALUE` settings.

    Raises:
        ConfigError: one is of another form, or given twice.
    """
    options: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"expected --set KEY=VALUE, got {setting!r}",
                where="--set",
                hint="for example --set reasoning=optional",
            )
        if key in options:
            raise ConfigError(f"expected each option once, got --set {key}=… twice", where="--set")
        options[key] = value
    return options


def takes_policy(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose a policy; the command gets them as `choice`."""

    @functools.wraps(command)
    def run(*, policy: str | None, settings: tuple[str, ...], train_model: str | None, **rest: Any) -> Any:
        return command(choice=Choice(policy, policy_settings(settings) or None, train_model), **rest)

    wrapped: Any = run
    for option in (
        click.option("--train-model", metavar="NAME", help="Train only calls of this model; others are context."),
        click.option(
            "--set", "settings", multiple=True, metavar="KEY=VALUE", help="An option of the policy; may be repeated."
        ),
        click.option(
            "--policy",
            metavar="NAME",
            help="returned_history (default), all_captured, final_context, or package.module:function.",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped
