"""Rows and conversations to files, and files checked against what was captured. README.md states the formats."""

from gristmill.export.check import FolderCheck
from gristmill.export.folder import REJECTED_NAME, ROWS_NAME
from gristmill.export.formats import DEFAULT_FORMAT, FORMATS, Format, Needs, loss_lines, open_export
from gristmill.export.lineage_check import check_capture
from gristmill.export.manifest import (
    MANIFEST_NAME,
    MANIFEST_SCHEMA,
    FileEntry,
    Loss,
    Manifest,
    RolloutCounts,
    read_manifest,
)
from gristmill.export.reading import read_rows
from gristmill.export.row_json import ROW_SCHEMA, decode_row, encode_row
from gristmill.export.writer import ExportWriter

__all__ = [
    "DEFAULT_FORMAT",
    "FORMATS",
    "MANIFEST_NAME",
    "MANIFEST_SCHEMA",
    "REJECTED_NAME",
    "ROWS_NAME",
    "ROW_SCHEMA",
    "ExportWriter",
    "FileEntry",
    "FolderCheck",
    "Format",
    "Loss",
    "Manifest",
    "Needs",
    "RolloutCounts",
    "check_capture",
    "decode_row",
    "encode_row",
    "loss_lines",
    "open_export",
    "read_manifest",
    "read_rows",
]
