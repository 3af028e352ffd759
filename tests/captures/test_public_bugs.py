"""Faults that people met in public while capturing (cases BUG-35, 36, 40, 42): each with the right answer."""

from __future__ import annotations

import json
from typing import Any

from gristmill.captures import CallContext, calls_from_reply, decode_reply
from gristmill.errors import Code
from gristmill.records import CallRecord
from gristmill.tokens import TokenBook
from tests.captures.engine import chat_body, load, logprobs, sse


def record(**kwargs: Any) -> CallRecord:
    [made] = calls_from_reply(decode_reply("chat", **kwargs), CallContext(model_call_id="c"), TokenBook())
    assert made.tokens is not None or not made.record.usable
    return made.record


# BUG-35: cutting the longer of two lists to fit pairs tokens with each other's log-probability.
def test_bug_35_more_logprobs_than_ids() -> None:
    body = chat_body(token_ids=[11, 12], logprobs=logprobs(-0.1, -0.2, -0.3), usage={"completion_tokens": 3})
    made = record(body=body)
    assert (made.usable, made.unusable_reason) == (False, Code.LOGPROB_COUNT_MISMATCH)
    assert made.unusable_detail is not None
    assert all(part in made.unusable_detail for part in ("2 token ids", "3 logprobs", "reported 3"))


# BUG-36: ids made from text are not the ids that were sampled.
def test_bug_36_no_ids_no_tokenisation() -> None:
    made = record(body=chat_body(token_ids=None, logprobs=logprobs(-0.1, -0.2), usage={"completion_tokens": 2}))
    assert (made.usable, made.unusable_reason) == (False, Code.TOKEN_IDS_MISSING)
    assert "token_ids" in (made.unusable_detail or "")


# BUG-40: neither the end of the connection nor who closed first says that an answer is complete.
def test_bug_40_only_the_terminal_event_completes() -> None:
    def chunk(**fields: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, **fields}], "prompt_token_ids": [1]}

    half = sse(chunk(delta={"content": "half"}, token_ids=[5], logprobs=logprobs(-1)), done=False)
    made = record(sse=half)
    assert (made.usable, made.unusable_reason, made.response_status) == (False, Code.STREAM_TRUNCATED, "unknown")
    whole = sse(
        chunk(delta={"content": "whole"}, token_ids=[6], logprobs=logprobs(-1)),
        chunk(delta={}, finish_reason="stop"),
        {"choices": [], "usage": {"completion_tokens": 1}},
    )
    made = record(sse=whole)
    assert (made.usable, made.response_status) == (True, "completed")


# BUG-42: a version read when the answer arrives does not say which weights sampled each token.
def test_bug_42_weight_versions_are_the_engines_spans_or_nothing() -> None:
    assert (
        decode_reply("generate", body=json.dumps(load("generate_weight_version_change")["body"]).encode())
        .choices[0]
        .weight_versions[0]
        .version
        == "v-keep-1"
    )
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    ids = {"token_ids": [1, 2], "logprobs": logprobs(-1, -1)}
    made = record(body=chat_body(weight_versions=spans, **ids))
    assert [(span.version, span.start, span.end) for span in made.weight_versions] == [("7", 0, 1), ("8", 1, 2)]
    lone = record(body=chat_body(meta_info={"weight_version": "8"}, **ids))
    assert (lone.weight_versions, lone.usable) == ((), True)
