"""A build: rows of a whole archive, partition by partition, on one machine or on many.

Invariant: whatever the engine, however many processes and however often it was stopped, the same archive and options
give the same partitions, byte for byte. The summary is written when all of them are there.

Not here: one partition (partition), engines (local, ray_data).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from enum import StrEnum

from gristmill.archive import ArchiveReader, as_url, is_archive
from gristmill.archive.local import sweep_work
from gristmill.engine.job import BuildJob, BuildOptions
from gristmill.engine.local import run_local
from gristmill.engine.partition import PartReport, raise_failure
from gristmill.engine.plan import Plan, make_plan, part_tasks
from gristmill.engine.summary import SUMMARY_NAME, BuildSummary, add_up
from gristmill.errors import Code, ConfigError, ExportError
from gristmill.export.formats import FORMATS, Needs

__all__ = ["Engine", "build", "make_job"]


class Engine(StrEnum):
    """Where partitions are made."""

    LOCAL = "local"
    RAY = "ray"


def make_job(
    archive: str | os.PathLike[str], rows: str | os.PathLike[str], options: BuildOptions, import_paths: tuple[str, ...]
) -> BuildJob:
    """Name the places of a build so that other processes understand them."""
    return BuildJob(archive=_absolute(archive), rows=_absolute(rows), options=options, import_paths=import_paths)


def _absolute(given: str | os.PathLike[str]) -> str:
    return as_url(given) or os.path.abspath(given)


def build(  # noqa: PLR0913 - one call makes all of a build
    archive: str | os.PathLike[str],
    rows: str | os.PathLike[str],
    options: BuildOptions | None = None,
    *,
    engine: Engine = Engine.LOCAL,
    jobs: int = 1,
    apart: bool = False,
    overwrite: bool = False,
    import_paths: tuple[str, ...] = (),
    on_plan: Callable[[Plan], None] = lambda plan: None,
    on_part: Callable[[PartReport], None] = lambda report: None,
) -> BuildSummary:
    """Make the rows of an archive; partitions that are there already are passed over.

    Args:
        archive: path or URL of the data set, or of one of its partitions.
        rows: path or URL of the folder that the rows go to.
        options: how rows are made.
        engine: where.
        jobs: processes of `local`, or at most so many partitions at a time on Ray.
        apart: with one process of `local`, take another than this: a policy of one's own may end the one it runs in.
        overwrite: replace rows that were made otherwise.
        import_paths: folders in which a policy of one's own may lie.
        on_plan: is told what there is to do.
        on_part: is told of each partition that was made.

    Raises:
        DecodeError: the archive, or what is there already, cannot be read.
        ConfigError, PolicyError: the policy cannot be loaded, or the engine is not installed.
        ExportError: `output_exists`, `manifest_differs` as `make_plan`; `worker_lost`; `file_unreadable`. Partitions
            that were finished stay.
    """
    job = make_job(archive, rows, options or BuildOptions(), import_paths)
    if is_archive(job.rows):
        raise ExportError(
            f"expected a place for rows, {job.place.name} is an archive",
            code=Code.OUTPUT_EXISTS,
            where=job.place.name,
            hint="name another folder for the rows",
        )
    target = FORMATS[job.options.format]
    if job.options.advantage is not None and target.needs is Needs.SELECTION:
        raise ConfigError(
            f"expected no advantages for format {target.name!r}, which has no place for them", where="--advantage"
        )
    job.prepare()
    job.options.load()
    with ArchiveReader(job.archive) as reader:
        planned = part_tasks(reader, job.options.advantage)
        plan = make_plan(job, planned.tasks, overwrite=overwrite)
    on_plan(plan)
    place = job.place
    if plan.todo:
        # What it says is not so any more, and a stopped build has none.
        place.remove(SUMMARY_NAME)
        for run in {task.partition for task in plan.tasks}:
            sweep_work(place.inside(f"run={run}"))
    if engine is Engine.RAY and plan.todo:
        from gristmill.engine.ray_data import run_ray  # noqa: PLC0415 - an extra

        reports = run_ray(job, plan.todo, jobs)
    else:
        reports = run_local(job, plan.todo, jobs, apart=apart)
    with contextlib.closing(reports):
        for report in reports:
            raise_failure(report)
            on_part(report)
    summary = add_up(place, job.options, plan.tasks, planned.groups)
    place.write(SUMMARY_NAME, summary.encode())
    return summary
