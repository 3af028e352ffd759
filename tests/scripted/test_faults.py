from __future__ import annotations

import gzip
import http.client
import json
import threading
import time
from math import isnan
from typing import Any

import pytest

from gristmill.captures import decode_reply
from gristmill.errors import Code
from gristmill.scripted import ScriptedEngine
from tests.scripted.talk import CHAT, COMPLETIONS, TIMEOUT_S, always, ask, begun, chat, connected, events_of

WORDS = {"content": "one two three four five six seven eight nine ten"}


IDS_OF_SGLANG = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}


def faulty(kind: str, **more: Any) -> dict[str, Any]:
    return always({**WORDS, "fault": {"kind": kind, **more}})


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_with_all_that_a_client_acts_on(stream: bool) -> None:
    """A harness waits as long as Retry-After says, and reads the code in the body."""
    fault = {
        "kind": "status",
        "status": 429,
        "retry_after_s": 0.5,
        "body": {"error": "slow"},
        "headers": {"x-why": "y"},
    }
    with ScriptedEngine(always([{"fault": fault}, {"fault": {"kind": "status", "status": 503}}, WORDS])).serve() as url:
        first, second, third = (ask(url, CHAT, chat(stream=stream)) for _ in range(3))
    assert (first.status, first.headers["retry-after"], first.headers["x-why"]) == (429, "0.5", "y")
    assert first.json == {"error": "slow"}
    assert (second.status, second.json["error"]["code"]) == (503, 503)
    assert third.reply().choices[0].reason is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_reset_before_the_head(stream: bool) -> None:
    """A connection that is reset before anything came may be tried again, elsewhere too."""
    with ScriptedEngine(faulty("reset")).serve() as url, pytest.raises(ConnectionResetError):
        ask(url, CHAT, chat(stream=stream))


@pytest.mark.parametrize("stream", [False, True])
def test_a_reset_in_the_middle(stream: bool) -> None:
    """What came before the reset is there, and nothing says that it was all."""
    with (
        ScriptedEngine(faulty("reset", after_chunks=3)).serve() as url,
        begun(url, CHAT, chat(stream=stream)) as response,
    ):
        assert response.status == 200
        with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
            response.read()


def test_a_stream_that_ends_without_its_end() -> None:
    """HTTP says the stream is complete; only the protocol's own end tells that it is not."""
    with ScriptedEngine(faulty("eof", after_chunks=3)).serve() as url:
        said = ask(url, CHAT, chat(stream=True))
    reply = said.reply()
    assert len([chunk for chunk in said.chunks if chunk["choices"][0].get("token_ids")]) == 3
    assert reply.choices[0].reason is Code.STREAM_TRUNCATED


def test_a_body_that_ends_in_the_middle() -> None:
    """Half a JSON document in good order is no reply."""
    with ScriptedEngine(faulty("eof")).serve() as url:
        said = ask(url, CHAT, chat())
    assert said.status == 200
    assert said.reply().choices[0].reason is Code.REPLY_MALFORMED


@pytest.mark.parametrize("stream", [False, True])
def test_fewer_bytes_than_promised(stream: bool) -> None:
    """A cut connection must not pass for the end of the answer."""
    with (
        ScriptedEngine(faulty("truncate", after_chunks=2)).serve() as url,
        begun(url, CHAT, chat(stream=stream)) as response,
        pytest.raises(http.client.IncompleteRead) as cut,
    ):
        response.read()
    assert cut.value.partial


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_that_are_nothing(stream: bool) -> None:
    """Bytes that are no JSON and no UTF-8 must end one call, and not the gateway."""
    with ScriptedEngine(faulty("garbage", after_chunks=1)).serve() as url:
        reply = ask(url, CHAT, chat(stream=stream)).reply()
    assert reply.choices[0].reason is Code.REPLY_MALFORMED


@pytest.mark.parametrize("after", [None, 3])
def test_silence_lasts_until_the_client_goes(after: int | None) -> None:
    """A server that says nothing and keeps the connection open is what idle timeouts are for."""
    engine = ScriptedEngine(faulty("silence", after_chunks=after))
    with engine.serve() as url:
        if after is None:
            # Nothing comes, not even a head: the client's own patience ends it.
            connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=0.2)
            connection.request("POST", CHAT, json.dumps(chat(stream=True)), {"content-type": "application/json"})
            with pytest.raises(TimeoutError):
                connection.getresponse()
            connection.close()
        else:
            with begun(url, CHAT, chat(stream=True)) as response:
                events = events_of(response)
                assert len([next(events) for _ in range(after + 1)]) == after + 1
        deadline = time.monotonic() + TIMEOUT_S
        while engine.requests[0].ended is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.requests[0].ended == "disconnected"


