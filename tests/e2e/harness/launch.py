"""How a harness is started, and what is left when it has ended.

Invariant: a harness gets a fresh home, an environment of named variables only, and no input to wait for.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

__all__ = ["MODEL", "Endpoint", "Folder", "Harness", "Launch", "Ran", "lines_of", "run"]

Json = dict[str, Any]
MODEL = "scripted-coder"
TIMEOUT_S = 180


@dataclass(frozen=True)
class Endpoint:
    """Where a harness sends its calls: base address without `/v1`, key, model name."""

    base: str
    key: str
    model: str

    @property
    def v1(self) -> str:
        return f"{self.base}/v1"


@dataclass(frozen=True)
class Folder:
    """A fresh home and a small repository to work in."""

    root: Path

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def work(self) -> Path:
        return self.root / "work"

    def make(self) -> Folder:
        """Make both; the repository has one commit."""
        self.home.mkdir(parents=True)
        self.work.mkdir()
        (self.work / "mill.py").write_text("def grind(grain):\n    return grain / wheel.teeth\n")
        git = ["git", "-c", "user.name=e2e", "-c", "user.email=e2e@localhost", "-c", "init.defaultBranch=main"]
        for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "A mill that does not turn"]):
            subprocess.run([*git, *words], cwd=self.work, check=True, env={**os.environ, "HOME": str(self.home)})
        return self


@dataclass(frozen=True)
class Launch:
    """One run of a harness: its words, the variables it needs beside home and path, options of `gristmill run`."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    run_options: Sequence[str] = ()


@dataclass(frozen=True)
class Ran:
    """A run that has ended."""

    status: int
    out: str
    err: str


class Harness(Protocol):
    """A harness under one configuration."""

    name: str
    shell: str
    """Its tool that runs a command."""
    makes_title: bool
    plain_use: bool
    options: tuple[str, ...]
    """Of the policy, for what its history leaves out."""
    delegates: str | None
    """Its tool that starts a sub-agent."""

    def launch(self, endpoint: Endpoint, folder: Folder, task: str, *, again: bool = False) -> Launch:
        """Return how to give it a task; `again`: in the session before."""
        ...

    def plain(self, folder: Folder, task: str) -> Launch:
        """Return how its user would give it a task, for `gristmill run`; where `plain_use` is true."""
        ...

    def history(self, ran: Ran, folder: Folder) -> Json:
        """Return what it hands back of its last run, as a result."""
        ...


def run(launch: Launch, folder: Folder, path: str) -> Ran:
    """Run a harness to its end."""
    env = {"HOME": str(folder.home), "PATH": path, "LANG": "C.UTF-8", "TERM": "dumb", **launch.env}
    try:
        done = subprocess.run(
            list(launch.argv),
            cwd=folder.work,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        out, err = (
            part.decode(errors="replace") if isinstance(part, bytes) else part or ""
            for part in (late.stdout, late.stderr)
        )
        return Ran(124, out, err)
    return Ran(done.returncode, done.stdout, done.stderr)


def lines_of(text: str) -> Iterator[Json]:
    """Yield the JSON objects among the lines of an output."""
    for line in text.splitlines():
        if line.startswith("{"):
            yield json.loads(line)
