"""The rows of an export, one after the other, for whoever trains on them.

Invariant: the rows are given in the order in which they were written, and they are those that the manifest names: when
the last one is given, their ids add up to its digest, or the reader is told that they do not.

Not here: whether rows follow from the captures (check), and records that are no rows (messages, trainers).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gristmill.errors import Code, DecodeError, ExportError
from gristmill.export.folder import ROWS_NAME, is_parquet_part
from gristmill.export.formats import JSONL, PARQUET
from gristmill.export.manifest import Manifest, read_manifest
from gristmill.export.row_json import decode_row
from gristmill.export.writer import RecordDigest
from gristmill.reconstruction import Row

__all__ = ["read_rows"]


def read_rows(folder: Path | str) -> Iterator[Row]:
    """Read the rows of a `parquet` or `jsonl` export.

    Args:
        folder: of the export. Its manifest is read at once, its rows while they are taken, a row group or a line at a
            time.

    Returns:
        the rows in their order; the rows of a rollout stand together.

    Raises:
        DecodeError: `file_unreadable`, `file_malformed`, `schema_unsupported`; while rows are taken also
            `row_malformed`, and after the last one `manifest_differs`: rows are missing, added or exchanged.
        ExportError: `option_invalid`: it is an export in another format.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest.format not in {PARQUET, JSONL}:
        raise ExportError(
            f"expected an export of rows, {PARQUET} or {JSONL}, {folder} is {manifest.format!r}",
            code=Code.OPTION_INVALID,
            where=str(folder),
            hint=f"export it again with --to {PARQUET}",
        )
    return _rows(folder, manifest)


def _rows(folder: Path, manifest: Manifest) -> Iterator[Row]:
    ids = RecordDigest()
    for row in _stored(folder, manifest):
        ids.add(row.row_id)
        yield row
    if ids.hexdigest() != manifest.rows_digest:
        raise DecodeError(
            f"expected the rows that the manifest names, got others: rows_digest {ids.hexdigest()}",
            code=Code.MANIFEST_DIFFERS,
            where=str(folder),
            hint="gristmill verify says which rows they are",
        )


def _stored(folder: Path, manifest: Manifest) -> Iterator[Row]:
    names = [entry.name for entry in manifest.files]
    if manifest.format == JSONL:
        yield from _lines(folder / ROWS_NAME)
        return
    from gristmill.export.parquet_reader import read_parquet_rows  # noqa: PLC0415 - pyarrow only where it is needed

    for name in sorted(filter(is_parquet_part, names), key=lambda name: (len(name), name)):
        yield from read_parquet_rows(folder / name)


def _lines(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield decode_row(line, f"{path} line {number}")
    except OSError as error:
        message = f"cannot read {path}: {error.strerror or error}"
        raise DecodeError(message, code=Code.FILE_UNREADABLE, where=str(path)) from error
