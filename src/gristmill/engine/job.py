"""What a build is to do, and its partitions: values that are sent to other processes and other machines.

Invariant: a job and a task say everything that a partition of rows depends on; the same two give the same bytes
anywhere. A stamp repeats them beside the rows, so that a later run knows what it finds.

Not here: doing it (partition), and in which order (plan).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from hashlib import sha256
from typing import Final

import msgspec

from gristmill.archive import ArchiveFile, Place, place_of
from gristmill.credit import AdvantageKind, AdvantageNote, Advantages
from gristmill.errors import Code, DecodeError
from gristmill.reconstruction import RowMode
from gristmill.selection import SelectionPolicy, resolve_selection_policy

__all__ = ["STAMP_NAME", "BuildJob", "BuildOptions", "PartTask", "Stamp", "part_folder", "run_folder"]

STAMP_NAME: Final = "build.json"
"""Name of the file beside the rows of a partition that says what they were made from, and how."""

_STAMP_SCHEMA: Final = 1
_MOST_STAMP: Final = 2**20


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rows are made.

    Attributes:
        format: of the records, a name in `export.FORMATS`.
        policy, options, train_model: how calls are selected.
        mode: how they become rows.
        advantage: which advantages rows carry; None: none.
    """

    format: str = "parquet"
    policy: str = "returned_history"
    options: Mapping[str, str] = {}
    train_model: str | None = None
    mode: RowMode = RowMode.MERGED
    advantage: AdvantageKind | None = None

    def load(self) -> SelectionPolicy:
        """Find the policy.

        Raises:
            PolicyError, ConfigError: as `resolve_selection_policy`.
        """
        with contextlib.redirect_stdout(sys.stderr):
            return resolve_selection_policy(self.policy, self.options)


class BuildJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all partitions of a build.

    Attributes:
        archive, rows: paths or URLs, which mean the same in every process.
        options: how rows are made.
        import_paths: folders in which a policy of one's own may lie.
    """

    archive: str
    rows: str
    options: BuildOptions
    import_paths: tuple[str, ...] = ()

    def prepare(self) -> None:
        """Let this process import from the folders of the job."""
        sys.path[:0] = [path for path in self.import_paths if path not in sys.path]

    @property
    def place(self) -> Place:
        """Where the rows are."""
        return place_of(self.rows)


class PartTask(msgspec.Struct, frozen=True, kw_only=True):
    """One partition of rows: it is made of one part of an archive.

    Attributes:
        partition, part: of the archive.
        files: of the part, as its manifest says.
        attempts: how many it has.
        advantages: of the groups that its attempts are in; None: rows have none.
    """

    partition: str
    part: int
    files: tuple[ArchiveFile, ...]
    attempts: int
    advantages: Advantages | None = None

    @property
    def name(self) -> str:
        """The folder of its rows below that of all rows."""
        return f"{run_folder(self.partition)}/{part_folder(self.part)}"


def run_folder(partition: str) -> str:
    """Name the folder of the rows of a partition of the archive."""
    return f"run={partition}"


def part_folder(part: int) -> str:
    """Name the folder of the rows of a part."""
    return f"part={part:05d}"


class Stamp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the rows of a partition were made from, and how.

    Attributes:
        partition, part: of the archive.
        inputs: sha256 over the digests of the part's files.
        build: how rows were made.
        advantage: how advantages were made; those over groups depend on the rewards of the whole archive.
    """

    kind: str = "gristmill.build"
    schema: int = _STAMP_SCHEMA
    partition: str
    part: int
    inputs: str
    build: BuildOptions
    advantage: AdvantageNote | None = None

    @classmethod
    def of(cls, options: BuildOptions, task: PartTask) -> Stamp:
        """Make the stamp of a partition."""
        digests = "".join(f"{entry.name} {entry.bytes} {entry.sha256}\n" for entry in task.files)
        inputs = sha256(digests.encode()).hexdigest()
        note = None if task.advantages is None else task.advantages.note
        return cls(partition=task.partition, part=task.part, inputs=inputs, build=options, advantage=note)

    def encode(self) -> bytes:
        """Write the stamp as indented JSON with a line end."""
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=2) + b"\n"

    def differences(self, other: Stamp) -> list[str]:
        """Name what differs."""
        names = self.build.__struct_fields__
        found = [name for name in names if getattr(self.build, name) != getattr(other.build, name)]
        if (self.partition, self.part, self.inputs) != (other.partition, other.part, other.inputs):
            found.append("inputs")
        if not found and self.advantage != other.advantage:
            found.append("rewards in its groups")
        return found


def read_stamp(place: Place) -> Stamp:
    """Read the stamp of a partition of rows.

    Raises:
        DecodeError: `file_unreadable`, `file_malformed`, `schema_unsupported`.
    """
    where = place.path_of(STAMP_NAME)
    data = place.read(STAMP_NAME, _MOST_STAMP)
    try:
        head = msgspec.json.decode(data, type=_Schema)
        if head.schema > _STAMP_SCHEMA:
            raise DecodeError(
                f"expected rows of a build of schema {_STAMP_SCHEMA} or older, got {head.schema}",
                code=Code.SCHEMA_UNSUPPORTED,
                where=where,
                hint="they were written by a newer version of Gristmill",
            )
        return msgspec.json.decode(data, type=Stamp)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"expected what rows were built from: {error}", where=where) from error


class _Schema(msgspec.Struct):
    schema: int = 0
