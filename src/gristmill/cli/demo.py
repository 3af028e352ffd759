"""`gristmill demo`: the main job, from an agent that runs to training rows, in a folder to look around in.

An agent of this package runs through a gateway in front of a scripted engine; rollouts that were recorded from a real
engine join it in the ledger.

JSON: `{"folder", "ledger", "captured": {rollout_id, calls, sampled_tokens, reward}, "imported": {…} as of `import`,
"selected": [{rollout_id, calls, terminal_call_id}], "diff": {…} as the counts of `diff`, "explained": {…} as of
`explain`, "manifest": {…} as in the file, "losses", "findings": […] as of `verify`, "funnel"}`.

Invariant: nothing is replaced but what an earlier demo made.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import msgspec

from gristmill.cli.attempts import Captures
from gristmill.cli.choice import Choice
from gristmill.cli.failure import DATA_FAILED
from gristmill.errors import Code, ExportError, InternalError

if TYPE_CHECKING:
    from gristmill.cli.diff import Compared, Comparison
    from gristmill.cli.importing import Counted
    from gristmill.cli.prose import Explanation
    from gristmill.cli.select import Selected
    from gristmill.export import Manifest
    from gristmill.pipeline import Funnel
    from gristmill.reconstruction import Finding

__all__ = ["command"]

_SHOWN: Final = "live-mill"
_OTHER_POLICY: Final = "all_captured"
_DEFAULT_FOLDER: Final = "gristmill-demo"
_README: Final = "README.md"
_LEDGER: Final = "run.gristmill"
_HEADING: Final = "# Made by `gristmill demo`\n"
_TEXT: Final = f"""{_HEADING}
The next `gristmill demo` replaces what is in `mill/`, `captures/`, `{_LEDGER}` and `rows/`.

- `mill/`: where an agent worked while its model calls were captured.
- `captures/`: four rollouts recorded from a real engine, a folder each: the calls, and what the harness returned.
- `{_LEDGER}`: the ledger, one file: calls that were captured live, and the recordings that were imported.
- `rows/`: the training rows as Parquet, the rollouts that were rejected (none), and the manifest that
  `gristmill verify` checks.
