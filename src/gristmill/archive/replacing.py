"""What a partition holds that the one in its place would not.

Invariant: an attempt counts as held only under its snapshot id, which covers everything that was stored of it; what
cannot be read is not held.

Not here: replacing (writer, and the places).
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b
from typing import Final

from gristmill.archive.place import Place
from gristmill.archive.reader import ArchiveReader
from gristmill.errors import Code, DecodeError, ExportError
from gristmill.ledger import AttemptKey

__all__ = ["refuse_loss", "told_apart"]

_NAMED: Final = 3
_HINT: Final = "give the new partition another name with --partition, or drop what only the old one holds with --drop"


def told_apart(key: AttemptKey, snapshot_id: str) -> bytes:
    """Return sixteen bytes that stand for an attempt and everything stored of it."""
    text = f"{key.attempt} {snapshot_id} {key.rollout_id}"
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def refuse_loss(partition: Place, held: Collection[bytes]) -> None:
    """Refuse to replace a partition by one that holds less.

    Args:
        partition: that is there.
        held: what the new one holds, as `told_apart` writes it.

    Raises:
        ExportError: `output_exists`: an attempt is in the old one only, or there with other content, or the old one
            cannot be read.
    """
    missing: list[str] = []
    count = 0
    try:
        with ArchiveReader(partition.address) as reader:
            for key, snapshot_id in reader.snapshots():
                if told_apart(key, snapshot_id) not in held:
                    count += 1
                    if len(missing) < _NAMED:
                        missing.append(f"{key.rollout_id}/{key.attempt}")
    except DecodeError as error:
        message = f"expected to read what {partition.name} holds before it is replaced: {error.message}"
        raise ExportError(message, code=Code.OUTPUT_EXISTS, where=partition.name, hint=_HINT) from error
    if count:
        named = ", ".join(missing) + (", …" if count > len(missing) else "")
        raise ExportError(
            f"expected a partition with everything that is in {partition.name}, it lacks {count:,} of its attempts, or "
            f"holds them otherwise: {named}",
            code=Code.OUTPUT_EXISTS,
            where=partition.name,
            hint=_HINT,
        )
