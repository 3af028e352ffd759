"""Rules of capture.md §1 and §3 on replies made for them."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

import pytest

from gristmill.captures import Reply, ReplyChoice, decode_reply, dialect_of
from gristmill.errors import Code, ConfigError
from gristmill.records import Dialect, ResponseStatus, WeightSpan
from tests.captures.engine import chat_body, logprobs, sse

LP = logprobs(-0.5, -0.25)


def chat(**choice: Any) -> ReplyChoice:
    [read] = decode_reply("chat", body=chat_body(**choice)).choices
    return read


# Each engine puts ids elsewhere; a place that is not looked at makes its calls untrainable.
@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": [7, 8]},
        {"response_token_ids": [7, 8]},
        {"root": {"sglext": {"output_ids": [[7, 8]]}}},
        {"provider_specific_fields": {"token_ids": [7, 8]}},
        {"message": {"role": "assistant", "content": "ok", "provider_specific_fields": {"token_ids": [7, 8]}}},
        {"raw_output": {"completion_token_ids": [7, 8]}},
        {"raw_output": {"token_ids": [7, 8]}},
        {"meta_info": {"output_token_logprobs": [[-0.5, 7, "a"], [-0.25, 8, "b"]]}},
        {"logprobs": {"content": [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -0.25}]}},
        {
            "logprobs": {
                "content": [{"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:8", "logprob": -0.25}]
            }
        },
        {"logprobs": {"tokens": ["token_id:7", "token_id:8"], "token_logprobs": [-0.5, -0.25]}},
    ],
)
@pytest.mark.parametrize("usage", [None, {"completion_tokens": 2}])
def test_sampled_ids_are_found_in_every_place(fields: dict[str, Any], usage: Any) -> None:
    has_own = "meta_info" in fields or "logprobs" in fields
    choice = chat(**({} if has_own else {"logprobs": LP}), usage=usage, **fields)
    assert (list(choice.token_ids or ()), list(choice.logprobs or ())) == ([7, 8], [-0.5, -0.25])
    assert choice.reason is None


# Taking a later place although an earlier one is complete would mix the ids of two lists.
def test_the_first_complete_place_wins() -> None:
    choice = chat(token_ids=[7, 8], response_token_ids=[1, 2], raw_output={"token_ids": [3, 4]}, logprobs=LP)
    assert choice.token_ids == [7, 8]


# A list with a hole, or one that is shorter than the engine's count, is not what was sampled.
@pytest.mark.parametrize("partial", [[7], [7, None], [None, None], []])
def test_a_partial_list_is_no_list(partial: list[Any]) -> None:
    usage = {"completion_tokens": 2}
    choice = chat(token_ids=partial, response_token_ids=[7, 8], logprobs=LP, usage=usage)
    assert (choice.token_ids, choice.reason) == ([7, 8], None)
    alone = chat(token_ids=[7, None], logprobs=LP, usage=usage)
    assert (alone.token_ids, alone.reason) == (None, Code.TOKEN_IDS_MISSING)
    assert alone.detail is not None
    assert "1 of 2 are missing" in alone.detail


# Log-probabilities of text are no ids; a token's text is never looked up.
def test_text_is_never_made_into_ids() -> None:
    choice = chat(logprobs=LP)
    assert (choice.token_ids, choice.reason) == (None, Code.TOKEN_IDS_MISSING)


# Of several such lists the first is reported.
def test_the_first_invalid_list_is_reported() -> None:
    choice = chat(token_ids=["7"], response_token_ids=[7.5], logprobs=LP)
    assert (choice.token_ids, choice.reason) == (None, Code.TOKEN_ID_INVALID)
    assert choice.detail == "token_ids holds something that is not an integer"


# An id that is no integer would be cast into a token that was never sampled.
@pytest.mark.parametrize("wrong", [["7", 8], [7.5, 8], [True, 8], [[7], 8], [10**5000, 1]])
def test_an_id_that_is_no_integer_is_refused(wrong: list[Any]) -> None:
    text = chat_body(token_ids=["HERE"], logprobs=LP).replace(b'["HERE"]', _dump(wrong))
    [choice] = decode_reply("chat", body=text).choices
    assert (choice.token_ids, choice.reason) == (None, Code.TOKEN_ID_INVALID)


def _dump(values: list[Any]) -> bytes:
    return (
        "[" + ",".join("1" * 5000 if isinstance(v, int) and v > 9**99 else json.dumps(v) for v in values) + "]"
    ).encode()


# Prompt ids are the context that the token was sampled in; each engine has its own place for them.
@pytest.mark.parametrize(
    "fields",
    [
        {"root": {"prompt_token_ids": [4, 5]}},
        {"root": {"prompt_token_ids": None, "sglext": {"input_ids": [4, 5]}}},
        {"root": {"prompt_token_ids": None}, "prompt_token_ids": [4, 5]},
        {"root": {"prompt_token_ids": None}, "raw_output": {"prompt_token_ids": [4, 5]}},
        {"root": {"prompt_token_ids": [4, None]}, "prompt_token_ids": [4, 5]},
    ],
)
def test_prompt_ids_are_found_in_every_place(fields: dict[str, Any]) -> None:
    assert chat(token_ids=[7, 8], logprobs=LP, **fields).prompt_ids == [4, 5]


# A generation without its exact context cannot make a row.
def test_missing_prompt_ids_are_a_reason() -> None:
    assert chat(root={"prompt_token_ids": None}, token_ids=[7, 8], logprobs=LP).reason is Code.PROMPT_IDS_MISSING


# Ids, log-probabilities and the engine's count must agree, or tokens carry each other's log-probability.
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"token_ids": [7, 8], "logprobs": logprobs(-1)}, Code.LOGPROB_COUNT_MISMATCH),
        ({"token_ids": [7, 8], "logprobs": LP, "usage": {"completion_tokens": 3}}, Code.TOKEN_COUNT_MISMATCH),
        ({"token_ids": [7, 8], "usage": {"completion_tokens": 3}}, Code.TOKEN_COUNT_MISMATCH),
        ({"token_ids": [7, 8]}, Code.LOGPROBS_MISSING),
        ({"token_ids": [7, 8], "logprobs": {"content": None}}, Code.LOGPROBS_MISSING),
        ({"token_ids": [7, 8], "logprobs": {"content": [None, {"logprob": -1}]}}, None),
    ],
)
def test_counts_must_agree(fields: dict[str, Any], reason: Code | None) -> None:
    assert chat(**fields).reason is reason


def two_choices(first: list[int] | None, second: list[int] | None, reported: int) -> Reply:
    def one(index: int, ids: list[int] | None) -> dict[str, Any]:
        values = logprobs(*[-1.0] * len(ids)) if ids is not None else None
        message = {"role": "assistant", "content": str(index)}
        return {"index": index, "message": message, "finish_reason": "stop", "token_ids": ids, "logprobs": values}

    body = {"id": "r", "choices": [one(1, second), one(0, first)], "prompt_token_ids": [1]}
    return decode_reply("chat", body=json.dumps({**body, "usage": {"completion_tokens": reported}}).encode())


# With n > 1 the usage is the sum: comparing it with one choice would refuse every good call.
def test_usage_is_the_sum_over_choices() -> None:
    good = two_choices([1], [2, 3], 3)
    assert [(choice.index, choice.reason) for choice in good.choices] == [(0, None), (1, None)]
    wrong = two_choices([1], [2, 3], 4)
    assert {choice.reason for choice in wrong.choices} == {Code.TOKEN_COUNT_MISMATCH}
    # A sibling without ids leaves the sum open, unless the others alone are already too many.
    assert [c.reason for c in two_choices([1], None, 3).choices] == [None, Code.TOKEN_IDS_MISSING]
    assert [c.reason for c in two_choices([1, 2], None, 1).choices] == [
        Code.TOKEN_COUNT_MISMATCH,
        Code.TOKEN_IDS_MISSING,
    ]


# Completion is read, never inferred: an unknown or absent reason must not become `completed`.
@pytest.mark.parametrize(
    ("finish", "status", "reason"),
    [
        ("stop", ResponseStatus.COMPLETED, None),
        ("function_call", ResponseStatus.COMPLETED, None),
        ("length", ResponseStatus.INCOMPLETE, None),
        ("content_filter", ResponseStatus.INCOMPLETE, None),
        ("abort", ResponseStatus.INCOMPLETE, Code.ABORTED),
        ("error", ResponseStatus.FAILED, Code.CALL_FAILED),
        ("surprise", ResponseStatus.UNKNOWN, None),
        (None, ResponseStatus.UNKNOWN, None),
    ],
)
def test_chat_status_is_read_from_the_finish_reason(finish: Any, status: ResponseStatus, reason: Any) -> None:
    choice = chat(token_ids=[7, 8], logprobs=LP, finish_reason=finish)
    assert (choice.finish_reason, choice.response_status, choice.reason) == (finish, status, reason)


# Echoed prompts carry log-probabilities too; pairing those with sampled ids shifts every one of them.
def test_echo_takes_the_last_logprobs_and_only_with_echo() -> None:
    body = chat_body(token_ids=[7, 8], logprobs=logprobs(None, -9, -0.5, -0.25))
    assert list(decode_reply("chat", body=body, echo=True).choices[0].logprobs or ()) == [-0.5, -0.25]
    assert decode_reply("chat", body=body).choices[0].reason is Code.LOGPROB_COUNT_MISMATCH
    plain = chat_body(token_ids=[7, 8], logprobs=LP)
    assert decode_reply("chat", body=plain, echo=True).choices[0].reason is None


# The engine's own spans say which weights sampled which token.
def test_weight_spans_are_kept_as_given() -> None:
    spans = [{"version": 7, "start": 0, "end": 1}, {"version": "v8", "start": 1, "end": 2}]
    choice = chat(token_ids=[7, 8], logprobs=LP, weight_versions=spans)
    assert choice.weight_versions == (WeightSpan("7", 0, 1), WeightSpan("v8", 1, 2))
    for wrong in ({"version": "v"}, {"version": "v", "start": 2, "end": 1}, {"version": None, "start": 0, "end": 1}):
        assert chat(token_ids=[7, 8], logprobs=LP, weight_versions=[wrong]).reason is Code.REPLY_MALFORMED


# A span beyond the ids spoils the tokens, not the answer that a harness is waiting for.
def test_weight_spans_that_do_not_fit_the_ids_make_a_call_unusable() -> None:
    choice = chat(token_ids=[7, 8], logprobs=LP, weight_versions=[{"version": "v", "start": 0, "end": 3}])
    assert (choice.reason, choice.weight_versions) == (Code.TOKEN_COUNT_MISMATCH, ())
    assert choice.detail == "2 token ids, a span of weights that ends at 3"
    assert choice.items


# SGLang says its weights beside the scores.
def test_weight_spans_of_sglang() -> None:
    meta = {"weight_versions": [{"version": "w1", "start": 0, "end": 2}]}
    assert chat(token_ids=[7, 8], logprobs=LP, meta_info=meta).weight_versions == (WeightSpan("w1", 0, 2),)


# One log-probability that is no number is reported; the reply around it is good.
def test_nan_among_the_log_probabilities() -> None:
    entries = b'{"content": [{"logprob": NaN}, {"logprob": -Infinity}]}'
    body = (
        b'{"prompt_token_ids": [1], "choices": [{"message": {"content": "x"}, "finish_reason": "stop", '
        b'"token_ids": [7, 8], "logprobs": ' + entries + b"}]}"
    )
    [choice] = decode_reply("chat", body=body).choices
    assert choice.logprobs is not None
    assert [isfinite(value) for value in choice.logprobs] == [False, False]
    assert choice.items == ({"content": "x"},)
    chunk = body.replace(b'"message"', b'"delta"')
    [streamed] = decode_reply("chat", sse=b"data: " + chunk + b"\n\ndata: [DONE]\n\n").choices
    assert (streamed.items, streamed.token_ids) == (choice.items, choice.token_ids)


# A reply that is not what its dialect says must be kept with a reason, not crash a collection run.
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [1]}',
        b'{"choices": [{"message": 1}]}',
        b'{"choices": [{"index": -1, "message": {}}]}',
        b'{"choices": [{"index": 0, "message": {}}, {"index": 0, "message": {}}]}',
        b'{"choices": [{"message": {}, "finish_reason": 1}]}',
        b'{"id": "\\ud800", "choices": [{"message": {}}]}',
        b'{"choices": [{"message": {"x": NaN}}]}',
        b'{"choices": [{"message": {"x": [{"y": -Infinity}]}}]}',
        b'{"choices": NaN}',
        b'{"choices": [NaN',
        b"[" * 100_000,
        b'{"choices": [{"message": ' + b"[" * 2000 + b"]" * 2000 + b"}]}",
        b"\xff",
    ],
)
def test_malformed_bodies_are_reported(body: bytes) -> None:
    reply = decode_reply("chat", body=body)
    assert [choice.reason for choice in reply.choices] == [Code.REPLY_MALFORMED]
    assert reply.status is ResponseStatus.UNKNOWN


# Lone surrogates are what models emit when a token ends inside a character; the call must survive them.
def test_a_lone_surrogate_in_the_text_is_kept() -> None:
    message = {"role": "assistant", "content": "\ud83d"}
    choice = chat(message=message, token_ids=[7, 8], logprobs=LP, usage={"completion_tokens": 2})
    assert choice.items == (message,)
    assert (choice.token_ids, choice.reason) == ([7, 8], None)


# An error that comes with status 200, or as the last event of a stream, is still an error.
@pytest.mark.parametrize("dialect", ["chat", "completions", "generate", "responses", "messages"])
def test_errors_are_failed_calls_in_every_dialect(dialect: str) -> None:
    error = {"error": {"message": "no \ud800 memory"}}
    body = json.dumps(error).encode()
    stream = f"event: error\ndata: {json.dumps(error)}\n\n"
    for reply in (
        decode_reply(dialect, body=body),
        decode_reply(dialect, 500, body),
        decode_reply(dialect, 500, b"oops"),
        decode_reply(dialect, 500, b"[1]"),
        decode_reply(dialect, sse=stream),
        decode_reply(dialect, 502, sse=""),
    ):
        assert reply.status is ResponseStatus.FAILED
        assert [choice.reason for choice in reply.choices] == [Code.CALL_FAILED]
        assert reply.error
    assert decode_reply(dialect, body=body).error == "no \\ud800 memory"


# Engines word errors in several ways; each must be recognised as one.
def test_forms_of_error_bodies() -> None:
    for body in (b'{"error": "text"}', b'{"error": ""}', b'{"error": {}}', b'{"object": "error", "message": "m"}'):
        assert decode_reply("chat", body=body).choices[0].reason is Code.CALL_FAILED
    assert decode_reply("messages", body=b'{"type": "error"}').choices[0].reason is Code.CALL_FAILED


# A recorder names the route; taking another dialect for it would read nothing.
def test_routes_name_dialects() -> None:
    assert dialect_of("/r/abc/0/v1/messages?beta=true") is Dialect.MESSAGES
    assert dialect_of("/v1/chat/completions/") is Dialect.CHAT
    assert dialect_of("/v1/completions") is Dialect.COMPLETIONS
    assert dialect_of("/v1/messages/count_tokens") is None
    assert dialect_of("/v1/chat/completions/batch") is None


# An error event may carry its message without the usual wrapper.
def test_error_events_without_wrapper() -> None:
    reply = decode_reply("chat", sse='event: error\ndata: {"message": "m"}\n\n')
    assert (reply.error, reply.status) == ("m", ResponseStatus.FAILED)


# A caller's mistake is told as such, not recorded as a bad reply.
def test_wrong_use_of_the_door_is_refused() -> None:
    for arguments in (
        ("unknown", 200, b"{}"),
        ("/tokenize", 200, b"{}"),
        ("chat", 200, None),
        ("chat", 200, b"", ""),
    ):
        with pytest.raises(ConfigError):
            decode_reply(*arguments)


# What the client was served is the evidence; each dialect serves it elsewhere.
def test_items_of_completions_and_generate() -> None:
    tokens = {"index": 0, "finish_reason": "stop", "token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}}
    body = {"prompt_token_ids": [1], "choices": [{**tokens, "text": "hi"}]}
    for dialect in ("completions", "generate"):
        [choice] = decode_reply(dialect, body=json.dumps(body).encode()).choices
        assert choice.items == ({"role": "assistant", "content": "hi"},)
        assert choice.reason is None
    body = {"prompt_token_ids": [1], "choices": [tokens]}
    assert decode_reply("generate", body=json.dumps(body).encode()).choices[0].items == ()
    assert decode_reply("completions", body=json.dumps(body).encode()).choices[0].reason is Code.REPLY_MALFORMED
    assert decode_reply("completions", body=b'{"choices":[{"text":"a"}]}').choices[0].reason is Code.TOKEN_IDS_MISSING


def response(**fields: Any) -> Reply:
    base = {"id": "resp_1", "model": "m", "status": "completed", "output": []}
    return decode_reply("responses", body=json.dumps({**base, **fields}).encode())


def raw(*tokens: Any) -> list[dict[str, Any]]:
    return [{"type": "raw_message_tokens", "message": "", "tokens": list(tokens)}]


def text_item(*values: float) -> dict[str, Any]:
    part = {"type": "output_text", "text": "x", "logprobs": [{"logprob": value} for value in values]}
    return {"type": "message", "role": "assistant", "content": [part]}


# Status words of the Responses API; anything else must not count as completed.
@pytest.mark.parametrize(
    ("fields", "status", "finish", "reason"),
    [
        ({}, ResponseStatus.COMPLETED, None, Code.TOKEN_IDS_MISSING),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
            ResponseStatus.INCOMPLETE,
            "content_filter",
            Code.TOKEN_IDS_MISSING,
        ),
        ({"status": "failed"}, ResponseStatus.FAILED, None, Code.CALL_FAILED),
        ({"status": "failed", "error": {"message": "m"}}, ResponseStatus.FAILED, None, Code.CALL_FAILED),
        ({"status": "cancelled"}, ResponseStatus.INCOMPLETE, "cancelled", Code.ABORTED),
        ({"status": "in_progress"}, ResponseStatus.UNKNOWN, None, Code.TOKEN_IDS_MISSING),
        ({"status": None}, ResponseStatus.UNKNOWN, None, Code.TOKEN_IDS_MISSING),
    ],
)
def test_responses_status(fields: dict[str, Any], status: Any, finish: Any, reason: Any) -> None:
    [choice] = response(**fields).choices
    assert (choice.response_status, choice.finish_reason, choice.reason) == (status, finish, reason)


# Responses tokens are used only where they are whole; half of them would train a shifted row.
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input_messages": raw(1), "output_messages": raw(7, 8), "output": [text_item(-1, -2)]}, None),
        ({"input_messages": raw(1), "output_messages": raw(7, 8)}, Code.LOGPROBS_MISSING),
        (
            {"input_messages": raw(1), "output_messages": raw(7, 8), "output": [text_item(-1)]},
            Code.LOGPROB_COUNT_MISMATCH,
        ),
        (
            {
                "input_messages": raw(1),
                "output_messages": raw(7, 8),
                "output": [text_item(-1, -2), text_item(-1, -2)],
            },
            Code.LOGPROB_COUNT_MISMATCH,
        ),
        ({"output_messages": raw(7, 8), "output": [text_item(-1, -2)]}, Code.PROMPT_IDS_MISSING),
        ({"output_messages": raw(7) + raw(8)}, Code.TOKEN_IDS_MISSING),
        ({"output_messages": raw(7, None)}, Code.TOKEN_IDS_MISSING),
        (
            {"input_messages": raw(1), "output_messages": raw(7), "usage": {"output_tokens": 2}},
            Code.TOKEN_COUNT_MISMATCH,
        ),
        ({"output": [1]}, Code.REPLY_MALFORMED),
        ({"output": [{"content": [1, {"logprobs": [1]}, {"logprobs": []}]}]}, Code.TOKEN_IDS_MISSING),
        ({"output_messages": raw(7), "input_messages": raw(1), "output": [{"content": [{"logprobs": [1]}]}]}, None),
    ],
)
def test_responses_tokens(fields: dict[str, Any], reason: Code | None) -> None:
    assert response(**fields).choices[0].reason is reason


# A Messages reply without a stop reason may be an aborted one: unknown, never completed.
def test_messages_status() -> None:
    def stop(reason: Any) -> ReplyChoice:
        body = {"id": "m", "type": "message", "role": "assistant", "content": [], "stop_reason": reason}
        return decode_reply("messages", body=json.dumps(body).encode()).choices[0]

    assert stop("pause_turn").response_status is ResponseStatus.INCOMPLETE
    assert stop("new_word").response_status is ResponseStatus.UNKNOWN
    assert stop(None).response_status is ResponseStatus.UNKNOWN
    assert "unknown whether the reply is complete" in (stop(None).detail or "")
    assert decode_reply("messages", body=b"{}").choices[0].reason is Code.REPLY_MALFORMED
    assert decode_reply("messages", body=b"[").choices[0].reason is Code.REPLY_MALFORMED
    assert decode_reply("responses", body=b"[").choices[0].reason is Code.REPLY_MALFORMED
    assert decode_reply("responses", body=b"[]").choices[0].reason is Code.REPLY_MALFORMED


# A stream's text is complete only with its [DONE] and a finish reason for each choice.
def test_small_streams_of_each_choice_dialect() -> None:
    chunk = {"choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}]}
    for dialect in ("completions", "generate"):
        [choice] = decode_reply(dialect, sse=sse(chunk)).choices
        assert choice.items == ({"role": "assistant", "content": "hi"},)
