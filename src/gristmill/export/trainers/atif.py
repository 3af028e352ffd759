"""Agent Trajectory Interchange Format (ATIF) v1.8: a trajectory a rollout, a step a trained call, each with its prompt.

Invariant: every trained call is one agent step with its whole prompt, its sampled ids and their log-probabilities; the
rows are told by `extra.gristmill`, so that reading gives them back equal, mask included. Text comes from captured
exchanges alone. What is known of a call and has no field stands under `extra.gristmill`, in the names of our capture
lines, so that importing a trajectory gives the calls back.

Not here: text as steps (atif_text), and reading trajectories as captures (gristmill.interop).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from gristmill.errors import ReconstructionError
from gristmill.export.exchange_turns import ChatExchange, chat_exchange
from gristmill.export.row_json import exactly_written
from gristmill.export.trainers.atif_text import StepWriter
from gristmill.export.trainers.layout import by_rollout, refuse_media
from gristmill.export.trainers.losses import dropped, statements
from gristmill.export.trainers.objects import trainer_module
from gristmill.export.trainers.projection import Kept, Projection, Sample, Source
from gristmill.reconstruction import Row, Span, SpanRole
from gristmill.records import CallRecord, Capture, Float32Array, Int32Array, PurposeLabel, Sampling

__all__ = ["ATIF", "trajectories"]

_VERSION: Final = "ATIF-v1.8"
_OWN: Final = "gristmill"
_SCHEMA: Final = 1
_LOSSES: Final = statements(
    "extras",
    certificates="Calls without their certificates: how each context relates to the call that it continues.",
    texts="Calls without text: their request and reply were not kept, or are no chat messages.",
    texts_changed="Messages whose parts are joined, or that lost fields of their own kind; ids are not touched.",
    request_settings="Calls without their tool choice, response format and stop strings.",
)


class _Call(msgspec.Struct, frozen=True, eq=False):
    """A trained call: prompt int32[P], sampled int32[G], float32[G] nats, its spans, its record if that is at hand."""

    call_id: str
    row: int
    prompt_T: Int32Array
    sampled_T: Int32Array
    logprobs_T: Float32Array
    spans: tuple[Span, ...]
    record: CallRecord | None


def _samples(source: Source, losses: Counter[str]) -> Sequence[Sample]:
    for row in source.rows:
        refuse_media(row, "atif")
        losses.update(dropped(row, ("extras",)))
        losses["certificates"] += sum(span.certificate is not None for span in row.spans)
    document = _Document(source, losses).write()
    return (Sample(tuple(row.row_id for row in source.rows), document),)


def _calls(source: Source) -> list[_Call]:
    """Give the trained calls, in commit order where the capture is at hand, else in the order of the rows."""
    records = {} if source.capture is None else {record.model_call_id: record for record in source.capture.records}
    calls: list[_Call] = []
    for index, row in enumerate(source.rows):
        by_call: dict[str, list[Span]] = {}
        for span in row.spans:
            if span.role is SpanRole.SAMPLED:
                by_call.setdefault(span.call_id, []).append(span)
        for call_id, spans in by_call.items():
            start, end = spans[0].start, spans[-1].end
            ids, logprobs = row.token_ids, row.logprobs[start:end]
            record = records.get(call_id)
            calls.append(_Call(call_id, index, ids[:start], ids[start:end], logprobs, tuple(spans), record))
    order = {call_id: number for number, call_id in enumerate(records)}
    calls.sort(key=lambda call: order.get(call.call_id, 0))
    return calls


class _Document:
    """One rollout as a trajectory with those of its sub-agents."""

    def __init__(self, source: Source, losses: Counter[str]) -> None:
        self._source = source
        self._losses = losses
        self._calls = _calls(source)
        self._exported = {call.call_id for call in self._calls}
        self._roots = _Roots(source.capture)

    def write(self) -> dict[str, Any]:
        first = self._source.rows[0]
        name = f"{first.rollout_id}/{first.attempt}"
        main = _Trajectory(name, first.rollout_id)
        subs: dict[str, _Trajectory] = {}
        for call in self._calls:
            root = self._roots.of_subagent(call.record)
            if root is None:
                self._add(main, call)
                continue
            if root not in subs:
                subs[root] = _Trajectory(f"{name}/{root}", first.rollout_id)
                main.steps.refer(subs[root].name)
            self._add(subs[root], call)
        document = main.written()
        if subs:
            document["subagent_trajectories"] = [sub.written() for sub in subs.values()]
        document["extra"] = {_OWN: self._own()}
        return document

    def _own(self) -> dict[str, Any]:
        """Say what the rows are: which calls each trains, and what the rollout was worth."""
        first = self._source.rows[0]
        rows: list[dict[str, Any]] = []
        for index, row in enumerate(self._source.rows):
            trained = [call.call_id for call in self._calls if call.row == index]
            made: dict[str, Any] = {"row_id": row.row_id, "calls": trained, "loss_weight": row.loss_weight}
            if row.credits:
                made["credits"] = msgspec.to_builtins(row.credits)
            rows.append(made)
        return {
            "schema": _SCHEMA,
            "rollout_id": first.rollout_id,
            "attempt": first.attempt,
            "group_id": first.group_id,
            "reward": first.reward,
            "advantage": first.advantage,
            "rows": rows,
        }

    def _add(self, trajectory: _Trajectory, call: _Call) -> None:
        text = self._text(call)
        trajectory.tools.append(None if text is None else text.tools)
        step = trajectory.steps.reply(text)
        if text is not None:
            self._losses["texts_changed"] += sum(bool(turn.losses) for turn in (*text.request, text.reply))
            self._losses["request_settings"] += 1
        model = None if call.record is None else call.record.model
        if model is not None:
            step["model_name"] = model
        step["llm_call_count"] = 1
        step["metrics"] = {
            "prompt_tokens": int(call.prompt_T.size),
            "completion_tokens": int(call.sampled_T.size),
            "prompt_token_ids": call.prompt_T,
            "completion_token_ids": call.sampled_T,
            "logprobs": call.logprobs_T,
            "extra": {"loss_mask": np.ones(call.sampled_T.size, np.uint8)},
        }
        step["extra"] = {_OWN: self._own_of(call)}

    def _text(self, call: _Call) -> ChatExchange | None:
        capture, record = self._source.capture, call.record
        if capture is not None and record is not None:
            try:
                return chat_exchange(record, capture.exchanges.get(call.call_id))
            except ReconstructionError:
                # Tokens are what is trained; text that no chat message holds is left out, and counted.
                pass
        self._losses["texts"] += 1
        return None

    def _own_of(self, call: _Call) -> dict[str, Any]:
        """Write what is known of a call in the names of our capture lines."""
        own: dict[str, Any] = {"model_call_id": call.call_id}
        start = call.spans[0].start
        versions = [
            {"version": span.weight_version, "start": span.start - start, "end": span.end - start}
            for span in call.spans
            if span.weight_version is not None
        ]
        if versions:
            own["weight_versions"] = versions
        record = call.record
        if record is None:
            own["sampling"] = {"temperature": call.spans[0].temperature, "logprobs_mode": call.spans[0].logprobs_mode}
        else:
            own.update(_stated(record))
            if record.parent_call_id is None or record.parent_call_id in self._exported:
                own["parent_call_id"] = record.parent_call_id
                own["parent_resolution"] = record.parent_resolution
            if record.sampling != Sampling():
                own["sampling"] = msgspec.to_builtins(record.sampling)
        return {key: value for key, value in own.items() if value is not None or key == "parent_call_id"}


def _stated(record: CallRecord) -> dict[str, Any]:
    names = ("response_id", "choice_index", "requested_model", "adapter", "tokenizer", "session_id")
    more = ("parent_session_id", "response_status", "finish_reason", "weights_at_start", "weights_at_end")
    stated: dict[str, Any] = {name: getattr(record, name) for name in (*names, *more)}
    stated["dialect"] = None if record.dialect == "unknown" else str(record.dialect)
    if record.purpose.evidence or record.purpose.label is not PurposeLabel.UNKNOWN:
        stated["purpose"] = msgspec.to_builtins(record.purpose)
    return stated


class _Roots:
    """Which conversation of a sub-agent a call belongs to: it is named by its first call."""

    def __init__(self, capture: Capture | None) -> None:
        self._records = {} if capture is None else {record.model_call_id: record for record in capture.records}

    def of_subagent(self, record: CallRecord | None) -> str | None:
        """Return the first call of a sub-agent's conversation; None for the main agent's calls."""
        if record is None or record.purpose.label is not PurposeLabel.SUBAGENT:
            return None
        seen = {record.model_call_id}
        while record.parent_call_id in self._records and record.parent_call_id not in seen:
            before = self._records[record.parent_call_id]
            if before.purpose.label is not PurposeLabel.SUBAGENT:
                break
            record = before
            seen.add(record.model_call_id)
        return record.model_call_id


class _Trajectory:
    """One trajectory while its steps are written."""

    def __init__(self, name: str, session_id: str) -> None:
        self.name = name
        self.steps = StepWriter()
        self.tools: list[str | None] = []
        self._session_id = session_id

    def written(self) -> dict[str, Any]:
        """Give the document; tools are the agent's where all its calls had the same."""
        # The harness does not say what it is; the format wants a name and a version.
        agent: dict[str, Any] = {"name": "unknown", "version": "unknown"}
        tools = set(self.tools)
        if len(tools) == 1 and (only := tools.pop()) is not None:
            agent["tool_definitions"] = orjson.loads(only)
        return {
            "schema_version": _VERSION,
            "session_id": self._session_id,
            "trajectory_id": self.name,
            "agent": agent,
            "steps": self.steps.steps,
        }


