"""Importer of the Agent Trajectory Interchange Format (ATIF), v1.0 to v1.8.

A trajectory is an attempt; those of its sub-agents, embedded or in files beside it, and its continuations are calls of
the same attempt, each trajectory a session of its own. The transcript becomes the harness's result, with references to
the calls of the main trajectory and its continuations.

Invariant: ids and log-probabilities come from a step's metrics. The format states no parents: a call's parent is the
call of the step before it where its prompt begins with all tokens of that call, else it is not resolved. A trajectory
that is referred to and is not there is a lost call.

Not here: single steps (atif_steps), Harbor's folders (harbor).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, cast

import msgspec

from gristmill.canonical import JsonValue
from gristmill.captures import CapturedRollout
from gristmill.captures.fields import JsonObject, count_at, name_at
from gristmill.captures.reply import Unexpected, encodable
from gristmill.errors import DecodeError
from gristmill.interop.atif_steps import TRAJECTORY, StepReader, check_version, is_call, own_of
from gristmill.interop.attempt import AttemptLines, hole, refused
from gristmill.interop.foreign import bytes_of, loads_foreign, object_at, objects_at, unknown_keys
from gristmill.interop.importer import Importer, Report
from gristmill.interop.lines import Key, KeyedLines, first_object
from gristmill.interop.reward import reward_at
from gristmill.records import LostCall, Result

__all__ = ["ATIF", "ATIF_LOSSES", "CallTokens", "TrajectoryReader"]

ATIF_LOSSES: Final = {
    "fields": "Fields without a place in a call, such as costs, cached tokens, efforts and extras, are left out.",
    "timestamps": "Times of steps: whether they are of its beginning or its end is not said.",
    "finish_reasons": "Calls without finish reason, which the format does not have: whether they finished is unknown.",
    "requests": "Calls without the request that was sent: tools and sampling settings are unknown.",
    "copied_steps": "Steps that were copied from another trajectory are left out.",
    "dispatched_steps": "Steps of the agent that no model was asked for are left out.",
    "references": "Trajectories that are referred to and are not there: each is a lost call.",
}


class _Document(msgspec.Struct, frozen=True):
    """A trajectory and where it stands: the place for errors and the folder that its references start from."""

    value: JsonObject
    place: str
    folder: Path | None


def _load(path: Path) -> _Document:
    place = str(path)
    try:
        value = object_at(loads_foreign(bytes_of(path), place), "$")
        check_version(value, place)
    except Unexpected as error:
        raise refused(error, place) from error
    return _Document(value, place, path.parent)


def _read(path: Path, report: Report) -> Iterator[CapturedRollout]:
    if path.is_dir():
        yield from _read_folder(path, report)
    elif path.suffix == ".jsonl":
        yield from _read_lines(path, report)
    else:
        yield from _read_files([path], report)


def _read_folder(folder: Path, report: Report) -> Iterator[CapturedRollout]:
    """Read the trajectories in a folder; those that another one refers to are parts of it."""
    roots: list[Path] = []
    parts: set[Path] = set()
    for path in sorted(folder.glob("*.json")):
        try:
            document = _load(path)
        except DecodeError as error:
            report.refuse(error)
            continue
        roots.append(path)
        parts.update(path.parent / name for name in _referred(document.value))
    resolved = {part.resolve() for part in parts}
    yield from _read_files([path for path in roots if path.resolve() not in resolved], report)


def _read_files(paths: Iterable[Path], report: Report) -> Iterator[CapturedRollout]:
    seen: set[tuple[str, int]] = set()
    for path in paths:
        try:
            yield from _once(_attempt(_load(path), path.stem, report), seen, report, str(path))
        except DecodeError as error:
            report.refuse(error)


def _read_lines(path: Path, report: Report) -> Iterator[CapturedRollout]:
    """Read a file with a trajectory on each line."""
    file = KeyedLines(path, report, lambda value: _key(_unwrapped(value), ""))
    seen: set[tuple[str, int]] = set()
    for key in file.keys:
        for line in file.lines(key):
            try:
                value = _unwrapped(line.value)
                check_version(value, line.place)
                document = _Document(value, line.place, path.parent)
                yield from _once(_attempt(document, f"line-{line.number}", report), seen, report, line.place)
            except DecodeError as error:
                report.refuse(error)
            except Unexpected as error:
                report.refuse(refused(error, line.place))


def _unwrapped(value: JsonObject) -> JsonObject:
    """Take the trajectory out of a line that our own export wrote around it."""
    return object_at(value["sample"], "$.sample") if "sample" in value and "made_for" in value else value


def _once(
    rollout: CapturedRollout, seen: set[tuple[str, int]], report: Report, place: str
) -> Iterator[CapturedRollout]:
    key = (rollout.capture.rollout_id, rollout.capture.attempt)
    if key in seen:
        message = f"expected each trajectory once, got a second one of {key[0]!r}"
        report.refuse(DecodeError(message, where=place))
        return
    seen.add(key)
    yield rollout


def _referred(trajectory: JsonObject) -> Iterator[str]:
    """Give the files that a trajectory refers to, as far as it can be read."""
    waiting: list[JsonValue] = [trajectory]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting.extend(cast("list[JsonValue]", part))
        elif isinstance(part, dict):
            for key, value in cast(JsonObject, part).items():
                if key in {"continued_trajectory_ref", "trajectory_path"} and isinstance(value, str):
                    yield value
                elif key in {"steps", "observation", "results", "subagent_trajectory_ref", "subagent_trajectories"}:
                    waiting.append(value)


def _key(trajectory: JsonObject, name: str) -> Key:
    own = own_of(trajectory, "$")
    rollout = name_at(own, "rollout_id", "$.extra") or name_at(trajectory, "trajectory_id", "$")
    rollout = rollout or name_at(trajectory, "session_id", "$") or encodable(name)
    return Key(rollout, count_at(own, "attempt", "$.extra") or 0)


def _attempt(document: _Document, name: str, report: Report) -> CapturedRollout:
    """Read a trajectory with all that it refers to.

    Raises:
        DecodeError: it cannot be read.
    """
    try:
        key = _key(document.value, name)
        lines = AttemptLines(*key, report)
        reader = TrajectoryReader(lines, report)
        reader.read(document.value, document.place, document.folder)
        own = own_of(document.value, "$")
        lines.result = Result(
            value=reader.transcript(),
            reward=reward_at(own.get("reward"), "$.extra.reward"),
            group_id=name_at(own, "group_id", "$.extra"),
            advantage=reward_at(own.get("advantage"), "$.extra.advantage"),
        )
        return lines.finish()
    except Unexpected as error:
        raise refused(error, document.place) from error


class CallTokens(NamedTuple):
    """The call of a step and its token ids, as far as they are stated."""

    call_id: str
    prompt: list[JsonValue] | None
    sampled: list[JsonValue] | None

    def extend(self, before: CallTokens) -> bool:
        """Tell whether the prompt begins with all tokens of another call."""
        if not before.prompt or before.sampled is None or self.prompt is None:
            return False
        whole = [*before.prompt, *before.sampled]
        return self.prompt[: len(whole)] == whole


class _Session(msgspec.Struct, frozen=True):
    """Which trajectory of the attempt calls belong to: prefix of their ids, its session and that of its parent."""

    prefix: str
    session_id: str | None
    parent_session_id: str | None = None
    subagent: bool = False


class TrajectoryReader:
    """Reads the trajectories of one attempt into it.

    Args:
        lines: the attempt.
        report: gets the losses.
    """

    def __init__(self, lines: AttemptLines, report: Report) -> None:
        self._lines = lines
        self._report = report
        self._messages: list[JsonValue] = []
        self._references: list[JsonValue] = []
        self._last: str | None = None
        self._seen: set[Path] = set()
        self._used: set[str] = set()

    def transcript(self) -> JsonObject:
        """Give the harness's result: its messages, the calls of the main trajectory, and the last of them as scored."""
        result: JsonObject = {"messages": self._messages}
        if self._references:
            result["trajectory"] = {"turns": self._references}
            result["terminal_response_id"] = self._last
        return result

    def read(self, trajectory: JsonObject, place: str, folder: Path | None) -> None:
        """Read a main trajectory, its sub-agents and its continuations, in the order of their steps.

        Raises:
            Unexpected, DecodeError: it cannot be read.
        """
        check_version(trajectory, place)
        session = name_at(trajectory, "session_id", "$") or name_at(trajectory, "trajectory_id", "$")
        self._one(trajectory, "$", folder, _Session("", session))

    def _one(self, trajectory: JsonObject, where: str, folder: Path | None, session: _Session) -> None:
        report = self._report
        agent = object_at(trajectory.get("agent"), f"{where}.agent")
        unknown = [*unknown_keys(trajectory, TRAJECTORY), *unknown_keys(agent, frozenset({"model_name"}))]
        report.lose("fields", len(unknown))
        embedded = self._embedded(trajectory, where)
        steps = StepReader(agent, report)
        before: CallTokens | None = None
        for step, place in objects_at(trajectory, "steps", where):
            if is_call(step, place):
                before = self._call(steps, step, place, session, before)
            steps.add(step, place)
            for result, at in steps.results(step, place):
                for reference, spot in objects_at(result, "subagent_trajectory_ref", at):
                    self._subagent(reference, spot, embedded, folder, session)
        for name in [name for name in embedded if f"{session.prefix}{encodable(name)}/" not in self._used]:
            report.note(f"{self._lines.rollout_id} {name}", "this sub-agent is embedded and no step refers to it")
        for name in embedded:
            self._subagent({"trajectory_id": name}, where, embedded, folder, session)
        if not session.subagent:
            self._messages.extend(steps.messages)
        continued = name_at(trajectory, "continued_trajectory_ref", where)
        if continued is not None:
            self._follow(continued, folder, session, f"{session.prefix}{Path(continued).stem}/")

    def _embedded(self, trajectory: JsonObject, where: str) -> dict[str, tuple[JsonObject, str]]:
        made: dict[str, tuple[JsonObject, str]] = {}
        for sub, place in objects_at(trajectory, "subagent_trajectories", where):
            name = name_at(sub, "trajectory_id", place)
            if not name or name in made:
                raise Unexpected("a trajectory_id of its own", repr(name), place)
            made[name] = (sub, place)
        return made

    def _call(
        self, steps: StepReader, step: JsonObject, where: str, session: _Session, before: CallTokens | None
    ) -> CallTokens:
        line = steps.call(step, where)
        number = count_at(step, "step_id", where)
        call_id = line.get("model_call_id") or f"{session.prefix}step-{where if number is None else number}"
        tokens = CallTokens(str(call_id), line.get("prompt_token_ids"), line.get("generation_token_ids"))
        stated: JsonObject = {"model_call_id": call_id, "session_id": session.session_id}
        stated["parent_session_id"] = session.parent_session_id
        if session.subagent:
            stated["purpose"] = {"label": "subagent", "evidence": "subagent_trajectory_ref"}
        if "parent_call_id" not in line:
            follows = before is not None and tokens.extend(before)
            stated["parent_call_id"] = before.call_id if before is not None and follows else None
            stated["parent_resolution"] = "resolved" if follows else "root" if before is None else "unresolved"
        self._lines.call({**stated, **{key: v for key, v in line.items() if v is not None or key == "parent_call_id"}})
        if not session.subagent:
            self._last = str(line.get("response_id") or call_id)
            self._references.append({"model_calls": [{"response_id": self._last, "model_call_id": call_id}]})
        return tokens

    def _subagent(
        self,
        reference: JsonObject,
        where: str,
        embedded: dict[str, tuple[JsonObject, str]],
        folder: Path | None,
        session: _Session,
    ) -> None:
        name, path = name_at(reference, "trajectory_id", where), name_at(reference, "trajectory_path", where)
        prefix = f"{session.prefix}{encodable(name or '')}/"
        if name is not None and name in embedded:
            if prefix not in self._used:
                self._used.add(prefix)
                sub, place = embedded[name]
                self._one(sub, place, folder, _Session(prefix, name, session.session_id, True))
        elif path is not None:
            named = name or Path(path).stem
            prefix = f"{session.prefix}{encodable(named)}/"
            self._follow(path, folder, _Session(prefix, named, session.session_id, True), prefix)
        elif name is None:
            raise Unexpected("trajectory_id or trajectory_path", "neither", where)
        else:
            self._missing(prefix.rstrip("/"), name)

    def _follow(self, name: str, folder: Path | None, session: _Session, prefix: str) -> None:
        """Read a trajectory in a file of its own, once."""
        path = None if folder is None or "://" in name else folder / name
        if path is not None and path.resolve() in self._seen:
            return
        if path is None or not path.is_file():
            self._missing(prefix.rstrip("/"), name)
            return
        self._seen.add(path.resolve())
        try:
            document = _load(path)
            self._one(document.value, "$", path.parent, msgspec.structs.replace(session, prefix=prefix))
        except Unexpected as error:
            self._report.refuse(refused(error, str(path)))
            self._lines.lose([hole(prefix.rstrip("/"), str(path))])
        except DecodeError as error:
            self._report.refuse(error)
            self._lines.lose([hole(prefix.rstrip("/"), str(path))])

    def _missing(self, call_id: str, name: str) -> None:
        self._report.lose("references")
        reason = f"trajectory {encodable(name)!r} is referred to and is not there"
        self._lines.lose([LostCall(model_call_id=encodable(call_id), reason=reason, maybe_received=True)])


# Detection

_LOOKED_AT: Final = 1 << 16
_stated: Final = re.compile(rb'"schema_version"\s*:\s*"ATIF-v1\.')


def _is_trajectory(value: JsonValue) -> bool:
    stated = cast(JsonObject, value).get("schema_version") if isinstance(value, dict) else None
    return isinstance(stated, str) and stated.startswith("ATIF-v1.")


def _certain(path: Path) -> bool:
    if path.suffix == ".jsonl":
        line = first_object(path) if path.is_file() else None
        return line is not None and _is_trajectory(line.get("sample", line) if "made_for" in line else line)
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            # Writers state the version first; a document that does not is read where its format is named.
            return _stated.search(file.read(_LOOKED_AT)) is not None
    except OSError:
        return False


ATIF: Final = Importer(
    name="atif",
    title="Trajectories in the Agent Trajectory Interchange Format, as files, folders or JSON lines.",
    made_for="atif 1.8.0 (ATIF-v1.8)",
    losses=ATIF_LOSSES,
    read=_read,
    certain=_certain,
)
