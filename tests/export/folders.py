"""Folders of an export, checked, tampered with and sealed again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from gristmill.export import FileEntry, FolderCheck, read_manifest
from gristmill.reconstruction import Finding
from gristmill.records import Capture, Result

__all__ = ["Attempt", "entry_paths", "findings", "reseal"]

Attempt = tuple[Capture, Result, Any]


def findings(folder: Path, attempts: Sequence[Attempt], *, whole: bool = True) -> list[Finding]:
    """Check a folder against attempts."""
    check = FolderCheck(folder)
    found = [finding for attempt in attempts for finding in check.check(*attempt)]
    return found + list(check.finish(policy="returned_history", options={}, train_model=None, whole=whole))


def reseal(folder: Path, **fields: Any) -> None:
    """Make the manifest say what the files are, as somebody who hides a change would."""
    manifest = read_manifest(folder)
    entries: list[FileEntry] = []
    for entry in manifest.files:
        data = (folder / entry.name).read_bytes()
        entries.append(FileEntry(entry.name, len(data), sha256(data).hexdigest(), entry.rows))
    changed = msgspec.structs.replace(manifest, files=tuple(entries), **fields)
    sealed = msgspec.structs.replace(changed, manifest_digest=changed.digest())
    (folder / "manifest.json").write_bytes(sealed.encode())


def entry_paths(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of every value of a document that holds no other."""
    members = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    found = [place for key, held in members for place in entry_paths(held, (*path, key))]
    return found or [path]


def change_entry(folder: Path, place: Sequence[Any]) -> None:
    """Change one value of a manifest."""
    path = folder / "manifest.json"
    document = json.loads(path.read_bytes())
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    value = holder[place[-1]]
    changed = {
        dict: {"x": "1"} if place[-1] == "options" else {"x": 1},
        str: "tree" if place[-1] == "mode" else f"{value}x",
        int: 0 if place[-1] == "schema" else value + 1 if isinstance(value, int) else 0,
        type(None): "m",
    }
    holder[place[-1]] = changed[type(value)]
    path.write_text(json.dumps(document))
