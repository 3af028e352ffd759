"""Samples of a projection to lines of JSON, and back: `samples.jsonl`, a record a line.

Invariant: a line holds the trainer's fields under `sample`, exactly as the projection made them (float32 as its
shortest text that reads back equal), beside the ids that say which rollout and rows it is. Records of one attempt
stand together; a rollout that the format cannot express, or JSON cannot, is refused whole, and others go on.

Not here: what the fields are (the projections), and folders (folder, writer).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from gristmill.errors import Code, DecodeError, ExportError, ReconstructionError
from gristmill.export.folder import SAMPLES_NAME, Folder
from gristmill.export.jsonl import rows_needed
from gristmill.export.row_json import exactly_written
from gristmill.export.trainers.projection import Projection, Sample, Source
from gristmill.export.writer import Outcome, RecordDigest, refused
from gristmill.pipeline import RebuiltRollout
from gristmill.records import Capture, Result
from gristmill.selection import Rejected, Selection

__all__ = ["SAMPLE_SCHEMA", "ProjectedRecords", "Record", "projected", "read_samples", "sample_lines"]

SAMPLE_SCHEMA: Final = 1
"""Version of the line around a sample; readers refuse newer ones."""

_ID_LEN: Final = 32


class Record(NamedTuple):
    """One record: its id, and its line with the line end."""

    record_id: str
    line: bytes


def sample_lines(projection: Projection, source: Source, losses: Counter[str]) -> tuple[Record, ...]:
    """Make the records of one attempt, all of them or none.

    Args:
        projection: the format.
        source: the attempt; it has at least one row.
        losses: counts up what was dropped or changed.

    Raises:
        ReconstructionError: the format cannot express the rollout; `not_expressible`: a number of it is not finite.
        ExportError: `row_malformed`: a text cannot be written as UTF-8.
    """
    lost = Counter[str]()
    samples = projection.samples(source, lost)
    first = source.rows[0]
    records: list[Record] = []
    for index, sample in enumerate(samples):
        record_id = _record_id(projection, sample, index)
        line = {
            "schema": SAMPLE_SCHEMA,
            "record_id": record_id,
            "rollout_id": first.rollout_id,
            "attempt": first.attempt,
            "group_id": first.group_id,
            "made_for": projection.made_for,
            "rows": sample.rows,
            "sample": _plain(sample.fields, record_id),
        }
        try:
            records.append(Record(record_id, orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"))
        except (orjson.JSONEncodeError, TypeError) as error:
            message = f"cannot write sample {index} of rollout {first.rollout_id!r} as JSON: {error}"
            raise ExportError(message, code=Code.ROW_MALFORMED, where=f"record={index}") from error
    losses += lost
    return tuple(records)


def _record_id(projection: Projection, sample: Sample, index: int) -> str:
    """Digest the rows of a sample; like a row's id it does not depend on rewards."""
    key = ("gristmill-sample-1", projection.name, index, sample.rows)
    return sha256(msgspec.json.encode(key)).hexdigest()[:_ID_LEN]


def _plain(value: Any, record_id: str) -> Any:
    """Return what orjson writes exactly: arrays in one piece, no number that JSON does not have."""
    if isinstance(value, np.ndarray):
        array = cast(npt.NDArray[Any], value)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise _not_finite(record_id)
        array = np.ascontiguousarray(array)
        return exactly_written(array) if array.dtype == np.float32 else array
    if isinstance(value, Mapping):
        return {key: _plain(held, record_id) for key, held in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(held, record_id) for held in cast(Sequence[Any], value)]
    if isinstance(value, float) and not np.isfinite(value):
        raise _not_finite(record_id)
    return value


def _not_finite(record_id: str) -> ReconstructionError:
    message = f"expected finite numbers in record {record_id}, got others: JSON has none"
    return ReconstructionError(Code.NOT_EXPRESSIBLE, message, where=f"record={record_id}")


class ProjectedRecords:
    """Writes the samples of a projection as JSON lines."""

    def __init__(self, folder: Folder, projection: Projection) -> None:
        self.ids = RecordDigest()
        self.losses = Counter[str]()
        self._projection = projection
        self._part = folder.part(SAMPLES_NAME)

    def add(self, capture: Capture, result: Result, outcome: RebuiltRollout | Selection) -> Outcome:
        """Write the samples of an attempt, or say why the format cannot express it.

        Raises:
            ExportError: `row_malformed`; `option_invalid`: it was selected and not rebuilt.
        """
        made = projected(self._projection, capture, result, outcome, self.losses)
        if isinstance(made, Rejected):
            return made
        for record in made:
            self._part.write_record(record.line)
            self.ids.add(record.record_id)
        return outcome

    def close(self) -> None:
        """Nothing is held back."""


def projected(
    projection: Projection,
    capture: Capture,
    result: Result,
    outcome: RebuiltRollout | Selection,
    losses: Counter[str],
) -> tuple[Record, ...] | Rejected:
    """Make the records of one attempt, or the refusal of the format; otherwise as `sample_lines`."""
    rows = rows_needed(outcome)
    try:
        return sample_lines(projection, Source(rows, capture, result), losses)
    except ReconstructionError as refusal:
        return refused(outcome.selection if isinstance(outcome, RebuiltRollout) else outcome, refusal)


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    schema: int
    record_id: str
    rollout_id: str
    attempt: int
    group_id: str | None
    made_for: str
    rows: tuple[str, ...]
    sample: Any


_decoder: Final = msgspec.json.Decoder(_Line)
_schema: Final = re.compile(rb'\{"schema":(\d{1,9}),')


def read_samples(folder: Path) -> Iterator[Any]:
    """Read the trainer's fields of every record of a folder, in order.

    Raises:
        DecodeError: `file_unreadable`, `file_malformed`, `schema_unsupported`; `where` is file and line.
    """
    path = folder / SAMPLES_NAME
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file, 1):
                yield _read(data, f"{path} line {number}").sample
    except OSError as error:
        message = f"cannot read {path}: {error.strerror or error}"
        raise DecodeError(message, code=Code.FILE_UNREADABLE, where=str(path)) from error


def _read(data: bytes, where: str) -> _Line:
    stated = _schema.match(data)
    if stated is not None and int(stated[1]) > SAMPLE_SCHEMA:
        message = f"expected sample schema {SAMPLE_SCHEMA} or older, got {int(stated[1])}"
        hint = "it was written by a newer version of Gristmill"
        raise DecodeError(message, code=Code.SCHEMA_UNSUPPORTED, where=where, hint=hint)
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"expected a sample: {error}", where=where) from error
