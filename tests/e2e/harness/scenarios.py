"""What each harness is put through behind `gristmill serve`, and what must then be true.

Invariant: engine, witness and gateway are a scenario's own, and have ended with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gristmill.records import CallRecord, PurposeLabel
from gristmill.scripted import ScriptedEngine
from tests.e2e.checks import Checks
from tests.e2e.harness import scripts
from tests.e2e.harness.launch import MODEL, Endpoint, Folder, Harness, Json, Ran, run
from tests.e2e.harness.played import Played, check_chain, check_played, ids_of, labelled, read_played
from tests.e2e.stage import Gateway, Rollout, gateway
from tests.e2e.witness import Witness

__all__ = [
    "Scenario",
    "Scene",
    "blank",
    "check_delegated",
    "compacting",
    "delegating",
    "delegating_twice",
    "scene",
    "steady",
    "troubled",
]


@dataclass
class Scene:
    """One harness in one scenario."""

    checks: Checks
    harness: Harness
    folder: Folder
    path: str
    gateway: Gateway
    witness: Witness
    engine_url: str
    rollout: Rollout

    def go(self, task: str, *, again: bool = False) -> Ran:
        """Give the harness a task and let it end."""
        endpoint = Endpoint(self.rollout.base, self.rollout.key, MODEL)
        ran = run(self.harness.launch(endpoint, self.folder, task, again=again), self.folder, self.path)
        told = f"status {ran.status}\n{ran.out[-1500:]}\n{ran.err[-1500:]}"
        self.checks.check("the harness ends well", ran.status == 0, told)
        return ran

    def play(self, task: str) -> Played:
        """Give the harness a task, and finish the attempt with what it hands back."""
        return self.end(self.harness.history(self.go(task), self.folder))

    def end(self, result: Json, *options: str) -> Played:
        """Finish the attempt and read everything."""
        self.gateway.finish(self.rollout, result)
        options = (*self.harness.options, *options)
        return read_played(
            self.gateway.ledger, self.rollout.attempt_key, self.witness.calls(), self.engine_url, options
        )


Scenario = Callable[[Scene], None]


@contextmanager
def scene(checks: Checks, harness: Harness, script: Json, root: Path, path: str) -> Iterator[Scene]:
    """Start everything for one scenario."""
    root.mkdir(parents=True)
    with (
        ScriptedEngine(script).serve() as engine_url,
        Witness(engine_url) as witness,
        gateway(witness.url, root) as gate,
    ):
        rollout = gate.begin("mend")
        yield Scene(checks, harness, Folder(root).make(), path, gate, witness, engine_url, rollout)


def steady(stage: Scene) -> None:
    """Four turns without trouble."""
    made = stage.play(scripts.TASK)
    check_played(stage.checks, stage.harness, made)
    main = made.of("main")
    stage.checks.equal("four turns", 4, len(main))
    check_chain(stage.checks, "main agent", main)
    stage.checks.equal("the history selects these four", ids_of(main), made.selected)


def blank(stage: Scene) -> None:
    """Replies whose text is white space alone, which some harnesses do not send back."""
    made = stage.end(stage.harness.history(stage.go(scripts.TASK), stage.folder), "--set", "whitespace=trim")
    main = made.of("main")
    stage.checks.equal("three turns", 3, len(main))
    check_chain(stage.checks, "main agent", main)
    stage.checks.equal("the history selects them, white space aside", ids_of(main), made.selected)


def troubled(stage: Scene) -> None:
    """An error and a stream that breaks off; the harness asks again."""
    made = stage.play(scripts.TASK)
    check_played(stage.checks, stage.harness, made)
    main, every = made.of("main"), made.of("main", usable=False)
    stage.checks.equal("three turns", 3, len(main))
    stage.checks.check("with tries that failed", len(every) > len(main), every)
    check_chain(stage.checks, "main agent", main)
    stage.checks.equal("the history selects these three", ids_of(main), made.selected)
    again = [record for record in main if any(_repeats(record, other) for other in every)]
    stage.checks.check("calls asked again say which they repeat", all(r.retry_of is not None for r in again), again)


def _repeats(record: CallRecord, other: CallRecord) -> bool:
    return other.ordinal < record.ordinal and other.request_digest == record.request_digest


def delegating(stage: Scene) -> None:
    """A sub-agent."""
    made = stage.play(scripts.TASK)
    check_delegated(stage.checks, stage.harness, made)
    stage.checks.equal("the history selects the main agent's calls", ids_of(made.of("main")), made.selected)


def delegating_twice(stage: Scene) -> None:
    """Two sub-agents at the same time; neither is taken for the other."""
    made = stage.play(scripts.TASK)
    check_played(stage.checks, stage.harness, made)
    check_chain(stage.checks, "main agent", made.of("main"))
    for what in ("millstones", "wheels"):
        sub = made.of(what)
        stage.checks.equal(f"two turns of the one that counts {what}", 2, len(sub))
        stage.checks.check("they are labelled so", labelled(sub, PurposeLabel.SUBAGENT), [r.purpose for r in sub])
        check_chain(stage.checks, f"one that counts {what}", sub)
    stage.checks.equal("the history selects the main agent's calls", ids_of(made.of("main")), made.selected)


def check_delegated(checks: Checks, harness: Harness, made: Played) -> None:
    """What holds of an attempt with a sub-agent."""
    check_played(checks, harness, made)
    main, sub = made.of("main"), made.of("sub")
    checks.equal("two turns of the sub-agent", 2, len(sub))
    checks.check("they are labelled so", labelled(sub, PurposeLabel.SUBAGENT), [r.purpose for r in sub])
    check_chain(checks, "main agent", main)
    check_chain(checks, "sub-agent", sub)


def compacting(stage: Scene) -> None:
    """A conversation that is summarised, and goes on from the summary."""
    histories = [stage.harness.history(stage.go(scripts.TASK), stage.folder)]
    result: Json = histories[0]
    if stage.harness.name == "claude-code":
        stage.go("/compact", again=True)
        histories.append(stage.harness.history(stage.go(scripts.POLISH, again=True), stage.folder))
        result = {"messages": [message for each in histories for message in each["messages"]]}
    made = stage.end(result)
    checks = stage.checks
    check_played(checks, stage.harness, made)
    compact, main, after = made.of("compact"), made.of("main"), made.of("after")
    checks.equal("one call makes the summary", 1, len(compact))
    checks.check("it is labelled so", labelled(compact, PurposeLabel.COMPACTION), [r.purpose for r in compact])
    check_chain(checks, "conversation before it", main)
    check_chain(checks, "conversation after it", after)
    told = (*main, *compact, *after) if stage.harness.name == "codex" else (*main, *after)  # its file has the summary
    checks.equal("the history selects what it holds", ids_of(told), made.selected)
