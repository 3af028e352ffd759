"""What a subject works with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.checks import Checks
from tests.e2e.stage import Gateway, Rollout
from tests.e2e.vllm.engine import Engine
from tests.e2e.witness import Witness

__all__ = ["Scene"]


@dataclass
class Scene:
    """Everything that runs; a subject adds the attempts it finished to `rollouts`, whose rows are then checked."""

    checks: Checks
    engine: Engine
    witness: Witness
    gateway: Gateway
    folder: Path
    rollouts: list[Rollout]

    def finish(self, rollout: Rollout) -> None:
        """Finish an attempt of single calls; its result names the last usable call as the scored one."""
        records = self.gateway.captured(rollout).records
        times = Counter(record.response_id for record in records)
        alone = [record for record in records if record.usable and times[record.response_id] == 1]
        self.gateway.finish(rollout, {"terminal_response_id": alone[-1].response_id})
        self.rollouts.append(rollout)
