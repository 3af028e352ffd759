"""Real harnesses through the gateway: `python -m tests.e2e.harness [WORD…]`, started by harness.sh.

Invariant: harness, gateway and engine run in one network that has only loopback; each case has a ledger of its own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.e2e import loopback
from tests.e2e.checks import Checks
from tests.e2e.harness import running, scenarios, scripts, shared
from tests.e2e.harness.claude_code import ClaudeCode
from tests.e2e.harness.codex import Codex
from tests.e2e.harness.launch import Harness, Json
from tests.e2e.harness.mini_swe_agent import MiniSweAgent
from tests.e2e.harness.openai_agents import OpenaiAgents
from tests.e2e.harness.opencode import Opencode
from tests.e2e.harness.pi import Pi
from tests.e2e.harness.scenarios import Scenario

Case = Callable[[Checks, Path], None]
_DIALECTS = ("chat", "responses", "messages")


def cases(path: str) -> Iterator[tuple[str, Case]]:
    """Yield every case by name."""
    harnesses: list[Harness] = [
        ClaudeCode(),
        Codex(),
        *(Opencode(dialect, path) for dialect in _DIALECTS),
        *(Pi(dialect) for dialect in _DIALECTS),
        MiniSweAgent(),
        *(OpenaiAgents(dialect, stream=stream) for dialect in ("chat", "responses") for stream in (False, True)),
    ]
    for harness in harnesses:
        yield from _served(harness, path)
        if harness.plain_use:
            yield f"{harness.name}: run, steady", _under_run(running.run_steady, harness, path)
            yield f"{harness.name}: run, blank", _under_run(running.run_blank, harness, path)
            yield f"{harness.name}: run, troubled", _under_run(running.run_troubled, harness, path)
            if harness.delegates is not None:
                yield f"{harness.name}: run, delegating", _under_run(running.run_delegating, harness, path)
    for harness in (ClaudeCode(), Codex(), Opencode("chat", path), Pi("messages")):
        yield f"{harness.name}: gateway killed", _under_run(shared.killed, harness, path)
    several = [ClaudeCode(), Codex(), Opencode("messages", path), Pi("responses"), MiniSweAgent(), Pi("chat")]
    yield "together", lambda checks, root: shared.together(checks, several, root, path)
    claude = ClaudeCode()
    twice = scripts.delegating_twice(claude)
    yield "claude-code: two sub-agents", _behind_serve(scenarios.delegating_twice, claude, twice, path)
    for harness in (ClaudeCode(), Codex(compact_above=17_000)):
        yield (
            f"{harness.name}: compacting",
            _behind_serve(scenarios.compacting, harness, scripts.compacting(harness), path),
        )


def _served(harness: Harness, path: str) -> Iterator[tuple[str, Case]]:
    # The SDK gives up on a stream that breaks off.
    trouble = scripts.troubled(harness, cut="streamed" not in harness.name)
    yield f"{harness.name}: steady", _behind_serve(scenarios.steady, harness, scripts.steady(harness), path)
    yield f"{harness.name}: blank", _behind_serve(scenarios.blank, harness, scripts.blank(harness), path)
    yield f"{harness.name}: troubled", _behind_serve(scenarios.troubled, harness, trouble, path)
    if harness.delegates is not None:
        yield (
            f"{harness.name}: delegating",
            _behind_serve(scenarios.delegating, harness, scripts.delegating(harness), path),
        )


def _behind_serve(scenario: Scenario, harness: Harness, script: Json, path: str) -> Case:
    def case(checks: Checks, root: Path) -> None:
        with scenarios.scene(checks, harness, script, root, path) as stage:
            scenario(stage)

    return case


def _under_run(play: Callable[[Checks, Harness, Path, str], None], harness: Harness, path: str) -> Case:
    def case(checks: Checks, root: Path) -> None:
        play(checks, harness, root, path)

    return case


def main(wanted: list[str]) -> int:
    """Run the cases whose name holds one of the words, or all."""
    loopback.enter()
    root = Path(tempfile.mkdtemp(prefix="e2e-harness-"))
    checks = Checks()
    for number, (name, case) in enumerate(cases(os.environ["E2E_PATH"])):
        if not wanted or any(word in name for word in wanted):
            with checks.subject(name):
                case(checks, root / str(number))
    return checks.close(root)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
