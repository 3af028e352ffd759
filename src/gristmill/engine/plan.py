"""Which partitions a build makes, and which of them are there already.

Invariant: a partition that is there is passed over only if it was made from the same inputs in the same way and its
files are there; any other is refused before anything is written, unless it is to be replaced.

Not here: making them (partition), and adding them up (summary).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

import msgspec

from gristmill.archive import ArchiveReader, Place
from gristmill.archive.attempt_rows import RowValues
from gristmill.archive.place import MANIFEST_NAME
from gristmill.credit import AdvantageKind, Advantages, Facts, Groups, GroupTotals, facts_of, totals_of
from gristmill.engine.job import BuildJob, PartTask, Stamp, part_folder, read_stamp, run_folder
from gristmill.engine.manifests import rows_manifest
from gristmill.errors import Code, DecodeError, ExportError
from gristmill.records import Result

__all__ = ["Plan", "Planned", "make_plan", "part_tasks", "written_parts"]

_RUN, _PART = "run=", "part="
_RESULTS: Final = ("rollout_id", "attempt", "result")
_decode_result: Final = msgspec.msgpack.Decoder(Result).decode


class Plan(NamedTuple):
    """The partitions of a build, in the order of the archive.

    Attributes:
        tasks: all of them.
        todo: those that have to be made.
    """

    tasks: tuple[PartTask, ...]
    todo: tuple[PartTask, ...]


class Planned(NamedTuple):
    """The partitions that rows of an archive have, and how its groups did."""

    tasks: tuple[PartTask, ...]
    groups: GroupTotals


def part_tasks(archive: ArchiveReader, advantage: AdvantageKind | None) -> Planned:
    """Read the results of an archive, without histories and tokens, and give the partitions that its rows have.

    Args:
        archive: that is open.
        advantage: which advantages rows carry.

    Raises:
        DecodeError: `file_unreadable`; `file_malformed`: an attempt stands in two places; `manifest_differs`: results
            are not what was archived, and advantages of other partitions depend on them.
        ConfigError: `attempt_differs`.
    """
    archive.index()
    groups = Groups()
    tasks: list[PartTask] = []
    named: list[set[str]] = []
    for number, part in enumerate(archive.parts):
        own = set[str]()
        with archive.open_part(number) as read:
            for facts in map(_facts, read.rows(_RESULTS)):
                groups.add(facts)
                if facts.group_id is not None:
                    own.add(facts.group_id)
            tasks.append(PartTask(partition=part.partition, part=part.part, files=part.files, attempts=len(read)))
        named.append(own)
    if advantage is not None:
        made = groups.advantages(advantage)
        tasks = [
            msgspec.structs.replace(task, advantages=_of_groups(made, own))
            for task, own in zip(tasks, named, strict=True)
        ]
    return Planned(tuple(tasks), totals_of(groups.statistics(), groups.ungrouped))


def _of_groups(made: Advantages, own: Collection[str]) -> Advantages:
    """Take what a part needs of the advantages of the whole archive."""
    return Advantages(made.note, {group: made.groups[group] for group in sorted(own) if group in made.groups})


def _facts(row: RowValues) -> Facts:
    """Read what counts of an attempt; one that cannot be read counts for nothing, and is refused in its turn."""
    result = Result()
    if row["result"] is not None:
        try:
            result = _decode_result(row["result"])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            result = Result()
    return facts_of(row["rollout_id"], row["attempt"], result)


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
