"""The files that NeMo Gym leaves of a run: which there are, what stands on their lines, and whose each line is.

Invariant: a line is of exactly one kind, by keys that only that kind has, and of one rollout: by its own id, by the
indices that Gym makes ids of, or by the name of a file that holds one rollout. Any other line is refused.

Not here: what the lines say (tokens, rollout, reading).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple, cast

from gristmill.captures.call_line import id_at
from gristmill.captures.fields import JsonObject, count_at
from gristmill.captures.reply import Unexpected
from gristmill.errors import DecodeError
from gristmill.interop.attempt import hole, refused
from gristmill.interop.foreign import bytes_of, loads_foreign, object_at, unreadable
from gristmill.interop.importer import Report
from gristmill.interop.lines import Key, KeyedLines, Line, first_object
from gristmill.records import LostCall

__all__ = ["Files", "Kind", "is_certain", "kind_of_line", "rollout_id_of"]

_TOKENS: Final = ".tokens.jsonl"
_OF_ONE: Final = (_TOKENS, ".lineage.jsonl", ".capture.jsonl")
_MARKS: Final = {
    ".tokens.incomplete": "NeMo Gym marked it as lost",
    ".tokens.intents": "it was begun and never recorded",
}
_SIDECAR: Final = "_failures.jsonl"
_PASSED_OVER: Final = "not read: nothing of a rollout stands in it"


class Kind(StrEnum):
    """What stands on a line."""

    ENTRY = "token record"
    STAGED = "staged call"
    LEDGER = "line of a ledger"
    MANIFEST = "manifest"
    RECEIPT = "receipt"
    EXCHANGE = "exchange"
    RESULT = "rollout"


_CERTAIN: Final = frozenset({Kind.STAGED, Kind.MANIFEST, Kind.RECEIPT})


class _Source(NamedTuple):
    """One file by rollout: lines, or whole documents; the rollout that it is named after; what stands in it."""

    lines: KeyedLines | None
    documents: dict[str, list[Line]]
    owner: str | None
    rollouts: frozenset[str]
    kinds: frozenset[Kind]


def kind_of_line(line: JsonObject) -> Kind | None:
    """Tell what stands on a line; None where it is nothing of Gym's."""
    if "token_ids_delta" in line:
        return Kind.STAGED
    if isinstance(line.get("records"), list) and "rollout_id" in line:
        return Kind.MANIFEST
    if isinstance(line.get("manifest"), list) and "rollout_id" in line:
        return Kind.RECEIPT
    if "model_call_id" in line:
        if "generation_token_ids" in line and "rollout_id" in line:
            return Kind.ENTRY
        if {"staging_key", "failure_reason", "fingerprint"} & line.keys():
            return Kind.LEDGER
        return Kind.EXCHANGE if {"request", "status_code"} & line.keys() else None
    return Kind.RESULT if {"response", "responses", "reward", "ng_trajectory"} & line.keys() else None


def rollout_id_of(line: JsonObject) -> str | None:
    """Return the rollout id that a rollout's line states or that Gym makes of its indices, None where it has neither.

    Raises:
        Unexpected: one of them has another type.
    """
    stated = id_at(line, "_ng_rollout_id")
    stated = id_at(line, "rollout_id") if stated is None else stated
    if stated is None:
        task, rollout = count_at(line, "_ng_task_index", "$"), count_at(line, "_ng_rollout_index", "$")
        if task is None or rollout is None:
            return None
        stated = f"{task}-{rollout}"
    attempt = count_at(line, "_ng_attempt_index", "$")
    return f"{stated}-a{attempt}" if attempt else stated


def is_certain(path: Path) -> bool:
    """Tell whether a path can be nothing else than what Gym left of a run."""
    if path.is_dir():
        return any(path.glob(f"*{_TOKENS}"))
    if path.name.endswith(_TOKENS):
        return True
    first = first_object(path)
    if first is None:
        return False
    kind = kind_of_line(first)
    # A call line of ours has the names of a token record's fields, but not all of them.
    return kind in _CERTAIN or ("token_item_index" if kind is Kind.ENTRY else "_ng_task_index") in first


