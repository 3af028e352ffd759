"""`--from` and `--completed`: captures that other programs wrote, read attempt by attempt.

Not here: the formats (gristmill.interop), which paths are read so (sources).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from gristmill.cli.nearest import OneOf

if TYPE_CHECKING:
    from gristmill.captures import CaptureFile
    from gristmill.cli.sources import Source

__all__ = ["FOREIGN_OPTIONS", "foreign_parts"]


def _importers() -> dict[str, str | None]:
    from gristmill.interop import IMPORTERS

    return {name: made.title for name, made in IMPORTERS.items()}


FOREIGN_OPTIONS: Final[tuple[Callable[[Any], Any], ...]] = (
    click.option(
        "--from",
        "foreign_format",
        type=OneOf("format", _importers),
        metavar="FORMAT",
        help="PATHS are captures of another program: atif, harbor, rllm, request-response, …",
    ),
    click.option(
        "--completed",
        is_flag=True,
        help="State that calls finished of which such a format says neither status nor finish reason.",
    ),
)


def foreign_parts(source: Source, losses: Counter[str], *, skip_bad: bool, completed: bool) -> Iterator[CaptureFile]:
    """Read foreign captures, each attempt as a part of its own; what could not be carried is told with the last part.

    Args:
        source: the path and its format.
        losses: counts up what could not be carried.
        skip_bad, completed: as `Report` has them.

    Raises:
        DecodeError: as the importer.
    """
    from gristmill.captures import CaptureFile, Note
    from gristmill.interop import Report, importer_named

    importer = importer_named(source.format_name or "")
    report = Report(skip_bad=skip_bad, completed=completed)
    told = 0
    for rollout in importer.read(source.file, report):
        key = (rollout.capture.rollout_id, rollout.capture.attempt)
        notes, bad = tuple(report.notes), tuple(report.bad[told:])
        report.notes.clear()
        told = len(report.bad)
        yield CaptureFile({key: rollout}, notes, bad)
    losses.update(report.losses)
    lost = [
        Note(importer.name, f"{name} {count:,}: {importer.losses[name]}")
        for name, count in sorted(report.losses.items())
    ]
    yield CaptureFile({}, (*report.notes, *lost), tuple(report.bad[told:]))
