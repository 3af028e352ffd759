"""What a harness has to be told so that its model calls go through a gateway, and where its own record is afterwards.

Invariant: a harness gets the rollout's key and address and nothing else of ours; files made for it lie in a folder that
is made for one run. What is the user's choice (permissions, telemetry, prompts) stays the user's.

Not here: any particular harness (one module each), starting it (child).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from gristmill.service.histories.history import ReturnedHistory

__all__ = ["Harness", "Ran", "Reach", "Setup", "option_value", "write_private"]


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """How a harness reaches the gateway.

    Attributes:
        openai_base_url: ends with `/v1`.
        anthropic_base_url: without `/v1`.
        key: the rollout's.
        model: a name that the gateway serves, None where it was not said and the engine does not tell.
        max_model_len: tokens of prompt and reply together, where the engine tells.
    """

    openai_base_url: str
    anthropic_base_url: str
    key: str
    model: str | None = None
    max_model_len: int | None = None

    @property
    def named_model(self) -> str:
        """A model name for settings that have to have one."""
        return "default" if self.model is None else self.model


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Variables to set, and to take away because they would send calls elsewhere."""

    variables: Mapping[str, str] = {}
    removed: tuple[str, ...] = ()


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has ended.

    Attributes:
        command: as it was started.
        environment: of the harness.
        folder: made for this run.
        working_directory: where it ran.
        sessions: session ids that its calls carried.
        since_s: when it started, unix seconds.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    working_directory: Path
    sessions: Collection[str] = ()
    since_s: float = 0.0


class Harness(Protocol):
    """One harness."""

    @property
    def name(self) -> str: ...

    @property
    def programs(self) -> tuple[str, ...]:
        """Names of its programs."""
        ...

    def prepare(self, reach: Reach, folder: Path) -> Setup:
        """Say what the harness needs; files go into the folder, which is empty and private."""
        ...

    def history(self, ran: Ran) -> ReturnedHistory:
        """Read what the harness wrote down.

        Raises:
            Unreadable: it is not what this harness writes.
        """
        ...


def write_private(path: Path, text: str) -> None:
    """Write a file of settings, readable for its owner alone."""
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")


def option_value(command: Sequence[str], *names: str) -> str | None:
    """Return the value of an option on a command line: `-o X`, `--output X` or `--output=X`; the last one counts."""
    found: str | None = None
    for position, word in enumerate(command):
        if word in names and position + 1 < len(command):
            found = command[position + 1]
        for name in names:
            if name.startswith("--") and word.startswith(f"{name}="):
                found = word.partition("=")[2]
    return found