# Back


def _steps(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for trajectory in (document, *document.get("subagent_trajectories", ())):
        yield from trajectory["steps"]


def _restore(document: Mapping[str, Any]) -> Sequence[Kept]:
    metrics = {step["extra"][_OWN]["model_call_id"]: step["metrics"] for step in _steps(document) if "metrics" in step}
    return tuple(_restored([metrics[call] for call in row["calls"]]) for row in document["extra"][_OWN]["rows"])


def _restored(calls: Sequence[Mapping[str, Any]]) -> Kept:
    """Put a row together again: the longest of its calls is the whole row."""
    leaf = max(calls, key=lambda call: call["prompt_tokens"] + call["completion_tokens"])
    ids = np.asarray([*leaf["prompt_token_ids"], *leaf["completion_token_ids"]], np.int32)
    mask, logprobs = np.zeros(ids.size, np.uint8), np.zeros(ids.size, np.float32)
    for call in calls:
        start = call["prompt_tokens"]
        end = start + call["completion_tokens"]
        mask[start:end] = call["extra"]["loss_mask"]
        logprobs[start:end] = np.asarray(call["logprobs"], np.float64).astype(np.float32)
    return Kept(ids, mask, logprobs)


ATIF: Final = Projection(
    name="atif",
    title="Agent Trajectory Interchange Format v1.8: a trajectory a rollout, a step a trained call.",
    made_for="atif 1.8.0 (ATIF-v1.8)",
    losses=_LOSSES,
    samples=_samples,
    restore=_restore,
    text=True,
)


def trajectories(
    rows: Iterable[Row], captures: Mapping[tuple[str, int], Capture] | None = None, *, package: str = "atif"
) -> list[Any]:
    """Make the format's own objects, `atif.Trajectory`.

    Args:
        rows: rollouts in a piece.
        captures: captures by rollout id and attempt, for the text; without them steps have tokens alone.
        package: `atif`, or `harbor.models.trajectories`, which has the same classes.

    Raises:
        ConfigError: `trainer_missing`.
        ReconstructionError: `not_expressible`.
        ExportError: `row_missing`.
    """
    classes = trainer_module(package, f"pip install {package.partition('.')[0]}")
    held = captures or {}
    made: list[Any] = []
    for rollout in by_rollout(rows):
        source = Source(rollout, held.get((rollout[0].rollout_id, rollout[0].attempt)))
        for sample in _samples(source, Counter()):
            made.append(classes.Trajectory.model_validate(_plain(sample.fields)))
    return made


def _plain(value: Any) -> Any:
    """Turn arrays into lists, float32 into the numbers that their shortest texts are."""
    if isinstance(value, np.ndarray):
        array = cast(npt.NDArray[Any], value)
        # The shortest text of a float32, read as the double that a Python float is.
        array = exactly_written(array) if array.dtype == np.float32 else array
        return orjson.loads(orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY))
    if isinstance(value, Mapping):
        return {key: _plain(held) for key, held in cast(Mapping[str, Any], value).items()}
    return [_plain(held) for held in cast(Sequence[Any], value)] if isinstance(value, list | tuple) else value
