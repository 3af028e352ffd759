"""Files as other programs write them, rebuilt: their field names, our own sentences and numbers."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from gristmill.captures import CapturedRollout
from gristmill.interop import Report, importer_named
from gristmill.records import Capture

Json = dict[str, Any]

TURNS: tuple[tuple[list[int], list[int], list[float]], ...] = (
    ([1, 2, 3], [10, 11], [-0.25, -0.5]),
    ([1, 2, 3, 10, 11, 4], [12], [-0.125]),
    ([1, 2, 3, 10, 11, 4, 12, 5], [13, 14, 15], [-1.0, -0.0625, -2.0]),
)
"""Three turns, each prompt going on from the turn before: prompt ids, sampled ids, log-probabilities."""

TEXTS = ("I look at the list.", "It has three names.", "The answer is three.")
ASKED = ("How many names are there?", "1: Ada, 2: Bo, 3: Cy", "Say it shortly.")


class Imported(msgspec.Struct):
    """What an importer gave and what it reported."""

    rollouts: list[CapturedRollout]
    report: Report

    @property
    def one(self) -> CapturedRollout:
        [rollout] = self.rollouts
        return rollout

    @property
    def capture(self) -> Capture:
        return self.one.capture

    @property
    def reasons(self) -> dict[str, str | None]:
        """Why each call is not usable, None where it is."""
        return {record.model_call_id: record.unusable_reason for record in self.capture.records}

    @property
    def parents(self) -> dict[str, str | None]:
        return {record.model_call_id: record.parent_call_id for record in self.capture.records}


def imported(name: str, path: Path, *, skip_bad: bool = False, completed: bool = False) -> Imported:
    report = Report(skip_bad=skip_bad, completed=completed)
    return Imported(list(importer_named(name).read(path, report)), report)


def tokens_of(capture: Capture) -> dict[str, tuple[list[int], list[int], list[float]]]:
    """Give prompt ids, sampled ids and log-probabilities of every call that has tokens."""
    whole: dict[str, list[int]] = {}
    made: dict[str, tuple[list[int], list[int], list[float]]] = {}
    for record in capture.records:
        if record.model_call_id not in capture.tokens:
            continue
        delta = capture.tokens[record.model_call_id]
        base = whole[record.base_call_id] if record.base_call_id is not None else []
        ids = [*base[: record.prev_len], *delta.ids_T.tolist()]
        whole[record.model_call_id] = ids
        sampled = record.cum_len - record.prompt_len
        logprobs = delta.logprobs_T.tolist()[len(delta.ids_T) - sampled :]
        made[record.model_call_id] = (ids[: record.prompt_len], ids[record.prompt_len :], logprobs)
    return made


def written(path: Path, value: Any) -> Path:
    """Write JSON as Python does, NaN and all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def lines(path: Path, values: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def said(text: str, **more: Any) -> Json:
    return {"role": "assistant", "content": text, **more}


def messages(turn: int) -> list[Json]:
    """The conversation that turn `turn` was asked to go on."""
    made: list[Json] = []
    for number in range(turn + 1):
        made.append({"role": "user", "content": ASKED[number]})
        if number < turn:
            made.append(said(TEXTS[number]))
    return made


# Request and response


def chat_response(turn: int, **more: Any) -> Json:
    """A chat completion as vLLM serves it with ids."""
    prompt, sampled, logprobs = TURNS[turn]
    content = [{"token": f"token_id:{token}", "logprob": value} for token, value in zip(sampled, logprobs, strict=True)]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": said(TEXTS[turn]),
        "token_ids": sampled,
        "logprobs": {"content": content},
    }
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)}
    body = {"id": f"resp-{turn}", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}
    return {**body, "prompt_token_ids": prompt, **more}


def pair(turn: int, **more: Any) -> Json:
    request = {"model": "m", "messages": messages(turn), "temperature": 0.5}
    return {"session_id": "s", "request": request, "response": chat_response(turn), **more}


# ATIF


def step(number: int, turn: int, **more: Any) -> Json:
    prompt, sampled, logprobs = TURNS[turn]
    metrics = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(sampled),
        "prompt_token_ids": prompt,
        "completion_token_ids": sampled,
        "logprobs": logprobs,
    }
    return {"step_id": number, "source": "agent", "message": TEXTS[turn], "metrics": metrics, **more}


def trajectory(steps: Sequence[Json] | None = None, **more: Any) -> Json:
    if steps is None:
        steps = []
        for turn in range(3):
            steps.append({"step_id": 2 * turn + 1, "source": "user", "message": ASKED[turn]})
            steps.append(step(2 * turn + 2, turn))
    agent = {"name": "counter", "version": "1", "model_name": "m"}
    return {"schema_version": "ATIF-v1.8", "session_id": "run-1", "agent": agent, "steps": list(steps), **more}


