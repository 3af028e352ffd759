"""The same harnesses as their users start them, under `gristmill run`: it finds, configures, finishes and rewards.

Invariant: nothing tells the harness where its calls go but `gristmill run`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from gristmill.ledger import AttemptKey, AttemptState, SqliteReader
from gristmill.scripted import ScriptedEngine
from tests.e2e.checks import Checks
from tests.e2e.harness import scripts
from tests.e2e.harness.launch import MODEL, Folder, Harness, Json, Launch, run
from tests.e2e.harness.played import Played, check_chain, check_played, ids_of, read_played
from tests.e2e.harness.scenarios import check_delegated
from tests.e2e.stage import COMMAND
from tests.e2e.witness import Witness

__all__ = ["run_blank", "run_delegating", "run_steady", "run_troubled"]

_KEY = AttemptKey("mend", 0)


def _play(checks: Checks, harness: Harness, script: Json, root: Path, path: str) -> tuple[Played, Json] | None:
    root.mkdir(parents=True)
    folder, ledger = Folder(root).make(), root / "run.gristmill"
    plain = harness.plain(folder, scripts.TASK)
    with ScriptedEngine(script).serve() as engine_url, Witness(engine_url) as witness:
        options = [
            "--upstream",
            witness.url,
            "--ledger",
            str(ledger),
            "--model",
            MODEL,
            "--rollout-id",
            _KEY.rollout_id,
        ]
        options += ["--reward-command", "grep -c grind mill.py", "--json", *plain.run_options]
        env = {**plain.env, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        ran = run(Launch([*COMMAND, "run", *options, "--", *plain.argv], env), folder, path)
        told = f"status {ran.status}\n{ran.out[-1500:]}\n{ran.err[-1500:]}"
        if not checks.check("gristmill run ends as the harness does: well", ran.status == 0, told):
            return None
        report = json.loads(ran.out)
        made = read_played(ledger, _KEY, witness.calls(), engine_url, harness.options)
    _check_report(checks, ledger, report)
    return made, report


def _check_report(checks: Checks, ledger: Path, report: Json) -> None:
    expected = {"rollout_id": "mend", "attempt": 0, "exit_code": 0, "signal": None, "reward": 1.0, "reward_error": None}
    checks.equal("its report", expected, {name: report[name] for name in expected})
    sources = report["history_sources"]
    checks.check("it found the harness's own history", bool(sources) and report["history_missing"] is None, report)
    reader = SqliteReader(ledger)
    try:
        summaries = [(summary.state, summary.reward) for summary in reader.summaries()]
    finally:
        reader.close()
    checks.check("the attempt is closed and has its reward", len(summaries) == 1 and summaries[0][1] == 1.0, summaries)
    checks.check("it takes no more calls", summaries[0][0] is not AttemptState.OPEN, summaries)


def run_steady(checks: Checks, harness: Harness, root: Path, path: str) -> None:
    """Four turns."""
    played = _play(checks, harness, scripts.steady(harness), root, path)
    if played is not None:
        made, report = played
        check_played(checks, harness, made)
        main = made.of("main")
        check_chain(checks, "main agent", main)
        checks.equal("the history selects the main agent's calls", ids_of(main), made.selected)
        checks.equal(
            "and the report says so", ("selected", None), (report["outcome"]["outcome"], report["outcome"]["code"])
        )


def run_blank(checks: Checks, harness: Harness, root: Path, path: str) -> None:
    """Replies whose text is white space alone: what an engine's parser leaves between thinking and a tool call."""
    played = _play(checks, harness, scripts.blank(harness), root, path)
    if played is not None:
        made, report = played
        main = made.of("main")
        check_chain(checks, "main agent", main)
        checks.equal(
            "the report selects them", ("selected", None), (report["outcome"]["outcome"], report["outcome"]["code"])
        )


def run_troubled(checks: Checks, harness: Harness, root: Path, path: str) -> None:
    """An error and a broken stream."""
    played = _play(checks, harness, scripts.troubled(harness, cut="streamed" not in harness.name), root, path)
    if played is not None:
        made, _ = played
        check_played(checks, harness, made)
        checks.equal("the history selects the main agent's calls", ids_of(made.of("main")), made.selected)


def run_delegating(checks: Checks, harness: Harness, root: Path, path: str) -> None:
    """A sub-agent, whose calls may be in the history too."""
    played = _play(checks, harness, scripts.delegating(harness), root, path)
    if played is not None:
        made, _ = played
        check_delegated(checks, harness, made)
        main, sub = set(ids_of(made.of("main"))), set(ids_of(made.of("sub")))
        chosen = set(made.selected)
        checks.check(
            "the history selects the main agent's calls, all or none of the sub-agent's", main <= chosen, chosen
        )
        checks.check("and nothing else", chosen - main in ({*()}, sub), chosen)
