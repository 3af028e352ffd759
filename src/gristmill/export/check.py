"""A folder of rows checked against what was captured: manifest, files, rows and refusals.

Invariant: every field of the manifest and every line of the files is either proved from the captures or a finding;
a finding never hides another. Lines are found by their place in the file, so memory grows with the number of
rollouts only by a place each.

Not here: the rows of one rollout (reconstruction.checks), and captures (lineage_check).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec

from gristmill.errors import Code, DecodeError
from gristmill.export.jsonl import FORMAT, REJECTED_NAME, ROWS_NAME, Totals, rejected_line
from gristmill.export.manifest import MANIFEST_NAME, FileEntry, Manifest, RolloutCounts, read_manifest
from gristmill.export.row_json import decode_row
from gristmill.pipeline import RebuiltRollout
from gristmill.reconstruction import Finding, Rollout, Row, verify_rows
from gristmill.records import Capture, Result
from gristmill.selection import Rejected

__all__ = ["FolderCheck"]

_Key = tuple[str, int]
_OF_ALL_ROLLOUTS: Final = ("rollouts", "funnel", "rejected", "forks", "context_tokens")


class _Line(NamedTuple):
    """Where a line stands: number from 1, byte offset, length in bytes."""

    number: int
    offset: int
    length: int


class _Named(msgspec.Struct):
    """What every line of both files names."""

    rollout_id: str
    attempt: int
    row_id: str = ""


_named: Final = msgspec.json.Decoder(_Named)


class _Scan:
    """One pass over a file: size, digest, and the place of every line by attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[_Key, list[_Line]] = {}
        self.nameless: list[_Line] = []
        self.ids = sha256()
        self.missing = False
        digest, offset, number = sha256(), 0, 0
        try:
            with path.open("rb") as file:
                for number, data in enumerate(file, 1):
                    digest.update(data)
                    self._place(_Line(number, offset, len(data)), data)
                    offset += len(data)
        except FileNotFoundError:
            self.missing = True
        except OSError as error:
            message = f"cannot read {path}: {error.strerror or error}"
            raise DecodeError(message, code=Code.FILE_UNREADABLE, where=str(path)) from error
        self.entry = FileEntry(path.name, offset, digest.hexdigest(), number)

    def _place(self, line: _Line, data: bytes) -> None:
        try:
            named = _named.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.nameless.append(line)
            return
        self.ids.update(f"{named.row_id}\n".encode())
        self.lines.setdefault((named.rollout_id, named.attempt), []).append(line)

    def read(self, lines: Sequence[_Line]) -> Iterator[bytes]:
        if not lines:
            return
        with self.path.open("rb") as file:
            for line in lines:
                file.seek(line.offset)
                yield file.read(line.length)

    def where(self, line: _Line) -> str:
        return f"{self.path} line {line.number}"