def test_silence_does_not_keep_the_engine_from_stopping() -> None:
    """A test that ends while an answer waits would hang."""
    engine = ScriptedEngine(faulty("silence", after_chunks=1))
    serving = engine.serve()
    with begun(serving.start(), CHAT, chat(stream=True)) as response:
        next(events_of(response))
        begin = time.monotonic()
        serving.stop()
        assert time.monotonic() - begin < TIMEOUT_S / 2


def test_elsewhere() -> None:
    """A client that follows redirects sends its request, and its key, to a stranger."""
    with ScriptedEngine(faulty("redirect", location="http://127.0.0.1:9/x", status=308)).serve() as url:
        said = ask(url, CHAT, chat())
    assert (said.status, said.headers["location"]) == (308, "http://127.0.0.1:9/x")


@pytest.mark.parametrize("stream", [False, True])
def test_packed_answers(stream: bool) -> None:
    """An engine, or a proxy before it, that packs answers whatever was accepted."""
    with ScriptedEngine(always({**WORDS, "gzip": True})).serve() as url:
        said = ask(url, CHAT, chat(stream=stream))
    assert said.headers["content-encoding"] == "gzip"
    assert said._replace(data=gzip.decompress(said.data)).reply().choices[0].reason is None


WRONG: list[tuple[dict[str, Any], Code]] = [
    ({"token_ids": "missing"}, Code.TOKEN_IDS_MISSING),
    ({"token_ids": "short"}, Code.LOGPROB_COUNT_MISMATCH),
    ({"token_ids": "long"}, Code.LOGPROB_COUNT_MISMATCH),
    ({"usage": 1}, Code.TOKEN_COUNT_MISMATCH),
    ({"logprobs": "missing"}, Code.LOGPROBS_MISSING),
    ({"logprobs": "short"}, Code.LOGPROB_COUNT_MISMATCH),
    ({"logprobs": "nan"}, Code.LOGPROB_NOT_FINITE),
    ({"prompt_ids": "missing"}, Code.PROMPT_IDS_MISSING),
]


@pytest.mark.parametrize(("wrong", "code"), WRONG, ids=[str(wrong) for wrong, _ in WRONG])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_what_is_said_wrongly_is_found(wrong: dict[str, Any], code: Code, stream: bool, route: str) -> None:
    """A row would be trained on tokens that were never sampled."""
    body = chat(stream=stream)
    if route == COMPLETIONS:
        del body["messages"], body["top_logprobs"]
        body |= {"prompt": "hi", "logprobs": 1, "max_tokens": 200}
    with ScriptedEngine(always({**WORDS, "wrong": wrong})).serve() as url:
        reply = ask(url, route, body).reply(route)
    choice = reply.choices[0]
    if code is Code.LOGPROB_NOT_FINITE:
        # Found when the call is stored; the reply itself only holds what is no number.
        assert isnan((choice.logprobs or [0.0])[-1])
    else:
        assert choice.reason is code


def test_a_stream_without_its_last_words() -> None:
    """A finish reason, or `[DONE]`, that never came is not read into a stream."""
    for wrong in ({"done": False}, {"finish": False}):
        with ScriptedEngine(always({**WORDS, "wrong": wrong})).serve() as url:
            assert ask(url, CHAT, chat(stream=True)).reply().choices[0].reason is Code.STREAM_TRUNCATED


def test_ids_of_replies_and_prompts_that_lie() -> None:
    """A response id that comes twice, and prompt ids that are not the ones that were sent."""
    ids = [1, 2, 3]
    script = always({**WORDS, "wrong": {"response_id": "chatcmpl-same", "prompt_ids": "differ"}})
    with ScriptedEngine(script).serve() as url:
        said = [ask(url, CHAT, chat(kv_transfer_params={"prompt_token_ids": ids})).json for _ in range(2)]
    assert [one["id"] for one in said] == ["chatcmpl-same"] * 2
    assert said[0]["prompt_token_ids"] != ids


@pytest.mark.parametrize(
    ("route", "profile", "abort"),
    [
        (COMPLETIONS, "vllm", "/inference/v1/abort_requests"),
        (CHAT, "sglang", "/abort_request"),
        (COMPLETIONS, "sglang", "/abort_request"),
    ],
)
def test_aborts_of_other_streams(route: str, profile: str, abort: str) -> None:
    """Each route and engine ends an aborted stream in its own words."""
    script = always({"content": "word " * 200, "gap_s": 0.01}, profile=profile)
    body = chat(stream=True, return_token_ids=False, rid="r1", **IDS_OF_SGLANG)
    if route == COMPLETIONS:
        del body["messages"], body["top_logprobs"]
        body |= {"prompt": "hi", "logprobs": 1, "max_tokens": 500, "return_token_ids": True}
    with ScriptedEngine(script).serve() as url, begun(url, route, body, X_Request_Id="r1") as response:
        events = events_of(response)
        first = [next(events) for _ in range(4)]
        ask(url, abort, {"request_ids": ["cmpl-r1"], "rid": "r1"})
        text = "".join(f"data: {event}\n\n" for event in (*first, *events))
    choice = decode_reply(route, 200, sse=text).choices[0]
    assert choice.reason is Code.ABORTED
    assert 0 < len(choice.token_ids or ()) < 200


