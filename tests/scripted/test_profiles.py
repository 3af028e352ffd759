from __future__ import annotations

from typing import Any

import pytest

from gristmill.errors import Code
from gristmill.scripted import ScriptedEngine
from gristmill.scripted.tokenizer import the_tokenizer
from tests.scripted.talk import BASH, CHAT, COMPLETIONS, always, ask, chat

LOOK: dict[str, Any] = {
    "reasoning": "I look.",
    "content": "Looking.",
    "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}],
}
IN_BODY = {"return_token_ids": True, "return_prompt_token_ids": True, "return_meta_info": True}
IN_SGLEXT = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}


def sglang(**settings: Any) -> ScriptedEngine:
    return ScriptedEngine(always(LOOK, profile="sglang", thinking=True, split=0.2, **settings))


def asking(**more: Any) -> dict[str, Any]:
    return {**chat(tools=[BASH], return_token_ids=False), **more}


def streaming(**more: Any) -> dict[str, Any]:
    return asking(stream=True, stream_options={"include_usage": True}, **more)


def test_a_body_of_sglang_has_its_fields() -> None:
    """The adapter of SGLang asks in other words and finds the ids elsewhere."""
    with sglang(weights="v3").serve() as url:
        said = ask(url, CHAT, asking(**IN_BODY))
    choice = said.json["choices"][0]
    assert {"prompt_token_ids", "response_token_ids", "meta_info", "matched_stop"} <= choice.keys()
    assert "token_ids" not in choice
    assert choice["message"]["reasoning_content"] == "\nI look.\n"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"command": "ls"}'
    assert choice["meta_info"]["weight_version"] == said.json["metadata"]["weight_version"] == "v3"
    assert [entry[1] for entry in choice["meta_info"]["output_token_logprobs"]] == choice["response_token_ids"]
    assert said.json["usage"]["prompt_tokens_details"] is None
    read = said.reply().choices[0]
    assert read.reason is None
    assert the_tokenizer().decode(read.token_ids or ()).endswith("</tool_call><|im_end|>")


def test_matched_stop_names_what_ended_it() -> None:
    """A stop token that is not named cannot be told from a stop string."""
    script = always({"content": "one two three"}, profile="sglang")
    with ScriptedEngine(script).serve() as url:
        natural = ask(url, CHAT, chat()).json["choices"][0]
        stopped = ask(url, CHAT, chat(stop=["two"])).json["choices"][0]
        cut = ask(url, CHAT, chat(max_tokens=2)).json["choices"][0]
    assert natural["matched_stop"] == the_tokenizer().control("<|im_end|>")
    assert (stopped["matched_stop"], stopped["message"]["content"]) == ("two", "one ")
    assert (cut["finish_reason"], cut["matched_stop"]) == ("length", None)


@pytest.mark.parametrize("field", IN_BODY)
def test_sglang_refuses_ids_in_a_stream(field: str) -> None:
    """An adapter that asks for them all the same loses every streamed call."""
    with sglang().serve() as url:
        said = ask(url, CHAT, streaming(**{field: True}))
    assert said.status == 400
    assert said.json["object"] == "error"
    assert field in said.json["message"]


@pytest.mark.parametrize("headers", [False, True])
def test_a_stream_of_sglang_gives_ids_near_its_end(headers: bool) -> None:
    """In a stream the ids come in one chunk of their own, asked for by fields or by headers."""
    asked: dict[str, Any] = {} if headers else IN_SGLEXT
    sent = {"x_sglext_return_input_ids": "1", "x_sglext_return_output_ids": "1"} if headers else {}
    with sglang().serve() as url:
        stream = ask(url, CHAT, streaming(**asked), **sent)
        body = ask(url, CHAT, asking(**asked), **sent)
        none = ask(url, CHAT, streaming())
    extension = stream.chunks[-2]
    assert extension["choices"] == []
    assert extension["sglext"] == body.json["sglext"]
    assert all("token_ids" not in choice for chunk in stream.chunks for choice in chunk["choices"])
    for said in (stream, body):
        choice = said.reply().choices[0]
        assert choice.reason is None
        assert list(choice.token_ids or ()) == extension["sglext"]["output_ids"][0]
    assert none.reply().choices[0].reason is Code.TOKEN_IDS_MISSING
    message: Any = stream.reply().choices[0].items[0]
    assert message["tool_calls"][0]["function"]["name"] == "bash"


def test_token_in_and_routes_of_sglang() -> None:
    """Token-in, tokens and aborts go by other names."""
    ids = the_tokenizer().encode("<|im_start|>user\nexact<|im_end|>\n<|im_start|>assistant\n")
    with sglang().serve() as url:
        assert ask(url, CHAT, asking(input_ids=ids, **IN_BODY)).json["choices"][0]["prompt_token_ids"] == ids
        assert ask(url, CHAT, asking(input_ids=[10**9])).status == 400
        assert ask(url, CHAT, asking(rid="r1")).json["id"] == "r1"
        assert ask(url, "/detokenize", {"tokens": ids}).json == {"text": the_tokenizer().decode(ids)}
        assert ask(url, "/abort_request", {"rid": "r1"}).status == 200
        assert ask(url, f"{CHAT}/render", chat()).status == 403


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_sglang(stream: bool) -> None:
    """The second route of SGLang carries ids streamed, too."""
    body: dict[str, Any] = {"model": "scripted", "prompt": "Say", "max_tokens": 40, "logprobs": 1, "stream": stream}
    body["stream_options"] = {"include_usage": True}
    with sglang().serve() as url:
        with_ids = ask(url, COMPLETIONS, {**body, "return_token_ids": True})
        without = ask(url, COMPLETIONS, body)
    assert with_ids.reply(COMPLETIONS).choices[0].reason is None
    assert without.reply(COMPLETIONS).choices[0].reason is Code.TOKEN_IDS_MISSING


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_a_plain_server_gives_no_ids(stream: bool, route: str) -> None:
    """Calls of an engine without ids are captured, and say why they cannot be trained."""
    script = always(LOOK, profile="plain", thinking=True)
    body = chat(tools=[BASH], stream=stream)
    if route == COMPLETIONS:
        body = {"model": "scripted", "prompt": "Say", "logprobs": 1, "stream": stream, "max_tokens": 60}
        body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    with ScriptedEngine(script).serve() as url:
        said = ask(url, route, body)
        assert ask(url, "/version").status == ask(url, "/tokenize", {"prompt": "x"}).status == 404
        assert ask(url, "/v1/models").json["data"] == [
            {
                "id": "scripted",
                "object": "model",
                "created": ask(url, "/v1/models").json["data"][0]["created"],
                "owned_by": "scripted",
            }
        ]
    assert b"token_ids" not in said.data
    assert b"stop_reason" not in said.data
    choice = said.reply(route).choices[0]
    assert choice.reason is Code.TOKEN_IDS_MISSING
    if route == CHAT:
        message: Any = choice.items[0]
        assert message["reasoning_content"] == "\nI look.\n"
        assert message["tool_calls"][0]["function"]["name"] == "bash"
