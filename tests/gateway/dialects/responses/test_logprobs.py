"""Log-probabilities that a client asks for: those of the text, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.captures.reply import Unexpected
from tests.gateway.dialects.responses.exchange import (
    BODY,
    chat_body,
    chunk,
    encoder,
    events,
    recorded,
    recorded_chunks,
    streamed,
    translated,
    whole,
)

ASKED = {**BODY, "include": ["message.output_text.logprobs"], "top_logprobs": 1}


def scored(*tokens: str | bytes) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    for index, token in enumerate(tokens):
        raw = token if isinstance(token, bytes) else token.encode()
        entry = {"token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": -float(index)}
        entries.append({**entry, "top_logprobs": [entry, entry], "token_id": 7})
    return {"content": entries}


def numbers(served: dict[str, Any]) -> list[float]:
    [item] = [item for item in served["output"] if item["type"] == "message"]
    return [entry["logprob"] for entry in item["content"][0]["logprobs"]]


# A client would compute the likelihood of its answer from thoughts and control tokens.
@pytest.mark.parametrize("together", [False, True])
def test_the_text_has_the_log_probabilities_of_its_tokens(together: bool) -> None:
    tokens = ["<think>", "so", "</think>", "\n\n", "so", "lo", "<|end|>"]
    if together:
        chunks = [chunk({"reasoning": "so", "content": "\n\nsolo"}, "stop", logprobs=scored(*tokens))]
    else:
        deltas: list[dict[str, Any]] = [{}, {"reasoning": "so"}, {}, {"content": "\n\n"}, {"content": "so"}, {}, {}]
        deltas[5] = {"content": "lo"}
        entries = scored(*tokens)["content"]
        chunks = [chunk(delta, logprobs={"content": [entry]}) for delta, entry in zip(deltas, entries, strict=True)]
        chunks.append(chunk({}, "stop"))
    reply = streamed(chunks, ASKED)
    assert numbers(reply.served) == [-3.0, -4.0, -5.0]
    body = chat_body({"reasoning": "so", "content": "\n\nsolo"})
    body["choices"][0]["logprobs"] = scored(*tokens)
    assert whole(body, ASKED) == reply.served
    entry = reply.served["output"][1]["content"][0]["logprobs"][0]
    assert entry["top_logprobs"] == [{"token": "\n\n", "bytes": [10, 10], "logprob": -3.0}]
    assert entry.keys() == {"token", "bytes", "logprob", "top_logprobs"}
    done = [event for event in events(reply.held) if event["type"] == "response.output_text.done"]
    assert done[0]["logprobs"] == reply.served["output"][1]["content"][0]["logprobs"]


# A token that belongs to the text only in part, as a stop string leaves it, is still one of its tokens.
def test_a_token_that_is_cut_counts() -> None:
    reply = streamed([chunk({"content": "a buf"}, "stop", logprobs=scored("a", " buffer", "!"))], ASKED)
    assert numbers(reply.served) == [0.0, -1.0]
    split = scored(b"\xf0\x9f", b"\x98\x80")
    assert numbers(streamed([chunk({"content": "😀"}, "stop", logprobs=split)], ASKED).served) == [0.0, -1.0]


# Numbers that belong to other tokens are worse than none.
def test_text_that_is_not_in_the_tokens_has_none() -> None:
    assert numbers(streamed([chunk({"content": "b"}, "stop", logprobs=scored("a"))], ASKED).served) == []


# An engine that gives no bytes gives the text of the token.
def test_without_bytes_the_text_of_a_token_counts() -> None:
    entry = {"token": "é", "logprob": -1.5, "bytes": None}
    reply = streamed([chunk({"content": "é"}, "stop", logprobs={"content": [entry]})], {**ASKED, "top_logprobs": 0})
    [shown] = reply.served["output"][0]["content"][0]["logprobs"]
    assert shown == {**entry, "top_logprobs": []}


# What is no list of log-probabilities fails the call instead of leaving numbers out.
def test_other_forms_are_refused() -> None:
    made = encoder(ASKED)
    made.begin()
    with pytest.raises(Unexpected):
        made.chunk(chunk({"content": "a"}, logprobs={"content": [1]}))


# A client that did not ask pays for numbers it does not read, and sees what the capture asked for.
def test_a_client_that_did_not_ask_gets_none() -> None:
    reply = streamed([chunk({"content": "a"}, "stop", logprobs=scored("a"))])
    assert numbers(reply.served) == []
    assert b'"logprob"' not in reply.now + reply.held
    assert "logprobs" not in translated(BODY).body


# The numbers of a real engine, streamed and not, must be found.
def test_recorded_log_probabilities_are_those_of_the_text() -> None:
    body = recorded("chat_basic_stop")["body"]
    served = whole(body, ASKED)
    [item] = [item for item in served["output"] if item["type"] == "message"]
    [part] = item["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    theirs = recorded("responses_stream_text")["events"][-1]["data"]["response"]["output"][1]["content"][0]
    assert part["text"] == theirs["text"]
    assert [entry["token"] for entry in part["logprobs"]] == [entry["token"] for entry in theirs["logprobs"]]
    reply = streamed(recorded_chunks("stream_interval_8"), ASKED)
    [item] = [item for item in reply.served["output"] if item["type"] == "message"]
    assert "".join(entry["token"] for entry in item["content"][0]["logprobs"]) == item["content"][0]["text"]
