"""The manifest of a folder of rows: what is in it, how it was made, and how much of the capture it trains.

Invariant: equal rows made in the same way give the same bytes: no clock, no host, no path. Every field can be
computed again from the captures and the files, and `manifest_digest` covers them all, so that a changed one is
found even where two ways of making rows happen to agree.

Not here: writing folders (folder, writer), and computing it again (check).
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from gristmill.credit import AdvantageNote
from gristmill.errors import Code, DecodeError
from gristmill.pipeline import Funnel
from gristmill.reconstruction import RowMode

__all__ = [
    "MANIFEST_NAME",
    "MANIFEST_SCHEMA",
    "FileEntry",
    "Loss",
    "Manifest",
    "RolloutCounts",
    "read_manifest",
    "schema_of",
    "sealed",
]

OLDEST_SCHEMA: Final = 1
MANIFEST_SCHEMA: Final = 2
"""Version of the manifest; readers refuse newer ones. New in 2: `advantage`; one without it states 1."""

MANIFEST_NAME: Final = "manifest.json"


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: size in bytes, sha256 in hexadecimal digits, number of its records (`rows`)."""

    name: str
    bytes: int
    sha256: str
    rows: int


class RolloutCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attempts that were selected, and that were rejected."""

    selected: int = 0
    rejected: int = 0


class Loss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that the format dropped or changed, by its name in `formats`, and how often."""

    name: str
    count: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a folder of rows holds.

    Attributes:
        format: of the records: a name in `formats.FORMATS`.
        files: in order of their names.
        policy, options, train_model: how the calls were selected, as given on the command line.
        mode: how they became rows.
        rows_digest: sha256 over the ids of rows (or records) in the order of the files, each with a line end.
        rollouts: counts of attempts.
        funnel: captured, usable, selected, trained, in calls and sampled tokens.
        rejected: rejected attempts by code.
        forks: forks from recorded parents by cause.
        context_tokens: of all rows; context that several rows repeat counts each time.
        losses: what the format dropped or changed; not there where it was nothing.
        advantage: how advantages were made; not there where rows have none.
        manifest_digest: sha256 of this manifest with an empty `manifest_digest`.
    """

    schema: int = OLDEST_SCHEMA
    format: str
    files: tuple[FileEntry, ...]
    policy: str
    options: Mapping[str, str]
    train_model: str | None
    mode: RowMode
    rows_digest: str
    rollouts: RolloutCounts
    funnel: Funnel
    rejected: Mapping[str, int]
    forks: Mapping[str, int]
    context_tokens: int
    losses: tuple[Loss, ...] = ()
    advantage: AdvantageNote | None = None
    manifest_digest: str = ""

    def encode(self) -> bytes:
        """Write the manifest as indented JSON with a line end."""
        return msgspec.json.format(self._json(), indent=2) + b"\n"

    def digest(self) -> str:
        """Compute `manifest_digest`."""
        plain = msgspec.structs.replace(self, manifest_digest="")
        return sha256(plain._json()).hexdigest()

    def _json(self) -> bytes:
        left_out = {name for name in ("losses", "advantage") if not getattr(self, name)}
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name not in left_out}
        return msgspec.json.encode(fields, order="deterministic")


def sealed(manifest: Manifest) -> Manifest:
    """Return the manifest with its schema and its digest."""
    stated = msgspec.structs.replace(manifest, schema=schema_of(manifest.advantage))
    return msgspec.structs.replace(stated, manifest_digest=stated.digest())


def schema_of(advantage: AdvantageNote | None) -> int:
    """Return the oldest schema that has all of a manifest's fields."""
    return OLDEST_SCHEMA if advantage is None else MANIFEST_SCHEMA


class _Schema(msgspec.Struct):
    schema: int


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder.

    Raises:
        DecodeError: `file_unreadable`; `file_malformed`, `where` is the file and the JSON path; `schema_unsupported`.
    """
    path = folder / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DecodeError(
            f"cannot read {path}: {error.strerror or error}",
            code=Code.FILE_UNREADABLE,
            where=str(path),
            hint="a folder of rows is made by `gristmill export`, and its manifest is written last",
        ) from error
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(data, path, error) from error
    if manifest.schema > MANIFEST_SCHEMA:
        raise _newer(manifest.schema, path)
    return manifest


def _refused(data: bytes, path: Path, error: Exception) -> DecodeError:
    try:
        schema = msgspec.json.decode(data, type=_Schema).schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        schema = MANIFEST_SCHEMA
    if schema > MANIFEST_SCHEMA:
        return _newer(schema, path)
    message, _, place = str(error).partition(" - at `")
    return DecodeError(f"expected a manifest: {message}", where=f"{path} {place.rstrip('`') or '$'}")


def _newer(schema: int, path: Path) -> DecodeError:
    return DecodeError(
        f"expected manifest schema {MANIFEST_SCHEMA} or older, got {schema}",
        code=Code.SCHEMA_UNSUPPORTED,
        where=str(path),
        hint="it was written by a newer version of Gristmill",
    )
