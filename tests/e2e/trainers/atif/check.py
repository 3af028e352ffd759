"""The format's own Trajectory (package atif): rows out, validated, written by the package, and in again."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden import Golden, following  # isort: skip
from trajectory_check import check, restored  # isort: skip

import atif


def main() -> None:
    golden = Golden("atif", "atif")
    check(golden, "atif", atif.Trajectory)
    with following("atif.md") as (page, read):
        made = page["made"]
        golden.is_type({type(one) for one in made}, {atif.Trajectory}, "page")
        golden.is_type(sum(map(len, restored(made))), len(read), "page")
    golden.report(atif.Trajectory, atif.Step, atif.Metrics, atif.SubagentTrajectoryRef)


if __name__ == "__main__":
    main()
