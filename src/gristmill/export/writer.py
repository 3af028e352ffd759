"""One writer for all formats: attempts in, a folder with its manifest out.

Invariant: every attempt ends up in exactly one of records and refusals, and the manifest counts both. A refusal of the
format itself is one like any other. Attempts are written as they come: memory does not grow with their number.

Not here: what a format writes (jsonl, parquet_writer, messages), and which formats there are (formats).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from gristmill.credit import AdvantageNote, RewardsDigest, facts_of
from gristmill.errors import Code, ReconstructionError
from gristmill.export.folder import REJECTED_NAME, Folder, rejected_line, writing
from gristmill.export.manifest import Loss, Manifest, RolloutCounts, sealed
from gristmill.export.totals import Totals
from gristmill.pipeline import RebuiltRollout
from gristmill.reconstruction import RowMode
from gristmill.records import Capture, Result
from gristmill.selection import Rejected, Selection, Verdict

__all__ = ["ExportSettings", "ExportWriter", "Outcome", "RecordDigest", "RecordFile", "losses_of", "refused"]

Outcome = RebuiltRollout | Selection | Rejected
"""What became of an attempt."""


class RecordDigest:
    """The digest over the ids of the records in their order, each with a line end."""

    def __init__(self) -> None:
        self._digest = sha256()

    def add(self, record_id: str) -> None:
        """Add the id of the next record."""
        self._digest.update(f"{record_id}\n".encode("utf-8", "surrogatepass"))

    def hexdigest(self) -> str:
        """Return 64 hexadecimal digits."""
        return self._digest.hexdigest()


class RecordFile(Protocol):
    """What a format puts the records of attempts into."""

    @property
    def ids(self) -> RecordDigest: ...
    @property
    def losses(self) -> Counter[str]: ...

    def add(self, capture: Capture, result: Result, outcome: RebuiltRollout | Selection) -> Outcome:
        """Write the records of an attempt, all or none, and say what became of it in this format."""
        ...

    def close(self) -> None:
        """Write what is still held back; further parts of the folder may be made until then."""
        ...


class ExportSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the outcomes of an export were made, for its manifest."""

    format: str
    policy: str
    options: Mapping[str, str]
    train_model: str | None
    mode: RowMode
    advantage: AdvantageNote | None = None


def losses_of(counts: Mapping[str, int]) -> tuple[Loss, ...]:
    """Give counted losses as the manifest holds them; what did not occur is left out."""
    return tuple(Loss(name, counts[name]) for name in sorted(counts) if counts[name])


def refused(selection: Selection, refusal: ReconstructionError) -> Rejected:
    """Make the refusal of a selected attempt that a format cannot express."""
    evidence = {"code": str(refusal.code)}
    return Rejected(
        rollout_id=selection.rollout_id,
        attempt=selection.attempt,
        policy=selection.policy,
        options=selection.options,
        code=refusal.code,
        where=refusal.where,
        message=refusal.message,
        evidence=refusal.evidence,
        verdicts=tuple(
            Verdict(verdict.model_call_id, False, Code.ROLLOUT_REJECTED, evidence) if verdict.included else verdict
            for verdict in selection.verdicts
        ),
    )


class ExportWriter:
    """Writes a folder; leaving the `with` block without `finish` leaves no manifest and no part behind.

    Args:
        folder: to be written.
        records: made from the folder, holds the records.
        settings: for the manifest.

    Attributes:
        rewards: of the attempts so far, to be compared with those that advantages were made of.
    """

    def __init__(self, folder: Folder, records: RecordFile, settings: ExportSettings) -> None:
        self.folder = folder
        self.totals = Totals()
        self.rewards = RewardsDigest()
        self._records = records
        self._settings = settings
        self._rejected = folder.part(REJECTED_NAME)

    @property
    def path(self) -> Path:
        """The folder's path."""
        return self.folder.path

    def add(self, capture: Capture, result: Result, outcome: Outcome) -> Rejected | None:
        """Write the records of an attempt, or its refusal.

        Args:
            capture: the attempt.
            result: what the harness handed back.
            outcome: what became of it; `FORMATS[name].needs` says what it has to be.

        Returns:
            The refusal where the format cannot express what was selected; it has been written.

        Raises:
            ExportError: `row_malformed`, `file_unreadable`, `option_invalid` (rows were needed).
        """
        with writing(self.path):
            final = outcome if isinstance(outcome, Rejected) else self._records.add(capture, result, outcome)
            if isinstance(final, Rejected):
                self._rejected.write_record(rejected_line(final))
        self.totals.add(capture, final)
        self.rewards.add(facts_of(capture.rollout_id, capture.attempt, result))
        return final if isinstance(final, Rejected) and final is not outcome else None

    def finish(self) -> Manifest:
        """Put the files in their places, the manifest last.

        Raises:
            ExportError: `row_malformed`, `file_unreadable`.
        """
        with writing(self.path):
            self._records.close()
        totals, settings = self.totals, self._settings
        manifest = sealed(
            Manifest(
                format=settings.format,
                files=self.folder.close(),
                policy=settings.policy,
                options=dict(settings.options),
                train_model=settings.train_model,
                mode=settings.mode,
                rows_digest=self._records.ids.hexdigest(),
                rollouts=RolloutCounts(totals.selected, totals.rejected),
                funnel=totals.funnel,
                rejected=dict(totals.codes),
                forks=dict(totals.forks),
                context_tokens=totals.context_tokens,
                losses=losses_of(self._records.losses),
                advantage=settings.advantage,
            )
        )
        self.folder.place(manifest.encode())
        return manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.folder.discard()
