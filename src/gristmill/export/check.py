"""A folder of an export checked against what was captured: manifest, files, records and refusals.

Invariant: every field of the manifest and every record of the files is either proved from the captures or a finding;
a finding never hides another.

Not here: finding records in files (scan, parquet_scan), the rows of one rollout (reconstruction.checks), and captures
(lineage_check).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from gristmill.credit import AdvantageNote
from gristmill.errors import Code, ConfigError, DecodeError
from gristmill.export.folder import (
    MESSAGES_NAME,
    REJECTED_NAME,
    ROWS_NAME,
    SAMPLES_NAME,
    is_parquet_part,
    rejected_line,
)
from gristmill.export.formats import FORMATS, JSONL, MESSAGES, PARQUET, Needs
from gristmill.export.jsonl import losses_of_rows
from gristmill.export.manifest import MANIFEST_NAME, Manifest, RolloutCounts, read_manifest, schema_of
from gristmill.export.messages import Conversation, conversations
from gristmill.export.row_json import decode_row
from gristmill.export.scan import Held, Key, LineScan, Scan, as_finding
from gristmill.export.totals import Totals
from gristmill.export.trainers import PROJECTIONS
from gristmill.export.trainers.samples import Record, projected
from gristmill.export.writer import Outcome, losses_of
from gristmill.pipeline import RebuiltRollout
from gristmill.reconstruction import Finding, Rollout, Row, verify_rows
from gristmill.records import Capture, Result
from gristmill.selection import Rejected, Selection

__all__ = ["FolderCheck"]

_DATA_SUFFIXES: Final = frozenset({".parquet", ".jsonl"})
_OF_ALL_ROLLOUTS: Final = ("rollouts", "funnel", "rejected", "forks", "context_tokens", "losses")


class FolderCheck:
    """Checks a folder of an export, attempt by attempt.

    Args:
        folder: of the export.

    Raises:
        DecodeError: the manifest or a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self.format = _format(folder, self.manifest.format)
        self.rows_checked = 0
        self._records = _scan(folder, self.format)
        self._rejected = LineScan(folder / REJECTED_NAME, _raw)
        self._totals = Totals()
        self._losses = Counter[str]()
        self._advantages: AdvantageNote | None = None
        self._unproved = 0

    def expect(self, advantages: AdvantageNote | None) -> None:
        """Say how the advantages of the outcomes are made that `check` gets; None, as without this: they have none.

        Where they were made of other rewards than those of the folder, as when a part of the captures is at hand, the
        advantages in it are not compared, and `finish` says so.
        """
        self._advantages = advantages

    @property
    def _provable(self) -> bool:
        stated, made = self.manifest.advantage, self._advantages
        return stated is None or made is None or stated.kind != made.kind or stated == made

    @property
    def needs(self) -> Needs:
        """What the outcomes that `check` gets have to be: rebuilt rollouts, or selections."""
        return FORMATS[self.format].needs

    def check(self, capture: Capture, result: Result, outcome: Outcome) -> Iterator[Finding]:
        """Find what the folder says of one attempt that its capture does not prove.

        Args:
            capture: the attempt.
            result: what the harness handed back.
            outcome: of running the manifest's policy (and mode, and advantages) on it; `needs` says what it has to be.

        Raises:
            ConfigError: rows are needed, a selection was given.
        """
        key = (capture.rollout_id, capture.attempt)
        held = self._records.take(key)
        self.rows_checked += len(held)
        numbers = [record.number for record in held]
        if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            message = f"expected the records of rollout {key[0]!r} to stand together, they do not"
            yield Finding(Code.ROW_METADATA_DIFFERS, f"{held[0].where} rollout={key[0]}", message)
        if self.format in {PARQUET, JSONL}:
            yield from self._rows(capture, result, outcome, held)
        else:
            outcome = yield from self._lines(capture, result, outcome, held)
        self._totals.add(capture, outcome)
        yield from self._refusal(key, outcome)

    def _rows(self, capture: Capture, result: Result, outcome: Outcome, held: Sequence[Held]) -> Iterator[Finding]:
        if isinstance(outcome, Selection):
            raise ConfigError(f"expected rebuilt rollouts to check {self.format} with, got a selection")
        rows: list[Row] = []
        for record in held:
            if isinstance(record.value, DecodeError):
                yield as_finding(record.value, self.folder)
            else:
                rows.append(cast(Row, record.value))
        if isinstance(outcome, Rejected):
            for row in rows:
                message = f"row {row.row_id}: of a rollout that was rejected with {outcome.code}"
                yield Finding(Code.ROW_UNEXPECTED, f"row={row.row_id}", message)
        else:
            self._losses += losses_of_rows(result, outcome.rows)
            by = outcome.rows if self._provable else rows
            self._unproved += not self._provable
            yield from _of_rollout(capture, result, outcome, rows, by[0].advantage if by else None)

    def _lines(
        self, capture: Capture, result: Result, outcome: Outcome, held: Sequence[Held]
    ) -> Generator[Finding, None, Outcome]:
        """Make the conversations or samples again and compare them; returns what became of the attempt."""
        if self.needs is Needs.SELECTION and isinstance(outcome, RebuiltRollout):
            outcome = outcome.selection
        made: Sequence[Conversation | Record] | Rejected = ()
        if isinstance(outcome, Selection):
            made = conversations(capture, result, outcome, self._losses, mode=self.manifest.mode)
        elif isinstance(outcome, RebuiltRollout):
            made = projected(PROJECTIONS[self.format], capture, result, outcome, self._losses)
        if isinstance(outcome, RebuiltRollout) and not isinstance(made, Rejected) and not self._provable:
            # A sample is one piece with its advantages.
            self._unproved += 1
            return outcome
        expected = () if isinstance(made, Rejected) else tuple(record.line for record in made)
        for index, (line, record) in enumerate(zip_longest(expected, held)):
            if record is None:
                message = f"expected record {index} of rollout {capture.rollout_id!r}, it is not there"
                yield Finding(Code.ROW_MISSING, f"record={index}", message)
            elif line is None:
                message = f"expected {len(expected)} records of rollout {capture.rollout_id!r}, got one more"
                yield Finding(Code.ROW_UNEXPECTED, record.where, message)
            elif line != record.value:
                message = f"expected record {index} of rollout {capture.rollout_id!r} as captured, it differs"
                yield Finding(Code.ROW_METADATA_DIFFERS, record.where, message)
        if isinstance(made, Rejected):
            return made
        return outcome

    def _refusal(self, key: Key, outcome: Outcome) -> Iterator[Finding]:
        """Compare the refusal of an attempt with its line."""
        lines = self._rejected.take(key)
        expected = [rejected_line(outcome)] if isinstance(outcome, Rejected) else []
        if [line.value for line in lines] != expected:
            what = f"the refusal {outcome.code}" if isinstance(outcome, Rejected) else "no refusal"
            message = f"expected {what} of rollout {key[0]!r} attempt {key[1]}, got {len(lines)} line(s) that differ"
            where = lines[0].where if lines else str(self._rejected.path)
            yield Finding(Code.MANIFEST_DIFFERS, where, message, {"rollout_id": key[0], "attempt": key[1]})

    def finish(
        self, *, policy: str, options: Mapping[str, str], train_model: str | None, whole: bool
    ) -> Iterator[Finding]:
        """Find what the manifest and the files say that the attempts, all of them checked by now, do not prove.

        Args:
            policy, options, train_model: that the outcomes came from.
            whole: whether every captured attempt was checked.
        """
        yield from self._records.strays()
        yield from self._rejected.strays()
        if whole:
            yield from self._unknown()
        yield from self._manifest(policy, options, train_model, whole)
        yield from self._not_proved()
        yield from self._unlisted()

    def _not_proved(self) -> Iterator[Finding]:
        stated, made = self.manifest.advantage, self._advantages
        if stated is None or made is None or self._provable:
            return
        what = "advantages" if self.format in {PARQUET, JSONL} else "records, which hold advantages,"
        message = (
            f"the {what} of {self._unproved} attempt{'s' if self._unproved != 1 else ''} are not proved: made of "
            f"{stated.rewards} rewards in groups, while the captures at hand hold {made.rewards}, or others"
        )
        yield Finding(Code.MANIFEST_DIFFERS, f"{self.folder / MANIFEST_NAME} $.advantage", message)

    def _unlisted(self) -> Iterator[Finding]:
        """Find data files that the manifest does not list: whoever loads the folder by a pattern loads them too."""
        listed = {entry.name for entry in self.manifest.files}
        for entry in sorted(self.folder.iterdir()):
            if entry.suffix.lower() in _DATA_SUFFIXES and entry.name not in listed:
                message = f"expected listed files only, got {entry.name}: a file that the manifest does not list"
                yield Finding(Code.MANIFEST_DIFFERS, str(entry), message)

    def _unknown(self) -> Iterator[Finding]:
        for (rollout_id, attempt), count, where in self._records.left():
            message = f"expected records of captured rollouts only, got {count} of {rollout_id!r} attempt {attempt}"
            yield Finding(Code.ROW_UNEXPECTED, where, message)
        for (rollout_id, attempt), _, where in self._rejected.left():
            message = f"expected refusals of captured rollouts only, got one of {rollout_id!r} attempt {attempt}"
            yield Finding(Code.MANIFEST_DIFFERS, where, message)

    def _manifest(
        self, policy: str, options: Mapping[str, str], train_model: str | None, whole: bool
    ) -> Iterator[Finding]:
        """Make the manifest again and compare it, entry by entry."""
        totals, got = self._totals, self.manifest
        entries = (*self._records.entries, *self._rejected.entries)
        expected = msgspec.structs.replace(
            got,
            schema=schema_of(got.advantage),
            format=self.format,
            files=tuple(sorted(entries, key=lambda entry: entry.name)),
            policy=policy,
            options=dict(options),
            train_model=train_model,
            rows_digest=self._records.ids.hexdigest(),
            rollouts=RolloutCounts(totals.selected, totals.rejected),
            funnel=totals.funnel,
            rejected=dict(totals.codes),
            forks=dict(totals.forks),
            context_tokens=totals.context_tokens,
            losses=losses_of(self._losses),
            advantage=self._advantages if self._provable else got.advantage,
            manifest_digest=got.digest(),
        )
        wanted, found = msgspec.to_builtins(expected), msgspec.to_builtins(got)
        for name in wanted:
            if whole or name not in _OF_ALL_ROLLOUTS:
                yield from self._compared(f"$.{name}", wanted[name], found[name])

    def _compared(self, path: str, wanted: Any, got: Any) -> Iterator[Finding]:
        if wanted == got:
            return
        if isinstance(wanted, Mapping) and isinstance(got, Mapping):
            first, second = cast(Mapping[str, Any], wanted), cast(Mapping[str, Any], got)
            for key in dict.fromkeys((*first, *second)):
                yield from self._compared(f"{path}.{key}", first.get(key), second.get(key))
            return
        if isinstance(wanted, list | tuple) and isinstance(got, list | tuple):
            ours, theirs = cast(Sequence[Any], wanted), cast(Sequence[Any], got)
            for index, (one, other) in enumerate(zip_longest(ours, theirs)):
                yield from self._compared(f"{path}[{index}]", one, other)
            return
        where = f"{self.folder / MANIFEST_NAME} {path}"
        yield Finding(Code.MANIFEST_DIFFERS, where, f"expected {path[2:]} {wanted!r}, got {got!r}")


