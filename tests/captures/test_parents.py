"""Parents of calls whose lines do not speak of them: worked out from the requests, never guessed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gristmill.captures import read_lines, write_lines
from gristmill.records import Capture, ParentResolution

USER = {"role": "user", "content": "count the pears"}


def chat(call_id: str, messages: list[dict[str, Any]], answer: str, **fields: Any) -> bytes:
    line = {
        "kind": "exchange",
        "model_call_id": call_id,
        "request": {"method": "POST", "path": "/v1/chat/completions", "body": {"messages": messages}},
        "status": 200,
        "body": {
            "id": f"r-{call_id}",
            "prompt_token_ids": [1],
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": answer},
                    "finish_reason": "stop",
                    "token_ids": [2],
                    "logprobs": {"content": [{"token": "x", "logprob": -0.5}]},
                }
            ],
        },
        **fields,
    }
    return json.dumps(line).encode()


def capture_of(*lines: bytes) -> Capture:
    (rollout,) = read_lines(lines).rollouts.values()
    return rollout.capture


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_a_continued_conversation_has_its_parent() -> None:
    """Without it, a recorded conversation would look like unrelated calls and retries would go unnoticed."""
    capture = capture_of(
        chat("c1", [USER], "two"), chat("c2", [USER, assistant("two"), {"role": "user", "content": "sure?"}], "yes")
    )
    first, second = capture.records
    assert (first.parent_call_id, first.parent_resolution) == (None, ParentResolution.ROOT)
    assert (second.parent_call_id, second.parent_resolution) == ("c1", ParentResolution.RESOLVED)


def test_equal_answers_are_ambiguous_unless_one_never_arrived() -> None:
    """A wrong parent would make a rejected retry look required."""
    follow_up = [USER, assistant("two"), {"role": "user", "content": "sure?"}]
    capture = capture_of(chat("c1", [USER], "two"), chat("c2", [USER], "two"), chat("c3", follow_up, "yes"))
    assert capture.records[2].parent_call_id is None
    assert capture.records[2].parent_resolution is ParentResolution.AMBIGUOUS
    cut = chat("c1", [USER], "two", delivery="aborted")
    capture = capture_of(cut, chat("c2", [USER], "two"), chat("c3", follow_up, "yes"))
    assert capture.records[2].parent_call_id == "c2"


def test_a_stated_parent_stands() -> None:
    """Who wrote the capture knows better than its words do."""
    follow_up = [USER, assistant("two"), {"role": "user", "content": "sure?"}]
    capture = capture_of(chat("c1", [USER], "two"), chat("c2", follow_up, "yes", parent_call_id=None))
    assert capture.records[1].parent_call_id is None
    assert capture.records[1].parent_resolution is None


def test_a_request_that_cannot_be_read_has_no_parent() -> None:
    """A malformed request must not stop the import of the call."""
    capture = capture_of(chat("c1", [USER], "two"), chat("c2", [{"role": "user", "content": [3]}], "yes"))
    assert capture.records[1].parent_call_id is None
    assert capture.records[1].parent_resolution is None


@pytest.mark.parametrize("stated", [{}, {"parent_call_id": None}])
def test_writing_and_reading_keeps_the_parents(stated: dict[str, Any]) -> None:
    """A capture that is written out and read back must not gain or lose a parent."""
    follow_up = [USER, assistant("two"), {"role": "user", "content": "sure?"}]
    capture = capture_of(chat("c1", [USER], "two"), chat("c2", follow_up, "yes", **stated))
    again = capture_of(*write_lines(capture))
    assert [(r.parent_call_id, r.parent_resolution) for r in again.records] == [
        (r.parent_call_id, r.parent_resolution) for r in capture.records
    ]
