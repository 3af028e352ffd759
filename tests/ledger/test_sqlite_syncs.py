"""Acknowledged means synced: counted from below, because a killed process proves nothing about a lost machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.ledger import SqliteLedger

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("counting syncs needs a C compiler and Linux's LD_PRELOAD")
    made = tmp_path_factory.mktemp("shim") / "syncs.so"
    source = Path(__file__).with_name("syncs.c")
    built = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(source), "-ldl"], capture_output=True, check=False
    )
    if built.returncode:
        pytest.skip(f"the compiler cannot make a shared library: {built.stderr.decode()[:200]}")
    return made


def written(shim: Path, folder: Path, writers: int, calls: int, **settings: str) -> tuple[str, str]:
    """Run the writer; return the events and what it printed."""
    log = folder / "events"
    read, write = os.pipe()
    command = f"exec 9>&{write}; exec {sys.executable} -m tests.ledger.acknowledge {folder}/x.ledger {writers} {calls}"
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "SYNCS_LOG": str(log),
        "PYTHONPATH": os.pathsep.join(sys.path),
        **settings,
    }
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, pass_fds=[write], capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    os.close(write)
    os.close(read)
    assert done.returncode == 0, done.stderr
    return log.read_text(), done.stdout


@pytest.mark.parametrize(("writers", "calls"), [(1, 40), (8, 20)])
def test_every_group_is_synced_before_it_is_acknowledged(shim: Path, tmp_path: Path, writers: int, calls: int) -> None:
    events, _ = written(shim, tmp_path, writers, calls)
    assert events.count("a") == writers * calls
    # Nothing is acknowledged while a write to the log has no sync behind it, and every group has writes of its own.
    assert not re.search("w[^s]*a", events)
    groups = re.findall("([^a]+)a+", events)
    assert all(re.search("w+s+$", group) for group in groups)
    assert len(groups) <= writers * calls
    if writers == 1:
        assert len(groups) == calls
    assert events.count("s") >= len(groups)


def test_after_a_failed_sync_nothing_is_acknowledged(shim: Path, tmp_path: Path) -> None:
    # The kernel forgets what it could not write, and says so once: a second sync that succeeds proves nothing.
    events, printed = written(shim, tmp_path, 1, 20, SYNCS_FAIL_SYNC="12")
    assert "ledger_write_failed" in printed
    told = events.count("a")
    assert 0 < told < 20
    with SqliteLedger(tmp_path / "x.ledger") as ledger:
        assert ledger.counts().calls >= told


def test_a_short_write_fails_alone(shim: Path, tmp_path: Path) -> None:
    # A disk that fills up writes half a page; what follows it must not be read as a transaction.
    events, printed = written(shim, tmp_path, 1, 40, SYNCS_SHORT="120")
    assert "ledger_full" in printed
    told = events.count("a")
    assert 0 < told < 40
    assert f"calls {told}" in printed
    with SqliteLedger(tmp_path / "x.ledger") as ledger:
        assert ledger.counts().calls == told
