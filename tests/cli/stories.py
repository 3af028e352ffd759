"""Small captures on disk for the command line's tests, and a way to run it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gristmill.cli import main

Json = dict[str, Any]

TWO_TURNS = ("one", "two, at some length")


class Ran(NamedTuple):
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document on standard output."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Ran:
    """Run the command line in this process."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    return Ran(code, *capsys.readouterr())


def said(text: str) -> Json:
    return {"role": "assistant", "content": text}


def call(call_id: str, text: str, prompt: list[int], generation: list[int], **fields: Any) -> Json:
    """A `call` line of a finished chat call with exact tokens."""
    return {
        "kind": "call",
        "rollout_id": "r",
        "model_call_id": call_id,
        "response_id": f"resp-{call_id}",
        "model": "m",
        "finish_reason": "stop",
        "response_status": "completed",
        "output_items": [said(text)],
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": [-0.1 * token for token in generation],
        **fields,
    }


def story() -> list[Json]:
    """Two turns, and between them a retry whose answer nobody got."""
    return [
        call("c1", "one", [1, 2, 3], [4, 5]),
        call("x1", "other", [1, 2, 3, 4, 5, 6], [9], parent_call_id="c1"),
        call("c2", TWO_TURNS[1], [1, 2, 3, 4, 5, 6], [7, 8], parent_call_id="c1"),
    ]


def returned(*texts: str, **fields: Any) -> Json:
    """A result whose history holds the given replies, a user turn between them."""
    output: list[Json] = []
    for text in texts:
        output += [{"role": "user", "content": "go on"}, said(text)]
    return {"response": {"output": output}, "reward": 1.0, "group_id": "g", **fields}


def write_story(folder: Path, calls: list[Json] | None = None, result: Mapping[str, Any] | None = None) -> Path:
    """Write a story folder; without a result there is no result.json."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = story() if calls is None else calls
    (folder / "capture.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def good_story(folder: Path, rollout_id: str = "r") -> Path:
    """The story, returned whole."""
    calls = [{**line, "rollout_id": rollout_id} for line in story()]
    return write_story(folder, calls, returned(*TWO_TURNS))


def refused_story(folder: Path, rollout_id: str = "bad") -> Path:
    """A story whose result holds an edited reply."""
    calls = [{**line, "rollout_id": rollout_id} for line in story()]
    return write_story(folder, calls, returned("one", TWO_TURNS[1] + "!"))
