"""The manifest of a partition: what it holds, and the proof that it is there.

Invariant: it is written last, and names every file with its size and digest; the snapshot id of each attempt is in the
files named `attempts-…`, so one digest covers them all. It holds no clock, host or path: equal captures give an equal
one.

Not here: writing partitions (writer), reading them (reader).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, BinaryIO, Final

import msgspec

from gristmill.archive.columns import TABLES, file_name
from gristmill.archive.place import MANIFEST_NAME, Place
from gristmill.errors import Code, ConfigError, DecodeError

__all__ = [
    "ARCHIVE_SCHEMA",
    "PARTITION_PREFIX",
    "ArchiveCounts",
    "ArchiveFile",
    "ArchiveManifest",
    "check_name",
    "read_manifest",
    "sealed",
]

ARCHIVE_SCHEMA: Final = 1
"""Version of tables and manifest; readers refuse newer ones."""

PARTITION_PREFIX: Final = "run="
"""Of the folder of a partition, so that query engines read its name as a column."""

_KIND: Final = "gristmill.archive"
_MOST_BYTES: Final = 2**26
_MOST_PARTS: Final = 10**5
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_BLOCK_bytes: Final = 2**20


class ArchiveFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: size in bytes, sha256 in hexadecimal digits, number of its rows."""

    name: str
    bytes: int
    sha256: str
    rows: int

    def check(self, file: BinaryIO, where: str) -> None:
        """Compare all bytes of an open file with what is said here.

        Raises:
            DecodeError: `manifest_differs`.
            OSError: it cannot be read.
        """
        digest, size = sha256(), 0
        while data := file.read(_BLOCK_bytes):
            digest.update(data)
            size += len(data)
        if (size, digest.hexdigest()) != (self.bytes, self.sha256):
            message = f"expected {self.name} as its manifest says, got other bytes"
            raise DecodeError(message, code=Code.MANIFEST_DIFFERS, where=where)


class ArchiveCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Totals; `late` outcomes are also counted among the `lost` calls."""

    attempts: int = 0
    calls: int = 0
    lost: int = 0
    late: int = 0
    usable_calls: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0


class ArchiveManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a partition holds.

    Attributes:
        kind: tells it from other manifests.
        partition: its name.
        parts: how many there are; each is three files.
        exchanges: whether what went over the wire was kept.
        files: in order of their names.
        counts: totals.
        states: attempts by state.
        attempts_digest: sha256 over rollout id, attempt and snapshot id of all attempts in their order.
        manifest_digest: sha256 of this manifest with an empty `manifest_digest`.
    """

    kind: str = _KIND
    schema: int = ARCHIVE_SCHEMA
    partition: str
    parts: int
    exchanges: bool
    files: tuple[ArchiveFile, ...]
    counts: ArchiveCounts
    states: Mapping[str, int]
    attempts_digest: str
    manifest_digest: str = ""

    def encode(self) -> bytes:
        """Write the manifest as indented JSON with a line end."""
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=2) + b"\n"

    def digest(self) -> str:
        """Compute `manifest_digest`."""
        plain = msgspec.structs.replace(self, manifest_digest="")
        return sha256(msgspec.json.encode(plain, order="deterministic")).hexdigest()

    def file(self, name: str) -> ArchiveFile:
        """Return what the manifest says of a file that it names."""
        return next(entry for entry in self.files if entry.name == name)

    def part_files(self, part: int) -> tuple[ArchiveFile, ...]:
        """Return what the manifest says of the files of a part."""
        return tuple(self.file(file_name(table, part)) for table in TABLES)


def sealed(manifest: ArchiveManifest) -> ArchiveManifest:
    """Return the manifest with its digest."""
    return msgspec.structs.replace(manifest, manifest_digest=manifest.digest())


def check_name(name: str) -> str:
    """Return the name of a partition.

    Raises:
        ConfigError: `option_invalid`: it cannot be the name of a folder everywhere.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"expected letters, digits, '.', '_' and '-' as the name of a partition, got {name!r}", where="--partition"
        )
    return name


class _Head(msgspec.Struct):
    kind: str = ""
    schema: int = 0


def read_manifest(place: Place) -> ArchiveManifest:
    """Read the manifest of a partition's folder.

    Raises:
        DecodeError: `file_unreadable`; `file_malformed`; `schema_unsupported`; `manifest_differs`: it is not what it
            was when it was written.
    """
    where = place.path_of(MANIFEST_NAME)
    data = place.read(MANIFEST_NAME, _MOST_BYTES)
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.kind != _KIND:
            raise DecodeError(f"expected the manifest of an archive, got one of {head.kind!r}", where=where)
        if head.schema > ARCHIVE_SCHEMA:
            raise DecodeError(
                f"expected an archive of schema {ARCHIVE_SCHEMA} or older, got {head.schema}",
                code=Code.SCHEMA_UNSUPPORTED,
                where=where,
                hint="it was written by a newer version of Gristmill",
            )
        manifest = msgspec.json.decode(data, type=ArchiveManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"expected the manifest of an archive: {error}", where=where) from error
    _check(manifest, where)
    return manifest


def _check(manifest: ArchiveManifest, where: str) -> None:
    if manifest.digest() != manifest.manifest_digest:
        raise DecodeError(
            "expected a manifest as it was written, its digest is another", code=Code.MANIFEST_DIFFERS, where=where
        )
    if not 0 <= manifest.parts <= _MOST_PARTS:
        raise DecodeError(f"expected at most {_MOST_PARTS:,} parts, got {manifest.parts:,}", where=where)
    expected = sorted(file_name(table, part) for part in range(manifest.parts) for table in TABLES)
    if [entry.name for entry in manifest.files] != expected:
        raise DecodeError(f"expected the {len(expected)} files of {manifest.parts} parts, got others", where=where)
    counts: dict[str, Any] = msgspec.structs.asdict(manifest.counts)
    numbers = [*counts.values(), *(size for entry in manifest.files for size in (entry.bytes, entry.rows))]
    if min(numbers) < 0 or not all(_DIGEST.fullmatch(entry.sha256) for entry in manifest.files):
        raise DecodeError("expected sizes, counts and digests, got something else", where=where)
