"""Archives to build from, and folders of rows to compare."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gristmill.archive import ArchivedAttempt, PartitionWriter, place_of
from tests.archive.stored import rollouts

__all__ = ["DEADLY", "PROGRAM", "contents", "many_parts", "start"]

PROGRAM = [sys.executable, "-c", "import sys; from gristmill.cli import main; sys.exit(main())"]

DEADLY = """
import os, signal
from gristmill.selection import select_captured_calls

def deadly(records, result):
    if records[0].rollout_id == "rollout-00030":
        os.kill(os.getpid(), signal.SIGKILL)
    return select_captured_calls(records, result)
"""
"""A policy that ends its process at one rollout."""


def many_parts(
    path: Path | str, count: int = 40, *, partitions: Sequence[str] = ("a", "b"), part_bytes: int = 9000
) -> None:
    """Write an archive of several partitions of several parts."""
    each = count // len(partitions)
    for number, name in enumerate(partitions):
        with PartitionWriter(place_of(path), name, part_bytes=part_bytes) as writer:
            for capture, result in rollouts(each, number * each):
                writer.add(ArchivedAttempt(capture=capture, result=result))
            writer.finish()


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder, hidden ones included."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start the command in a process group of its own."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [*PROGRAM, *map(str, arguments)]
    # Wherever it is started, it is this Gristmill.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(os.path.isabs, sys.path))}
    return subprocess.Popen(command, env=env, start_new_session=True, **{**pipes, **options})
