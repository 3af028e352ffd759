"""The captures that a command line names, attempt by attempt.

Invariant: paths are read one at a time and nothing is kept, so memory does not grow with their number; an attempt
that stands in two places is refused, since nothing says which is the right one; what was passed over is said.

Not here: what commands do with an attempt, and the format of captures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import msgspec

from gristmill.cli.nearest import did_you_mean
from gristmill.errors import Code, ConfigError, DecodeError

if TYPE_CHECKING:
    from gristmill.captures import CaptureFile
    from gristmill.records import Capture, Result

__all__ = ["Attempt", "Captures", "takes_captures"]

_STORY: Final = "capture.jsonl"
_MOST_REMARKS: Final = 10


class Attempt(NamedTuple):
    """One attempt, where it was read, and its result; a result that is not known is an empty one."""

    source: Path
    capture: Capture
    result: Result


class Captures(msgspec.Struct):
    """The captures that the command line names, and what reading them said.

    Attributes:
        paths: files and folders.
        result: file of the harness's result, for one attempt.
        rollout, attempt: read only these.
        skip_bad: pass over lines that cannot be read.
        bad_lines: those that were, as `{where, message}`.
    """

    paths: tuple[Path, ...]
    result: Path | None = None
    rollout: str | None = None
    attempt: int | None = None
    skip_bad: bool = False
    bad_lines: list[dict[str, str]] = []
    remarks: int = 0

    @property
    def whole(self) -> bool:
        """Whether every attempt of the paths is read."""
        return self.rollout is None and self.attempt is None

    def __iter__(self) -> Iterator[Attempt]:
        """Read attempt by attempt.

        Raises:
            DecodeError: a path cannot be read, or holds no call.
            ConfigError: `rollout_unknown`, an attempt in two places, `--result` with several attempts.
        """
        seen: dict[tuple[str, int], Path] = {}
        found = False
        sources = list(self._sources())
        if self.result is not None and len(sources) != 1:
            raise ConfigError(
                f"expected one capture to go with {self.result}, got {len(sources)}",
                where="--result",
                hint="put result.json beside each capture, or `result` lines into it",
            )
        for source in sources:
            for key, rollout in self._read(source).rollouts.items():
                if key in seen:
                    raise _twice(key, seen[key], source)
                seen[key] = source
                if self._wanted(key):
                    found = True
                    yield _attempt(source, rollout.capture, rollout.result)
        self._tell_unsaid()
        if not seen:
            raise DecodeError("expected a captured call, got none", where=", ".join(map(str, self.paths)))
        if not found:
            raise self._unknown(seen)

    def _wanted(self, key: tuple[str, int]) -> bool:
        rollout_id, attempt = key
        return self.rollout in {None, rollout_id} and self.attempt in {None, attempt}

    def _unknown(self, seen: Iterable[tuple[str, int]]) -> ConfigError:
        rollout_ids = dict.fromkeys(rollout_id for rollout_id, _ in seen)
        if self.rollout is not None and self.rollout not in rollout_ids:
            message = f"no rollout {self.rollout!r} in the capture"
            hint = did_you_mean(self.rollout, rollout_ids)
            return ConfigError(message, code=Code.ROLLOUT_UNKNOWN, where="--rollout", hint=hint)
        numbers = sorted({attempt for rollout_id, attempt in seen if self.rollout in {None, rollout_id}})
        message = f"no attempt {self.attempt} in the capture"
        hint = f"There is {', '.join(map(str, numbers[:8]))}."
        return ConfigError(message, code=Code.ROLLOUT_UNKNOWN, where="--attempt", hint=hint)

    def _sources(self) -> Iterator[Path]:
        """Give each path, and each story of a folder of stories."""
        for path in self.paths:
            stories = _stories(path)
            if not stories:
                yield path
                continue
            beside = sum(entry.suffix in {".json", ".jsonl"} for entry in path.iterdir())
            if beside:
                self._remark("note", f"{path}: {beside} file(s) beside the capture folders are not read")
            yield from stories

    def _read(self, source: Path) -> CaptureFile:
        from gristmill.captures import read_capture

        read = read_capture(source, result=self.result, skip_bad=self.skip_bad)
        for note in read.notes:
            self._remark("note", f"{note.where}: {note.message}")
        for error in read.bad_lines:
            self.bad_lines.append({"where": error.where or str(source), "message": error.message})
            self._remark("warning", f"skipped {error.where}: {error.message}")
        return read

    def _remark(self, kind: str, text: str) -> None:
        from gristmill.cli.screen import remark

        self.remarks += 1
        if self.remarks <= _MOST_REMARKS:
            remark(kind, text)

    def _tell_unsaid(self) -> None:
        from gristmill.cli.screen import remark

        if self.remarks > _MOST_REMARKS:
            remark("note", f"{self.remarks - _MOST_REMARKS} more of these")


def _stories(path: Path) -> list[Path]:
    """Return the capture folders in a folder that is none itself."""
    try:
        if not path.is_dir() or (path / _STORY).exists():
            return []
        return sorted(entry for entry in path.iterdir() if (entry / _STORY).is_file())
    except OSError:
        # Reading it will say why it cannot be read.
        return []


def _attempt(source: Path, capture: Capture, result: Result | None) -> Attempt:
    from gristmill.records import Result

    return Attempt(source, capture, Result() if result is None else result)


def _twice(key: tuple[str, int], first: Path, second: Path) -> ConfigError:
    place = f"both {first} and {second}" if first != second else f"{first} twice"
    return ConfigError(
        f"expected each attempt in one place, attempt {key[1]} of rollout {key[0]!r} is in {place}",
        where=str(second),
        hint="give the lines a rollout_id or an attempt of their own, or name one of the paths",
    )


def takes_captures(*, argument: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the arguments that name captures; the command gets them as `captures`.

    Args:
        argument: add PATHS too; a command that reads its positional arguments itself passes False, and replaces
            the paths of `captures`.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(
            *,
            result: Path | None,
            rollout: str | None,
            attempt: int | None,
            skip_bad: bool,
            paths: tuple[Path, ...] = (),
            **rest: Any,
        ) -> Any:
            captures = Captures(tuple(paths), result, rollout, attempt, skip_bad, bad_lines=[])
            return command(captures=captures, **rest)

        options: list[Callable[[Any], Any]] = [
            click.option("--result", type=click.Path(path_type=Path), help="File of the harness's result."),
            click.option("--rollout", metavar="ID", help="Only this rollout."),
            click.option("--attempt", type=click.IntRange(0), metavar="N", help="Only this attempt."),
            click.option("--skip-bad", is_flag=True, help="Pass over lines that cannot be read; each is reported."),
        ]
        if argument:
            options.insert(0, click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path)))
        wrapped: Any = run
        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped

    return add
