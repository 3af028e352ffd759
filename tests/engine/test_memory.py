"""Memory does not grow with the number of rollouts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MOST_GROWTH_BYTES = 80 * 2**20
"""Far more than a peak moves from run to run, far less than the 250 MB that the larger run has more."""

_PEAK = """
import json, resource, sys
import numpy as np
from gristmill.archive import ArchivedAttempt, PartitionWriter, place_of
from gristmill.engine import BuildOptions, build
from gristmill.records import CallRecord, Capture, Result
from gristmill.tokens import TokenBook

def attempts(count, tokens_T):
    ids_T = (np.arange(tokens_T, dtype=np.int32) * 7919) % 50_000
    logprobs_T = np.linspace(-2.0, -0.1, tokens_T // 2, dtype=np.float32)
    for number in range(count):
        stored = TokenBook().add("c", ids_T[: tokens_T // 2] + number, ids_T[tokens_T // 2 :], logprobs_T)
        fields = {name: getattr(stored, name) for name in stored.__struct_fields__ if name != "delta"}
        record = CallRecord(
            model_call_id="c", response_id="r", usable=True, response_status="completed", finish_reason="stop", **fields
        )
        capture = Capture(rollout_id=f"rollout-{number}", records=(record,), tokens={"c": stored.delta})
        yield ArchivedAttempt(capture=capture, result=Result(value={"response": {"id": "r", "output": []}}, reward=1.0))

def peak():
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

folder, count, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if what == "archive":
    with PartitionWriter(place_of(folder + "/runs"), "a") as writer:
        for attempt in attempts(count, 200_000):
            writer.add(attempt)
        writer.finish()
else:
    summary = build(folder + "/runs", folder + "/rows", BuildOptions(policy="all_captured"))
    assert summary.rollouts.selected == count, summary
print(json.dumps(peak()))
"""


def _peak_bytes(folder: Path, count: int, what: str) -> int:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", _PEAK, str(folder), str(count), what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_peaks_are_flat(tmp_path: Path) -> None:
    """Ten times the rollouts, 1.6 MB of tokens each, in nearly the same memory."""
    peaks = {
        (what, count): _peak_bytes(tmp_path / str(count), count, what)
        for what in ("archive", "build")
        for count in (20, 200)
    }
    for what in ("archive", "build"):
        assert peaks[what, 200] - peaks[what, 20] < MOST_GROWTH_BYTES, peaks
