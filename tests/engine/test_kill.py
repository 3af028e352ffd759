"""Builds that are killed, and workers that are."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from gristmill.engine import build
from tests.cli.stories import run
from tests.engine.builds import DEADLY, contents, many_parts, start

KILLS = 10


def _finished(rows: Path) -> int:
    return sum(1 for _ in rows.glob("run=*/part=*/manifest.json"))


def _killed(rng: random.Random, number: int, runs: Path, rows: Path) -> bool:
    """Kill a build at random: on its way to its first partitions, or a little after some more of them are there."""
    process = start("build", runs, rows, "--jobs", "2")
    wanted = _finished(rows) + rng.randrange(4)
    while process.poll() is None and _finished(rows) < wanted:
        try:
            process.wait(timeout=0.002)
        except subprocess.TimeoutExpired:
            continue
    try:
        process.wait(timeout=rng.random() * 0.2)
    except subprocess.TimeoutExpired:
        if number % 2:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            # Only the one that was started: its workers have to notice.
            process.kill()
    # They hold the pipes, so this ends when the last of them has.
    process.communicate(timeout=60)
    return process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_ten_kills_change_no_byte(tmp_path: Path) -> None:
    """A build of a night is killed now and then; nobody may find out from its rows."""
    runs, rows = tmp_path / "runs", tmp_path / "rows"
    many_parts(runs, 160, part_bytes=1)
    build(runs, tmp_path / "whole")
    rng = random.Random(7)
    killed = number = 0
    while killed < KILLS:
        number += 1
        if _killed(rng, number, runs, rows):
            killed += 1
        else:
            # It was faster than the kill: there has to be something left to do.
            shutil.rmtree(rows / "run=b")
        assert number < 5 * KILLS
    build(runs, rows, jobs=2)
    assert contents(rows) == contents(tmp_path / "whole")


def test_one_kill_leaves_whole_partitions_only(tmp_path: Path) -> None:
    """The same in short, for every day."""
    runs, rows = tmp_path / "runs", tmp_path / "rows"
    many_parts(runs, 60, part_bytes=1)
    build(runs, tmp_path / "whole")
    rng = random.Random(3)
    while not _killed(rng, 0, runs, rows):
        shutil.rmtree(rows)
    whole = contents(tmp_path / "whole")
    for manifest in rows.glob("run=*/part=*/manifest.json"):
        for path in manifest.parent.iterdir():
            assert path.read_bytes() == whole[str(path.relative_to(rows))]
    build(runs, rows)
    assert contents(rows) == whole


def test_a_worker_that_dies_ends_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Out of memory, for example: an error that says so, and what was finished stays."""
    many_parts(tmp_path / "runs", part_bytes=1)
    (tmp_path / "deadly_policy.py").write_text(DEADLY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    ran = run(capfd, "build", "runs", "rows", "--policy", "deadly_policy:deadly", "--jobs", "2", "--json")
    assert (ran.code, ran.json["error"]["code"]) == (3, "worker_lost")
    there = _finished(tmp_path / "rows")
    assert there > 5
    assert not (tmp_path / "rows" / "summary.json").exists()
    (tmp_path / "deadly_policy.py").write_text(DEADLY.replace("00030", "nobody"), encoding="utf-8")
    ran = run(capfd, "build", "runs", "rows", "--policy", "deadly_policy:deadly", "--jobs", "2", "--json")
    assert (ran.code, ran.json["there"]) == (0, there)


ENDINGS = """
import os, sys

def leaves(records, result):
    os._exit(0)

def ends(records, result):
    sys.exit()

def closes(records, result):
    raise GeneratorExit

def hungry(records, result):
    raise MemoryError
"""


@pytest.fixture
def endings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An archive of one part, and policies that do not return; the module of the policies."""
    many_parts(tmp_path / "runs", 4, partitions=("a",), part_bytes=10**9)
    (tmp_path / "policies_that_end.py").write_text(ENDINGS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "policies_that_end"


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_build_of_one_partition_tells_that_its_process_died(
    endings: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], jobs: int
) -> None:
    """A pipeline that looks at the exit code would go on without rows: a policy can end its process with 0."""
    process = start("build", "runs", "rows", "--policy", f"{endings}:leaves", "--jobs", jobs, "--json")
    out, _ = process.communicate(timeout=120)
    assert (process.returncode, json.loads(out)["error"]["code"]) == (3, "worker_lost")
    assert _finished(tmp_path / "rows") == 0
    ran = run(capfd, "build", "runs", "rows", "--jobs", jobs, "--json")
    assert (ran.code, ran.json["made"]) == (0, 1)


@pytest.mark.parametrize("policy", ["ends", "closes"])
def test_a_policy_that_ends_by_an_exception_breaks_its_contract(
    endings: str, capfd: pytest.CaptureFixture[str], policy: str
) -> None:
    """It takes no other rollout with it, and is no bug of ours."""
    ran = run(capfd, "build", "runs", "rows", "--policy", f"{endings}:{policy}", "--json")
    assert (ran.code, ran.json["summary"]["rejected"]) == (1, {"policy_broke_contract": 4})
    ran = run(capfd, "select", "runs", "--policy", f"{endings}:{policy}", "--json")
    assert (ran.code, ran.json["error"]["code"]) == (1, "policy_broke_contract")


def test_memory_that_is_not_there_refuses_no_rollout(
    endings: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is trained would depend on the machine: the build ends, and goes on where there is more."""
    for command in (["build", "runs", "rows"], ["select", "runs"]):
        ran = run(capfd, *command, "--policy", f"{endings}:hungry", "--json")
        assert (ran.code, ran.json["error"]["code"]) == (3, "memory_exhausted")
    assert _finished(tmp_path / "rows") == 0
