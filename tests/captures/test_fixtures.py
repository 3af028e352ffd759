"""Every recorded exchange of a real engine decodes to exactly what was recorded."""

from __future__ import annotations

import json
from math import isnan
from typing import Any

import pytest

from gristmill.canonical import loads
from gristmill.captures import CallContext, calls_from_reply, decode_reply
from gristmill.captures.decode import decode_value
from gristmill.errors import Code
from gristmill.fingerprint import output_items
from gristmill.records import ItemKind, ResponseStatus
from gristmill.tokens import TokenBook
from tests.captures.engine import FOLDER, SAMPLED, decode, load

CHOICE_ROUTES = [
    name for name in SAMPLED if not name.startswith(("messages", "responses", "abort_messages", "abort_r"))
]
BODIES = [name for name in CHOICE_ROUTES if "body" in load(name) and load(name)["status"] == 200]
STREAMS = [name for name in CHOICE_ROUTES if "sse_raw" in load(name)]


def usable(name: str) -> list[tuple[str | None, str | None, bool, str | None]]:
    fixture = load(name)
    context = CallContext(model_call_id="c", request=fixture["request"]["body"])
    made = calls_from_reply(decode(fixture), context, TokenBook())
    return [
        (call.record.response_status, call.record.finish_reason, call.record.usable, call.record.unusable_reason)
        for call in made
    ]


# A fixture folder that lost a dialect would leave that dialect untested.
def test_the_fixtures_cover_every_dialect_and_form() -> None:
    dialects = {(decode(load(name)).dialect.value, "sse_raw" in load(name)) for name in SAMPLED}
    assert dialects == {
        (dialect, stream)
        for dialect in ("chat", "completions", "responses", "messages", "generate")
        for stream in (False, True)
    }
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2_500_000


# An id that is not the recorded one trains a token that was never sampled.
@pytest.mark.parametrize("name", BODIES)
def test_a_body_gives_the_recorded_ids_and_logprobs(name: str) -> None:
    body = load(name)["body"]
    reply = decode(load(name))
    assert reply.response_id == body.get("id", body.get("request_id"))
    assert reply.usage.completion_tokens == body["usage"]["completion_tokens"]
    for choice, recorded in zip(reply.choices, body["choices"], strict=True):
        assert choice.token_ids == recorded["token_ids"]
        assert choice.prompt_ids == (body.get("prompt_token_ids") or recorded.get("prompt_token_ids"))
        assert choice.finish_reason == recorded["finish_reason"]
        values = logprob_list(recorded)
        if name == "completions_echo":
            values = values[len(recorded["prompt_token_ids"]) :]
        assert [value for value in choice.logprobs or () if not isnan(value)] == [v for v in values if v is not None]


# Ids of chunks joined in another way than they were recorded would shift every token.
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_gives_the_recorded_events_joined(name: str) -> None:
    fixture = load(name)
    chunks = [event["data"] for event in fixture["events"] if event["data"] != "[DONE]"]
    reply = decode(fixture)
    for choice in reply.choices:
        pieces = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == choice.index]
        ids = [token for piece in pieces for token in piece.get("token_ids") or ()]
        assert list(choice.token_ids or ()) == ids
        values = [value for piece in pieces for value in logprob_list(piece)]
        assert list(choice.logprobs or ()) == values
        said = [piece["finish_reason"] for piece in pieces if piece.get("finish_reason")]
        assert [choice.finish_reason] == said
        for item in choice.items:
            for key in ("content", "reasoning"):
                joined = "".join((piece.get("delta") or {}).get(key) or "" for piece in pieces)
                if "delta" in pieces[0]:
                    assert (item.get(key) or "") == joined


def logprob_list(piece: dict[str, Any]) -> list[float]:
    given = piece.get("logprobs") or {}
    return given.get("token_logprobs") or [entry["logprob"] for entry in given.get("content") or ()]


# The same seed was run as a body and as a stream: two records of one generation must be equal.
@pytest.mark.parametrize(
    ("body", "stream"),
    [
        ("chat_tool_call", "stream_tool_call"),
        ("chat_tool_call_parallel", "stream_tool_call_parallel"),
        ("chat_stop_string_include_false", "stream_stop_string_include_false"),
    ],
)
def test_stream_and_body_of_one_generation_agree(body: str, stream: str) -> None:
    [one], [other] = decode(load(body)).choices, decode(load(stream)).choices
    assert one.token_ids == other.token_ids
    assert one.prompt_ids == other.prompt_ids
    assert (one.finish_reason, one.stop_reason, one.reason) == (other.finish_reason, other.stop_reason, other.reason)

    def said(items: Any) -> list[tuple[str, str, str]]:
        # The engine streams the white space before a tool call and leaves it out of a body: both are as served.
        atoms = [atom for item in output_items(items) for atom in item.atoms or ()]
        return [(atom.kind, atom.name, atom.text) for atom in atoms if atom.text.strip()]

    assert said(one.items) == said(other.items)


# The fast decoder and the exact one must never disagree about a reply.
@pytest.mark.parametrize("name", BODIES)
def test_fast_and_exact_decoding_agree(name: str) -> None:
    fixture = load(name)
    echo = bool(fixture["request"]["body"].get("echo"))
    raw = json.dumps(fixture["body"]).encode()
    fast = decode_reply(fixture["request"]["path"], body=raw, echo=echo)
    exact = decode_value(fast.dialect, 200, loads(raw), echo=echo)
    assert repr(fast) == repr(exact)  # NaN is not equal to itself