"""


class _Captured(NamedTuple):
    """The rollout that was captured live."""

    rollout_id: str
    calls: int
    sampled_tokens: int
    reward: float


class _Done(NamedTuple):
    """What the demo did."""

    captured: _Captured
    imported: Counted
    selections: list[Selected]
    comparison: Comparison
    flips: Compared
    explanation: Explanation
    manifest: Manifest
    losses: tuple[str, ...]
    findings: list[Finding]
    funnel: Funnel
    checked: str


@click.command("demo")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path(_DEFAULT_FOLDER),
    metavar="DIR",
    show_default=True,
    help="Folder for the captures and the rows; an earlier demo's is replaced.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(*, out: Path, as_json: bool) -> int:
    """Do the main job on an agent that runs now, and on rollouts recorded from a real engine.

    Capture, import, select, compare, explain, export, verify. No GPU and no network: the engine is a scripted one.
    """
    from gristmill.service.packages import packages_of

    with packages_of("engine", "gateway"):
        # Before anything is made: what comes later needs all of them.
        for module in ("scripted", "service.server"):
            importlib.import_module(f"gristmill.{module}")

    _prepare(out)
    done = _run(out)
    if as_json:
        _write_json(out, done)
    else:
        _tell(out, done)
    return DATA_FAILED if done.findings else 0


def _prepare(out: Path) -> None:
    """Make the folder, and put the recordings into it."""
    from gristmill.demo import recordings

    readme = out / _README
    if out.exists() and any(out.iterdir()):
        if not readme.is_file() or not readme.read_bytes().startswith(_HEADING.encode()):
            raise ExportError(
                f"expected a new folder or an earlier demo's, {out} holds other files",
                code=Code.OUTPUT_EXISTS,
                where=str(out),
                hint="name another folder with --out",
            )
        for name in ("mill", "captures", "rows"):
            shutil.rmtree(out / name, ignore_errors=True)
        for file in out.glob(f"{_LEDGER}*"):
            file.unlink()
    out.mkdir(parents=True, exist_ok=True)
    # First, so that a demo that was interrupted can be replaced too.
    readme.write_text(_TEXT, encoding="utf-8")
    _copy(recordings(), out / "captures")


def _copy(source: Traversable, target: Path) -> None:
    target.mkdir()
    for entry in source.iterdir():
        if entry.is_dir():
            _copy(entry, target / entry.name)
        else:
            (target / entry.name).write_bytes(entry.read_bytes())


def _capture(out: Path) -> _Captured:
    """Run the agent of this package through a gateway, as one rollout of the ledger."""
    from gristmill.demo.agent import mend_the_mill, prepare
    from gristmill.scripted import ScriptedEngine
    from gristmill.service.rollout import rollout

    prepare(out / "mill")
    settings = {"min_free_bytes": 0, "log_level": "error"}
    with (
        ScriptedEngine("demo").serve() as engine,
        rollout(ledger=out / _LEDGER, upstream=engine, rollout_id=_SHOWN, group_id="live", settings=settings) as live,
    ):
        finished = mend_the_mill(live.openai_base_url, live.key, out / "mill")
        funnel = live.finish(finished.result, finished.reward).funnel
    return _Captured(_SHOWN, funnel.captured_calls, funnel.captured_tokens, finished.reward)


def _choices() -> tuple[Choice, Choice]:
    return Choice(), Choice(_OTHER_POLICY)


def _run(out: Path) -> _Done:
    from gristmill.cli.diff import Comparison, compare
    from gristmill.cli.explain import explain_one
    from gristmill.cli.export import write_export
    from gristmill.cli.funnel import Tally
    from gristmill.cli.importing import bring_in
    from gristmill.cli.select import selected
    from gristmill.cli.verify import Checked, findings
    from gristmill.export import FolderCheck
    from gristmill.export.formats import loss_lines
    from gristmill.reconstruction import RowMode

    live = _capture(out)
    imported = bring_in(Captures((out / "captures",)), out / _LEDGER)
    captures, choices, comparison = Captures((out / _LEDGER,)), _choices(), Comparison()
    selections = [selected(attempt, choices[0]) for attempt in captures]
    flips = {attempt.capture.rollout_id: compare(attempt, choices, comparison) for attempt in captures}
    shown = next(attempt for attempt in captures if attempt.capture.rollout_id == _SHOWN)
    explanation = explain_one(shown, choices[0], _retry_of(selections))
    if explanation is None:
        raise InternalError(f"expected the repeated call in {_SHOWN}, it is not there")
    manifest = write_export(captures, choices[0], "parquet", out / "rows", mode=RowMode.MERGED)
    tally, checked = Tally(), Checked(manifest=True)
    found = list(findings(captures, choices[0], FolderCheck(out / "rows"), tally, checked))
    told = checked.text()
    losses = loss_lines(manifest)
    return _Done(
        live, imported, selections, comparison, flips[_SHOWN], explanation, manifest, losses, found, tally.funnel, told
    )


def _retry_of(selections: list[Selected]) -> str:
    """Name the call whose request was asked again."""
    made = next(made for made in selections if made.outcome.rollout_id == _SHOWN)
    return next(
        (verdict.model_call_id for verdict in made.outcome.verdicts if verdict.code is Code.RETRY_SUPERSEDED),
        "(no call was repeated)",
    )


def _write_json(out: Path, done: _Done) -> None:
    import json

    from gristmill.cli.diff import comparison_json
    from gristmill.cli.document import json_text
    from gristmill.cli.explain import explanation_json
    from gristmill.cli.funnel import funnel_json
    from gristmill.cli.verify import finding_json
    from gristmill.selection import Rejected

    document: dict[str, Any] = {
        "folder": str(out),
        "ledger": str(out / _LEDGER),
        "captured": done.captured._asdict(),
        "imported": msgspec.to_builtins(done.imported),
        "selected": [
            {
                "rollout_id": made.outcome.rollout_id,
                "calls": list(made.outcome.calls),
                "terminal_call_id": made.outcome.terminal_call_id,
            }
            for made in done.selections
            if not isinstance(made.outcome, Rejected)
        ],
        "diff": comparison_json(_choices(), done.comparison),
        "explained": explanation_json(done.explanation),
        "manifest": json.loads(done.manifest.encode()),
        "losses": list(done.losses),
        "findings": [finding_json(finding) for finding in done.findings],
        "funnel": funnel_json(done.funnel),
    }
    sys.stdout.write(json_text(document) + "\n")


def _tell(out: Path, done: _Done) -> None:
    import shlex

    from gristmill.cli.diff import show_compared, show_table
    from gristmill.cli.plural import counted
    from gristmill.cli.rows import counts_text
    from gristmill.cli.screen import remark, show, show_whole, words

    imported = done.imported
    live = done.captured
    show(words(f"Gristmill on an agent that runs now, and {imported.added} rollouts recorded from a real engine"), "")
    _head("1 capture", "an agent mends a mill; every model call it makes goes through a gateway into a ledger")
    told = f"{counted(live.calls, 'call')}, {live.sampled_tokens:,} sampled tokens, reward {live.reward:g}"
    show_whole(words(f"{live.rollout_id}  {told}"), "")
    _head("2 import", "rollouts that were captured elsewhere, with the tokens as the engine sampled them")
    told = f"{counted(imported.added, 'rollout')}, {counted(imported.calls, 'call')}"
    show_whole(words(f"{out / _LEDGER}  {told}"), "")
    _head("3 select", "which captured calls earned the reward, proved from what the harness returned")
    _tell_selections(done.selections)
    _head("4 diff", "what another policy would decide")
    show_compared(done.flips)
    show_table(_choices(), done.comparison)
    show("")
    _head("5 explain", "why the call whose reply broke off, and was asked for again, is not trained")
    show(words(done.explanation.text), "")
    _head("6 export", "every selected token once, on the context and with the log-probability it was sampled with")
    for entry in done.manifest.files:
        show_whole(words(f"{out / 'rows' / entry.name}  {counted(entry.rows, 'record')}"))
    show(*(words(f"loss report: {loss}", "dim") for loss in done.losses), "")
    _head("7 verify", "rows, manifest and ledger, each proved against the others")
    for finding in done.findings:
        show(words(f"{finding.code} at {finding.where}: {finding.message}", "red"))
    told = counted(len(done.findings), "finding") if done.findings else "nothing found"
    show(words(f"checked {done.checked}: {told}"), "")
    counts = counts_text(done.funnel, done.manifest.forks, done.manifest.rejected)
    show(*(words(line, "bold" if number == 0 else "") for number, line in enumerate(counts)))
    show_whole(words(f"files: {out / 'captures'}, {out / _LEDGER}, {out / 'rows'}"))
    remark("next", shlex.join([_program(), "show", str(out / _LEDGER), _SHOWN]))


def _program() -> str:
    """Give the command as it can be given again: where it is not on the PATH, as it was started."""
    started = Path(sys.argv[0])
    if shutil.which("gristmill") is not None or started.name != "gristmill" or not started.is_file():
        return "gristmill"
    here = Path.cwd()
    return str(started.relative_to(here) if started.is_relative_to(here) else started)


def _tell_selections(selections: list[Selected]) -> None:
    from gristmill.cli.screen import show, words
    from gristmill.cli.select import show_outcome
    from gristmill.selection import Rejected

    for made in selections:
        if made.outcome.rollout_id == _SHOWN:
            show_outcome(made)
    for made in selections:
        outcome = made.outcome
        if outcome.rollout_id != _SHOWN and not isinstance(outcome, Rejected):
            show(words(f"{outcome.rollout_id}  {len(outcome.calls)} of {len(outcome.verdicts)} calls"))
    show("")


def _head(name: str, what: str) -> None:
    from rich.text import Text

    from gristmill.cli.screen import show

    show(Text.assemble((name, "bold"), f"  {what}"))
