"""A data set of captures, read as a ledger is.

Invariant: only partitions whose manifest is there are read, and nothing of a file is handed out before all of its bytes
were compared with the manifest, once a reader. `check` and `prove` also compare what is read back with snapshot ids. An
attempt that stands in two places is refused.

Not here: files (parquet_part), and writing (writer).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import BinaryIO, Final, NamedTuple, Self

import msgspec

from gristmill.archive.attempt_reading import summary_of
from gristmill.archive.attempt_rows import ArchivedAttempt, RowValues, pack, without_places
from gristmill.archive.columns import ATTEMPTS, file_name
from gristmill.archive.key_index import KeyIndex, Location
from gristmill.archive.manifest import PARTITION_PREFIX, ArchiveFile, ArchiveManifest, read_manifest
from gristmill.archive.opening import place_of
from gristmill.archive.parquet_part import PartReader
from gristmill.archive.place import MANIFEST_NAME, Place, reading
from gristmill.errors import Code, DecodeError, LedgerError
from gristmill.ledger import AttemptKey, AttemptSetup, AttemptState, Counts, StoredCall, Summary
from gristmill.records import Capture, Result

__all__ = ["ArchiveReader", "PartPlace", "check_file", "is_archive"]

_KEY: Final = ("rollout_id", "attempt")
_OPEN_PARTS: Final = 4


class PartPlace(NamedTuple):
    """A part of a data set: its partition's name, folder and manifest, and its number."""

    partition: str
    place: Place
    manifest: ArchiveManifest
    part: int

    @property
    def files(self) -> tuple[ArchiveFile, ...]:
        """What the manifest says of its files."""
        return self.manifest.part_files(self.part)


def check_file(place: Place, entry: ArchiveFile) -> None:
    """Compare a file with what a manifest says of it.

    Raises:
        DecodeError: `file_unreadable`; `manifest_differs`.
    """
    where = place.path_of(entry.name)
    with reading(where), place.open(entry.name) as file:
        entry.check(file, where)


def is_archive(given: str | os.PathLike[str]) -> bool:
    """Say whether a path or URL is a data set, or a partition of one; rows that were built have partitions, too.

    Raises:
        ConfigError, DecodeError: a URL that nothing serves, or that cannot be read.
    """
    place = place_of(given)
    names = [name for name in place.folders() if name.startswith(PARTITION_PREFIX)]
    first = file_name(ATTEMPTS, 0)
    if place.name.rstrip("/").rpartition("/")[2].startswith(PARTITION_PREFIX) and place.size(first) is not None:
        return True
    return any(place.inside(name).size(first) is not None for name in names)


