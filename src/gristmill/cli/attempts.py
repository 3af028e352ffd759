"""The captures that a command line names, attempt by attempt.

Invariant: attempts are read one at a time and nothing is kept, so memory does not grow with their number; an attempt
that stands in two places is refused, since nothing says which is the right one; what was passed over is said.

Not here: what commands do with an attempt, where captures stand (sources), what is said of reading them (remarks), the
format of captures, and ledgers.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import msgspec

from gristmill.cli.foreign import FOREIGN_OPTIONS, foreign_parts
from gristmill.cli.nearest import did_you_mean
from gristmill.cli.place import PLACE, place_of
from gristmill.cli.remarks import Remarks, with_hint
from gristmill.cli.sources import Kind, Source, refuse_other, size_bytes, sources
from gristmill.errors import Code, ConfigError, DecodeError, LedgerError

if TYPE_CHECKING:
    from gristmill.captures import CaptureFile
    from gristmill.cli.store import Stored
    from gristmill.ledger import AttemptKey, LedgerAddress, Summary
    from gristmill.records import Capture, Result

__all__ = ["STATES", "Attempt", "Captures", "paths_and_name", "takes_captures"]

STATES: Final = ("open", "finished", "frozen", "abandoned")
_FROZEN: Final = "frozen"
_HOLDS_RESULTS: Final = {
    Kind.LEDGER: "a ledger, which holds the results",
    Kind.FOREIGN: "a capture of another program, whose format says where results stand",
}


class Attempt(NamedTuple):
    """One attempt and where it was read.

    Attributes:
        source: file or folder.
        capture: what was captured.
        result: what the harness handed back; an empty one where it is not known.
        summary: the ledger's line about it, where it comes from one and was looked up.
        has_result: whether the result is known.
        share_bytes: its share of the source's size, for progress.
    """

    source: LedgerAddress
    capture: Capture
    result: Result
    summary: Summary | None = None
    has_result: bool = True
    share_bytes: int = 0


DAMAGED: Final = frozenset({Code.LEDGER_DAMAGED, Code.FILE_MALFORMED, Code.MANIFEST_DIFFERS})
"""Codes of what a ledger holds and cannot be read back."""


class Captures(msgspec.Struct):
    """The captures that the command line names, and what reading them said.

    Attributes:
        paths: ledgers, files and folders.
        result: file of the harness's result, for one attempt.
        rollout, attempt, group, state: read only these; a capture in files is frozen.
        skip_bad: pass over lines that cannot be read.
        format_name: the foreign format of the paths, None where they are ours or tell theirs.
        completed: calls of foreign formats count as finished where nothing says whether they did.
        tokens, exchanges, summaries: what is read of a ledger's attempt beside its records; of files all of it is.
        summaries_only: of ledgers nothing else is read.
        losses: what importers could not carry, how often, by format and name.
        remarks: what reading had to say.
        damaged: takes what cannot be read of ledgers, where it is and why; None: the first damage ends the reading.
    """

    paths: tuple[LedgerAddress, ...]
    result: Path | None = None
    rollout: str | None = None
    attempt: int | None = None
    group: str | None = None
    state: str | None = None
    skip_bad: bool = False
    format_name: str | None = None
    completed: bool = False
    tokens: bool = True
    exchanges: bool = False
    summaries: bool = False
    summaries_only: bool = False
    losses: dict[str, Counter[str]] = {}
    damaged: list[tuple[str, str]] | None = None
    remarks: Remarks = msgspec.field(default_factory=Remarks)

    @property
    def bad_lines(self) -> list[dict[str, str]]:
        """Lines that were passed over, as `{where, message}`."""
        return self.remarks.bad_lines

    @property
    def whole(self) -> bool:
        """Whether every attempt of the paths is read."""
        return (self.rollout, self.attempt, self.group, self.state) == (None, None, None, None)

    def reading(self) -> list[str]:
        """Write how the paths are read as it is given on a command line."""
        result = [] if self.result is None else ["--result", str(self.result)]
        named = [] if self.format_name is None else ["--from", self.format_name]
        flags = {"--completed": self.completed, "--skip-bad": self.skip_bad}
        return [*result, *named, *(flag for flag, given in flags.items() if given)]

    def arguments(self) -> list[str]:
        """Write everything but the paths as it is given on a command line."""
        written: list[str] = []
        for name in ("rollout", "attempt", "group", "state"):
            value = getattr(self, name)
            written += [] if value is None else [f"--{name}", str(value)]
        return [*written, *self.reading()]

    def __iter__(self) -> Iterator[Attempt]:
        """Read attempt by attempt.

        Raises:
            DecodeError: a path cannot be read, or holds no call.
            LedgerError: a ledger cannot be read.
            ConfigError: `rollout_unknown`, an attempt in two places, `--result` with several attempts.
        """
        places = self.places()
        before = len(self.damaged or ())
        seen: dict[tuple[str, int], LedgerAddress] = {}
        known: dict[str, set[int]] = {}
        read = found = False
        try:
            for source in places:
                for attempt in self._read(source, known):
                    read = True
                    key = (attempt.capture.rollout_id, attempt.capture.attempt)
                    if len(places) > 1 or source.kind is Kind.FOREIGN:
                        if key in seen:
                            raise _twice(key, seen[key], source.path)
                        seen[key] = source.path
                    if self._wants(attempt):
                        found = True
                        yield attempt
        finally:
            self.remarks.tell_unsaid()
        if len(self.damaged or ()) > before:
            # What was not found may be what cannot be read.
            return
        if not read and not known:
            raise DecodeError("expected a captured call, got none", where=", ".join(map(str, self.paths)))
        if not found:
            raise self._unknown(known)

    def _read(self, source: Source, known: dict[str, set[int]]) -> Iterator[Attempt]:
        if source.kind is Kind.LEDGER:
            return self._stored(source, known)
        return self._filed(source, known) if source.kind is Kind.FILES else self._foreign(source, known)

    def places(self) -> list[Source]:
        """Give the sources behind the paths.

        Raises:
            ConfigError: `--result` with several of them, or a result.json that may belong to any of several files.
            DecodeError: a path is something else that Gristmill writes.
        """
        for path in self.paths:
            refuse_other(path)
        places = list(sources(self.paths, self.format_name))
        holders = [_HOLDS_RESULTS[place.kind] for place in places if place.kind is not Kind.FILES]
        if self.result is not None and (holders or len(places) != 1):
            got = holders[0] if holders else str(len(places))
            raise ConfigError(
                f"expected one capture to go with {self.result}, got {got}",
                where="--result",
                hint="put result.json beside each capture, or `result` lines into it",
            )
        shared = Counter(place.file.parent for place in places if _is_lines(place))
        for folder, count in shared.items():
            if count > 1 and (folder / "result.json").is_file():
                raise ConfigError(
                    f"expected one file of capture lines beside {folder / 'result.json'}, got {count}",
                    where=str(folder),
                    hint="give each capture a folder of its own, or put `result` lines into the files",
                )
        return places

    def files(self) -> list[Path]:
        """Return the paths that are files or folders of this machine."""
        return [path for path in self.paths if isinstance(path, Path)]

    def bytes(self) -> int:
        """Add up the sizes of the captures in files."""
        return sum(size_bytes(place.file) for place in self.places() if place.kind is not Kind.LEDGER)

    # Filters

    def _wanted_key(self, key: tuple[str, int]) -> bool:
        rollout_id, attempt = key
        return self.rollout in {None, rollout_id} and self.attempt in {None, attempt}

    def _wants(self, attempt: Attempt) -> bool:
        state = _FROZEN if attempt.summary is None else str(attempt.summary.state)
        group = attempt.result.group_id if attempt.summary is None else attempt.summary.group_id
        return self.group in {None, group} and self.state in {None, state}

    def _unknown(self, known: dict[str, set[int]]) -> ConfigError:
        if self.rollout is not None and self.rollout not in known:
            message = f"no rollout {self.rollout!r} in the capture"
            hint = did_you_mean(self.rollout, known)
            return ConfigError(message, code=Code.ROLLOUT_UNKNOWN, where="--rollout", hint=hint)
        numbers = {number for name, numbers in known.items() if self.rollout in {None, name} for number in numbers}
        if self.attempt is not None and self.attempt not in numbers:
            hint = f"There is {', '.join(map(str, sorted(numbers)[:8]))}."
            message = f"no attempt {self.attempt} in the capture"
            return ConfigError(message, code=Code.ROLLOUT_UNKNOWN, where="--attempt", hint=hint)
        asked = " and ".join(
            f"{name} {value!r}" for name, value in (("group", self.group), ("state", self.state)) if value
        )
        where = "--state" if self.group is None else "--group"
        return ConfigError(f"no rollout of {asked} in the capture", code=Code.ROLLOUT_UNKNOWN, where=where)

    # Ledgers

    def _stored(self, source: Source, known: dict[str, set[int]]) -> Iterator[Attempt]:
        from gristmill.cli.store import reading

        with reading(source.path, None if self.damaged is None else self._damage) as ledger:
            found = False
            try:
                for key, summary in self.stored_keys(ledger):
                    found = True
                    try:
                        attempt = self.stored_attempt(ledger, source.path, key, summary)
                    except (LedgerError, DecodeError) as error:
                        self._damage(error, f"rollout={key.rollout_id}")
                        continue
                    yield attempt
                if not found:
                    for key in ledger.attempts():
                        known.setdefault(key.rollout_id, set()).add(key.attempt)
            except (LedgerError, DecodeError) as error:
                self._damage(error, str(source.path))

    def _damage(self, error: LedgerError | DecodeError, where: str | None = None) -> None:
        """Take damage, for who looks for it; anything else is raised."""
        if self.damaged is None or error.code not in DAMAGED:
            raise error
        self.damaged.append((where or error.where or "", error.message))

    def stored_keys(self, ledger: Stored) -> Iterator[tuple[AttemptKey, Summary | None]]:
        """Give the wanted attempts of a ledger, with their summaries where those are read anyway."""
        from gristmill.ledger import AttemptState

        if self.rollout is not None and not self.summaries and self.state is None and self.group is None:
            for key in ledger.rollout(self.rollout):
                if self._wanted_key(key):
                    yield key, None
            return
        state = None if self.state is None else AttemptState(self.state)
        for summary in ledger.summaries(state=state, group_id=self.group):
            if self._wanted_key(summary.key):
                yield summary.key, summary

    def stored_attempt(self, ledger: Stored, path: LedgerAddress, key: AttemptKey, summary: Summary | None) -> Attempt:
        """Read one attempt of a ledger."""
        from gristmill.records import Capture, Result

        if self.summaries_only:
            return Attempt(path, Capture(rollout_id=key.rollout_id, attempt=key.attempt), Result(), summary, False)
        capture, result = ledger.read(key, tokens=self.tokens, exchanges=self.exchanges)
        return Attempt(path, capture, result or Result(), summary, result is not None)

    def without_calls(self) -> Iterator[Attempt]:
        """Read attempt by attempt, of ledgers nothing but the summaries; otherwise as iterating does."""
        self.summaries, self.summaries_only = True, True
        return iter(self)

    def results(self) -> Iterator[Attempt]:
        """Read every attempt, whatever the filters, for its result: no tokens, and nothing is said of the reading."""
        unfiltered = {"rollout": None, "attempt": None, "group": None, "state": None}
        own: dict[str, Any] = {"losses": {}, "remarks": Remarks(quiet=True)}
        less = {"tokens": False, "exchanges": False, "summaries": False, "summaries_only": False}
        damaged = None if self.damaged is None else list[tuple[str, str]]()
        return iter(msgspec.structs.replace(self, **unfiltered, **own, **less, damaged=damaged))

    # Files

    def _filed(self, source: Source, known: dict[str, set[int]]) -> Iterator[Attempt]:
        from gristmill.captures.stream import CaptureStream

        if source.passed_over:
            told = f"{source.passed_over} file(s) beside the captures are not read"
            self.remarks.say("note", f"{source.file.parent}: {told}")
        with with_hint(self.skip_bad):
            stream = CaptureStream(source.file, result=self.result, skip_bad=self.skip_bad)
        if not self.whole:
            for rollout_id, number in stream.keys:
                known.setdefault(rollout_id, set()).add(number)
        share_bytes = size_bytes(source.file) // max(len(stream.keys), 1)
        with with_hint(self.skip_bad):
            yield from self._of_parts(stream.parts(self._wanted_key), source, share_bytes)

    def _foreign(self, source: Source, known: dict[str, set[int]]) -> Iterator[Attempt]:
        losses = self.losses.setdefault(source.format_name or "", Counter())
        parts = foreign_parts(source, losses, skip_bad=self.skip_bad, completed=self.completed)
        with with_hint(self.skip_bad, foreign=True):
            for attempt in self._of_parts(parts, source):
                key = (attempt.capture.rollout_id, attempt.capture.attempt)
                if not self.whole:
                    known.setdefault(key[0], set()).add(key[1])
                if self._wanted_key(key):
                    yield attempt

    def _of_parts(self, parts: Iterable[CaptureFile], source: Source, share_bytes: int = 0) -> Iterator[Attempt]:
        from gristmill.records import Result

        for part in parts:
            self.remarks.take(part, source)
            for key, (capture, result) in part.rollouts.items():
                if source.kind is Kind.FOREIGN or self._wanted_key(key):
                    yield Attempt(source.path, capture, result or Result(), None, result is not None, share_bytes)


def _is_lines(place: Source) -> bool:
    return place.kind is Kind.FILES and place.file.suffix == ".jsonl"


def _twice(key: tuple[str, int], first: LedgerAddress, second: LedgerAddress) -> ConfigError:
    place = f"both {first} and {second}" if first != second else f"{first} twice"
    return ConfigError(
        f"expected each attempt in one place, attempt {key[1]} of rollout {key[0]!r} is in {place}",
        where=str(second),
        hint="give the lines a rollout_id or an attempt of their own, or name one of the paths",
    )


def _options(argument: bool, filters: bool) -> list[Callable[[Any], Any]]:
    paths = click.argument("paths", nargs=-1, required=True, type=PLACE)
    narrowing: list[Callable[[Any], Any]] = [
        click.option("--rollout", metavar="ID", help="Only this rollout."),
        click.option("--attempt", type=click.IntRange(0), metavar="N", help="Only this attempt."),
        click.option("--group", metavar="ID", help="Only rollouts of this group."),
        click.option(
            "--state", type=click.Choice(STATES), help="Only attempts in this state; captures in files are frozen."
        ),
    ]
    return [
        *([paths] if argument else []),
        click.option("--result", type=click.Path(path_type=Path), help="File of the harness's result."),
        *FOREIGN_OPTIONS,
        *(narrowing if filters else []),
        click.option("--skip-bad", is_flag=True, help="Pass over lines that cannot be read; each is reported."),
    ]


def takes_captures(
    *, argument: bool = True, filters: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the arguments that name captures; the command gets them as `captures`.

    Args:
        argument: add PATHS too; a command that reads its positional arguments itself passes False, and replaces
            the paths of `captures`.
        filters: add the options that narrow them down.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(*, result: Path | None, skip_bad: bool, paths: tuple[Path, ...] = (), **rest: Any) -> Any:
            narrowed = {name: rest.pop(name) for name in ("rollout", "attempt", "group", "state") if filters}
            foreign = {"format_name": rest.pop("foreign_format"), "completed": rest.pop("completed")}
            captures = Captures(tuple(paths), result, skip_bad=skip_bad, **narrowed, **foreign)
            return command(captures=captures, **rest)

        wrapped: Any = run
        for option in reversed(_options(argument, filters)):
            wrapped = option(wrapped)
        return wrapped

    return add


def paths_and_name(arguments: Iterable[str]) -> tuple[tuple[LedgerAddress, ...], str | None]:
    """Split positional arguments: the last one is a name if no file is called so and it is not the only one."""
    given = list(arguments)
    last = place_of(given[-1])
    named = len(given) > 1 and isinstance(last, Path) and not last.exists()
    return tuple(map(place_of, given[:-1] if named else given)), given[-1] if named else None