# What the engine did decides whether a call is trained; each recorded outcome must be told apart.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chat_basic_stop", [("completed", "stop", True, None)]),
        ("chat_length", [("incomplete", "length", True, None)]),
        ("chat_tool_call", [("completed", "tool_calls", True, None)]),
        ("chat_n2", [("incomplete", "length", True, None), ("completed", "stop", True, None)]),
        ("chat_ids_only", [("incomplete", "length", False, Code.LOGPROBS_MISSING)]),
        ("chat_include_reasoning_false", [("incomplete", "length", False, Code.TOKEN_IDS_MISSING)]),
        ("chat_error_model", [("failed", None, False, Code.CALL_FAILED)]),
        ("abort_api_nonstream", [("incomplete", "abort", False, Code.ABORTED)]),
        ("pause_abort_stream", [("incomplete", "abort", False, Code.ABORTED)]),
        ("generate_abort", [("incomplete", "abort", False, Code.ABORTED)]),
        ("abort_messages", [("unknown", None, False, Code.TOKEN_IDS_MISSING)]),
        ("abort_messages_stream", [("unknown", None, False, Code.TOKEN_IDS_MISSING)]),
        ("abort_responses", [("completed", None, False, Code.TOKEN_IDS_MISSING)]),
        ("completions_echo", [("incomplete", "length", True, None)]),
        ("completions_score_max_tokens_0_echo", [("incomplete", "length", False, Code.LOGPROB_COUNT_MISMATCH)]),
        ("completions_stream", [("incomplete", "length", True, None)]),
        ("generate_stream", [("incomplete", "length", True, None)]),
        ("generate_tokens", [("completed", "stop", True, None)]),
        ("messages_basic", [("completed", "end_turn", False, Code.TOKEN_IDS_MISSING)]),
        ("messages_max_tokens", [("incomplete", "max_tokens", False, Code.TOKEN_IDS_MISSING)]),
        ("messages_stop_sequence", [("completed", "stop_sequence", False, Code.TOKEN_IDS_MISSING)]),
        ("messages_stream_tool_call", [("completed", "tool_use", False, Code.TOKEN_IDS_MISSING)]),
        ("responses_length", [("incomplete", "max_output_tokens", False, Code.TOKEN_IDS_MISSING)]),
        ("responses_messages", [("completed", None, False, Code.LOGPROBS_MISSING)]),
        ("responses_messages_stream", [("incomplete", "max_output_tokens", False, Code.LOGPROBS_MISSING)]),
        ("responses_logprobs_text", [("completed", None, True, None)]),
        ("responses_stream_text", [("completed", None, False, Code.LOGPROB_COUNT_MISMATCH)]),
        ("responses_previous", [("failed", None, False, Code.CALL_FAILED)]),
        ("stream_basic", [("completed", "stop", True, None)]),
        ("stream_n2", [("incomplete", "length", True, None), ("incomplete", "length", True, None)]),
        ("stream_interval_8", [("incomplete", "length", True, None)]),
        ("stream_continuous_usage", [("incomplete", "length", True, None)]),
        ("stream_include_reasoning_false", [("incomplete", "length", False, Code.TOKEN_IDS_MISSING)]),
        ("stream_no_logprobs", [("incomplete", "length", False, Code.LOGPROBS_MISSING)]),
    ],
)
def test_status_and_reason_of_each_recorded_outcome(name: str, expected: list[tuple[Any, ...]]) -> None:
    assert usable(name) == expected


# Prompts of several lengths in one Completions call: each choice has its own.
def test_choices_of_several_prompts_keep_their_own_prompt() -> None:
    reply = decode(load("completions_multi_prompt_n2"))
    assert [len(choice.prompt_ids or ()) for choice in reply.choices] == [13, 13, 5, 5]
    assert all(choice.reason is None for choice in reply.choices)


# The sampling and the stored token counts of a row come from here.
def test_a_real_reply_becomes_a_complete_record() -> None:
    fixture = load("chat_tool_call_with_content")
    context = CallContext(
        model_call_id="c7", rollout_id="r", attempt=2, parent_call_id="c6", request=fixture["request"]["body"]
    )
    [made] = calls_from_reply(decode(fixture), context, TokenBook())
    record, tokens = made
    assert record.usable
    assert tokens is not None
    body = fixture["body"]
    assert record.response_id == body["id"]
    assert record.prompt_len == len(body["prompt_token_ids"])
    assert record.cum_len - record.prompt_len == body["usage"]["completion_tokens"]
    assert tokens.ids_T.tolist() == body["prompt_token_ids"] + body["choices"][0]["token_ids"]
    assert (record.rollout_id, record.attempt, record.parent_call_id, record.parent_resolution) == (
        "r",
        2,
        "c6",
        "resolved",
    )
    assert record.sampling.temperature == fixture["request"]["body"]["temperature"]
    assert record.model == "tiny-qwen3"
    assert record.context_digest
    assert record.continuation_digest
    assert {item.kind for item in record.output_items} == {ItemKind.REASONING, ItemKind.TEXT, ItemKind.TOOL_CALL}


# A whole reply has one status only if its choices agree.
def test_the_status_of_a_reply_is_its_choices_status() -> None:
    assert decode(load("chat_n2")).status is ResponseStatus.UNKNOWN
    assert decode(load("stream_n2")).status is ResponseStatus.INCOMPLETE


# Token counts shown to people must count the cache the same way in every dialect.
def test_usage_of_each_dialect() -> None:
    assert decode(load("messages_tool_call")).usage.prompt_tokens == 301
    assert decode(load("responses_tool_call")).usage.prompt_tokens == 301
    assert decode(load("responses_tool_call")).usage.cached_tokens == 256
    assert decode(load("generate_n2_stop")).usage.cached_tokens == 256
