"""Plain JSON lines of requests and responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import Code, DecodeError
from gristmill.records import Dialect, Result
from tests.interop.foreign_files import ASKED, TEXTS, TURNS, Json, chat_response, imported, lines, pair, said, tokens_of

TEXT_TURN = {"input": "Name a river.", "output": "The Elbe."}


def one(tmp_path: Path, *values: Any, **options: Any) -> Any:
    return imported("request-response", lines(tmp_path / "log.jsonl", values), **options)


def beside(turn: int, **more: Any) -> Json:
    """A pair whose response has no tokens: they stand beside it."""
    prompt, sampled, logprobs = TURNS[turn]
    value = pair(turn)
    body = value["response"]
    del body["prompt_token_ids"], body["choices"][0]["token_ids"], body["choices"][0]["logprobs"]
    return {**value, "prompt_token_ids": prompt, "completion_token_ids": sampled, "logprobs": logprobs, **more}


RESPONSES: Json = {
    "id": "resp-9",
    "object": "response",
    "status": "completed",
    "output": [
        {
            "type": "message",
            "role": "assistant",
            "id": "msg-1",
            "status": "completed",
            "content": [{"type": "output_text", "text": TEXT_TURN["output"]}],
        }
    ],
}
MESSAGES: Json = {
    "id": "msg-9",
    "type": "message",
    "role": "assistant",
    "content": [{"type": "text", "text": TEXT_TURN["output"]}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 4, "output_tokens": 3},
}
COMPLETION: Json = {
    "id": "cmpl-9",
    "object": "text_completion",
    "choices": [{"index": 0, "text": TEXT_TURN["output"], "finish_reason": "stop"}],
}


@pytest.mark.parametrize(
    ("request_body", "response", "dialect"),
    [
        ({"input": TEXT_TURN["input"]}, RESPONSES, Dialect.RESPONSES),
        ({"messages": [{"role": "user", "content": TEXT_TURN["input"]}]}, MESSAGES, Dialect.MESSAGES),
        ({"prompt": TEXT_TURN["input"]}, COMPLETION, Dialect.COMPLETIONS),
        ({"prompt": TEXT_TURN["input"]}, {**COMPLETION, "object": None}, Dialect.COMPLETIONS),
        ({"messages": messages} if (messages := [said("hm")]) else {}, chat_response(0), Dialect.CHAT),
    ],
)
def test_every_dialect_is_told_by_its_bodies(tmp_path: Path, request_body: Json, response: Json, dialect: str) -> None:
    """A log names no dialect, and a call read in the wrong one says nothing."""
    found = one(tmp_path, {"request": request_body, "response": response})
    [record] = found.capture.records
    assert record.dialect == dialect
    assert record.response_status == "completed"
    assert [atom.text for item in record.output_items for atom in item.atoms or ()] == [
        TEXTS[0] if dialect is Dialect.CHAT else TEXT_TURN["output"]
    ]


@pytest.mark.parametrize("dialect", ["responses", "messages", "completions", "chat"])
def test_tokens_beside_the_response(tmp_path: Path, dialect: str) -> None:
    """Where an API serves no ids a proxy writes them beside its answer; they are as good."""
    bodies = {"responses": RESPONSES, "messages": MESSAGES, "completions": COMPLETION}
    prompt, sampled, logprobs = TURNS[0]
    value: Json = {"prompt_ids": prompt, "output_token_ids": sampled, "completion_logprobs": logprobs}
    if dialect == "chat":
        found = one(tmp_path, beside(0))
    else:
        body = {**bodies[dialect]}
        body.pop("usage", None)
        asked = {"input": "x"} if dialect == "responses" else {"prompt": "x"}
        asked = {"messages": [{"role": "user", "content": "x"}]} if dialect == "messages" else asked
        found = one(tmp_path, {"request": asked, "response": body, **value})
    assert tokens_of(found.capture) == {"line-1": TURNS[0]}
    assert found.reasons == {"line-1": None}


def test_log_probabilities_beside_the_response_as_objects(tmp_path: Path) -> None:
    """A proxy that copies `logprobs.content` copies objects."""
    found = one(tmp_path, beside(0, logprobs=[{"token": "a", "logprob": value} for value in TURNS[0][2]]))
    assert tokens_of(found.capture) == {"line-1": TURNS[0]}


@pytest.mark.parametrize(
    "more",
    [
        {"token_ids": [float("nan"), "x"]},
        {"token_ids": [10, 12]},
        {"prompt_token_ids": [1, 2]},
        {"logprobs": [-0.25, -0.75]},
        {"logprobs": [-0.25]},
    ],
)
def test_tokens_beside_that_contradict(tmp_path: Path, more: Json) -> None:
    """Two accounts of one call: none of them can be believed."""
    found = one(tmp_path, {**pair(0), **more})
    assert found.reasons == {"line-1": Code.REPLY_MALFORMED}
    assert one(tmp_path, {**pair(0), "token_ids": TURNS[0][1], "logprobs": TURNS[0][2]}).reasons == {"line-1": None}


def test_a_count_that_differs(tmp_path: Path) -> None:
    """The engine's own count is held against ids from beside the response too."""
    value = beside(1)
    value["response"]["usage"]["completion_tokens"] = 5
    assert one(tmp_path, value).reasons == {"line-1": Code.TOKEN_COUNT_MISMATCH}


