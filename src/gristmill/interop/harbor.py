"""Importer of Harbor's trials: `result.json` with the rollout details of its agent, and the trajectory beside it.

A trial is a rollout; its task is the group. Each rollout detail is a chat history of turns: a turn is a call. Where no
rollout details were collected, the calls are those of `agent/trajectory.json` (ATIF).

Invariant: a turn has the ids and log-probabilities that stand at its own place of lists that agree in length; where
they do not agree, nothing says which turn lacks which, and the shorter ones count for no turn. Text comes from the step
of the trajectory that has equal ids, if it is the only one. A parent is the turn before where the tokens prove it.

Not here: ATIF (atif), what harnesses other than Harbor write into such folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, cast

from gristmill.canonical import JsonValue
from gristmill.captures import CapturedRollout
from gristmill.captures.exact import plain_numbers
from gristmill.captures.fields import JsonObject, list_at, name_at, text_at
from gristmill.captures.reply import Unexpected, encodable
from gristmill.errors import DecodeError
from gristmill.interop.atif import ATIF_LOSSES, CallTokens, TrajectoryReader
from gristmill.interop.atif_steps import StepReader, check_version, is_call
from gristmill.interop.attempt import AttemptLines, hole, refused
from gristmill.interop.foreign import bytes_of, kept, loads_foreign, object_at, objects_at, unknown_keys
from gristmill.interop.importer import Importer, Report
from gristmill.interop.reward import reward_at
from gristmill.records import Result

__all__ = ["HARBOR"]

_RESULT: Final = "result.json"
_TRAJECTORY: Final = ("agent", "trajectory.json")
_DETAIL: Final = frozenset({"prompt_token_ids", "completion_token_ids", "logprobs", "extra"})
_TRIAL: Final = frozenset(
    {
        *("schema_version", "trial_name", "task_name", "agent_result", "verifier_result", "step_results"),
        *("exception_info", "reward_valid", "agent_info"),
    }
)
_STEP: Final = frozenset({"step_name", "agent_result", "verifier_result", "exception_info"})
_LOSSES: Final = {
    **ATIF_LOSSES,
    "trial_fields": "Fields of trials and their steps such as configuration, timings and totals are left out.",
    "turn_extras": "Data of turns that a provider added, such as routed experts: its type and shape are not stated.",
    "turns_unaligned": "Lists of a rollout detail that are shorter than the others: which turn lacks what is not said.",
    "texts": "Calls without text: no step of a trajectory beside them has the same ids.",
    "rewards_named": "Trials with several rewards, none of them called reward: the rollout has none; all are metadata.",
    "rewards_invalid": "Rewards that Harbor itself calls invalid: the rollout has none; they are metadata.",
    "rewards_of_steps": "Rewards of a trial's steps are metadata; the trial's own counts.",
}


def _read(path: Path, report: Report) -> Iterator[CapturedRollout]:
    for result in _trials(path):
        try:
            yield _trial(result, report)
        except DecodeError as error:
            report.refuse(error)


def _trials(path: Path) -> list[Path]:
    """Give the results of the trials behind a path: a trial's folder or result, or a job's folder with trials in it."""
    if not path.is_dir():
        return [path]
    inside = [entry / _RESULT for entry in sorted(path.iterdir()) if (entry / _RESULT).is_file()]
    # A job has a result of its own beside its trials, which is none of a trial.
    return inside or [path / _RESULT]


def _trial(path: Path, report: Report) -> CapturedRollout:
    """Read one trial.

    Raises:
        DecodeError: it cannot be read.
    """
    try:
        trial = object_at(loads_foreign(bytes_of(path), str(path)), "$")
        name = name_at(trial, "trial_name", "$")
        if not name:
            raise Unexpected("the result of a trial, with a trial_name", "none", "$.trial_name")
        lines = AttemptLines(name, 0, report)
        report.lose("trial_fields", len(unknown_keys(trial, _TRIAL)))
        turns = _Turns(lines, report, _model(trial))
        trajectory = path.parent.joinpath(*_TRAJECTORY)
        details = list(_details(trial, report))
        if details:
            turns.texts = _texts(trajectory, report)
            for prefix, detail, where in details:
                turns.read(prefix, detail, where)
            value = turns.references()
        else:
            value = _from_trajectory(trajectory, lines, report)
        lines.result = _result(trial, value, report)
        return lines.finish()
    except Unexpected as error:
        raise refused(error, str(path)) from error


def _model(trial: JsonObject) -> str | None:
    agent = trial.get("agent_info")
    model = None if agent is None else object_at(agent, "$.agent_info").get("model_info")
    return None if model is None else name_at(object_at(model, "$.agent_info.model_info"), "name", "$.agent_info")


def _details(trial: JsonObject, report: Report) -> Iterator[tuple[str, JsonObject, str]]:
    """Give the rollout details of a trial and of its steps, with a prefix for the ids of their calls."""
    holders: list[tuple[str, JsonObject, str]] = [("", trial, "$")]
    for number, (step, where) in enumerate(objects_at(trial, "step_results", "$")):
        report.lose("trial_fields", len(unknown_keys(step, _STEP)))
        holders.append((f"{encodable(name_at(step, 'step_name', where) or str(number))}/", step, where))
    for prefix, holder, where in holders:
        if holder.get("agent_result") is None:
            continue
        place = f"{where}.agent_result"
        agent = object_at(holder["agent_result"], place)
        report.lose("trial_fields", len(unknown_keys(agent, frozenset({"rollout_details"}))))
        for number, (detail, spot) in enumerate(objects_at(agent, "rollout_details", place)):
            yield f"{prefix}{number}.", detail, spot


class _Text(NamedTuple):
    """What a step of the trajectory says of the call with its ids: items and model."""

    items: JsonValue
    model: JsonValue


class _Turns:
    """The turns of a trial's rollout details, as calls.

    Attributes:
        texts: what calls said, by their prompt's and their sampled ids; None where two steps have the same.
    """

    def __init__(self, lines: AttemptLines, report: Report, model: str | None) -> None:
        self.texts: Mapping[tuple[str, str], _Text | None] = {}
        self._lines = lines
        self._report = report
        self._model = model
        self._main: list[str] = []
        self._first: str | None = None

    def read(self, prefix: str, detail: JsonObject, where: str) -> None:
        """Read one chat history.

        Raises:
            Unexpected: a list is none.
        """
        report = self._report
        extra = detail.get("extra")
        if extra is not None:
            report.lose("turn_extras", len(object_at(extra, f"{where}.extra")))
        report.lose("fields", len(unknown_keys(detail, _DETAIL)))
        prompts = list_at(detail, "prompt_token_ids", where) or []
        sampled = list_at(detail, "completion_token_ids", where) or []
        logprobs = list_at(detail, "logprobs", where) or []
        turns = max(len(prompts), len(sampled), len(logprobs))
        aligned = [values if len(values) == turns else [None] * turns for values in (prompts, sampled, logprobs)]
        report.lose("turns_unaligned", sum(0 < len(values) < turns for values in (prompts, sampled, logprobs)))
        before: CallTokens | None = None
        for number in range(turns):
            ids = [_ids(values[number], f"{where} turn {number}") for values in aligned]
            before = self._turn(f"{prefix}{number}", ids, before, main=self._is_main(prefix))

    def _is_main(self, prefix: str) -> bool:
        """Tell whether a history is its agent's main one: by the format's convention the first of a list."""
        return prefix.endswith("0.") and prefix[-3:-2] in {"", "/"}

    def _turn(
        self, call_id: str, lists: list[list[JsonValue] | None], before: CallTokens | None, *, main: bool
    ) -> CallTokens:
        prompt, sampled, logprobs = lists
        tokens = CallTokens(call_id, prompt, sampled)
        follows = before is not None and tokens.extend(before)
        line: JsonObject = {
            "model_call_id": call_id,
            "prompt_token_ids": prompt,
            "generation_token_ids": sampled,
            "generation_log_probs": logprobs,
            "model": self._model,
            "session_id": call_id.rpartition(".")[0],
            "parent_call_id": before.call_id if before is not None and follows else None,
            "parent_resolution": "resolved" if follows else "root" if before is None else "unresolved",
        }
        text = self.texts.get((repr(prompt), repr(sampled)))
        if text is None:
            self._report.lose("texts")
        else:
            line["output_items"] = text.items
            line["model"] = text.model or self._model
        self._report.lose("finish_reasons")
        self._report.lose("requests")
        self._lines.call(line)
        if main:
            self._main.append(call_id)
        return tokens

    def references(self) -> JsonObject:
        """Give the harness's result: the main history's calls by name, the last of them as the scored one."""
        if not self._main:
            return {}
        turns = [{"model_calls": [{"response_id": call, "model_call_id": call}]} for call in self._main]
        return {"trajectory": {"turns": turns}, "terminal_response_id": self._main[-1]}


def _ids(value: JsonValue, where: str) -> list[JsonValue] | None:
    if value is not None and not isinstance(value, list):
        raise Unexpected("a list for each turn", type(value).__name__, where)
    return cast("list[JsonValue] | None", value)


# The trajectory beside the result


def _trajectory(path: Path) -> JsonObject | None:
    if not path.is_file():
        return None
    try:
        trajectory = object_at(loads_foreign(bytes_of(path), str(path)), "$")
        check_version(trajectory, str(path))
    except Unexpected as error:
        raise refused(error, str(path)) from error
    return trajectory


def _texts(path: Path, report: Report) -> Mapping[tuple[str, str], _Text | None]:
    """Give what the calls of a trajectory said, by their ids; steps without ids tell nothing."""
    trajectory = _trajectory(path)
    if trajectory is None:
        return {}
    made: dict[tuple[str, str], _Text | None] = {}
    # Its losses are the trajectory's own; the calls come from the rollout details.
    unsaid = Report()
    try:
        steps = StepReader(object_at(trajectory.get("agent"), "$.agent"), unsaid)
        for step, where in objects_at(trajectory, "steps", "$"):
            if not is_call(step, where):
                continue
            line = steps.call(step, where)
            if line.get("prompt_token_ids") and line.get("generation_token_ids"):
                key = (repr(line["prompt_token_ids"]), repr(line["generation_token_ids"]))
                made[key] = None if key in made else _Text(line["output_items"], line["model"])
    except Unexpected as error:
        report.note(str(path), f"not used: {error.message} at {error.where}")
        return {}
    return made


def _from_trajectory(path: Path, lines: AttemptLines, report: Report) -> JsonValue:
    trajectory = _trajectory(path)
    if trajectory is None:
        return None
    reader = TrajectoryReader(lines, report)
    try:
        reader.read(trajectory, str(path), path.parent)
    except Unexpected as error:
        report.refuse(refused(error, str(path)))
        lines.lose([hole("trajectory", str(path))])
        return None
    return reader.transcript()


# The result


def _result(trial: JsonObject, value: JsonValue, report: Report) -> Result:
    metadata: JsonObject = {}
    reward = _reward(trial, metadata, report)
    steps: JsonObject = {}
    for number, (step, where) in enumerate(objects_at(trial, "step_results", "$")):
        rewards = _rewards(step, where)
        if rewards:
            steps[name_at(step, "step_name", where) or str(number)] = plain_numbers(rewards, where)
    if steps:
        report.lose("rewards_of_steps", len(steps))
        metadata["rewards_of_steps"] = steps
    failure = trial.get("exception_info")
    if failure is not None:
        metadata["exception_type"] = text_at(object_at(failure, "$.exception_info"), "exception_type", "$")
    return Result(value=value, reward=reward, group_id=name_at(trial, "task_name", "$"), metadata=metadata)


def _rewards(holder: JsonObject, where: str) -> JsonObject:
    verified = holder.get("verifier_result")
    if verified is None:
        return {}
    place = f"{where}.verifier_result"
    rewards = object_at(verified, place).get("rewards")
    return {} if rewards is None else object_at(kept(rewards, f"{place}.rewards"), f"{place}.rewards")


def _reward(trial: JsonObject, metadata: JsonObject, report: Report) -> float | None:
    """Return the trial's reward: the one that is there, or the one called reward."""
    rewards = _rewards(trial, "$")
    if not rewards:
        return None
    name = next(iter(rewards)) if len(rewards) == 1 else "reward"
    if len(rewards) > 1 or trial.get("reward_valid") is False:
        metadata["rewards"] = plain_numbers(rewards, "$.verifier_result.rewards")
    if trial.get("reward_valid") is False:
        report.lose("rewards_invalid")
        return None
    if name not in rewards:
        report.lose("rewards_named")
        return None
    return reward_at(rewards[name], f"$.verifier_result.rewards.{name}")


# Detection

_LOOKED_AT: Final = 1 << 16


def _certain(path: Path) -> bool:
    try:
        found = _trials(path) if path.is_dir() and not (path / "capture.jsonl").exists() else []
        return bool(found) and all(_is_trial(result) for result in found)
    except OSError:
        return False


def _is_trial(path: Path) -> bool:
    """Look for what Harbor writes first into the result of a trial: the rest may be long."""
    with path.open("rb") as file:
        head = file.read(_LOOKED_AT)
    return all(key in head for key in (b'"task_name"', b'"trial_name"', b'"trial_uri"'))


HARBOR: Final = Importer(
    name="harbor",
    title="Trials of Harbor: a trial's folder, or a job's folder with the trials in it.",
    made_for="harbor 0.26 (TrialResult, RolloutDetail)",
    losses=_LOSSES,
    read=_read,
    certain=_certain,
)
