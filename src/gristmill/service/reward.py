"""A rollout's reward, from a file or from what a command prints.

Invariant: a reward is one finite number that was written down as such; everything else is an error that is kept beside
the result, and the reward is missing, which is not 0.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Final, NamedTuple

from gristmill.service.handed import read_handed
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
    value = float(written) + 0.0
    if not isfinite(value):
        return Reward(error=f"expected a finite number, got {written[:80]!r}")
    return Reward(value)


def reward_from_file(path: Path, before: Stamp | None = None) -> Reward:
    """Read a file that holds a number and nothing else, unless it is still the one that was there `before`."""
    if is_stale(path, before):
        return Reward(error=f"expected a file that this run writes, {path} was there before and was not written")
    try:
        written = read_handed(path, _MOST_bytes).decode().strip()
    except OSError as error:
        return Reward(error=f"expected a file with a number, got {path}: {error.strerror}")
    except UnicodeDecodeError:
        return Reward(error=f"expected a file with a number, {path} is no text")
    # The harness chooses what the file is, perhaps a link to a secret: its text is not repeated.
    made = reward_in(written)
    return made if made.error is None else Reward(error=f"expected one finite number in {path}, got other text")


def reward_from_command(command: str, environment: Mapping[str, str]) -> Reward:
    """Run a shell command and read the last line that it prints on standard output.

    Its standard error goes where ours goes.
    """
    with tempfile.TemporaryFile() as output:
        # A file, so that a process left behind that holds the pipe is not waited for.
        done = subprocess.run(
            command, shell=True, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, check=False
        )
        if done.returncode != 0:
            return Reward(error=f"expected the reward command to succeed, it ended with code {done.returncode}")
        output.seek(max(0, output.seek(0, os.SEEK_END) - _MOST_bytes))
        lines = output.read().decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), None)
    if last is None:
        return Reward(error="expected a number on the last line of the reward command's output, got no output")
    return reward_in(last)
