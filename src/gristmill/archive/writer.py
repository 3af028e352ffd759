"""Writes one partition of a data set.

Invariant: the partition is there whole, its manifest last, or not at all. One that is replaced holds nothing that the
new one does not, unless it is said that it may be dropped. Every attempt is whole in one part of one partition of the
data set, and parts are bounded.
Of an attempt that is written, memory keeps sixteen bytes to know it again, and sixteen more where one is replaced.

Not here: the files of a part (parquet_part), and what was archived before (reader, replacing, elsewhere).
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from hashlib import sha256
from types import TracebackType
from typing import Final, Self

from gristmill.archive.attempt_rows import ArchivedAttempt, pack
from gristmill.archive.elsewhere import Elsewhere, key_digest
from gristmill.archive.local import sweep_work
from gristmill.archive.manifest import (
    PARTITION_PREFIX,
    ArchiveCounts,
    ArchiveFile,
    ArchiveManifest,
    check_name,
    sealed,
)
from gristmill.archive.parquet_part import PartWriter
from gristmill.archive.place import MANIFEST_NAME, Place, Publication, writing
from gristmill.archive.replacing import refuse_loss, told_apart
from gristmill.errors import Code, ExportError, LedgerError
from gristmill.ledger import AttemptKey

__all__ = ["PART_BYTES", "AttemptsDigest", "PartitionWriter"]

PART_BYTES: Final = 256 * 2**20
"""A part that takes this much memory is finished after the attempt."""


class AttemptsDigest:
    """The digest over the attempts of a partition in their order."""

    def __init__(self) -> None:
        self._digest = sha256(b"gristmill-attempts-1\n")

    def add(self, key: AttemptKey, snapshot_id: str) -> None:
        """Add the next attempt."""
        self._digest.update(f"{key.rollout_id}\n{key.attempt} {snapshot_id}\n".encode())

    def hexdigest(self) -> str:
        """Return 64 hexadecimal digits."""
        return self._digest.hexdigest()


class PartitionWriter:
    """Writes a partition; leaving the `with` block without `finish` leaves none behind.

    Args:
        place: the data set.
        name: of the partition.
        exchanges: whether what went over the wire is kept.
        part_bytes: after how much memory a part is finished.
        overwrite: replace a partition of this name, if the new one holds all of its attempts as they are there.
        drop: replace it whatever it holds.

    Attributes:
        already: attempts that were not written, because another partition holds them as they are.

    Raises:
        ConfigError: `option_invalid`: the name.
        ExportError: `output_exists`, `file_unreadable`.
        DecodeError: another partition of the data set cannot be read.
    """

    def __init__(
        self,
        place: Place,
        name: str,
        *,
        exchanges: bool = True,
        part_bytes: int = PART_BYTES,
        overwrite: bool = False,
        drop: bool = False,
    ) -> None:
        self.name = check_name(name)
        self._place = place
        self._exchanges = exchanges
        self._part_bytes = part_bytes
        folder = f"{PARTITION_PREFIX}{name}"
        there = place.inside(folder).size(MANIFEST_NAME) is not None
        if there and not overwrite:
            where = place.path_of(folder)
            raise ExportError(
                f"expected a new partition, {where} is there",
                code=Code.OUTPUT_EXISTS,
                where=where,
                hint="give it another name with --partition, or replace it by one that holds as much with --overwrite",
            )
        self._folder = folder
        self._elsewhere = Elsewhere(place, folder)
        self.already = 0
        self._held: set[bytes] | None = set() if there and not drop else None
        self._stack = ExitStack()
        self._publication: Publication | None = None
        self._part: PartWriter | None = None
        self._files: list[ArchiveFile] = []
        self._parts = 0
        self._counts = Counter[str]()
        self._states = Counter[str]()
        self._seen = set[bytes]()
        self._digest = AttemptsDigest()

    def _opened(self) -> Publication:
        if self._publication is None:
            sweep_work(self._place)
            self._publication = self._stack.enter_context(self._place.publishing(self._folder))
        return self._publication

    def _open(self) -> PartWriter:
        if self._part is None:
            self._part = PartWriter(self._opened().folder, self._parts)
            self._parts += 1
        return self._part

    def add(self, attempt: ArchivedAttempt) -> str:
        """Write an attempt and return the snapshot id under which it can be proved to be in the data set.

        Raises:
            ExportError: `output_exists`: another partition holds it with other content.
            LedgerError: `attempt_differs`: it was added before; `item_too_large`, `option_invalid`,
                `token_count_mismatch`, `call_unknown`: it holds what cannot be stored.
            ExportError: `file_unreadable`.
        """
        key = attempt.key
        known = key_digest(key)
        if known in self._seen:
            raise LedgerError(
                f"expected each attempt once, got {key.rollout_id}/{key.attempt} again",
                code=Code.ATTEMPT_DIFFERS,
                where=key.rollout_id,
            )
        packed = pack(attempt, exchanges=self._exchanges)
        row = packed.attempt
        snapshot: str = row["snapshot_id"]
        if self._elsewhere.holds(key, snapshot):
            self._seen.add(known)
            self.already += 1
            return snapshot
        part = self._open()
        part.add(packed)
        self._seen.add(known)
        for name in ("calls", "lost", "usable_calls", "sampled_tokens", "prompt_tokens"):
            self._counts[name] += row[name]
        self._counts["attempts"] += 1
        self._counts["late"] += len(attempt.late)
        self._states[row["state"]] += 1
        self._digest.add(key, snapshot)
        if self._held is not None:
            self._held.add(told_apart(key, snapshot))
        if part.bytes >= self._part_bytes:
            self._close_part()
        return snapshot

    def added(self, key: AttemptKey) -> bool:
        """Say whether an attempt was given to `add`."""
        return key_digest(key) in self._seen

    def _close_part(self) -> None:
        if self._part is not None:
            self._files += self._part.close()
            self._part = None
            self._opened().ship()

    def finish(self) -> ArchiveManifest:
        """Put the partition in its place.

        Raises:
            ExportError: `output_exists`: it lacks attempts of the one that it would replace, which stays;
                `file_unreadable`.
        """
        if self._held is not None:
            refuse_loss(self._place.inside(self._folder), self._held)
        if self._part is None and not self._files:
            # A partition without attempts has a part, too: one table without rows of each kind.
            self._open()
        self._close_part()
        manifest = sealed(
            ArchiveManifest(
                partition=self.name,
                parts=self._parts,
                exchanges=self._exchanges,
                files=tuple(sorted(self._files, key=lambda entry: entry.name)),
                counts=ArchiveCounts(**self._counts),
                states=dict(self._states),
                attempts_digest=self._digest.hexdigest(),
            )
        )
        publication = self._opened()
        with writing(self._place.path_of(self._folder)):
            (publication.folder / MANIFEST_NAME).write_bytes(manifest.encode())
        publication.finish()
        return manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._part is not None:
            self._part.discard()
        self._stack.close()
