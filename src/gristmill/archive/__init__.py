"""Captures as a Parquet data set, on a disk or in an object store."""

from gristmill.archive.attempt_rows import ArchivedAttempt
from gristmill.archive.manifest import ArchiveCounts, ArchiveFile, ArchiveManifest
from gristmill.archive.opening import as_url, place_of
from gristmill.archive.place import Place
from gristmill.archive.reader import ArchiveReader, PartPlace, is_archive
from gristmill.archive.writer import PART_BYTES, PartitionWriter

__all__ = [
    "PART_BYTES",
    "ArchiveCounts",
    "ArchiveFile",
    "ArchiveManifest",
    "ArchiveReader",
    "ArchivedAttempt",
    "PartPlace",
    "PartitionWriter",
    "Place",
    "as_url",
    "is_archive",
    "place_of",
]
