"""How a reply ends, and what a client is told of one that breaks off."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.captures.decode import decode_value
from gristmill.gateway.dialects.responses import RESPONSES
from gristmill.records import Dialect, ResponseStatus
from tests.gateway.dialects.responses.accumulate import accumulate
from tests.gateway.dialects.responses.exchange import (
    BODIES,
    call,
    chat_body,
    chunk,
    encoder,
    events,
    kinds,
    output_types,
    recorded,
    recorded_chunks,
    streamed,
    whole,
)


# A harness would take half an answer for a whole one, or the other way round.
@pytest.mark.parametrize(
    ("finish", "status", "reason"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("function_call", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
        ("repetition", "incomplete", "repetition"),
        ("error", "failed", None),
        ("abort", "failed", None),
        ("cancelled", "failed", None),
        (None, "failed", None),
    ],
)
def test_the_finish_reason_decides(finish: str | None, status: str, reason: str | None) -> None:
    reply = streamed([chunk({"content": "a"}), chunk({}, finish)])
    assert kinds(reply.held)[-1] == f"response.{status}"
    assert reply.served["status"] == status
    assert reply.served["incomplete_details"] == (None if reason is None else {"reason": reason})
    assert (reply.served["error"] is not None) is (status == "failed")
    assert reply.served["output"][0]["status"] == ("completed" if status == "completed" else "incomplete")
    assert accumulate(events(reply.now + reply.held)) == reply.served
    assert whole(chat_body({"content": "a"}, finish)) == reply.served
    read = decode_value(Dialect.RESPONSES, 200, reply.served)
    assert read.status == ResponseStatus(status)
    assert list(read.choices[0].items) == reply.served["output"]


# Of a reply that was cut, only what was being said is unfinished.
def test_only_the_last_item_of_a_cut_reply_is_incomplete() -> None:
    served = streamed([chunk({"reasoning": "a"}), chunk({"content": "b"}, "length")]).served
    assert [item["status"] for item in served["output"]] == ["completed", "incomplete"]


# A client that runs tools as their items are done must not run one whose generation was aborted.
def test_an_aborted_call_of_a_tool_is_not_said_to_be_done() -> None:
    reply = streamed([chunk({"tool_calls": [call(0, "bash", '{"command": "rm')]}), chunk({}, "abort")])
    assert "response.output_item.done" not in kinds(reply.now + reply.held)
    assert reply.served["output"][0]["arguments"] == '{"command": "rm'
    assert reply.served["output"][0]["status"] == "incomplete"


# Clients ask again only for codes that they know as temporary.
@pytest.mark.parametrize(("status", "code"), [(502, "server_error"), (429, "rate_limit_exceeded")])
def test_a_stream_that_breaks_says_so(status: int, code: str) -> None:
    made = encoder()
    begun = made.begin() + made.chunk(chunk({"reasoning": "a"})).now + made.chunk(chunk({"content": "b"})).now
    assert made.served()["status"] == "in_progress"
    assert output_types(made.served()) == ["reasoning", "message"]
    failure = made.failure(status, "the engine was lost")
    assert kinds(failure) == ["response.failed"]
    served = made.served()
    assert served["error"] == {"code": code, "message": "the engine was lost"}
    assert [item["status"] for item in served["output"]] == ["completed", "incomplete"]
    assert accumulate(events(begun + failure)) == served


# A reply that was withheld because it is not durable must leave a stream that reads well, and never say completed.
def test_a_reply_that_is_withheld_leaves_a_failed_stream() -> None:
    made = encoder()
    sent = made.begin() + made.chunk(chunk({"reasoning": "a"})).now
    sent += made.chunk(chunk({"tool_calls": [call(0, "bash", "{}")]}, "tool_calls")).now
    assert b"response.completed" in made.end().held
    sent += made.failure(503, "not durable")
    assert accumulate(events(sent)) == made.served()
    assert made.served()["status"] == "failed"
    assert [item["status"] for item in made.served()["output"]] == ["completed", "incomplete"]


# A stream that fails before anything was said is still a stream of this dialect.
def test_a_stream_may_fail_at_once() -> None:
    made = encoder()
    assert accumulate(events(made.failure(500, "no"))) == made.served()


# A call of a custom tool is told to the client when it is complete; a broken one was never told, so it is no evidence.
def test_a_custom_call_that_broke_off_was_not_served() -> None:
    tools = [{"type": "custom", "name": "patch"}]
    made = encoder({"model": "m", "input": "x", "stream": True, "tools": tools})
    sent = made.begin() + made.chunk(chunk({"tool_calls": [call(0, "patch", '{"input": "a')]})).now
    assert made.served()["output"] == []
    assert accumulate(events(sent + made.failure(502, "lost"))) == made.served()


# An aborted generation that says completed would be trained on as a whole answer.
@pytest.mark.parametrize("name", BODIES)
def test_a_recorded_body_ends_as_its_engine_said(name: str) -> None:
    body = recorded(name)["body"]
    expected = {"abort": "failed", "length": "incomplete"}.get(body["choices"][0]["finish_reason"], "completed")
    assert whole(body)["status"] == expected
    aborted = streamed(recorded_chunks("pause_abort_stream"))
    assert aborted.served["status"] == "failed"
    assert output_types(aborted.served) == ["reasoning", "message"]


# A client's error handling looks for these four keys.
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (503, "server_error"),
    ],
)
def test_an_error_has_the_dialects_shape(status: int, kind: str) -> None:
    expected: dict[str, Any] = {"message": "no", "type": kind, "param": None, "code": "some_code"}
    assert RESPONSES.error(status, "some_code", "no") == {"error": expected}
    assert RESPONSES.dialect is Dialect.RESPONSES