class FolderCheck:
    """Checks a folder of rows, attempt by attempt.

    Args:
        folder: of rows.

    Raises:
        DecodeError: the manifest or a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self.rows_checked = 0
        self._rows = _Scan(folder / ROWS_NAME)
        self._rejected = _Scan(folder / REJECTED_NAME)
        self._totals = Totals()

    def check(self, capture: Capture, result: Result, outcome: RebuiltRollout | Rejected) -> Iterator[Finding]:
        """Find what the folder says of one attempt that its capture does not prove.

        Args:
            capture: the attempt.
            result: what the harness handed back.
            outcome: of running the manifest's policy and mode on it.
        """
        key = (capture.rollout_id, capture.attempt)
        self._totals.add(capture, outcome)
        rows: list[Row] = []
        lines = self._rows.lines.pop(key, [])
        for line, data in zip(lines, self._rows.read(lines), strict=True):
            self.rows_checked += 1
            try:
                rows.append(decode_row(data, self._rows.where(line)))
            except DecodeError as error:
                yield Finding(error.code, error.where or str(self._rows.path), error.message)
        numbers = [line.number for line in lines]
        if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            message = f"expected the rows of rollout {key[0]!r} to stand together, they do not"
            yield Finding(Code.ROW_METADATA_DIFFERS, f"{self._rows.path} rollout={key[0]}", message)
        if isinstance(outcome, Rejected):
            for row in rows:
                message = f"row {row.row_id}: of a rollout that was rejected with {outcome.code}"
                yield Finding(Code.ROW_UNEXPECTED, f"row={row.row_id}", message)
        else:
            yield from _of_rollout(capture, result, outcome, rows)
        yield from self._refusal(key, outcome)

    def _refusal(self, key: _Key, outcome: RebuiltRollout | Rejected) -> Iterator[Finding]:
        """Compare the refusal of an attempt with its line."""
        lines = self._rejected.lines.pop(key, [])
        expected = [rejected_line(outcome)] if isinstance(outcome, Rejected) else []
        got = list(self._rejected.read(lines))
        if got != expected:
            what = f"the refusal {outcome.code}" if isinstance(outcome, Rejected) else "no refusal"
            message = f"expected {what} of rollout {key[0]!r} attempt {key[1]}, got {len(got)} line(s) that differ"
            where = self._rejected.where(lines[0]) if lines else str(self._rejected.path)
            yield Finding(Code.MANIFEST_DIFFERS, where, message, {"rollout_id": key[0], "attempt": key[1]})

    def finish(
        self, *, policy: str, options: Mapping[str, str], train_model: str | None, whole: bool
    ) -> Iterator[Finding]:
        """Find what the manifest and the files say that the attempts, all of them checked by now, do not prove.

        Args:
            policy, options, train_model: that the outcomes came from.
            whole: whether every captured attempt was checked.
        """
        for scan in (self._rows, self._rejected):
            if scan.missing:
                yield Finding(Code.MANIFEST_DIFFERS, str(scan.path), f"expected {scan.path.name}, it is not there")
            yield from self._nameless(scan)
        if whole:
            yield from self._unknown()
        yield from self._manifest(policy, options, train_model, whole)

    def _nameless(self, scan: _Scan) -> Iterator[Finding]:
        for line, data in zip(scan.nameless, scan.read(scan.nameless), strict=True):
            where, message, code = scan.where(line), "expected a refusal, got something else", Code.FILE_MALFORMED
            if scan is self._rows:
                try:
                    decode_row(data, where)
                except DecodeError as error:
                    where, message, code = error.where or where, error.message, error.code
            yield Finding(code, where, message)

    def _unknown(self) -> Iterator[Finding]:
        for (rollout_id, attempt), lines in self._rows.lines.items():
            message = f"expected rows of captured rollouts only, got {len(lines)} of {rollout_id!r} attempt {attempt}"
            yield Finding(Code.ROW_UNEXPECTED, self._rows.where(lines[0]), message)
        for (rollout_id, attempt), lines in self._rejected.lines.items():
            message = f"expected refusals of captured rollouts only, got one of {rollout_id!r} attempt {attempt}"
            yield Finding(Code.MANIFEST_DIFFERS, self._rejected.where(lines[0]), message)

    def _manifest(
        self, policy: str, options: Mapping[str, str], train_model: str | None, whole: bool
    ) -> Iterator[Finding]:
        """Make the manifest again and compare it, entry by entry."""
        totals, got = self._totals, self.manifest
        expected = msgspec.structs.replace(
            got,
            schema=1,
            format=FORMAT,
            files=tuple(sorted((self._rows.entry, self._rejected.entry), key=lambda entry: entry.name)),
            policy=policy,
            options=dict(options),
            train_model=train_model,
            rows_digest=self._rows.ids.hexdigest(),
            rollouts=RolloutCounts(totals.selected, totals.rejected),
            funnel=totals.funnel,
            rejected=dict(totals.codes),
            forks=dict(totals.forks),
            context_tokens=totals.context_tokens,
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


def _of_rollout(
    capture: Capture, result: Result, outcome: RebuiltRollout, rows: Sequence[Row]
) -> tuple[Finding, ...]:
    rollout = Rollout(
        rollout_id=capture.rollout_id,
        attempt=capture.attempt,
        group_id=result.group_id,
        reward=result.reward,
    )
    return verify_rows(
        capture.records, capture.tokens, outcome.selection.calls, rows, rollout=rollout, mode=outcome.mode
    )
