"""Built rows checked against the archive that they were built from: every partition, and the summary.

Invariant: a partition is proved as a folder of an export is, from what was captured; which partitions there are, what
they say they were made from, and the summary are proved too. One partition at a time is in memory.

Not here: one folder (export.check).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

import msgspec

from gristmill.archive import ArchiveReader, Place
from gristmill.archive.place import MANIFEST_NAME
from gristmill.engine.job import STAMP_NAME, BuildOptions, PartTask, Stamp, read_stamp
from gristmill.engine.manifests import rows_manifest
from gristmill.engine.outcome import Decided, decided, refused_for
from gristmill.engine.partition import opened_part
from gristmill.engine.plan import part_tasks, written_parts
from gristmill.engine.summary import SUMMARY_NAME, BuildSummary, add_up, read_summary
from gristmill.errors import Code, DecodeError, LedgerError
from gristmill.export import FolderCheck, check_capture
from gristmill.reconstruction import Finding

__all__ = ["BuildCheck", "is_build"]

_DAMAGED: Final = frozenset({Code.FILE_MALFORMED, Code.MANIFEST_DIFFERS})
_MISSING: Final = "expected this partition, it is not there"


def is_build(place: Place) -> bool:
    """Say whether a place holds built rows, finished or not."""
    return place.size(SUMMARY_NAME) is not None or bool(written_parts(place))


class BuildCheck:
    """Checks built rows.

    Args:
        archive: path or URL of the archive.
        rows: where the rows are.

    Raises:
        DecodeError: the archive, or the summary, cannot be read.

    Attributes:
        built: how the rows say that they were made.
        rows_checked: how many records were compared so far.
    """

    def __init__(self, archive: str, rows: Place) -> None:
        self._archive = archive
        self._rows = rows
        self.summary: BuildSummary = read_summary(rows)
        self.built: BuildOptions = self.summary.build
        self.rows_checked = 0

    def findings(self, options: BuildOptions, on_attempt: Callable[[Decided], None]) -> Iterator[Finding]:
        """Check partition by partition, then the summary.

        Args:
            options: how the rows are made again.
            on_attempt: is told of every attempt.

        Raises:
            DecodeError: the archive cannot be read.
            PolicyError, ConfigError: the policy cannot be loaded.
        """
        with ArchiveReader(self._archive) as reader:
            try:
                tasks, groups = part_tasks(reader, options.advantage)
            except DecodeError as error:
                if error.code not in _DAMAGED:
                    raise
                # Rewards and attempts of every partition depend on it, so that nothing else can be proved.
                yield Finding(error.code, error.where or reader.name, error.message)
                return
        there = set(written_parts(self._rows))
        whole = True
        for task in tasks:
            if task.name not in there:
                whole = False
                yield Finding(Code.MANIFEST_DIFFERS, self._rows.path_of(task.name), _MISSING)
                continue
            try:
                yield from self._part(options, task, on_attempt)
            except DecodeError as error:
                whole = False
                yield Finding(error.code, error.where or self._rows.path_of(task.name), error.message)
        for name in sorted(there - {task.name for task in tasks}):
            yield Finding(Code.MANIFEST_DIFFERS, self._rows.path_of(name), "expected partitions of the archive only")
        if whole:
            yield from self._summary(add_up(self._rows, options, tasks, groups))

    def _part(self, options: BuildOptions, task: PartTask, on_attempt: Callable[[Decided], None]) -> Iterator[Finding]:
        place = self._rows.inside(task.name)
        differs = Stamp.of(options, task).differences(read_stamp(place))
        if differs:
            message = f"expected rows of these inputs and options, {', '.join(differs)} differ"
            yield Finding(Code.MANIFEST_DIFFERS, place.path_of(STAMP_NAME), message)
        names = [MANIFEST_NAME, *(entry.name for entry in rows_manifest(place).files)]
        missing = [name for name in names if place.size(name) is None]
        for name in missing:
            yield Finding(Code.MANIFEST_DIFFERS, place.path_of(name), "expected a file that its manifest names")
        if missing:
            return
        # All files that are there: one that the manifest does not name is a finding.
        with opened_part(self._archive, task) as part, place.local(place.files()) as folder:
            check = FolderCheck(folder)
            check.expect(None if task.advantages is None else task.advantages.note)
            for one in decided(options, part, task.advantages):
                named = f"rollout={one.capture.rollout_id}"
                found = [*check_capture(one.capture), *_checked(check, options, one)]
                on_attempt(one)
                for finding in found:
                    yield msgspec.structs.replace(finding, where=f"{task.name} {named} {finding.where}")
            self.rows_checked += check.rows_checked
            ends = check.finish(
                policy=options.policy, options=options.options, train_model=options.train_model, whole=True
            )
            for finding in ends:
                yield msgspec.structs.replace(finding, where=f"{task.name} {finding.where}")

    def _summary(self, expected: BuildSummary) -> Iterator[Finding]:
        wanted = msgspec.to_builtins(expected)
        got = cast(Mapping[str, Any], msgspec.to_builtins(self.summary))
        for name, value in wanted.items():
            if value != got[name]:
                where = f"{self._rows.path_of(SUMMARY_NAME)} $.{name}"
                yield Finding(Code.MANIFEST_DIFFERS, where, f"expected {name} {value!r}, got {got[name]!r}")


def _checked(check: FolderCheck, options: BuildOptions, one: Decided) -> list[Finding]:
    try:
        return list(check.check(one.capture, one.result, one.outcome))
    except (DecodeError, LedgerError) as error:
        # As in the build: what was captured is decoded only now, so its refusal is what has to be there.
        return list(check.check(one.capture, one.result, refused_for(options, one.capture, error)))