# Harbor


def detail(turns: Iterable[int] = (0, 1, 2), **more: Any) -> Json:
    chosen = [TURNS[turn] for turn in turns]
    keys = ("prompt_token_ids", "completion_token_ids", "logprobs")
    return {**{key: [turn[place] for turn in chosen] for place, key in enumerate(keys)}, **more}


def trial(name: str = "count-names__a1", **more: Any) -> Json:
    return {
        "id": "7b0e4cf0-5a44-4be0-9b0e-2d6c8a0f3a11",
        "task_name": "count-names",
        "trial_name": name,
        "trial_uri": "file:///trials/count-names__a1",
        "task_id": {"path": "tasks/count-names"},
        "source": None,
        "task_checksum": "0" * 64,
        "config": {"task": {"path": "tasks/count-names"}, "trial_name": name},
        "agent_info": {"name": "terminus-2", "version": "2.0.0", "model_info": {"name": "m", "provider": "vllm"}},
        "agent_result": {"n_input_tokens": 17, "n_output_tokens": 6, "rollout_details": [detail()]},
        "verifier_result": {"rewards": {"reward": 1.0}},
        "reward_valid": True,
        **more,
    }


def job(folder: Path, *trials: Json) -> Path:
    """A job's folder: a folder for each trial, and the job's own result."""
    for value in trials:
        written(folder / str(value["trial_name"]) / "result.json", value)
    written(folder / "result.json", {"id": "job", "stats": {"n_trials": len(trials)}})
    return folder


# rLLM


def trace(turn: int, **more: Any) -> Json:
    prompt, sampled, logprobs = TURNS[turn]
    return {
        "trace_id": f"t{turn}",
        "session_id": "task-7:0",
        "model": "m",
        "messages": messages(turn),
        "prompt_token_ids": prompt,
        "prompt_delta_token_ids": None,
        "parent_trace_id": None,
        "response_message": said(TEXTS[turn]),
        "completion_token_ids": sampled,
        "logprobs": logprobs,
        "routing_matrices": None,
        "finish_reason": "stop",
        "weight_version": 4,
        "latency_ms": 12.5,
        "token_counts": {"prompt": len(prompt), "completion": len(sampled)},
        "timestamp": 1_700_000_000.0 + turn,
        "metadata": {},
        "raw_request": None,
        "raw_response": None,
        **more,
    }


def linked(turn: int, **more: Any) -> Json:
    """A trace whose prompt is stored as what follows the trace before it."""
    before, sampled, _ = TURNS[turn - 1]
    delta = TURNS[turn][0][len(before) + len(sampled) :]
    link = {"prompt_token_ids": [], "prompt_delta_token_ids": delta, "parent_trace_id": f"t{turn - 1}"}
    return trace(turn, **{**link, **more})


def sdk_trace(turn: int, **more: Any) -> Json:
    prompt, sampled, logprobs = TURNS[turn]
    output = {"message": said(TEXTS[turn]), "finish_reason": "stop", "output_token_ids": sampled}
    return {
        "trace_id": f"t{turn}",
        "session_name": "task-7:0:0",
        "name": "proxy/m",
        "input": {"messages": messages(turn), "prompt_token_ids": prompt},
        "output": {**output, "rollout_logprobs": logprobs},
        "model": "m",
        "latency_ms": 3.0,
        "tokens": {"prompt": len(prompt), "completion": len(sampled), "total": len(prompt) + len(sampled)},
        "metadata": {},
        "timestamp": 1_700_000_000.0 + turn,
        **more,
    }


def store(path: Path, traces: Iterable[Mapping[str, Any] | str]) -> Path:
    """The gateway's SQLite store with traces, a text standing for damaged data."""
    with closing(sqlite3.connect(path)) as database:
        database.execute(
            "CREATE TABLE traces (trace_id TEXT PRIMARY KEY, data TEXT NOT NULL, created_at REAL NOT NULL)"
        )
        database.execute(
            "CREATE TABLE trace_sessions (trace_id TEXT NOT NULL, session_id TEXT NOT NULL,"
            " run_id TEXT NOT NULL DEFAULT '', created_at REAL NOT NULL, PRIMARY KEY (trace_id, session_id))"
        )
        for number, value in enumerate(traces):
            data = value if isinstance(value, str) else json.dumps(value)
            name = f"t{number}" if isinstance(value, str) else value["trace_id"]
            session = "task-7:0" if isinstance(value, str) else value["session_id"]
            database.execute("INSERT INTO traces VALUES (?, ?, ?)", (name, data, float(number)))
            database.execute("INSERT INTO trace_sessions VALUES (?, ?, '', ?)", (name, session, float(number)))
        database.commit()
    return path


