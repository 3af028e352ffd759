"""`gristmill demo`: the main job on rollouts recorded from a real engine, in a folder to look around in.

JSON: `{"folder", "selected": [{rollout_id, calls, terminal_call_id}], "explained": {…} as of `explain`, "manifest":
{…} as in the file, "findings": […] as of `verify`, "funnel"}`.

Invariant: nothing is replaced but what an earlier demo made.
"""

from __future__ import annotations

import shutil
import sys
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from gristmill.cli.attempts import Attempt, Captures
from gristmill.cli.choice import Choice
from gristmill.cli.failure import DATA_FAILED
from gristmill.errors import Code, ExportError, InternalError

if TYPE_CHECKING:
    from gristmill.cli.prose import Explanation
    from gristmill.export import Manifest
    from gristmill.pipeline import Funnel
    from gristmill.reconstruction import Finding
    from gristmill.selection import Rejected, Selection

__all__ = ["command"]

_SHOWN: Final = "mend-the-mill"
_RETRY: Final = "c06"
_DEFAULT_FOLDER: Final = "gristmill-demo"
_README: Final = "README.md"
_HEADING: Final = "# Made by `gristmill demo`\n"
_TEXT: Final = f"""{_HEADING}
The next `gristmill demo` replaces what is in `captures/` and `rows/`.

- `captures/`: four rollouts recorded from a real engine, a folder each: the calls, and what the harness returned.
- `rows/`: the training rows, the rollouts that were rejected (none), and the manifest that `gristmill verify` checks.
"""


class _Done(NamedTuple):
    """What the demo did."""

    selections: list[tuple[Attempt, Selection | Rejected]]
    explanation: Explanation
    manifest: Manifest
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
    """Do the main job on rollouts recorded from a real engine: select, explain, rebuild, verify."""
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
        for name in ("captures", "rows"):
            shutil.rmtree(out / name, ignore_errors=True)
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


def _run(out: Path) -> _Done:
    from gristmill.cli.explain import explain_one
    from gristmill.cli.funnel import Tally
    from gristmill.cli.rows import write_folder
    from gristmill.cli.verify import Checked, findings
    from gristmill.export import FolderCheck
    from gristmill.reconstruction import RowMode

    captures, choice = Captures((out / "captures",)), Choice()
    selections = [(attempt, choice.select(attempt)) for attempt in captures]
    shown = next(attempt for attempt, _ in selections if attempt.capture.rollout_id == _SHOWN)
    explanation = explain_one(shown, choice, _RETRY)
    if explanation is None:
        raise InternalError(f"expected call {_RETRY} in the recording {_SHOWN}, it is not there")
    manifest = write_folder(captures, choice, RowMode.MERGED, out / "rows", overwrite=False)
    tally, checked = Tally(), Checked(manifest=True)
    found = list(findings(captures, choice, FolderCheck(out / "rows"), tally, checked))
    told = f"{checked.rollouts} rollouts, {checked.calls} calls, {checked.rows} rows and their manifest"
    return _Done(selections, explanation, manifest, found, tally.funnel, told)


def _write_json(out: Path, done: _Done) -> None:
    import json

    from gristmill.cli.document import json_text
    from gristmill.cli.explain import explanation_json
    from gristmill.cli.funnel import funnel_json
    from gristmill.cli.verify import finding_json
    from gristmill.selection import Rejected

    document: dict[str, Any] = {
        "folder": str(out),
        "selected": [
            {
                "rollout_id": outcome.rollout_id,
                "calls": list(outcome.calls),
                "terminal_call_id": outcome.terminal_call_id,
            }
            for _, outcome in done.selections
            if not isinstance(outcome, Rejected)
        ],
        "explained": explanation_json(done.explanation),
        "manifest": json.loads(done.manifest.encode()),
        "findings": [finding_json(finding) for finding in done.findings],
        "funnel": funnel_json(done.funnel),
    }
    sys.stdout.write(json_text(document) + "\n")


def _tell(out: Path, done: _Done) -> None:
    import shlex

    from gristmill.cli.rows import counts_text
    from gristmill.cli.screen import remark, show, words
    from gristmill.cli.select import show_outcome
    from gristmill.selection import Rejected

    rollouts = len(done.selections)
    show(words(f"Gristmill on {rollouts} agent rollouts recorded from a real engine"), "")
    _head("1 select", "which captured calls earned the reward, proved from what the harness returned")
    shown = [(attempt, outcome) for attempt, outcome in done.selections if outcome.rollout_id == _SHOWN]
    for attempt, outcome in shown:
        show_outcome(attempt, outcome)
    for _, outcome in done.selections:
        if outcome.rollout_id != _SHOWN and not isinstance(outcome, Rejected):
            show(words(f"{outcome.rollout_id}  {len(outcome.calls)} of {len(outcome.verdicts)} calls"))
    show("")
    _head("2 explain", f"why the retry {_RETRY}, whose answer was thrown away, is not trained")
    show(words(done.explanation.text), "")
    _head("3 rows", "every selected token once, on the context and with the log-probability it was sampled with")
    show(*(words(f"{out / 'rows' / entry.name}  {entry.rows} lines") for entry in done.manifest.files), "")
    _head("4 verify", "rows, manifest and captures, each proved against the others")
    for finding in done.findings:
        show(words(f"{finding.code} at {finding.where}: {finding.message}", "red"))
    told = f"{len(done.findings)} findings" if done.findings else "nothing found"
    show(words(f"checked {done.checked}: {told}"), "")
    counts = counts_text(done.funnel, done.manifest.forks, done.manifest.rejected)
    show(*(words(line, "bold" if number == 0 else "") for number, line in enumerate(counts)))
    show(words(f"files: {out / 'captures'}, {out / 'rows'}"))
    remark("next", shlex.join(["gristmill", "explain", str(out / "captures" / _SHOWN)]))


def _head(name: str, what: str) -> None:
    from rich.text import Text

    from gristmill.cli.screen import show

    show(Text.assemble((name, "bold"), f"  {what}"))
