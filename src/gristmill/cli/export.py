"""`gristmill export`: training data in a format of your choice, with a manifest and a report of what the format lost.

JSON: `{"folder", "format", "manifest": {…} as in the file, "losses": [text], "bad_lines"}`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gristmill.cli.attempts import Attempt, Captures, takes_captures
from gristmill.cli.choice import Choice, takes_policy
from gristmill.cli.credit import advantage_lines, advantages_of, refuse_changed, takes_advantage
from gristmill.cli.failure import DATA_FAILED
from gristmill.cli.format import takes_format, takes_mode
from gristmill.cli.rows import refuse_file

if TYPE_CHECKING:
    from gristmill.export import Manifest
    from gristmill.pipeline import RebuiltRollout
    from gristmill.reconstruction import RowMode
    from gristmill.selection import Rejected, Selection

__all__ = ["command", "decide", "show_folder", "write_export"]


@click.command("export")
@takes_captures()
@takes_policy
@takes_format("parquet, jsonl (training rows) or messages (chat messages for SFT, from any endpoint).")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Folder that is written.")
@takes_mode
@takes_advantage
@click.option("--overwrite", is_flag=True, help="Replace what is in DIR.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(
    *,
    captures: Captures,
    choice: Choice,
    format_name: str,
    out: Path,
    mode: str,
    advantage: str | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Write training data in a format of your choice.

    DIR is written whole or not at all: records, rejected rollouts, and a manifest that `gristmill verify` checks. What
    the format drops or changes is told and stands in the manifest. Ends with exit code 1 if every rollout was rejected.
    """
    from gristmill.export.formats import loss_lines
    from gristmill.reconstruction import RowMode

    manifest = write_export(
        captures, choice, format_name, out, mode=RowMode(mode), advantage=advantage, overwrite=overwrite
    )
    losses = loss_lines(manifest)
    if as_json:
        import json

        from gristmill.cli.document import json_text

        told = {"folder": str(out), "format": format_name, "manifest": json.loads(manifest.encode())}
        rest = {"losses": list(losses), "bad_lines": captures.bad_lines}
        sys.stdout.write(json_text({**told, **rest}) + "\n")
    else:
        show_folder(out, manifest, losses, captures, choice)
    return DATA_FAILED if not manifest.rollouts.selected else 0


def write_export(
    captures: Captures,
    choice: Choice,
    format_name: str,
    folder: Path,
    *,
    mode: RowMode,
    advantage: str | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write all attempts into a folder; where advantages are computed, results are read before.

    Raises:
        ConfigError: `option_invalid`, the format carries no advantages.
        ExportError: `output_exists`, `file_unreadable`, `attempt_differs`, or as the format says.
    """
    from gristmill.cli.progress import progress
    from gristmill.export.formats import FORMATS, open_export

    refuse_file(folder)
    choice.load()
    needs = FORMATS[format_name].needs
    captures.exchanges = captures.exchanges or FORMATS[format_name].exchanges
    choice.advantages = None if advantage is None else advantages_of(captures, advantage)
    with (
        open_export(
            format_name,
            folder,
            policy=choice.policy,
            options=choice.options,
            train_model=choice.train_model,
            mode=mode,
            overwrite=overwrite,
            advantage=None if choice.advantages is None else choice.advantages.note,
            inputs=captures.files(),
        ) as writer,
        progress("rollouts") as step,
    ):
        for attempt in captures:
            writer.add(attempt.capture, attempt.result, decide(attempt, choice, needs, mode))
            step(1)
        refuse_changed(captures, choice.advantages, writer.rewards)
        manifest: Manifest = writer.finish()
    return manifest


def decide(attempt: Attempt, choice: Choice, needs: str, mode: RowMode) -> RebuiltRollout | Selection | Rejected:
    """Make what a format needs of an attempt: rows, or only a selection."""
    return choice.rebuild(attempt, mode) if needs == "rows" else choice.select(attempt)


def show_folder(folder: Path, manifest: Manifest, losses: tuple[str, ...], captures: Captures, choice: Choice) -> None:
    """Say what was written, what the format lost, and the counts."""
    import shlex

    from gristmill.cli.plural import counted
    from gristmill.cli.rows import counts_text
    from gristmill.cli.screen import remark, show, show_whole, words

    for entry in manifest.files:
        show_whole(words(f"{folder / entry.name}  {counted(entry.rows, 'record')}  {counted(entry.bytes, 'byte')}"))
    for loss in losses:
        show(words(f"loss report: {loss}", "dim"))
    counts = counts_text(manifest.funnel, manifest.forks, manifest.rejected)
    show(*(words(line) for line in (*counts, *advantage_lines(manifest.advantage))))
    arguments = [*map(str, captures.paths), str(folder), *captures.arguments(), *choice.arguments()]
    remark("next", shlex.join(["gristmill", "verify", *arguments]))