class Files:
    """The lines of a file or folder by rollout.

    Raises:
        DecodeError: `file_unreadable`; `file_malformed` as `Report.refuse` says.
    """

    def __init__(self, path: Path, report: Report) -> None:
        self._report = report
        self._given = path
        self._folder = path if path.is_dir() else path.parent
        self._sources = [self._source(one) for one in self._paths(path)]

    def rollout_ids(self) -> list[str]:
        """Give the rollouts in the order in which files and lines name them."""
        found: dict[str, None] = {}
        for source in self._sources:
            keys = [key.rollout_id for key in source.lines.keys] if source.lines is not None else source.documents
            found.update(dict.fromkeys(keys))
            if source.owner is not None and source.lines is not None and source.lines.lost:
                found.setdefault(source.owner)
        found.update(dict.fromkeys(self._marked()))
        return list(found)

    def lines(self, rollout_id: str) -> Iterator[tuple[Kind, Line]]:
        """Give the lines of one rollout, file after file."""
        for source in self._sources:
            if rollout_id not in source.rollouts:
                continue
            if source.lines is not None:
                for line in source.lines.lines(Key(rollout_id)):
                    yield cast(Kind, kind_of_line(line.value)), line
            for line in source.documents.get(rollout_id, ()):
                yield cast(Kind, kind_of_line(line.value)), line

    def unread(self, rollout_id: str) -> Iterator[LostCall]:
        """Give what one rollout may have lost by lines that cannot be read.

        In a file of rollouts such a line is another rollout.
        """
        for source in self._sources:
            if source.lines is None or source.kinds == frozenset({Kind.RESULT}):
                continue
            if source.owner == rollout_id or (source.owner is None and rollout_id in source.rollouts):
                yield from source.lines.lost

    def missing(self, rollout_id: str, known: frozenset[str]) -> Iterator[LostCall]:
        """Give the calls that Gym says it lost: marked as such, or begun and never recorded."""
        names: dict[str, str] = {}
        for end, why in _MARKS.items():
            names = _names(self._folder / f"{rollout_id}{end}", why) | names
        yield from (_lost(name, why) for name, why in names.items() if name and name not in known)
        if "" in names:
            yield _lost("unnamed", names[""])

    def _marked(self) -> Iterator[str]:
        """Name the rollouts of marks that lie beside what was given: one may have lost all its calls."""
        if self._given.is_dir():
            for path in sorted(self._given.iterdir()):
                yield from (path.name.removesuffix(end) for end in _MARKS if path.name.endswith(end))
        elif self._given.name.endswith(_TOKENS):
            owner = self._given.name.removesuffix(_TOKENS)
            yield from (owner for end in _MARKS if (self._folder / f"{owner}{end}").is_file())

    def _paths(self, path: Path) -> Iterator[Path]:
        if not path.is_dir():
            yield path
            return
        try:
            inside = sorted(path.iterdir())
        except OSError as error:
            raise unreadable(path, error) from error
        for one in inside:
            if one.suffix not in {".json", ".jsonl"} or one.name.endswith(".tokens.state.json"):
                continue
            if one.name.endswith(_SIDECAR):
                self._report.note(str(one), "not read: tries of the collector that failed; rewards stand elsewhere")
                continue
            if one.name.endswith(_OF_ONE):
                yield one
                continue
            first = first_object(one)
            if one.suffix == ".jsonl" and (first is None or kind_of_line(first) is None):
                self._report.note(str(one), _PASSED_OVER)
                continue
            yield one

    def _source(self, path: Path) -> _Source:
        owner = next((path.name.removesuffix(end) for end in _OF_ONE if path.name.endswith(end)), None) or None
        if path.suffix == ".json":
            documents = self._documents(path)
            return _Source(None, documents, None, frozenset(documents), frozenset())
        kinds: set[Kind] = set()
        unnamed = count(1)

        def key_of(line: JsonObject) -> Key:
            kind = kind_of_line(line)
            # Collections from before Gym numbered them: each line is a rollout of its own.
            stand_in = f"{path.stem}-{next(unnamed)}" if kind is Kind.RESULT and rollout_id_of(line) is None else None
            key = Key(_owner_of(line, owner or stand_in))
            kinds.add(cast(Kind, kind))
            return key

        lines = KeyedLines(path, self._report, key_of)
        return _Source(lines, {}, owner, frozenset(key.rollout_id for key in lines.keys), frozenset(kinds))

    def _documents(self, path: Path) -> dict[str, list[Line]]:
        """Read a JSON file: one object, or an array of them."""
        found: dict[str, list[Line]] = {}
        try:
            value = loads_foreign(bytes_of(path), str(path))
        except DecodeError as error:
            self._report.refuse(error)
            return found
        members = cast("list[object]", value) if isinstance(value, list) else [value]
        for index, member in enumerate(members):
            place = f"{path} [{index}]" if isinstance(value, list) else str(path)
            try:
                known = isinstance(member, dict) and kind_of_line(cast(JsonObject, member)) is not None
                if path != self._given and not known:
                    # A folder holds other things as well; a file that was named is meant.
                    self._report.note(place, _PASSED_OVER)
                    continue
                line = object_at(member, "$")
                found.setdefault(_owner_of(line, None), []).append(Line(place, index + 1, line))
            except Unexpected as error:
                self._report.refuse(refused(error, place))
        return found


def _owner_of(line: JsonObject, file_of: str | None) -> str:
    """Return whose line it is.

    Raises:
        Unexpected: it is nothing of Gym's, names another rollout than its file, or names none.
    """
    if kind_of_line(line) is None:
        raise Unexpected(f"a {', '.join(Kind)}", "an object with the keys of none of them", "$")
    named = rollout_id_of(line)
    if named is None and file_of is None:
        expected = "rollout_id, _ng_rollout_id, or _ng_task_index with _ng_rollout_index"
        raise Unexpected(expected, "none of them", "$")
    if named is not None and file_of is not None and named != file_of:
        raise Unexpected(f"a line of rollout {file_of!r}, which the file is named after", repr(named), "$.rollout_id")
    return cast(str, named if named is not None else file_of)


def _names(path: Path, why: str) -> dict[str, str]:
    """Read the call ids of a marker file, a line each; there may be none."""
    if not path.is_file():
        return {}
    names = bytes_of(path).decode("utf-8", "replace").splitlines() or [""]
    return {name.strip(): why for name in names}


def _lost(name: str, why: str) -> LostCall:
    return LostCall(model_call_id=hole(name, "").model_call_id, reason=why, maybe_received=True)
