from __future__ import annotations

import json
from typing import Any

import pytest

from gristmill.canonical import JsonNumber, loads
from gristmill.captures.headers import Session, session_of
from gristmill.captures.retry import request_digest, says_retry
from gristmill.errors import InternalError
from tests.captures.harness import NAMES, Recorded, recorded

REPEATED = {
    "claude-code--run2-inject": [[1, 2, 3, 4], [5, 6], [7, 8]],
    "claude-code--run3-hang": [[1, 2]],
    "claude-code--run9-stall": [[0, 1]],
    "codex--run2-inject": [[0, 1, 2, 3], [4, 5]],
    "codex--run3-hang": [[0, 1], [2, 3, 4]],
    "codex--run8-stall": [[0, 1]],
    "mini-swe-agent--run2-inject": [[0, 1, 2, 3], [4, 5, 6]],
    "openai-agents--run3-inject": [[0, 1, 2]],
    "openai-agents--run4-stream-cut": [[0, 1, 2]],
    "opencode--run3-inject": [[1, 2, 3, 4], [5, 6]],
    "opencode--run7-stall": [[1, 2]],
    "pi--run5-inject": [[0, 1, 2, 3], [4, 5], [6, 7]],
    "pi--run6-hang-parallel": [[0, 1, 2]],
    "pi--run7-stall": [[0, 1]],
    "smolagents--run3-inject": [[0, 1, 2], [3, 4]],
}
"""Calls of the recorded runs that a harness sent again after a failure; all others are turns of their own."""


def digest(call: Recorded) -> str:
    return request_digest(loads(json.dumps(call.body)), session_of(call.headers, call.body))


# A retry that is not recognised is trained twice; a turn taken for a retry is answered with an old reply.
@pytest.mark.parametrize("name", NAMES)
def test_retries_of_real_harnesses_are_told_from_turns(name: str) -> None:
    groups: dict[str, list[int]] = {}
    for number, call in enumerate(recorded(name)):
        groups.setdefault(digest(call), []).append(number)
    assert [group for group in groups.values() if len(group) > 1] == REPEATED.get(name, [])


# Clients write the same request with other bytes when they send it again.
def test_bytes_do_not_count() -> None:
    one = loads(b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "\\u00e9"}], "seed": 1}')
    other = loads('{"seed":1,"messages":[{"content":"é","role":"user"}],"model":"m","stream_options":{"x":1}}')
    assert request_digest(one) == request_digest(other)
    assert request_digest(one) == request_digest({**one, "stream": False})


# The text that a request is billed by changes with the call.
def test_billing_blocks_do_not_count() -> None:
    def body(*system: str) -> Any:
        return {"system": [{"type": "text", "text": text} for text in system]}

    billed = [body(f"x-anthropic-billing-header: cc_version={n}", "rules") for n in range(2)]
    assert request_digest(billed[0]) == request_digest(billed[1]) == request_digest(body("rules"))
    assert request_digest(body("rules")) != request_digest(body("others"))
    assert request_digest({"system": "rules"}) != request_digest(body("rules"))


DIFFERENT = [
    b'{"a": 1}',
    b'{"a": 1.0}',
    b'{"a": true}',
    b'{"a": "1"}',
    b'{"a": [1]}',
    b'{"a": null}',
    b'{"a": {}}',
    b"{}",
    b"[]",
    b"null",
    b'{"a": 9007199254740993.0}',
    b'{"a": 9007199254740992.0}',
    b'{"a": 1e999}',
    b'{"a": 1e998}',
    b'{"a": 12345678901234567890123}',
    b'{"a": 12345678901234567890124}',
    b'{"a": "\\ud800"}',
    b'{"a": "\\ud801"}',
    b'{"a": 1, "a": 2}',
    b'{"a": 2, "a": 1}',
    b'{"a": [["a", 1], ["a", 2]]}',
    b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}",
    b'{"a": ' + b"[" * 201 + b"]" * 201 + b"}",
    b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}",
]


# Whatever JSON can say apart has to stay apart.
def test_different_values_have_different_digests() -> None:
    digests = [request_digest(loads(text)) for text in DIFFERENT]
    assert len(set(digests)) == len(DIFFERENT)
    assert all(len(digest) == 64 for digest in digests)


# A gateway may decode a body exactly or with plain floats.
@pytest.mark.parametrize("text", ["0.7", "0.70", "7e-1", "1.0", "-0.0", "1e22", "100000.0", "3.141592653589793"])
def test_numbers_count_by_value(text: str) -> None:
    plain = request_digest({"temperature": float(text)})
    assert request_digest(loads(f'{{"temperature": {text}}}')) == plain
    assert request_digest({"temperature": JsonNumber(text)}) == plain


# Subagents with one task send the same body; only their ids tell them apart.
def test_a_conversation_is_part_of_the_request() -> None:
    sessions = [None, Session(), *(Session(**{name: "x"}) for name in ("session_id", "thread_id", "agent_id"))]
    digests = {request_digest({"a": 1}, session) for session in sessions}
    assert len(digests) == len(sessions)
    assert request_digest({"a": 1}, Session(agent_id="x")) == request_digest({"a": 1}, Session(agent_id="x", window=1))


# Text types of other libraries are text; what is no JSON was never a request.
def test_what_is_no_json_is_refused() -> None:
    class Text(str):
        __slots__ = ()

    assert request_digest({"a": Text("x")}) == request_digest({"a": "x"})
    with pytest.raises(InternalError):
        request_digest({"a": object()})


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, False),
        ({"x-stainless-retry-count": "0"}, False),
        ({"x-stainless-retry-count": "2"}, True),
        ({"x-retry-attempt": "1"}, True),
        ({"x-stainless-retry-count": "0", "x-retry-count": "1"}, True),
        ({"x-stainless-retry-count": "-1"}, False),
        ({"x-stainless-retry-count": "²"}, False),
        ({"x-stainless-retry-count": "9" * 9000}, True),
    ],
)
# A count that is misread would answer a new call from the record.
def test_retry_counts(headers: dict[str, str], expected: bool) -> None:
    assert says_retry(headers) is expected