class ArchiveReader:
    """Reads a data set; what was frozen in the ledger is frozen here.

    Args:
        given: path or URL of the data set, or of one of its partitions.
        on_damage: for who looks for damage. It is told of a part whose attempts cannot be listed, and the others are
            read; calls are read from whatever bytes are there, and `check` says what is wrong with them. None: the
            first file that is not as its manifest says is an error wherever it is read.

    Raises:
        DecodeError: `file_unreadable`; `file_malformed`: there is no partition; `schema_unsupported`,
            `manifest_differs`, here and wherever something is read.
    """

    def __init__(
        self, given: str | os.PathLike[str], *, on_damage: Callable[[DecodeError], None] | None = None
    ) -> None:
        place = place_of(given)
        self._on_damage = on_damage
        self.name: Final = place.name
        self.partitions: dict[str, ArchiveManifest] = {}
        self.unfinished: list[str] = []
        """Partitions without a manifest: they are being written, or somebody was stopped while he wrote them."""
        self.parts: list[PartPlace] = []
        own = place.name.rstrip("/").rpartition("/")[2]
        if own.startswith(PARTITION_PREFIX) and place.size(MANIFEST_NAME) is not None:
            self._add(place, own)
        else:
            for name in place.folders():
                if name.startswith(PARTITION_PREFIX):
                    self._add(place.inside(name), name)
        if not self.partitions:
            what = "only unfinished ones" if self.unfinished else "none"
            raise DecodeError(
                f"expected a finished partition in {place.name}, got {what}",
                where=place.name,
                hint="`gristmill archive CAPTURES DATASET` writes one",
            )
        self._readers: dict[int, PartReader] = {}
        self._index: KeyIndex | None = None
        self._checked = dict[int, str | None]()
        self._proved = set[tuple[int, str]]()
        self._passed_over = set[int]()

    def _add(self, place: Place, folder: str) -> None:
        name = folder.removeprefix(PARTITION_PREFIX)
        if place.size(MANIFEST_NAME) is None:
            self.unfinished.append(name)
            return
        manifest = read_manifest(place)
        if manifest.partition != name:
            raise DecodeError(
                f"expected the manifest of partition {name}, got that of {manifest.partition}",
                code=Code.MANIFEST_DIFFERS,
                where=place.path_of(MANIFEST_NAME),
            )
        self.partitions[name] = manifest
        self.parts += (PartPlace(name, place, manifest, part) for part in range(manifest.parts))

    # Places

    def open_part(self, part: int) -> PartReader:
        """Open a part by its number over all partitions; the caller closes it.

        Raises:
            DecodeError: `file_unreadable`, `file_malformed`, `manifest_differs`, here and in what is read of it.
        """
        opened = self.parts[part]
        return PartReader(opened.place, opened.part, partial(self._prove_open, part))

    def _prove_open(self, part: int, name: str, file: BinaryIO) -> None:
        if (part, name) in self._proved or (self._on_damage is not None and not name.startswith(ATTEMPTS.name)):
            return
        opened = self.parts[part]
        opened.manifest.file(name).check(file, opened.place.path_of(name))
        self._proved.add((part, name))

    def _prove_part(self, part: int) -> None:
        opened = self.parts[part]
        for entry in opened.files:
            if (part, entry.name) not in self._proved:
                check_file(opened.place, entry)
                self._proved.add((part, entry.name))

    def _listed(self) -> Iterator[int]:
        """Give the parts whose attempts can be listed."""
        self.index()
        yield from (part for part in range(len(self.parts)) if part not in self._passed_over)

    def _reader(self, part: int) -> PartReader:
        read = self._readers.get(part)
        if read is None:
            while len(self._readers) >= _OPEN_PARTS:
                self._readers.pop(next(iter(self._readers))).close()
            read = self._readers[part] = self.open_part(part)
        return read

    def _rows(self, location: Location, names: tuple[str, ...] = ATTEMPTS.names) -> RowValues:
        [row] = self._reader(location.part).rows(names, first=location.number, count=1)
        return row

    def index(self) -> KeyIndex:
        """Return where each attempt stands.

        Raises:
            DecodeError: `file_unreadable`, `manifest_differs`; `file_malformed`: an attempt stands in two places.
        """
        if self._index is None:
            index = KeyIndex(self._keys_there(part) for part in range(len(self.parts)))
            for first, second in index.repeated():
                one, other = _key(self._rows(first, _KEY)), _key(self._rows(second, _KEY))
                if one == other:
                    places = f"{self._reader(first.part).where} and {self._reader(second.part).where}"
                    message = f"expected each attempt in one place, {one.rollout_id}/{one.attempt} is in {places}"
                    hint = "take one of the two partitions away: nobody can say which is right"
                    raise DecodeError(message, where=self.name, hint=hint)
            self._index = index
        return self._index

    def _keys_there(self, part: int) -> Iterator[AttemptKey]:
        """Give the keys of a part; one whose keys cannot be read has none for who looks for damage."""
        if self._on_damage is None:
            return self._keys(part)
        try:
            return iter(list(self._keys(part)))
        except DecodeError as error:
            self._passed_over.add(part)
            self._on_damage(error)
            return iter(())

    def _keys(self, part: int) -> Iterator[AttemptKey]:
        for row in self._reader(part).rows(_KEY):
            yield _key(row)

    def _find(self, key: AttemptKey) -> Location:
        for location in self.index().of_rollout(key.rollout_id):
            if _key(self._rows(location, _KEY)) == key:
                return location
        raise LedgerError(
            f"expected a captured rollout, got {key.rollout_id}/{key.attempt}",
            code=Code.ROLLOUT_UNKNOWN,
            where=key.rollout_id,
        )

    # As a ledger

    def attempts(self) -> Iterator[AttemptKey]:
        """Yield the attempts in the order in which they stand."""
        for part in self._listed():
            yield from self._keys(part)

    def snapshots(self) -> Iterator[tuple[AttemptKey, str]]:
        """Yield the attempts with their snapshot ids, in the order in which they stand."""
        for part in self._listed():
            for row in self._reader(part).rows((*_KEY, "snapshot_id")):
                yield _key(row), row["snapshot_id"]

    def rollout(self, rollout_id: str) -> tuple[AttemptKey, ...]:
        """Return the attempts of one rollout by number; empty where it is not there."""
        keys = (_key(self._rows(location, _KEY)) for location in self.index().of_rollout(rollout_id))
        return tuple(sorted(key for key in keys if key.rollout_id == rollout_id))

    def summaries(
        self,
        *,
        after: AttemptKey | None = None,
        state: AttemptState | None = None,
        group_id: str | None = None,
    ) -> Iterator[Summary]:
        """Yield one line for each attempt, in the order in which they stand; see `Ledger.summaries`."""
        begin = Location(0, -1) if after is None else self._find(after)
        for part in self._listed():
            if part < begin.part:
                continue
            read = self._reader(part)
            first = begin.number + 1 if part == begin.part else 0
            for row in read.rows(_SUMMARY, first=first):
                summary = summary_of(row, read.where)
                if state in {None, summary.state} and group_id in {None, summary.group_id}:
                    yield summary

    def summary(self, key: AttemptKey) -> Summary:
        """Return the line of one attempt; see `Ledger.summary`."""
        location = self._find(key)
        return summary_of(self._rows(location, _SUMMARY), self._reader(location.part).where)

    def counts(self) -> Counts:
        """Add up all attempts."""
        states, totals = Counter[AttemptState](), Counter[str]()
        for manifest in self.partitions.values():
            for state, count in manifest.states.items():
                states[AttemptState(state)] += count
            totals.update(msgspec.structs.asdict(manifest.counts))
        names = ("calls", "lost", "usable_calls", "sampled_tokens", "prompt_tokens")
        return Counts(attempts=states, **{name: totals[name] for name in names})

    def whole(self, key: AttemptKey, *, tokens: bool = True, exchanges: bool = True) -> ArchivedAttempt:
        """Return everything that is stored of an attempt.

        Raises:
            LedgerError: `rollout_unknown`.
            DecodeError: `file_unreadable`, `file_malformed`, `schema_unsupported`, `manifest_differs`.
        """
        location = self._find(key)
        return self._reader(location.part).read(location.number, tokens=tokens, exchanges=exchanges)

    def read(self, key: AttemptKey, *, tokens: bool = True, exchanges: bool = False) -> tuple[Capture, Result | None]:
        """Return everything captured of an attempt, and its result; see `Ledger.read`."""
        attempt = self.whole(key, tokens=tokens, exchanges=exchanges)
        return attempt.capture, attempt.result

    def late(self, key: AttemptKey) -> tuple[StoredCall, ...]:
        """Return the outcomes that came after the attempt had finished, in commit order."""
        return self.whole(key).late

    def setup(self, key: AttemptKey) -> AttemptSetup | None:
        """Return what an attempt was opened with."""
        return self.whole(key, tokens=False, exchanges=False).setup

    # Proof

    def check(self, key: AttemptKey) -> tuple[str, ...]:
        """Say, a sentence each, where what is stored of an attempt contradicts itself, or its files their manifest."""
        location = self._find(key)
        found: list[str] = []
        if location.part not in self._checked:
            self._checked[location.part] = self._check_part(location.part)
        damaged = self._checked[location.part]
        if damaged is not None:
            found.append(damaged)
        try:
            found += self._differences(location)
        except (DecodeError, LedgerError) as error:
            found.append(error.message)
        return tuple(found)

    def _check_part(self, part: int) -> str | None:
        try:
            self._prove_part(part)
        except DecodeError as error:
            return error.message
        return None

    def _differences(self, location: Location) -> Iterator[str]:
        """Make the rows of an attempt again from what is read back, and compare them with those that are there."""
        read = self._reader(location.part)
        row = self._rows(location)
        calls, _ = read.parts(row)
        # Texts are numbered as they come, which nothing depends on; the snapshot id covers what they say.
        attempt = read.attempt(row)
        packed = pack(attempt)
        yield from _differing("attempts", without_places(row), packed.attempt)
        if len(calls) != len(packed.calls):
            yield f"expected {len(packed.calls)} calls, got {len(calls)}"
        for stored, made in zip(calls, packed.calls, strict=False):
            yield from _differing(f"call {made['model_call_id']}", _comparable(stored), _comparable(made))

    def prove(self, key: AttemptKey) -> str:
        """Return the snapshot id of an attempt that was read back whole, from files that are as their manifest says.

        Raises:
            LedgerError: `rollout_unknown`; `manifest_differs`: what is read back is not what was archived.
            DecodeError: `file_unreadable`, `file_malformed`, `manifest_differs`.
        """
        location = self._find(key)
        self._prove_part(location.part)
        stated = self._rows(location, ("snapshot_id",))["snapshot_id"]
        found = self.whole(key).snapshot_id()
        if found != stated:
            raise LedgerError(
                f"expected {key.rollout_id}/{key.attempt} as it was archived, its digest is another",
                code=Code.MANIFEST_DIFFERS,
                where=key.rollout_id,
            )
        return found

    def close(self) -> None:
        """Close the files."""
        for read in self._readers.values():
            read.close()
        self._readers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_SUMMARY: Final = (
    *_KEY,
    *("state", "group_id", "reward", "has_result", "calls", "lost", "usable_calls", "sampled_tokens", "prompt_tokens"),
    *("models", "first_at", "last_at", "touched_at"),
)


def _key(row: RowValues) -> AttemptKey:
    return AttemptKey(row["rollout_id"], row["attempt"])


def _comparable(row: RowValues) -> RowValues:
    """Leave out what is proved by the snapshot id and need not be written in the same way."""
    left_out = {"token_ids", "logprobs", "extras", "request", "reply", "headers", "status"}
    return {name: value for name, value in row.items() if name not in left_out}


def _differing(what: str, stored: RowValues, made: RowValues) -> Iterator[str]:
    for name, value in made.items():
        if stored[name] != value:
            yield f"expected {name} of {what} {value!r}, got {stored[name]!r}"