def test_tokens_beside_several_choices(tmp_path: Path) -> None:
    """Nothing says whose they are."""
    value = beside(0)
    value["response"]["choices"].append({**value["response"]["choices"][0], "index": 1})
    with pytest.raises(DecodeError, match="tokens beside a response of one choice, got 2") as refused:
        one(tmp_path, value)
    assert refused.value.where is not None
    assert refused.value.where.endswith("log.jsonl line 1 $")


ROUTE = "/v1/chat/completions"
SPELLINGS: list[Json] = [
    {"request_body": pair(0)["request"], "response_body": chat_response(0)},
    {"kwargs": pair(0)["request"], "completion": chat_response(0)},
    {"request": {"url": "/v1/chat/completions", "body": pair(0)["request"]}, "response": chat_response(0)},
    {
        "url": "/v1/chat/completions",
        "request": pair(0)["request"],
        "response": {"status_code": 200, "body": chat_response(0)},
    },
    {"dialect": "chat", "request": pair(0)["request"], "response": chat_response(0), "status": 200},
    {"endpoint": "/v1/chat/completions", "request": pair(0)["request"], "sse": None, "response": chat_response(0)},
]


@pytest.mark.parametrize("value", SPELLINGS)
def test_spellings(tmp_path: Path, value: Json) -> None:
    """Loggers do not agree on names; the documented ones all work."""
    assert tokens_of(one(tmp_path, value).capture) == {"line-1": TURNS[0]}


def test_a_stream(tmp_path: Path) -> None:
    """A logged event stream is the reply as it went over the wire."""
    chunk = '{"id": "x", "model": "m", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Yes."}}]}'
    end = '{"id": "x", "model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}'
    stream = f"data: {chunk}\n\ndata: {end}\n\ndata: [DONE]\n\n"
    for value in ({"sse": stream}, {"response": stream}):
        found = one(tmp_path, {"dialect": "chat", "request": {"messages": [said("Is it?")]}, **value})
        [record] = found.capture.records
        assert (record.response_status, record.finish_reason) == ("completed", "stop")


def test_failed_calls_are_kept(tmp_path: Path) -> None:
    """A request that failed was a call too."""
    asked = {"path": "/v1/chat/completions", "request": pair(0)["request"]}
    found = one(
        tmp_path,
        {**asked, "status": 503, "response": {"error": {"message": "busy"}}},
        {**asked, "error": {"message": "connection lost"}},
    )
    assert found.reasons == {"line-1": Code.CALL_FAILED, "line-2": Code.CALL_FAILED}


def test_rollouts_rewards_and_results(tmp_path: Path) -> None:
    """Lines of several rollouts may stand in any order, with what they were worth and what came of them."""
    other = {**pair(0), "session_id": "t", "attempt": 1, "reward": 0.5, "group_id": "g"}
    found = one(
        tmp_path,
        pair(0, reward=1.0),
        other,
        pair(1, reward=1.0),
        {"session_id": "s", "result": {"messages": [said(TEXTS[1])]}},
        {**pair(1), "session_id": "u", "reward": 0.0},
        {**pair(2), "session_id": "u", "reward": 1.0},
        {**pair(0), "session_id": "v"},
    )
    by_id = {rollout.capture.rollout_id: rollout for rollout in found.rollouts}
    assert list(by_id) == ["s", "t", "u", "v"]
    assert by_id["s"].result == Result(value={"messages": [said(TEXTS[1])]}, reward=1.0)
    assert (by_id["t"].capture.attempt, by_id["t"].result) == (1, Result(reward=0.5, group_id="g"))
    assert (by_id["u"].result.reward, found.report.losses["rewards"]) == (None, 1)
    assert by_id["v"].result is None


def test_the_parent_is_the_call_that_a_request_goes_on_from(tmp_path: Path) -> None:
    """Retries and side conversations stand between the lines of a log."""
    aside = {"request": {"messages": [{"role": "user", "content": "Name it."}]}, "response": chat_response(0)}
    found = one(tmp_path, pair(0), {**aside, "session_id": "s"}, pair(1))
    assert found.parents == {"line-1": None, "line-2": None, "line-3": "line-1"}


