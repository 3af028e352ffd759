"""`gristmill build`: the rows of a whole archive, in several processes or on a Ray cluster.

JSON: `{"archive", "rows", "made", "there", "summary": {…} as in the file}`; `made` counts partitions of this run,
`there` those that were there already.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from gristmill.cli.choice import Choice, takes_policy
from gristmill.cli.credit import takes_advantage
from gristmill.cli.failure import DATA_FAILED
from gristmill.cli.format import takes_format, takes_mode

if TYPE_CHECKING:
    from gristmill.cli.progress import Step
    from gristmill.engine import BuildSummary
    from gristmill.engine.partition import PartReport
    from gristmill.engine.plan import Plan

__all__ = ["command"]


@click.command("build")
@click.argument("archive", metavar="ARCHIVE")
@click.argument("rows", metavar="ROWS")
@takes_policy
@takes_format("As of `export`: parquet, jsonl, messages, or the format of a trainer.")
@takes_mode
@takes_advantage
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Processes of this machine, or Ray Data: the cluster of RAY_ADDRESS, else an instance of this machine.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    metavar="N",
    default=os.cpu_count() or 1,
    show_default="all processors",
    help="Partitions that are made at a time.",
)
@click.option("--overwrite", is_flag=True, help="Replace rows that were made from other captures or otherwise.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(
    *,
    archive: str,
    rows: str,
    choice: Choice,
    format_name: str,
    mode: str,
    advantage: str | None,
    engine: str,
    jobs: int,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Make the rows of a whole archive, one partition for each of its parts.

    ARCHIVE is what `gristmill archive` wrote, ROWS a folder or a URL. A partition is there whole or not at all; one
    that is there already is passed over, so a build that was stopped goes on when run again. Refusals stand beside
    the rows, the counts of all partitions in summary.json. Ends with exit code 1 if every rollout was rejected.
    """
    from gristmill.credit import AdvantageKind
    from gristmill.engine import BuildOptions, Engine, build
    from gristmill.ledger.address import without_passwords
    from gristmill.reconstruction import RowMode

    options = BuildOptions(
        format=format_name,
        policy=choice.policy,
        options=choice.options,
        train_model=choice.train_model,
        mode=RowMode(mode),
        advantage=None if advantage is None else AdvantageKind(advantage),
    )
    watched = _Watched()
    try:
        summary = build(
            archive,
            rows,
            options,
            engine=Engine(engine),
            jobs=jobs,
            apart=":" in choice.policy,
            overwrite=overwrite,
            import_paths=(os.getcwd(),) if ":" in choice.policy else (),
            on_plan=watched.begin,
            on_part=watched.count,
        )
    finally:
        watched.end()
    archive, rows = without_passwords(archive), without_passwords(rows)
    if as_json:
        import json

        from gristmill.cli.document import json_text

        told = {"archive": archive, "rows": rows, "made": watched.made, "there": watched.there}
        sys.stdout.write(json_text({**told, "summary": json.loads(summary.encode())}) + "\n")
    else:
        _tell(archive, rows, choice, watched, summary)
    return DATA_FAILED if not summary.rollouts.selected else 0


class _Watched:
    """How far the build is."""

    def __init__(self) -> None:
        self.made = self.there = 0
        self._context: Any = None
        self._step: Step = lambda more: None

    def begin(self, plan: Plan) -> None:
        from gristmill.cli.progress import progress

        self.there = len(plan.tasks) - len(plan.todo)
        self._context = progress("rollouts", sum(task.attempts for task in plan.todo))
        self._step = self._context.__enter__()

    def count(self, report: PartReport) -> None:
        self.made += 1
        self._step(report.attempts)

    def end(self) -> None:
        if self._context is not None:
            self._context.__exit__(None, None, None)


def _tell(archive: str, rows: str, choice: Choice, watched: _Watched, summary: BuildSummary) -> None:
    import shlex

    from gristmill.cli.plural import counted
    from gristmill.cli.progress import bytes_text
    from gristmill.cli.rows import counts_text
    from gristmill.cli.screen import remark, show, show_whole, words

    some = "all" if watched.there == summary.partitions else f"{watched.there:,} of them"
    there = f", {some} there already" if watched.there else ""
    show_whole(words(f"{rows}: {counted(summary.partitions, 'partition')}{there}", "bold"))
    total = summary.rollouts.selected + summary.rollouts.rejected
    show(words(f"{counted(total, 'rollout')}, {counted(summary.records, 'record')}, {bytes_text(summary.bytes)}"))
    for loss in summary.losses:
        show(words(f"loss report: {loss.name} {loss.count:,}", "dim"))
    show(*(words(line) for line in counts_text(summary.funnel, summary.forks, summary.rejected)))
    own = choice.arguments() if ":" in choice.policy else []
    remark("next", shlex.join(["gristmill", "verify", archive, rows, *own]))
