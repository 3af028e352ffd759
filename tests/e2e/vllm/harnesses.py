"""Real harnesses on a real engine: prompts of real size, random replies, tool calls that the engine parsed."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from gristmill.records import ParentResolution
from tests.e2e.evidence import check_all_captured, check_tokens
from tests.e2e.harness.claude_code import ClaudeCode
from tests.e2e.harness.codex import Codex
from tests.e2e.harness.launch import Endpoint, Folder, Harness, Ran, run
from tests.e2e.harness.mini_swe_agent import MiniSweAgent
from tests.e2e.harness.opencode import Opencode
from tests.e2e.harness.pi import Pi
from tests.e2e.stage import Rollout
from tests.e2e.vllm.engine import MODEL
from tests.e2e.vllm.scene import Scene

__all__ = ["harnesses"]

TASK = "Look into this folder and say what the mill needs."
TIMES = 3


def harnesses(scene: Scene) -> None:
    """Each harness some times, all of them at the same time."""
    path = os.environ["E2E_PATH"]
    kinds: list[Harness] = [
        ClaudeCode(),
        Codex(),
        Opencode("chat", path),
        Pi("messages"),
        Pi("responses"),
        MiniSweAgent(),
    ]
    plays = [(kind, number) for kind in kinds for number in range(TIMES)]

    def one(play: tuple[Harness, int]) -> tuple[Harness, Rollout, Folder, Ran]:
        kind, number = play
        name = f"real-{kind.name}-{number}".translate(str.maketrans("", "", " ()"))
        rollout = scene.gateway.begin(name)
        folder = Folder(scene.folder / name).make()
        launch = kind.launch(Endpoint(rollout.base, rollout.key, MODEL), folder, TASK)
        return kind, rollout, folder, run(launch, folder, path)

    with ThreadPoolExecutor(3) as pool:
        ended = list(pool.map(one, plays))
    for kind, rollout, folder, ran in ended:
        checks = scene.checks
        checks.check(f"{rollout.name}: ends well", ran.status == 0, f"{ran.out[-1500:]}\n{ran.err[-1500:]}")
        outcome = scene.gateway.finish(rollout, kind.history(ran, folder))
        capture = scene.gateway.captured(rollout)
        mine = {record.model_call_id for record in capture.records}
        seen = [call for call in scene.witness.calls() if call.call_id in mine]
        checks.check(f"{rollout.name}: {len(seen)} calls, outcome {outcome['outcome']} {outcome['code']}", bool(seen))
        check_all_captured(checks, capture, seen)
        check_tokens(checks, capture, seen)
        told = [(record.parent_resolution, str(record.purpose.label)) for record in capture.records]
        checks.check(f"{rollout.name}: no parent is ambiguous", ParentResolution.AMBIGUOUS not in dict(told), told)
        if outcome["outcome"] == "selected":
            scene.rollouts.append(rollout)