def _format(folder: Path, stated: str) -> str:
    """Name the format of a folder: what the manifest says if its files are there, else what the files say."""
    names = {entry.name for entry in folder.iterdir()}
    there = {
        PARQUET: any(map(is_parquet_part, names)),
        MESSAGES: MESSAGES_NAME in names,
        JSONL: ROWS_NAME in names,
    }
    if there.get(stated) or (stated in PROJECTIONS and SAMPLES_NAME in names):
        return stated
    return next((name for name, held in there.items() if held), stated if stated in FORMATS else JSONL)


def _scan(folder: Path, name: str) -> Scan:
    if name == PARQUET:
        from gristmill.export.parquet_scan import ParquetScan  # noqa: PLC0415 - pyarrow only where it is needed

        return ParquetScan(folder)
    if name == MESSAGES or name in PROJECTIONS:
        return LineScan(folder / (MESSAGES_NAME if name == MESSAGES else SAMPLES_NAME), _raw)
    return LineScan(folder / ROWS_NAME, decode_row)


def _raw(data: bytes, where: str) -> bytes:
    return data


def _of_rollout(
    capture: Capture, result: Result, outcome: RebuiltRollout, rows: Sequence[Row], advantage: float | None
) -> tuple[Finding, ...]:
    rollout = Rollout(
        rollout_id=capture.rollout_id,
        attempt=capture.attempt,
        group_id=result.group_id,
        reward=result.reward,
        advantage=advantage,
        credits=result.credits,
    )
    return verify_rows(
        capture.records, capture.tokens, outcome.selection.calls, rows, rollout=rollout, mode=outcome.mode
    )
