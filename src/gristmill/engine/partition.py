"""One partition of rows, made of one part of an archive: the function that every engine runs.

Invariant: it depends on its job and its task only, and leaves a partition that is whole or none. Memory is bounded by a
row group of the archive, one attempt, and a row group of the rows.

Not here: which partitions there are (plan), and where this runs (local, ray_data).
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

import msgspec

from gristmill.archive import Place, place_of
from gristmill.archive.manifest import PARTITION_PREFIX
from gristmill.archive.parquet_part import PartReader
from gristmill.archive.place import writing
from gristmill.archive.reader import check_file
from gristmill.engine.job import STAMP_NAME, BuildJob, PartTask, Stamp, part_folder, run_folder
from gristmill.engine.outcome import decided, refused_for
from gristmill.errors import Code, DecodeError, ExportError, GristmillError, LedgerError
from gristmill.export import open_export

__all__ = ["PartReport", "build_part", "opened_part", "raise_failure", "report_of"]


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a partition ended; it crosses processes.

    Attributes:
        name: folder of the partition.
        attempts: of its part.
        code, message, where, hint: of the error that ended it, None where it is there.
    """

    name: str
    attempts: int
    code: Code | None = None
    message: str = ""
    where: str | None = None
    hint: str | None = None


@contextlib.contextmanager
def opened_part(archive: str, task: PartTask) -> Generator[PartReader]:
    """Open a part whose files are as the manifest said when the task was made.

    Raises:
        DecodeError: `file_unreadable`, `file_malformed`, `manifest_differs`.
    """
    folder = place_of(archive)
    own = f"{PARTITION_PREFIX}{task.partition}"
    if folder.name.rstrip("/").rpartition("/")[2] != own:
        folder = folder.inside(own)
    with folder.local([entry.name for entry in task.files]) as held:
        local = place_of(held)
        for entry in task.files:
            check_file(local, entry)
        with PartReader(local, task.part) as part:
            yield part


def build_part(job: BuildJob, task: PartTask) -> PartReport:
    """Make one partition of rows, in the place of what is there.

    Raises:
        DecodeError: `file_unreadable`, `file_malformed`, `manifest_differs`: the part cannot be read.
        ExportError: `file_unreadable`: the rows cannot be written.
        PolicyError, ConfigError: the policy cannot be loaded.
    """
    options = job.options
    rows = job.place.inside(run_folder(task.partition))
    with (
        opened_part(job.archive, task) as part,
        rows.publishing(part_folder(task.part)) as publication,
    ):
        with open_export(
            options.format,
            publication.folder,
            policy=options.policy,
            options=options.options,
            train_model=options.train_model,
            mode=options.mode,
            advantage=None if task.advantages is None else task.advantages.note,
        ) as writer:
            for capture, result, outcome in decided(options, part, task.advantages):
                try:
                    writer.add(capture, result, outcome)
                except (DecodeError, LedgerError) as error:
                    # What was captured is decoded only now, and nothing of it has been written.
                    writer.add(capture, result, refused_for(options, capture, error))
            writer.finish()
        _stamp(publication.folder, Stamp.of(options, task), rows)
        publication.finish()
    return PartReport(name=task.name, attempts=task.attempts)


def _stamp(folder: Path, stamp: Stamp, rows: Place) -> None:
    with writing(rows.name):
        (folder / STAMP_NAME).write_bytes(stamp.encode())


def report_of(job: BuildJob, task: PartTask) -> PartReport:
    """Make one partition of rows in another process: an error is told, since not every error can be sent."""
    try:
        job.prepare()
        return build_part(job, task)
    except GristmillError as error:
        told = error
    except MemoryError:
        told = ExportError(
            "expected more memory, there is none left",
            code=Code.MEMORY_EXHAUSTED,
            hint="make fewer partitions at a time (--jobs), or raise the limit; the same command goes on",
        )
    except OSError as error:
        told = ExportError(f"cannot read or write: {error.strerror or error}", where=error.filename)
    return PartReport(
        name=task.name,
        attempts=task.attempts,
        code=told.code,
        message=told.message,
        where=told.where,
        hint=told.hint,
    )


def raise_failure(report: PartReport) -> None:
    """Raise the error that ended a partition, if one did.

    Raises:
        ExportError: of any code.
    """
    if report.code is not None:
        raise ExportError(
            f"partition {report.name}: {report.message}", code=report.code, where=report.where, hint=report.hint
        )