def test_an_aborted_stream_keeps_what_was_sampled() -> None:
    """The tokens of an aborted generation are recorded, with the reason."""
    script = always({"content": "word " * 200, "gap_s": 0.01})
    with (
        ScriptedEngine(script).serve() as url,
        begun(url, CHAT, chat(stream=True), X_Request_Id="call-1") as response,
    ):
        events = events_of(response)
        first = [next(events) for _ in range(5)]
        assert ask(url, "/inference/v1/abort_requests", {"request_ids": ["chatcmpl-call-1"]}).status == 200
        rest = list(events)
    assert rest[-1] == "[DONE]"
    chunks = [json.loads(event) for event in (*first, *rest[:-1])]
    finish = next(chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["finish_reason"])
    assert (finish["choices"][0]["finish_reason"], finish["choices"][0]["token_ids"]) == ("abort", [])
    ids = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
    assert 4 <= len(ids) < 200
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids)
    text = "".join(f"data: {event}\n\n" for event in (*first, *rest))
    assert decode_reply(CHAT, 200, sse=text).choices[0].reason is Code.ABORTED


def test_an_aborted_body_comes_with_what_was_sampled() -> None:
    """An abort of a call that is not streamed answers it at once."""
    engine = ScriptedEngine(always({"content": "word " * 2000, "gap_s": 0.01}))
    with engine.serve() as url:
        said: list[Any] = []
        asking = threading.Thread(target=lambda: said.append(ask(url, CHAT, chat(), X_Request_Id="call-2")))
        asking.start()
        deadline = time.monotonic() + TIMEOUT_S
        while not said and time.monotonic() < deadline:
            ask(url, "/inference/v1/abort_requests", {"request_ids": ["chatcmpl-call-2"]})
            asking.join(0.05)
        asking.join(TIMEOUT_S)
    choice = said[0].json["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == said[0].json["usage"]["completion_tokens"]
    assert said[0].reply().choices[0].reason is Code.ABORTED


def test_an_unhealthy_engine() -> None:
    """A silent engine is given up only when its health check fails, so that must be possible."""
    with ScriptedEngine(always(WORDS)).serve() as url:
        assert ask(url, "/script/state", {"healthy": False}).json["healthy"] is False
        assert ask(url, "/health").status == 503
        assert ask(url, "/script/state", {"healthy": "no"}).status == 400
        assert ask(url, "/script/state", {"sick": True}).status == 400
        ask(url, "/script/reset", {})
        assert ask(url, "/health").status == 200


RENDERED = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
RENDERS = {"/v1/chat/completions/render": "token_ids", "/tokenize": "tokens"}


@pytest.mark.parametrize("path", RENDERS)
def test_renderings_that_go_wrong(path: str) -> None:
    """What depends on renderings has to be tried with such as fail, lie, or do not come."""
    with ScriptedEngine({**always(WORDS), "renders": "differ"}).serve() as url:
        wrong = ask(url, path, RENDERED).json[RENDERS[path]]
        assert ask(url, "/script/state", {"renders": "right"}).json["renders"] == "right"
        right = ask(url, path, RENDERED).json[RENDERS[path]]
        assert (wrong[:-1], wrong[-1] != right[-1]) == (right[:-1], True)
        assert ask(url, CHAT, chat(return_token_ids=True)).json["prompt_token_ids"] != wrong
        ask(url, "/script/state", {"renders": "fail"})
        assert ask(url, path, RENDERED).status == 500
        assert ask(url, "/tokenize", {"prompt": "hi"}).status == 200
        assert ask(url, "/script/state", {"renders": "often"}).status == 400
        assert ask(url, "/script/reset", {}).json["renders"] == "differ"


def test_a_rendering_that_hangs_ends_with_the_engine() -> None:
    """Whoever waits for it is let go when the engine stops."""
    engine = ScriptedEngine({**always(WORDS), "renders": "hang"})
    with engine.serve() as url, connected(url) as waiting:
        waiting.request("POST", "/tokenize", json.dumps(RENDERED), {"content-type": "application/json"})
        # The engine has the request: another one, sent after it, has been answered.
        assert ask(url, "/health").status == 200
        stopping = threading.Timer(0.1, engine.interrupt)
        stopping.start()
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            waiting.getresponse()
        stopping.join()
