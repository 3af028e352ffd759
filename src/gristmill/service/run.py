"""One rollout of a harness that is a command: opened, run, its own record read, finished.

Invariant: once a rollout is open it is finished, whatever the harness does: a failure of the harness, of the reward or
of its record is kept in the result's metadata and never turned into a reward or a history. The exit code is the
harness's.

Not here: which gateway (place), how a harness is told (harnesses), printing (the command).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import time
from typing import Any, Final, NamedTuple

import msgspec

from gristmill.canonical import JsonValue, loads
from gristmill.errors import ConfigError, DecodeError, GristmillError
from gristmill.ledger import AttemptKey, open_reader
from gristmill.records import Attribution, Failure
from gristmill.selection import DEFAULT_POLICY, SelectionPolicy
from gristmill.service.asked import check_result
from gristmill.service.child import Ended, child_environment, clean_environment, run_child
from gristmill.service.client import Opened
from gristmill.service.handed import read_handed
from gristmill.service.harnesses import Harness, Ran, Reach
from gristmill.service.histories.history import ReturnedHistory, Unreadable, no_history
from gristmill.service.outcome import Outcome, outcome_of
from gristmill.service.place import Begun, Place
from gristmill.service.reward import Reward, reward_from_command, reward_from_file
from gristmill.service.stamp import Stamp, is_stale, stamp_of

__all__ = ["WITHOUT_HISTORY", "Asked", "Report", "Unusable", "run_harness"]

_MOST_RESULT_bytes: Final = 64 * 1024 * 1024
WITHOUT_HISTORY: Final = "final_context"
"""The policy that needs nothing from the harness: the scored call is the end of the conversation."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and what to keep of it.

    Attributes:
        command: the harness's.
        harness: which kind it is.
        model: name that the harness asks for; None: the first that the gateway names.
        reward_file, reward_command: at most one of them.
        result_file: JSON that is the result, instead of the harness's own record.
        policy: name of a built-in policy to count by; None: by what the harness returned.
        own_policy: a policy of one's own instead; it is run here, over the ledger (which the place then has to name),
            and never named to the gateway.
        output_to_stderr: what the harness writes on standard output goes to standard error.
        on_failure: how a run that fails counts: an exit code other than 0, or an end before the harness had one; None:
            as any other run.
    """

    command: Sequence[str]
    harness: Harness
    model: str | None = None
    reward_file: Path | None = None
    reward_command: str | None = None
    result_file: Path | None = None
    policy: str | None = None
    own_policy: SelectionPolicy | None = None
    output_to_stderr: bool = False
    on_failure: Attribution | None = None


class Unusable(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that cannot be trained for one reason."""

    reason: str
    detail: str | None
    calls: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a run.

    Attributes:
        exit_code: the harness's, 128 + N for signal N.
        reward: None is a missing one; `reward_error` says why.
        history: `found` by `sources`, or `missing` for a reason.
        failure: of a run that failed, where it was asked how that counts.
        aborted: calls that were still running when the harness had ended.
        unusable: where no call was usable, why, the most frequent reason first.
    """

    rollout_id: str
    attempt: int
    gateway: str
    ledger: str | None
    harness: str
    exit_code: int
    signal: int | None
    reward: float | None
    reward_error: str | None
    failure: Failure | None
    history_sources: tuple[str, ...]
    history_missing: str | None
    aborted: int
    unusable: tuple[Unusable, ...]
    policy: str
    outcome: Outcome

    @property
    def key(self) -> AttemptKey:
        """Which attempt it was."""
        return AttemptKey(self.rollout_id, self.attempt)


def run_harness(asked: Asked, begun: Begun) -> Report:
    """Run a harness as one rollout that was opened for it.

    Raises:
        ConfigError: the command cannot be started.
        CaptureError: the gateway refused, or is gone.
    """
    place, opened = begun
    with (
        _Finishing(place, opened, asked.on_failure) as finishing,
        tempfile.TemporaryDirectory(prefix="gristmill-run-") as folder,
    ):
        reach = _reach(asked, place, opened)
        setup = asked.harness.prepare(reach, Path(folder))
        environment = child_environment(os.environ, place.secrets, setup, opened.attempt_key, opened.base_url)
        stamps = _Stamps(stamp_of(asked.reward_file), stamp_of(asked.result_file))
        since_s = time()
        ended = run_child(asked.command, environment, output_to_stderr=asked.output_to_stderr)
        finishing.metadata |= {"harness": asked.harness.name, "exit_code": ended.exit_code}
        reward = _reward(asked, place, opened.attempt_key, ended, stamps)
        sessions = {
            session
            for call in place.client.calls(opened.attempt_key)
            if isinstance(session := call.get("session_id"), str)
        }
        history = _history(
            asked,
            Ran(
                command=asked.command,
                environment=environment,
                folder=Path(folder),
                working_directory=Path.cwd(),
                sessions=sessions,
                since_s=since_s,
            ),
            stamps,
        )
        if reward.error is not None:
            finishing.metadata["reward_error"] = reward.error
        if history.missing is not None:
            finishing.metadata["history_missing"] = history.missing
        policy = asked.policy if asked.policy is not None else _default_policy(history)
        if ended.exit_code:
            finishing.fails(_reason(ended))
        answer = finishing.finish(history.value, reward.value, policy)
    outcome = _outcome(answer, asked.own_policy, place, opened.attempt_key)
    return Report(
        rollout_id=opened.rollout_id,
        attempt=opened.attempt,
        gateway=place.client.base_url,
        ledger=None if place.ledger is None else str(place.ledger),
        harness=asked.harness.name,
        exit_code=ended.exit_code,
        signal=ended.signal,
        reward=reward.value,
        reward_error=reward.error,
        failure=finishing.failure,
        history_sources=history.sources,
        history_missing=history.missing,
        aborted=answer["aborted"],
        unusable=_unusable(place, opened.attempt_key) if not outcome.funnel.usable_calls else (),
        policy=outcome.policy,
        outcome=outcome,
    )


def _unusable(place: Place, key: AttemptKey) -> tuple[Unusable, ...]:
    """Count why calls are not usable."""
    reasons = Counter(
        (str(call["unusable_reason"]), call["unusable_detail"])
        for call in place.client.calls(key)
        if not call["usable"]
    )
    return tuple(
        Unusable(reason=reason, detail=detail, calls=calls) for (reason, detail), calls in reasons.most_common()
    )


class _Stamps(NamedTuple):
    """The files that the harness writes, as they were before it ran."""

    reward: Stamp | None
    result: Stamp | None


class _Finishing:
    """Finishes a rollout, also where what happens in between fails."""

    def __init__(self, place: Place, opened: Opened, on_failure: Attribution | None) -> None:
        self._place: Final = place
        self._key: Final = opened.attempt_key
        self._on_failure: Final = on_failure
        self.failure: Failure | None = None
        self._done = False
        self.metadata: dict[str, Any] = {}

    def finish(self, value: JsonValue, reward: float | None, policy: str | None) -> dict[str, Any]:
        answer = self._place.client.finish(
            self._key, value, reward, failure=self.failure, metadata=self.metadata, policy=policy
        )
        self._done = True
        self._revoke()
        return answer

    def fails(self, reason: str) -> None:
        """Say that the run failed, where it was asked how that counts."""
        if self._on_failure is not None:
            self.failure = Failure(reason, self._on_failure)

    def _revoke(self) -> None:
        self._place.client.revoke(self._key, drain_s=0.0)

    def __enter__(self) -> _Finishing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or self._done:
            return
        self.metadata["error"] = _told(error)
        self.fails(_told(error))
        # The first failure is the one to tell.
        with contextlib.suppress(GristmillError):
            self.finish(None, None, None)


def _reason(ended: Ended) -> str:
    if ended.signal is not None:
        return f"the harness was ended by signal {ended.signal}"
    return f"the harness ended with exit code {ended.exit_code}"


def _told(error: BaseException) -> str:
    return error.message if isinstance(error, GristmillError) else type(error).__name__


def _reach(asked: Asked, place: Place, opened: Opened) -> Reach:
    models = place.client.models(opened.key)
    first = models[0] if models else {}
    name, length = first.get("id"), first.get("max_model_len")
    return Reach(
        openai_base_url=opened.openai_base_url,
        anthropic_base_url=opened.anthropic_base_url,
        key=opened.key,
        model=asked.model if asked.model is not None else name if isinstance(name, str) else None,
        max_model_len=length if isinstance(length, int) else None,
    )


def _reward(asked: Asked, place: Place, key: AttemptKey, ended: Ended, stamps: _Stamps) -> Reward:
    if asked.reward_file is not None:
        return reward_from_file(asked.reward_file, stamps.reward)
    if asked.reward_command is None:
        return Reward()
    environment = clean_environment(os.environ, place.secrets) | {
        "GRISTMILL_ROLLOUT_ID": key.rollout_id,
        "GRISTMILL_ATTEMPT": str(key.attempt),
        "HARNESS_EXIT_CODE": str(ended.exit_code),
    }
    return reward_from_command(asked.reward_command, environment)


def _history(asked: Asked, ran: Ran, stamps: _Stamps) -> ReturnedHistory:
    try:
        if asked.result_file is not None:
            return _from_file(asked.result_file, stamps.result)
        return asked.harness.history(ran)
    except Unreadable as error:
        return no_history(str(error))


def _from_file(path: Path, before: Stamp | None) -> ReturnedHistory:
    if is_stale(path, before):
        raise Unreadable(f"{path} was there before this run, which did not write it")
    try:
        value = loads(read_handed(path, _MOST_RESULT_bytes), path.name)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from error
    except DecodeError as error:
        raise Unreadable(f"{path}: {error.message}") from error
    if value is None:
        return no_history(f"{path} holds null")
    try:
        check_result(value, str(path))
    except ConfigError as error:
        raise Unreadable(f"{path}: {error.message}; {error.hint}") from error
    return ReturnedHistory(value=value, sources=(str(path),))


def _default_policy(history: ReturnedHistory) -> str:
    return DEFAULT_POLICY if history.missing is None else WITHOUT_HISTORY


def _outcome(answer: Mapping[str, Any], chosen: SelectionPolicy | None, place: Place, key: AttemptKey) -> Outcome:
    if chosen is None or place.ledger is None:
        names = Outcome.__struct_fields__
        return msgspec.convert({name: answer[name] for name in names}, Outcome)
    with open_reader(place.ledger) as ledger:
        return outcome_of(ledger, key, chosen)
