"""Which partitions a build makes, and which of them are there already.

Invariant: a partition that is there is passed over only if it was made from the same inputs in the same way and its
files are there; any other is refused before anything is written, unless it is to be replaced.

Not here: making them (partition), and adding them up (summary).
"""

from __future__ import annotations

from typing import NamedTuple

from gristmill.archive import ArchiveReader, Place
from gristmill.archive.columns import ATTEMPTS
from gristmill.archive.place import MANIFEST_NAME
from gristmill.engine.job import BuildJob, PartTask, Stamp, part_folder, read_stamp, run_folder
from gristmill.engine.manifests import rows_manifest
from gristmill.errors import Code, DecodeError, ExportError

__all__ = ["Plan", "make_plan", "part_tasks", "written_parts"]

_RUN, _PART = "run=", "part="


class Plan(NamedTuple):
    """The partitions of a build, in the order of the archive.

    Attributes:
        tasks: all of them.
        todo: those that have to be made.
    """

    tasks: tuple[PartTask, ...]
    todo: tuple[PartTask, ...]


def part_tasks(archive: ArchiveReader) -> tuple[PartTask, ...]:
    """Give the partitions that rows of an archive have.

    Raises:
        DecodeError: `file_unreadable`; `file_malformed`: an attempt stands in two places.
    """
    archive.index()
    tasks: list[PartTask] = []
    for part in archive.parts:
        entry = part.manifest.file(f"{ATTEMPTS.name}-{part.part:05d}.parquet")
        tasks.append(PartTask(partition=part.partition, part=part.part, files=part.files, attempts=entry.rows))
    return tuple(tasks)


def written_parts(rows: Place) -> list[str]:
    """Name the partitions of rows that are there, finished or not, below the folder of all rows."""
    runs = [name for name in rows.folders() if name.startswith(_RUN)]
    return [f"{run}/{part}" for run in runs for part in rows.inside(run).folders() if part.startswith(_PART)]


def make_plan(job: BuildJob, tasks: tuple[PartTask, ...], *, overwrite: bool) -> Plan:
    """Find out what there is to do.

    Args:
        job: of the build.
        tasks: its partitions.
        overwrite: replace what differs, and take away what does not belong to the build.

    Raises:
        ExportError: `output_exists`: a partition is there that was made otherwise, or belongs to another build;
            `manifest_differs`: one is there that is not whole any more.
        DecodeError: what is there cannot be read.
    """
    rows = job.place
    known = {task.name for task in tasks}
    for name in written_parts(rows):
        if name not in known:
            if not overwrite:
                raise _exists(name, "it is none of this archive")
            run, _, part = name.partition("/")
            rows.inside(run).remove(part)
    todo = [task for task in tasks if not _is_done(job, task, rows, overwrite)]
    return Plan(tasks, tuple(todo))


def _exists(name: str, why: str) -> ExportError:
    return ExportError(
        f"expected no other rows, {name} is there: {why}",
        code=Code.OUTPUT_EXISTS,
        where=name,
        hint="name another place for the rows, or replace them with --overwrite",
    )


def _is_done(job: BuildJob, task: PartTask, rows: Place, overwrite: bool) -> bool:
    place = rows.inside(run_folder(task.partition)).inside(part_folder(task.part))
    if place.size(MANIFEST_NAME) is None:
        return False
    try:
        found = read_stamp(place)
        entries = rows_manifest(place).files
    except DecodeError:
        if overwrite:
            return False
        raise
    differs = Stamp.of(job.options, task).differences(found)
    if differs:
        if overwrite:
            return False
        raise _exists(task.name, f"made with other {', '.join(differs)}")
    for entry in entries:
        if place.size(entry.name) != entry.bytes:
            if overwrite:
                return False
            raise ExportError(
                f"expected {entry.bytes:,} bytes of {entry.name} as its manifest says, got another file or none",
                code=Code.MANIFEST_DIFFERS,
                where=place.path_of(entry.name),
                hint="replace the rows with --overwrite",
            )
    return True
