"""Harbor's own Trajectory, and its TrialResult: the results that our importer is tested on are ones that it writes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden import Golden  # isort: skip
from trajectory_check import check, imported  # isort: skip

import tempfile

from harbor.models.agent.rollout_detail import RolloutDetail
from harbor.models.trajectories import Metrics, Step, SubagentTrajectoryRef, Trajectory
from harbor.models.trial.result import TrialResult

from tests.interop.foreign_files import TURNS, tokens_of, trial


def main() -> None:
    golden = Golden("harbor", "harbor")
    check(golden, "harbor.models.trajectories", Trajectory)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "result.json"
        path.write_text(TrialResult.model_validate(trial()).model_dump_json(indent=4))
        capture, result = imported("harbor", path)
    golden.is_type(list(tokens_of(capture).values()), list(TURNS), "a trial that Harbor wrote")
    golden.is_type(None if result is None else (result.reward, result.group_id), (1.0, "count-names"), "its reward")
    golden.report(Trajectory, Step, Metrics, SubagentTrajectoryRef, TrialResult, RolloutDetail)


if __name__ == "__main__":
    main()
