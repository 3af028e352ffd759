"""What each harness is put through, and what must then be true of the ledger.

Invariant: which call is which is told by the engine's script, never by the gateway's own labels.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gristmill.records import CallRecord, Capture, PurposeLabel
from gristmill.scripted import ScriptedEngine
from tests.e2e.checks import Checks
from tests.e2e.evidence import check_all_captured, check_rows, check_tokens
from tests.e2e.harness import scripts
from tests.e2e.harness.launch import Endpoint, Folder, Harness, Json, Ran, run
from tests.e2e.stage import Gateway, Rollout, gateway, gristmill
from tests.e2e.witness import Seen, Witness

__all__ = ["Scene", "blank", "compacting", "delegating", "steady", "troubled"]


@dataclass
class Scene:
    """One harness in one scenario, with engine, witness and gateway of its own."""

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
        endpoint = Endpoint(self.rollout.base, self.rollout.key, scripts.MODEL)
        ran = run(self.harness.launch(endpoint, self.folder, task, again=again), self.folder, self.path)
        told = f"status {ran.status}\n{ran.out[-1500:]}\n{ran.err[-1500:]}"
        self.checks.check("the harness ends well", ran.status == 0, told)
        return ran

    def rules(self) -> dict[str, str]:
        """Return which rule of the script answered which call."""
        with urllib.request.urlopen(f"{self.engine_url}/script/requests", timeout=20) as answer:
            told = json.loads(answer.read())
        asked = told if isinstance(told, list) else told["requests"]
        return {each["headers"].get("x-request-id", ""): each["rule"] for each in asked}


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


@dataclass
class Played:
    """A scenario that has been played: what the ledger and the witness have."""

    capture: Capture
    seen: list[Seen]
    rules: dict[str, str]
    selected: list[str]
    outcome: Json

    def of(self, *rules: str, usable: bool = True) -> list[CallRecord]:
        """Return the calls that some rules answered, in the order in which the engine saw them."""
        by_id = {record.model_call_id: record for record in self.capture.records}
        ids = [call.call_id or "" for call in self.seen if self.rules.get(call.call_id or "") in rules]
        found = [by_id[call_id] for call_id in ids if call_id in by_id]
        return [record for record in found if record.usable or not usable]

    def unusable(self) -> list[str]:
        """Return the calls to which the engine gave no whole reply."""
        return [call.call_id or "" for call in self.seen if not call.whole]


def played(stage: Scene, result: Json, *options: str) -> Played:
    """Finish the attempt with what the harness handed back, and read everything."""
    stage.gateway.finish(stage.rollout, result)
    words = ("select", str(stage.gateway.ledger), *stage.harness.options, *options, "--json")
    outcome = json.loads(gristmill(*words, check=False).stdout)["rollouts"][0]
    capture = stage.gateway.captured(stage.rollout)
    return Played(capture, stage.witness.calls(), stage.rules(), outcome.get("calls") or [], outcome)


def check_played(stage: Scene, made: Played) -> None:
    """What holds in every scenario."""
    checks = stage.checks
    check_all_captured(checks, made.capture, made.seen)
    check_tokens(checks, made.capture, made.seen, unusable=made.unusable())
    titles = made.of("title")
    if stage.harness.makes_title:
        checks.check("its title call is auxiliary", bool(titles) and _labelled(titles, PurposeLabel.AUXILIARY), titles)
    main = {record.purpose.label for record in made.of("main", "after", usable=False)}
    aside = {PurposeLabel.AUXILIARY, PurposeLabel.SUBAGENT, PurposeLabel.COMPACTION}
    checks.check("no call of the main agent is labelled as something else", not main & aside, main)
    checks.equal("the returned history is accepted", "selected", made.outcome["outcome"])
    if made.outcome["outcome"] != "selected":
        checks.check("(why it was not)", False, {key: made.outcome.get(key) for key in ("code", "where", "message")})
    expected = {stage.rollout.name: (made.capture, made.seen)}
    rows, options = stage.folder.root / "rows", stage.harness.options
    if options:
        check_rows(checks, stage.gateway.ledger, rows, expected, options, made.selected)
    else:
        check_rows(checks, stage.gateway.ledger, rows, expected)


def _labelled(records: list[CallRecord], label: PurposeLabel) -> bool:
    return all(record.purpose.label is label for record in records)


def _chain(stage: Scene, what: str, records: list[CallRecord], root: str | None = None) -> None:
    """Each call continues the one before."""
    ids = [record.model_call_id for record in records]
    parents = [record.parent_call_id for record in records]
    stage.checks.equal(f"each turn of the {what} continues the one before", [root, *ids[:-1]], parents)


def steady(stage: Scene) -> None:
    """Four turns without trouble."""
    ran = stage.go(scripts.TASK)
    made = played(stage, stage.harness.history(ran, stage.folder))
    check_played(stage, made)
    main = made.of("main")
    stage.checks.equal("four turns", 4, len(main))
    _chain(stage, "main agent", main)
    stage.checks.equal("the history selects these four", [r.model_call_id for r in main], made.selected)


def blank(stage: Scene) -> None:
    """Replies whose text is white space alone, which some harnesses do not send back."""
    ran = stage.go(scripts.TASK)
    made = played(stage, stage.harness.history(ran, stage.folder), "--set", "whitespace=trim")
    main = made.of("main")
    stage.checks.equal("three turns", 3, len(main))
    _chain(stage, "main agent", main)
    stage.checks.equal("the history selects them, white space aside", [r.model_call_id for r in main], made.selected)


def troubled(stage: Scene) -> None:
    """An error and a stream that breaks off; the harness asks again."""
    ran = stage.go(scripts.TASK)
    made = played(stage, stage.harness.history(ran, stage.folder))
    check_played(stage, made)
    main, every = made.of("main"), made.of("main", usable=False)
    stage.checks.equal("three turns", 3, len(main))
    stage.checks.check("with tries that failed", len(every) > len(main), every)
    _chain(stage, "main agent", main)
    stage.checks.equal("the history selects these three", [r.model_call_id for r in main], made.selected)
    again = [record for record in main if any(_repeats(record, other) for other in every)]
    stage.checks.check("calls asked again say which they repeat", all(r.retry_of is not None for r in again), again)


def _repeats(record: CallRecord, other: CallRecord) -> bool:
    return other.ordinal < record.ordinal and other.request_digest == record.request_digest


def delegating(stage: Scene) -> None:
    """A sub-agent."""
    ran = stage.go(scripts.TASK)
    made = played(stage, stage.harness.history(ran, stage.folder))
    check_played(stage, made)
    main, sub = made.of("main"), made.of("sub")
    stage.checks.equal("two turns of the sub-agent", 2, len(sub))
    stage.checks.check("they are labelled so", _labelled(sub, PurposeLabel.SUBAGENT), [r.purpose for r in sub])
    _chain(stage, "main agent", main)
    _chain(stage, "sub-agent", sub)
    stage.checks.equal("the history selects the main agent's", [r.model_call_id for r in main], made.selected)


def compacting(stage: Scene) -> None:
    """A conversation that is summarised, and goes on from the summary."""
    histories = [stage.harness.history(stage.go(scripts.TASK), stage.folder)]
    if stage.harness.name == "claude-code":
        stage.go("/compact", again=True)
        histories.append(stage.harness.history(stage.go(scripts.POLISH, again=True), stage.folder))
        result: Json = {"messages": [message for each in histories for message in each["messages"]]}
    else:
        result = histories[0]
    made = played(stage, result)
    check_played(stage, made)
    compact, main, after = made.of("compact"), made.of("main"), made.of("after")
    stage.checks.equal("one call makes the summary", 1, len(compact))
    stage.checks.check("it is labelled so", _labelled(compact, PurposeLabel.COMPACTION), [r.purpose for r in compact])
    _chain(stage, "conversation before it", main)
    _chain(stage, "conversation after it", after)
    told = (*main, *compact, *after) if stage.harness.name == "codex" else (*main, *after)  # its file has the summary
    stage.checks.equal("the history selects what it holds", [record.model_call_id for record in told], made.selected)


Scenario = Callable[[Scene], None]
