"""What a build came to: the counts of all its partitions.

Invariant: it is added up from the manifests that are there, so it is the same however often the build was stopped, and
can be added up again. It holds no clock, host or path.

Not here: the counts of one partition (export.manifest).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Final

import msgspec

from gristmill.archive import Place
from gristmill.credit import GroupTotals
from gristmill.engine.job import BuildOptions, PartTask
from gristmill.engine.manifests import rows_manifest
from gristmill.errors import DecodeError
from gristmill.export import Loss, RolloutCounts
from gristmill.export.writer import losses_of
from gristmill.pipeline import Funnel

__all__ = ["SUMMARY_NAME", "BuildSummary", "add_up", "read_summary"]

SUMMARY_NAME: Final = "summary.json"
_MOST_BYTES: Final = 2**26


class BuildSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The counts of a build.

    Attributes:
        build: how rows were made.
        partitions: how many partitions of rows there are.
        records, bytes: of all their files of records.
        rollouts: attempts that were selected, and that were rejected.
        funnel: captured, usable, selected, trained, in calls and sampled tokens.
        rejected: rejected attempts by code.
        forks: forks from recorded parents by cause.
        context_tokens: of all rows; context that several rows repeat counts each time.
        losses: what the format dropped or changed.
        groups: how the groups of rollouts did, over all results.
        rows_digest: sha256 over name and manifest digest of each partition, each with a line end.
    """

    kind: str = "gristmill.build"
    schema: int = 1
    build: BuildOptions
    partitions: int
    records: int
    bytes: int
    rollouts: RolloutCounts
    funnel: Funnel
    rejected: Mapping[str, int]
    forks: Mapping[str, int]
    context_tokens: int
    losses: tuple[Loss, ...]
    groups: GroupTotals
    rows_digest: str

    def encode(self) -> bytes:
        """Write the summary as indented JSON with a line end."""
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=2) + b"\n"


def add_up(rows: Place, options: BuildOptions, tasks: Sequence[PartTask], groups: GroupTotals) -> BuildSummary:
    """Add up the partitions of a build.

    Raises:
        DecodeError: a manifest cannot be read.
    """
    selected = rejected = records = size = context_tokens = 0
    funnel = Funnel()
    codes, forks, losses = Counter[str](), Counter[str](), Counter[str]()
    digest = sha256()
    for task in tasks:
        manifest = rows_manifest(rows.inside(task.name))
        digest.update(f"{task.name} {manifest.manifest_digest}\n".encode())
        selected += manifest.rollouts.selected
        rejected += manifest.rollouts.rejected
        held = [entry for entry in manifest.files if entry.name != "rejected.jsonl"]
        records += sum(entry.rows for entry in held)
        size += sum(entry.bytes for entry in held)
        context_tokens += manifest.context_tokens
        funnel = funnel.plus(manifest.funnel)
        codes.update(manifest.rejected)
        forks.update(manifest.forks)
        losses.update({loss.name: loss.count for loss in manifest.losses})
    return BuildSummary(
        build=options,
        partitions=len(tasks),
        records=records,
        bytes=size,
        rollouts=RolloutCounts(selected, rejected),
        funnel=funnel,
        rejected=dict(codes),
        forks=dict(forks),
        context_tokens=context_tokens,
        losses=losses_of(losses),
        groups=groups,
        rows_digest=digest.hexdigest(),
    )


def read_summary(rows: Place) -> BuildSummary:
    """Read the summary of a build.

    Raises:
        DecodeError: `file_unreadable`, `file_malformed`.
    """
    where = rows.path_of(SUMMARY_NAME)
    try:
        return msgspec.json.decode(rows.read(SUMMARY_NAME, _MOST_BYTES), type=BuildSummary)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"expected the summary of a build: {error}", where=where) from error
