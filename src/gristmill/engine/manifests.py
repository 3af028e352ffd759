"""Manifests of rows at any place.

Not here: what they hold (export.manifest).
"""

from __future__ import annotations

from gristmill.archive import Place
from gristmill.archive.place import MANIFEST_NAME
from gristmill.errors import DecodeError
from gristmill.export.manifest import Manifest, read_manifest

__all__ = ["rows_manifest"]

_MOST_BYTES = 2**26


def rows_manifest(place: Place) -> Manifest:
    """Read the manifest of a partition of rows.

    Raises:
        DecodeError: `file_unreadable`, `file_malformed`, `schema_unsupported`.
    """
    size = place.size(MANIFEST_NAME)
    where = place.path_of(MANIFEST_NAME)
    if size is not None and size > _MOST_BYTES:
        raise DecodeError(f"expected a manifest of at most {_MOST_BYTES:,} bytes, got {size:,}", where=where)
    with place.local([MANIFEST_NAME] if size is not None else []) as folder:
        return read_manifest(folder)
