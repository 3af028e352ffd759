"""Rows to files, and files checked against what was captured. README.md states the formats and their limits."""

from gristmill.export.check import FolderCheck
from gristmill.export.jsonl import MANIFEST_NAME, REJECTED_NAME, ROWS_NAME, RowsWriter
from gristmill.export.lineage_check import check_capture
from gristmill.export.manifest import MANIFEST_SCHEMA, FileEntry, Manifest, RolloutCounts, read_manifest
from gristmill.export.row_json import ROW_SCHEMA, decode_row, encode_row

__all__ = [
    "MANIFEST_NAME",
    "MANIFEST_SCHEMA",
    "REJECTED_NAME",
    "ROWS_NAME",
    "ROW_SCHEMA",
    "FileEntry",
    "FolderCheck",
    "Manifest",
    "RolloutCounts",
    "RowsWriter",
    "check_capture",
    "decode_row",
    "encode_row",
    "read_manifest",
]