def test_unknown_fields_and_headers_are_counted(tmp_path: Path) -> None:
    """What is left out is said, and keys of users are never kept."""
    request = {"path": "/v1/chat/completions", "headers": {"x-session-id": "h", "authorization": "secret"}}
    value = {"request": {**request, "body": pair(0)["request"]}, "response": chat_response(0), "latency_ms": 3}
    found = one(tmp_path, {**value, "metadata": {"a": 1}, "note": None, "error": None})
    assert found.report.losses == {"fields": 2, "headers": 1}
    [exchange] = found.capture.exchanges.values()
    assert exchange.headers == {"x-session-id": "h"}
    assert found.capture.records[0].session_id == "h"


BAD: list[tuple[Any, str]] = [
    ({**pair(0), "request": None}, "one of request, request_body, kwargs, got none"),
    ({**pair(0), "request": []}, "an object, got array"),
    ({**pair(0), "response": None}, "one of response, response_body, completion, sse, sse_raw, got none"),
    ({**pair(0), "response": 7}, "an object, got number"),
    ({**pair(0), "response_body": {}}, "got response and response_body"),
    ({**pair(0), "sse": "data: x\n\n"}, "got both"),
    ({**pair(0), "dialect": "smoke"}, "'smoke'"),
    ({**pair(0), "path": "/v1/embeddings"}, "a route that samples"),
    ({**pair(0), "status": "fine"}, "a count, got string"),
    ({**pair(0), "session_id": 4}, "a string, got number"),
    ({**pair(0), "attempt": -1}, "a count"),
    ({**pair(0), "reward": "high"}, "a finite number or null, got string"),
    ({**pair(0), "reward": float("nan")}, "a finite number or null"),
    ({**pair(0), "request": {"messages": [said("x")], "temperature": float("nan")}}, "a JSON value, got nan"),
    ({**pair(0), "prompt_token_ids": {}}, "an array, got object"),
    ({"request": {"model": "m"}, "response": {"id": "x"}}, "path, dialect, or a response that names its kind"),
    ({"request": {"messages": [], "prompt": ""}, "response": {"choices": []}}, "path, dialect"),
    ({"session_id": "s", "result": {"a": float("inf")}}, "a JSON value, got inf"),
    ("text", "an object, got string"),
]


@pytest.mark.parametrize(("value", "told"), BAD)
def test_bad_lines(tmp_path: Path, value: Any, told: str) -> None:
    """A bad line is named by its number; passed over, it leaves a hole that nobody takes for a whole rollout."""
    path = lines(tmp_path / "log.jsonl", [pair(0), value, pair(1)])
    with pytest.raises(DecodeError) as refused:
        imported("request-response", path)
    assert told in refused.value.message
    assert (refused.value.where or "").startswith(f"{path} line 2")
    found = imported("request-response", path, skip_bad=True)
    [error] = found.report.bad
    assert (error.where or "").startswith(f"{path} line 2")
    good = next(rollout.capture for rollout in found.rollouts if rollout.capture.rollout_id == "s")
    assert [record.model_call_id for record in good.records] == ["line-1", "line-3"]
    lost = [call for rollout in found.rollouts for call in rollout.capture.lost]
    assert [call.model_call_id for call in lost] == ["line-2"]
    assert "line 2 could not be read" in lost[0].reason


def test_two_groups_and_two_results(tmp_path: Path) -> None:
    """One rollout has one of each."""
    for values in (
        [pair(0, group_id="a"), pair(1, group_id="b")],
        [{"session_id": "s", "result": 1}, {"session_id": "s", "result": 2}],
    ):
        with pytest.raises(DecodeError) as refused:
            one(tmp_path, *values)
        assert "line 2" in (refused.value.where or "")


def test_repeated_keys(tmp_path: Path) -> None:
    """A line that says two things at once is no witness; what a client sent or was served is kept as it was."""
    path = tmp_path / "log.jsonl"
    good = lines(path, [pair(0)]).read_text()
    path.write_text('{"reward": 0, "reward": 1, ' + good[1:])
    with pytest.raises(DecodeError, match="each key once, got one repeated"):
        imported("request-response", path)


def test_non_numbers_in_a_reply_are_kept_as_text(tmp_path: Path) -> None:
    """An engine that writes NaN among its log-probabilities spoils one call and not what was said."""
    value = pair(0)
    value["response"]["choices"][0]["logprobs"]["content"][0]["logprob"] = float("nan")
    found = one(tmp_path, value, pair(1))
    assert found.reasons == {"line-1": Code.LOGPROB_NOT_FINITE, "line-2": None}
    reply = found.capture.exchanges["line-1"].reply
    assert isinstance(reply, str)
    assert '"logprob":NaN' in reply
    assert [atom.text for item in found.capture.records[0].output_items for atom in item.atoms or ()] == [TEXTS[0]]
    assert ASKED[0] in str(found.capture.exchanges["line-1"].request)
