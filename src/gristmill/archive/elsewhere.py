"""What the other partitions of a data set hold already.

Invariant: an attempt stands in one partition of a data set. One that is there with the same content is not written
again, and one that is there with other content is refused: nobody could say which of the two is right.

Not here: the partition that is replaced (replacing).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from gristmill.archive.manifest import PARTITION_PREFIX
from gristmill.archive.place import MANIFEST_NAME, Place
from gristmill.archive.reader import ArchiveReader
from gristmill.archive.replacing import told_apart
from gristmill.errors import Code, ExportError
from gristmill.ledger import AttemptKey

__all__ = ["Elsewhere", "key_digest"]


def key_digest(key: AttemptKey) -> bytes:
    """Return sixteen bytes that stand for an attempt, whatever is stored of it."""
    text = f"{key.attempt} {key.rollout_id}"
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


class Elsewhere:
    """The attempts of all finished partitions but one, by digests; memory keeps some hundred bytes of each.

    Args:
        place: the data set.
        folder: of the partition that is left out.

    Raises:
        DecodeError: a partition cannot be read, or is not as its manifest says.
    """

    def __init__(self, place: Place, folder: str) -> None:
        self._held: Final[dict[bytes, tuple[bytes, str]]] = {}
        for name in place.folders():
            other = place.inside(name)
            if not name.startswith(PARTITION_PREFIX) or name == folder or other.size(MANIFEST_NAME) is None:
                continue
            with ArchiveReader(other.address) as reader:
                for key, snapshot_id in reader.snapshots():
                    self._held[key_digest(key)] = told_apart(key, snapshot_id), name

    def holds(self, key: AttemptKey, snapshot_id: str) -> bool:
        """Say whether an attempt is there as it is.

        Raises:
            ExportError: `output_exists`: it is there with other content.
        """
        there = self._held.get(key_digest(key))
        if there is None:
            return False
        if there[0] == told_apart(key, snapshot_id):
            return True
        raise ExportError(
            f"expected a new attempt, or the one that is archived: {key.rollout_id}/{key.attempt} is in {there[1]}, "
            "with other content",
            code=Code.OUTPUT_EXISTS,
            where=there[1],
            hint="archive it in another data set",
        )
