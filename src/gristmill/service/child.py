"""Runs a harness: its environment, its signals, how it ended.

Invariant: the child gets standard input, output and error as they are, and none of our secrets: no variable of ours but
the rollout's own, no variable that holds the admin key or an engine's. Signals that this process gets go on to the
child; this process ends after it.

Not here: what a harness is told (harnesses).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from gristmill.errors import Code, ConfigError
from gristmill.gateway.settings import ENVIRONMENT_PREFIX
from gristmill.ledger import AttemptKey
from gristmill.service.harnesses import Setup

__all__ = ["Ended", "check_program", "child_environment", "clean_environment", "run_child"]

_FORWARDED: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)
_OF_TERMINAL: Final = frozenset({signal.SIGINT, signal.SIGQUIT})
_PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_SHORTEST_SECRET: Final = 8


class Ended(NamedTuple):
    """How a child ended: its exit code as a shell gives it (128 + N for signal N), and the signal."""

    exit_code: int
    signal: int | None = None


def check_program(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse a command that cannot be started, before anything is opened for it.

    Raises:
        ConfigError: `option_invalid`.
    """
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise ConfigError(
            f"expected a program, got {command[0]!r}, which is not there",
            code=Code.OPTION_INVALID,
            where="COMMAND",
            hint="everything behind -- is the harness's command line",
        )


def clean_environment(environment: Mapping[str, str], secrets: Collection[str]) -> dict[str, str]:
    """Copy an environment without variables of ours and without those that hold a secret."""
    hidden = [secret for secret in secrets if len(secret) >= _SHORTEST_SECRET]
    short = {secret for secret in secrets if 0 < len(secret) < _SHORTEST_SECRET}
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(ENVIRONMENT_PREFIX)
        and value not in short
        and not any(secret in value for secret in hidden)
    }


def child_environment(
    environment: Mapping[str, str], secrets: Collection[str], setup: Setup, key: AttemptKey, base_url: str
) -> dict[str, str]:
    """Make the environment of a harness.

    Args:
        environment: of this process.
        secrets: values that must not be in it.
        setup: what the harness needs.
        key: which attempt it is.
        base_url: of the gateway, which no proxy of the environment stands in front of.
    """
    child = clean_environment(environment, secrets)
    for name in setup.removed:
        child.pop(name, None)
    child.update(setup.variables)
    child["GRISTMILL_ROLLOUT_ID"] = key.rollout_id
    child["GRISTMILL_ATTEMPT"] = str(key.attempt)
    if any(child.get(name) or child.get(name.lower()) for name in _PROXIES):
        host = urlsplit(base_url).hostname or ""
        for name in ("NO_PROXY", "no_proxy"):
            child[name] = ",".join(part for part in (child.get(name), host) if part)
    return child


def run_child(command: Sequence[str], environment: Mapping[str, str], *, output_to_stderr: bool = False) -> Ended:
    """Run a command to its end.

    Args:
        command: program and arguments.
        environment: all of its variables.
        output_to_stderr: what it writes on standard output goes to standard error.

    Raises:
        ConfigError: `option_invalid`: it cannot be started.
    """
    with _forwarding() as forward:
        try:
            child = subprocess.Popen(command, env=dict(environment), stdout=sys.stderr if output_to_stderr else None)
        except OSError as error:
            raise ConfigError(
                f"expected a program that can be started, got {error.strerror} for {command[0]!r}",
                code=Code.OPTION_INVALID,
                where="COMMAND",
            ) from error
        forward.to(child)
        code = child.wait()
    return Ended(128 - code, -code) if code < 0 else Ended(code)


class _Forward:
    """Sends on to a child what this process is sent, from before the child is there."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    def to(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        while self._early:
            child.send_signal(self._early.pop(0))

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number in _OF_TERMINAL and _in_foreground():
            # The terminal sends it to the child as well.
            return
        if self._child is None:
            self._early.append(number)
        else:
            self._child.send_signal(number)


@contextmanager
def _forwarding() -> Generator[_Forward]:
    forward = _Forward()
    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield forward
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
