"""A rollout's reward, from a file or from what a command prints.

Invariant: a reward is one finite number that was written down as such; everything else is an error that is kept beside
the result, and the reward is missing, which is not 0.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Final, NamedTuple

from gristmill.service.stamp import Stamp, is_stale

__all__ = ["Reward", "reward_from_command", "reward_from_file", "reward_in"]

_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_MOST_bytes: Final = 64 * 1024


class Reward(NamedTuple):
    """A reward, or why there is none; neither where none was asked for."""

    value: float | None = None
    error: str | None = None


def reward_in(text: str) -> Reward:
    """Read a number that stands alone in a text."""
    written = text.strip()
    if _NUMBER.fullmatch(written) is None:
        return Reward(error=f"expected one number, got {written[:80]!r}")
    value = float(written)
    if not isfinite(value):
        return Reward(error=f"expected a finite number, got {written[:80]!r}")
    return Reward(value)


def reward_from_file(path: Path, before: Stamp | None = None) -> Reward:
    """Read a file that holds a number and nothing else, unless it is still the one that was there `before`."""
    if is_stale(path, before):
        return Reward(error=f"expected a file that this run writes, {path} was there before and was not written")
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_bytes + 1)
    except OSError as error:
        return Reward(error=f"expected a file with a number, got {error.strerror} for {path}")
    if len(data) > _MOST_bytes:
        return Reward(error=f"expected a file with a number, {path} is larger than {_MOST_bytes} bytes")
    try:
        return reward_in(data.decode())
    except UnicodeDecodeError:
        return Reward(error=f"expected a file with a number, {path} is no text")


def reward_from_command(command: str, environment: Mapping[str, str]) -> Reward:
    """Run a shell command and read the last line that it prints on standard output.

    Its standard error goes where ours goes.
    """
    done = subprocess.run(
        command, shell=True, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False
    )
    if done.returncode != 0:
        return Reward(error=f"expected the reward command to succeed, it ended with code {done.returncode}")
    lines = done.stdout.decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), None)
    if last is None:
        return Reward(error="expected a number on the last line of the reward command's output, got no output")
    return reward_in(last)
