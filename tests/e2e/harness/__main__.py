"""Real harnesses through the gateway: `python -m tests.e2e.harness [NAME…]`, started by harness.sh.

Invariant: harness, gateway and engine run in one network that has only loopback; each scenario has a ledger of its own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.e2e import loopback
from tests.e2e.checks import Checks
from tests.e2e.harness import scenarios, scripts
from tests.e2e.harness.claude_code import ClaudeCode
from tests.e2e.harness.codex import Codex
from tests.e2e.harness.launch import Harness, Json
from tests.e2e.harness.mini_swe_agent import MiniSweAgent
from tests.e2e.harness.openai_agents import OpenaiAgents
from tests.e2e.harness.opencode import Opencode
from tests.e2e.harness.pi import Pi


def cases(path: str) -> Iterator[tuple[str, Harness, Json, scenarios.Scenario]]:
    """Yield every case: scenario name, harness, script, scenario."""
    plain: list[Harness] = [
        ClaudeCode(),
        Codex(),
        *(Opencode(dialect, path) for dialect in ("chat", "responses", "messages")),
        *(Pi(dialect) for dialect in ("chat", "responses", "messages")),
        MiniSweAgent(),
        *(OpenaiAgents(dialect, stream=stream) for dialect in ("chat", "responses") for stream in (False, True)),
    ]
    for harness in plain:
        yield "steady", harness, scripts.steady(harness), scenarios.steady
        yield "blank", harness, scripts.blank(harness), scenarios.blank
        # The SDK gives up on a stream that breaks off.
        yield "troubled", harness, scripts.troubled(harness, cut="streamed" not in harness.name), scenarios.troubled
        if harness.delegates is not None:
            yield "delegating", harness, scripts.delegating(harness), scenarios.delegating
    for harness in (ClaudeCode(), Codex(compact_above=17_000)):
        yield "compacting", harness, scripts.compacting(harness), scenarios.compacting


def main(wanted: list[str]) -> int:
    """Run the cases whose harness or scenario is named, or all."""
    loopback.enter()
    path = os.environ["E2E_PATH"]
    root = Path(tempfile.mkdtemp(prefix="e2e-harness-"))
    checks = Checks()
    for number, (name, harness, script, scenario) in enumerate(cases(path)):
        subject = f"{harness.name}: {name}"
        if wanted and not any(word in subject for word in wanted):
            continue
        with (
            checks.subject(subject),
            scenarios.scene(checks, harness, script, root / str(number), path) as stage,
        ):
            scenario(stage)
    return checks.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
