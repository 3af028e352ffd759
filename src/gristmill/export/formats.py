"""The formats of an export: what each needs, what it loses, and one way to open all of them.

    with open_export("parquet", folder, policy=…, options=…, train_model=…, mode=…, overwrite=…) as writer:
        for each attempt: writer.add(capture, result, outcome)     # the refusal of the format itself, or None
        manifest = writer.finish()
    for line in loss_lines(manifest): …

Invariant: a format either carries a fact of a rollout or names it in its loss statements; what it cannot express it
refuses, as a `Rejected` that is written beside the records. The manifest holds the counted losses.

Not here: how files are written (writer and what it names), and what a trainer's format holds (trainers).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from gristmill.credit import AdvantageNote
from gristmill.errors import Code, ConfigError
from gristmill.export.folder import Folder, writing
from gristmill.export.jsonl import JSONL, JsonlRows
from gristmill.export.manifest import Manifest
from gristmill.export.messages import MessageRecords
from gristmill.export.trainers import PROJECTIONS
from gristmill.export.trainers.samples import ProjectedRecords
from gristmill.export.writer import ExportSettings, ExportWriter, RecordFile
from gristmill.reconstruction import RowMode

__all__ = [
    "DEFAULT_FORMAT",
    "FORMATS",
    "JSONL",
    "MESSAGES",
    "PARQUET",
    "Format",
    "Needs",
    "loss_lines",
    "open_export",
]

PARQUET: Final = "parquet"
MESSAGES: Final = "messages"
DEFAULT_FORMAT: Final = PARQUET


class Needs(StrEnum):
    """What an outcome has to be for a format: a rebuilt rollout, or a selection (a rebuilt rollout is one too)."""

    ROWS = "rows"
    SELECTION = "selection"


class Format(msgspec.Struct, frozen=True):
    """A format.

    Attributes:
        name: as given on the command line.
        title: one sentence.
        needs: what outcomes have to be; refusals are taken by all.
        losses: the statements that its loss report can make, by name.
        exchanges: whether it reads what went over the wire.
    """

    name: str
    title: str
    needs: Needs
    losses: Mapping[str, str]
    exchanges: bool = False


_ROW_LOSSES: Final = {
    "extras_as_bytes": "Extra arrays are stored as bytes beside their type and shape; nothing is dropped.",
    "credits_untrained": "Credits of calls that are not trained: left out.",
    "advantages": "Rollouts whose result holds an advantage that was not asked for: rows have none.",
    "failures": "Rollouts that failed and are scored: rows carry the reward and not the failure.",
}
_MESSAGE_LOSSES: Final = {
    "tokens": "Turns without their token ids, masks and log-probabilities: for supervised fine-tuning only.",
    "tokens_unusable": "Turns whose tokens are of no use for rows; their text is as served.",
    "request_settings": "Turns without their sampling settings, tool choice and response format.",
    "empty_replies": "Selected calls that said nothing are left out.",
    "reasoning_hidden": "Messages whose reasoning is encrypted, redacted or a summary: it is left out.",
    "arguments_rewritten": "Tool calls whose arguments were served as a value: written as JSON text again.",
    "texts_joined": "Messages of several text parts: joined without a separator.",
    "refusals": "Refusals are written as content.",
    "fields_dropped": "Messages with fields of their own kind beside the known ones: those are left out.",
    "error_flags": "Tool results without their mark as errors.",
    "tools_dropped": "Tools that are no functions are left out of the tools.",
    "credits": "Credits of calls: left out.",
    "advantages": "Rollouts whose result holds an advantage: conversations have none.",
    "failures": "Rollouts that failed and are scored: conversations carry the reward and not the failure.",
}

FORMATS: Final[Mapping[str, Format]] = {
    PARQUET: Format(PARQUET, "One row a record, every field of the row, in Parquet files.", Needs.ROWS, _ROW_LOSSES),
    JSONL: Format(JSONL, "One row a line of JSON, every field of the row.", Needs.ROWS, _ROW_LOSSES),
    MESSAGES: Format(
        MESSAGES,
        "Conversations as chat messages with tools and a train flag per turn; needs no tokens.",
        Needs.SELECTION,
        _MESSAGE_LOSSES,
        exchanges=True,
    ),
    **{
        name: Format(name, projection.title, Needs.ROWS, projection.losses, projection.text)
        for name, projection in PROJECTIONS.items()
    },
}
"""The formats, the default one first; trainers' formats last."""


def open_export(  # noqa: PLR0913 - one call opens every format
    name: str,
    folder: Path,
    *,
    policy: str,
    options: Mapping[str, str],
    train_model: str | None = None,
    mode: RowMode = RowMode.MERGED,
    overwrite: bool = False,
    advantage: AdvantageNote | None = None,
    inputs: Collection[Path] = (),
) -> ExportWriter:
    """Open a folder for an export.

    Args:
        name: of the format.
        folder: made if it is not there.
        policy, options, train_model: how calls are selected, for the manifest.
        mode: how they become rows, or conversations: one per path of calls that continue each other, or one per call.
        overwrite: replace what is there.
        advantage: how the advantages of the outcomes were made (`Advantages.note`), for the manifest; None: they have
            none.
        inputs: files that are read for this export: where one of them would be replaced, nothing is written.

    Raises:
        ConfigError: `option_invalid`: there is no such format, or it carries no advantages.
        ExportError: `output_exists`, `file_unreadable`.
    """
    if name not in FORMATS:
        message = f"expected one of {', '.join(FORMATS)}, got format {name!r}"
        raise ConfigError(message, code=Code.OPTION_INVALID, where="--to")
    if advantage is not None and FORMATS[name].needs is Needs.SELECTION:
        message = f"expected no advantages for format {name!r}, which has no place for them, got {advantage.kind}"
        raise ConfigError(message, code=Code.OPTION_INVALID, where="--advantage")
    settings = ExportSettings(
        format=name, policy=policy, options=options, train_model=train_model, mode=mode, advantage=advantage
    )
    place = Folder(folder, overwrite=overwrite, inputs=inputs)
    try:
        with writing(folder):
            return ExportWriter(place, _records(settings, place), settings)
    except BaseException:
        place.discard()
        raise


def _records(settings: ExportSettings, folder: Folder) -> RecordFile:
    if settings.format == PARQUET:
        from gristmill.export.parquet_writer import ParquetRows  # noqa: PLC0415 - pyarrow only where it is needed

        return ParquetRows(folder)
    if settings.format in PROJECTIONS:
        return ProjectedRecords(folder, PROJECTIONS[settings.format])
    return JsonlRows(folder) if settings.format == JSONL else MessageRecords(folder, settings.mode)


def loss_lines(manifest: Manifest) -> tuple[str, ...]:
    """Say what an export dropped or changed, and how often, one sentence a line."""
    known = FORMATS.get(manifest.format)
    statements: Mapping[str, str] = {} if known is None else known.losses
    if not manifest.losses:
        return (f"{manifest.format}: nothing is dropped or changed",)
    return tuple(
        f"{manifest.format}: {loss.name} {loss.count:,}: {statements.get(loss.name, 'not known to this version')}"
        for loss in manifest.losses
    )
