"""A few of the kills of `python -m tests.ledger.crash`: acknowledged means stored, however the process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_nothing_acknowledged_is_lost_when_the_writer_is_killed() -> None:
    # A process of its own: it forks, and pytest's must not.
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.ledger.crash", "--kills", "20", "--seed", "7"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "20 kills" in done.stdout
