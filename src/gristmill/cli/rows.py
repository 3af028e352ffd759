"""`gristmill rows`: rebuild the training rows of the selected calls.

With `--out` a folder is written: `rows.jsonl`, `rejected.jsonl`, `manifest.json` (see the README of
`gristmill.export`); JSON: `{"folder", "manifest"}`, the manifest as in the file. Without `--out` rows are printed,
one JSON line a row, and a rejected rollout is told on standard error; with `--json` then one document: `{"rows":
[…], "rejected": [{rollout_id, attempt, code, where, message}], "funnel", "forks", "bad_lines"}`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gristmill.cli.attempts import Captures, takes_captures
from gristmill.cli.choice import Choice, takes_policy
from gristmill.cli.credit import advantage_lines, advantages_of, refuse_changed, takes_advantage
from gristmill.cli.failure import DATA_FAILED
from gristmill.cli.format import takes_mode
from gristmill.errors import Code, ConfigError, ExportError

if TYPE_CHECKING:
    from gristmill.export import Manifest
    from gristmill.export.totals import Totals
    from gristmill.pipeline import Funnel, RebuiltRollout
    from gristmill.reconstruction import RowMode
    from gristmill.selection import Rejected

__all__ = ["command", "counts_text", "refuse_file", "write_folder"]


@click.command("rows")
@takes_captures()
@takes_policy
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Write a folder of rows.")
@takes_mode
@takes_advantage
@click.option("--overwrite", is_flag=True, help="Replace what is in DIR.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(
    *,
    captures: Captures,
    choice: Choice,
    out: Path | None,
    mode: str,
    advantage: str | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Rebuild the training rows of the selected calls.

    Without --out the rows go to standard output, one JSON line each. Ends with exit code 1 if every rollout was
    rejected.
    """
    from gristmill.reconstruction import RowMode

    if overwrite and out is None:
        raise ConfigError("--overwrite needs --out", code=Code.USAGE, where="--overwrite")
    choice.load()
    choice.advantages = None if advantage is None else advantages_of(captures, advantage)
    if out is None:
        totals = _print_rows(captures, choice, RowMode(mode), as_json)
        return DATA_FAILED if not totals.selected else 0
    manifest = write_folder(captures, choice, RowMode(mode), out, overwrite=overwrite)
    if as_json:
        import json

        from gristmill.cli.document import json_text

        sys.stdout.write(json_text({"folder": str(out), "manifest": json.loads(manifest.encode())}) + "\n")
    else:
        _show_folder(out, manifest, captures, choice)
    return DATA_FAILED if not manifest.rollouts.selected else 0


def write_folder(captures: Captures, choice: Choice, mode: RowMode, folder: Path, *, overwrite: bool) -> Manifest:
    """Write the rows of all attempts into a folder.

    Raises:
        ExportError: `output_exists`, `file_unreadable`.
    """
    from gristmill.export.formats import JSONL, open_export

    refuse_file(folder)
    with open_export(
        JSONL,
        folder,
        policy=choice.policy,
        options=choice.options,
        train_model=choice.train_model,
        mode=mode,
        overwrite=overwrite,
        advantage=None if choice.advantages is None else choice.advantages.note,
        inputs=captures.files(),
    ) as writer:
        for attempt in captures:
            writer.add(attempt.capture, attempt.result, choice.rebuild(attempt, mode))
        refuse_changed(captures, choice.advantages, writer.rewards)
        return writer.finish()


def refuse_file(folder: Path) -> None:
    """Refuse to write a folder where a file is.

    Raises:
        ExportError: `output_exists`.
    """
    if folder.exists() and not folder.is_dir():
        raise ExportError(
            f"expected a folder, {folder} is a file",
            code=Code.OUTPUT_EXISTS,
            where=str(folder),
            hint="name a new folder with --out; a file is never replaced",
        )


def _print_rows(captures: Captures, choice: Choice, mode: RowMode, as_json: bool) -> Totals:
    from gristmill.cli.document import Document
    from gristmill.cli.funnel import funnel_json
    from gristmill.cli.screen import remark
    from gristmill.export.totals import Totals
    from gristmill.selection import Rejected

    totals = Totals()
    rejected: list[dict[str, Any]] = []
    with Document("rows") as document:
        for attempt in captures:
            outcome = choice.rebuild(attempt, mode)
            totals.add(attempt.capture, outcome)
            if isinstance(outcome, Rejected):
                told = _refusal(outcome)
                if as_json:
                    rejected.append(told)
                else:
                    remark("rejected", f"{outcome.rollout_id}: {outcome.code} at {outcome.where}: {outcome.message}")
                continue
            for line in _lines(outcome):
                if as_json:
                    document.add_text(line)
                else:
                    sys.stdout.write(line + "\n")
        if as_json:
            rest = {"rejected": rejected, "funnel": funnel_json(totals.funnel), "forks": dict(totals.forks)}
            document.finish({**rest, "bad_lines": captures.bad_lines})
        else:
            for line in counts_text(totals.funnel, totals.forks, totals.codes):
                remark("rows", line)
    return totals


def _refusal(outcome: Rejected) -> dict[str, Any]:
    return {
        "rollout_id": outcome.rollout_id,
        "attempt": outcome.attempt,
        "code": str(outcome.code),
        "where": outcome.where,
        "message": outcome.message,
    }


def _lines(outcome: RebuiltRollout) -> Iterator[str]:
    """Give rows as ASCII JSON, so that nothing in them acts on a terminal."""
    from gristmill.export import encode_row

    for row in outcome.rows:
        text = encode_row(row).decode()
        yield text if text.isascii() and "\x7f" not in text else _ascii(text)


def _ascii(text: str) -> str:
    """Escape what is not ASCII; it only ever stands in JSON strings."""
    units = (character if " " <= character <= "~" else character.encode("utf-16-be").hex() for character in text)
    return "".join(
        unit if len(unit) == 1 else "".join(f"\\u{unit[at : at + 4]}" for at in range(0, len(unit), 4))
        for unit in units
    )


def counts_text(funnel: Funnel, forks: Mapping[str, int], codes: Mapping[str, int]) -> list[str]:
    """Say the funnel, the forks by cause and the refusals by code."""
    from gristmill.cli.funnel import funnel_text
    from gristmill.cli.screen import marks

    said = [funnel_text(funnel, marks().arrow, trained=True)]
    for what, counts in (("forks", forks), ("rejected", codes)):
        if counts:
            said.append(f"{what}: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    return said


def _show_folder(folder: Path, manifest: Manifest, captures: Captures, choice: Choice) -> None:
    import shlex

    from gristmill.cli.plural import counted
    from gristmill.cli.screen import remark, show, show_whole, words

    for entry in manifest.files:
        show_whole(words(f"{folder / entry.name}  {counted(entry.rows, 'line')}  {counted(entry.bytes, 'byte')}"))
    counts = counts_text(manifest.funnel, manifest.forks, manifest.rejected)
    show(*(words(line) for line in (*counts, *advantage_lines(manifest.advantage))))
    arguments = [*map(str, captures.paths), str(folder), *captures.arguments(), *choice.arguments()]
    remark("next", shlex.join(["gristmill", "verify", *arguments]))