class Format(msgspec.Struct):
    """A format as the tests over all of them see it.

    Attributes:
        write: writes a file of three turns, with the last turn's tokens replaced as given.
        calls: ids of its calls.
    """

    name: str
    file: str
    write: Callable[[Path, Json], Path]
    calls: tuple[str, ...]


def _pairs(path: Path, tokens: Json) -> Path:
    last = pair(2)
    choice = last["response"]["choices"][0]
    last["response"]["prompt_token_ids"] = tokens.get("prompt", TURNS[2][0])
    choice["token_ids"] = tokens.get("sampled", TURNS[2][1])
    logprobs = tokens.get("logprobs", TURNS[2][2])
    choice["logprobs"] = None if logprobs is None else {"content": [{"logprob": value} for value in logprobs]}
    return lines(path, [pair(0), pair(1), last])


def _trajectory(path: Path, tokens: Json) -> Path:
    value = trajectory()
    metrics = value["steps"][-1]["metrics"]
    names = {"prompt": "prompt_token_ids", "sampled": "completion_token_ids", "logprobs": "logprobs"}
    metrics.update({names[name]: given for name, given in tokens.items()})
    return written(path, value)


def _trial(path: Path, tokens: Json) -> Path:
    value = trial()
    [held] = value["agent_result"]["rollout_details"]
    names = {"prompt": "prompt_token_ids", "sampled": "completion_token_ids", "logprobs": "logprobs"}
    for name, given in tokens.items():
        held[names[name]] = [*held[names[name]][:2], given]
    return written(path, value)


def _traces(path: Path, tokens: Json) -> Path:
    names = {"prompt": "prompt_token_ids", "sampled": "completion_token_ids", "logprobs": "logprobs"}
    return lines(path, [trace(0), trace(1), trace(2, **{names[name]: given for name, given in tokens.items()})])


def _token_records(path: Path, tokens: Json) -> Path:
    """NeMo Gym's token records, prompts stored whole."""
    written: list[Json] = []
    for index, (prompt, sampled, logprobs) in enumerate(TURNS):
        given = tokens if index == 2 else {}
        served = {"type": "message", "role": "assistant", "content": TEXTS[index]}
        line = {
            "schema_version": 1,
            "rollout_id": "7-0",
            "model_call_id": f"c{index}",
            "response_id": f"resp-{index}",
            "model": "policy",
            "prompt_token_ids": given.get("prompt", prompt),
            "generation_token_ids": given.get("sampled", sampled),
            "generation_log_probs": given.get("logprobs", logprobs),
            "output_items": [served],
            "token_item_index": 0,
            "parent_call_id": f"c{index - 1}" if index else None,
            "parent_resolution": "resolved" if index else "root",
            "prompt_is_delta": False,
        }
        written.append(line)
    return lines(path, written)


def _token_items(path: Path, tokens: Json) -> Path:
    """A rollout of NeMo Gym whose items carry the tokens of their calls."""
    output: list[Json] = []
    for index, (prompt, sampled, logprobs) in enumerate(TURNS):
        given = tokens if index == 2 else {}
        item = {
            "type": "message",
            "role": "assistant",
            "content": TEXTS[index],
            "prompt_token_ids": given.get("prompt", prompt),
            "generation_token_ids": given.get("sampled", sampled),
            "generation_log_probs": given.get("logprobs", logprobs),
        }
        output += [item, {"role": "user", "content": "Go on."}]
    line = {"_ng_task_index": 7, "_ng_rollout_index": 0, "reward": 1.0, "response": {"id": "resp", "output": output}}
    return lines(path, [line])


FORMATS = (
    Format("request-response", "log.jsonl", _pairs, ("line-1", "line-2", "line-3")),
    Format("atif", "trajectory.json", _trajectory, ("step-2", "step-4", "step-6")),
    Format("harbor", "result.json", _trial, ("0.0", "0.1", "0.2")),
    Format("rllm", "traces.jsonl", _traces, ("t0", "t1", "t2")),
    Format("nemo-gym", "7-0.tokens.jsonl", _token_records, ("c0", "c1", "c2")),
    Format("nemo-gym", "rollouts.jsonl", _token_items, ("item-0", "item-2", "item-4")),
)
