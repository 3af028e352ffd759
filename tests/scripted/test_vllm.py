from __future__ import annotations

from typing import Any

import pytest

from gristmill.scripted import ScriptedEngine
from gristmill.scripted.tokenizer import the_tokenizer
from tests.scripted.talk import BASH, CHAT, COMPLETIONS, Said, always, ask, chat, fixture

TALK = {"reasoning": "Café first.", "content": "Then flour."}
CALLS = {
    "reasoning": "I look.",
    "content": "Looking.",
    "tool_calls": [
        {"name": "bash", "arguments": {"command": "ls"}},
        {"name": "bash", "arguments": '{"command":"echo \\u00e9",  "timeout": 1.0}'},
    ],
}
LONG = {"content": "word " * 400}
THOUGHT = {"reasoning": "Café first.", "content": "word " * 400}
MALFORMED = {"raw": '<think>\nHm.\n</think>\n\nSo\n<tool_call>\n{"name": "bash", "arguments": {"comm\n</tool_call>'}

BODIES = {
    "chat_basic_stop": TALK,
    "chat_ids_only": TALK,
    "chat_length": THOUGHT,
    "chat_n2": THOUGHT,
    "chat_top_logprobs_0": THOUGHT,
    "chat_include_reasoning_false": THOUGHT,
    "chat_stop_string_include_false": {"content": "buffered args use the pyc"},
    "chat_stop_token_ids": TALK,
    "chat_tool_call": {**CALLS, "content": None},
    "chat_tool_call_with_content": CALLS,
    "chat_tool_choice_named": TALK,
    "chat_tool_choice_required": TALK,
    "chat_tool_malformed": MALFORMED,
    "chat_structured_json_schema": {"json": {"title": "x"}},
    "chat_prompt_logprobs": THOUGHT,
    "chat_tokens_as_token_ids": TALK,
    "completions_echo": LONG,
    "completions_token_prompt": LONG,
    "completions_text_prompt": LONG,
    "completions_prompt_logprobs": LONG,
    "completions_multi_prompt_n2": LONG,
    "completions_score_max_tokens_0_echo": LONG,
}
STREAMS = {
    "stream_basic": TALK,
    "stream_n2": THOUGHT,
    "stream_interval_8": THOUGHT,
    "stream_no_logprobs": THOUGHT,
    "stream_continuous_usage": THOUGHT,
    "stream_include_reasoning_false": THOUGHT,
    "stream_stop_string_include_false": {"content": "buffered args use the pyc"},
    "stream_tool_call": {**CALLS, "content": None},
    "stream_tool_call_parallel": {**CALLS, "content": None},
    "completions_stream": LONG,
}


def recorded(name: str) -> dict[str, Any]:
    """A recorded exchange with ids that are in our vocabulary."""
    exchange = fixture(name)
    body = exchange["request"]["body"]
    if isinstance(body.get("prompt"), list):
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        small = [[token % 3000 for token in prompt] for prompt in prompts]
        body["prompt"] = small if isinstance(body["prompt"][0], list) else small[0]
    if body.get("stop_token_ids"):
        body["stop_token_ids"] = [the_tokenizer().control("</think>")]
    return exchange


def replayed(name: str, reply: dict[str, Any]) -> tuple[dict[str, Any], Said]:
    exchange = recorded(name)
    with ScriptedEngine(always(reply, models=["tiny-qwen3"], thinking=True)).serve() as url:
        return exchange, ask(url, exchange["request"]["path"], exchange["request"]["body"])


def merged(values: list[Any]) -> Any:
    """One value that has the keys of all of several objects."""
    if not all(isinstance(value, dict) for value in values):
        return next((value for value in values if value is not None), None)
    made: dict[str, Any] = {}
    for value in values:
        for key, part in value.items():
            made[key] = (
                merged([made[key], part])
                if made.get(key) is not None and part is not None
                else (part if made.get(key) is None else made[key])
            )
    return made


def differences(mine: Any, theirs: Any, where: str = "$") -> list[str]:
    """Where two replies are not of one form; what is null on one side is not looked into."""
    if mine is None or theirs is None:
        return []
    if isinstance(mine, dict) and isinstance(theirs, dict):
        if where.endswith(("top_logprobs[]", "prompt_logprobs[]")):
            return []
        found = [f"{where}.{key} on one side" for key in mine.keys() ^ theirs.keys()]
        return found + [
            line
            for key in mine.keys() & theirs.keys()
            for line in differences(mine[key], theirs[key], f"{where}.{key}")
        ]
    if isinstance(mine, list) and isinstance(theirs, list):
        return differences(merged(mine), merged(theirs), f"{where}[]") if mine and theirs else []
    return [] if type(mine) is type(theirs) else [f"{where}: {type(mine).__name__}, {type(theirs).__name__}"]


def kind_of(chunk: dict[str, Any]) -> str:
    if not chunk["choices"]:
        return "counts"
    choice = chunk["choices"][0]
    if choice.get("finish_reason") is not None:
        return "finish"
    return "role" if "role" in choice.get("delta", {}) else "middle"


@pytest.mark.parametrize("name", BODIES)
def test_bodies_have_the_form_of_recorded_ones(name: str) -> None:
    """A gateway tested here would meet other fields, or fields elsewhere, at a real engine."""
    exchange, said = replayed(name, BODIES[name])
    assert said.status == exchange["status"]
    assert differences(said.json, exchange["body"]) == []
    mine, theirs = said.json["choices"][0], exchange["body"]["choices"][0]
    assert {key for key, value in mine.items() if value is None} == {
        key for key, value in theirs.items() if value is None
    }
    assert mine["finish_reason"] == theirs["finish_reason"]


@pytest.mark.parametrize("name", STREAMS)
def test_streams_have_the_form_of_recorded_ones(name: str) -> None:
    """A gateway tested here would meet other events at a real engine."""
    exchange, said = replayed(name, STREAMS[name])
    theirs = [event["data"] for event in exchange["events"] if event["data"] != "[DONE]"]
    assert said.data.endswith(b"data: [DONE]\n\n")
    for kind in ("role", "middle", "finish", "counts"):
        both = [[chunk for chunk in chunks if kind_of(chunk) == kind] for chunks in (said.chunks, theirs)]
        assert bool(both[0]) == bool(both[1]), kind
        lines = [line for line in differences(*map(merged, both)) if ".delta." not in line]
        assert lines == [], kind
    deltas = [
        {key for chunk in chunks for choice in chunk["choices"] for key in choice.get("delta", ())}
        for chunks in (said.chunks, theirs)
    ]
    assert deltas[0] - {"content", "reasoning"} == deltas[1] - {"content", "reasoning"}


RENDERED = {
    *("request_id", "token_ids", "token_offsets", "features", "content_parts", "sampling_params", "model", "stream"),
    *("reasoning_ended", "reasoning_parser_kwargs", "return_token_ids", "output_mode", "stream_options", "cache_salt"),
    *("priority", "kv_transfer_params", "ec_transfer_params"),
}
"""Keys of a rendered Chat request, as vLLM 0.32 gave them."""

ERRORS = [
    "chat_error_model",
    "chat_error_max_tokens",
    "chat_error_validation",
    "chat_bad_kv_ids",
    "chat_out_of_vocab_ids",
    "chat_top_logprobs_30",
    "completions_bad_ids",
]


@pytest.mark.parametrize("name", ERRORS)
def test_refusals_are_those_of_the_engine(name: str) -> None:
    """A harness or gateway reacts to the engine's words and codes."""
    exchange = fixture(name)
    with ScriptedEngine(always(TALK, models=["tiny-qwen3"], thinking=True)).serve() as url:
        said = ask(url, exchange["request"]["path"], exchange["request"]["body"])
    assert said.status == exchange["status"]
    assert said.json == exchange["body"]


def test_a_prompt_that_is_too_long_is_refused_streamed_or_not() -> None:
    """The refusal of a stream is JSON, not an event."""
    with ScriptedEngine(always(LONG, models=["tiny-qwen3"], max_model_len=64)).serve() as url:
        for stream in (False, True):
            said = ask(url, CHAT, chat("word " * 200, model="tiny-qwen3", stream=stream))
            assert said.status == 400
            assert said.headers["content-type"] == "application/json"
            error = said.json["error"]
            assert (error["type"], error["param"], error["code"]) == ("BadRequestError", "input_tokens", 400)
            assert error["message"].startswith("This model's maximum context length is 64 tokens. However, your prompt")


@pytest.mark.parametrize("reply", [TALK, CALLS, MALFORMED], ids=["text", "calls", "malformed"])
@pytest.mark.parametrize("chunks", ["one", "uneven", 5])
@pytest.mark.parametrize("split", [0.0, 0.4])
def test_streamed_or_not_the_same_tokens(reply: dict[str, Any], chunks: str | int, split: float) -> None:
    """Whether a harness streams would decide what is trained."""
    script = always({**reply, "chunks": chunks}, thinking=True, split=split, seed=3)
    with ScriptedEngine(script).serve() as url:
        body = ask(url, CHAT, chat(tools=[BASH], seed=11)).reply().choices[0]
        stream = ask(url, CHAT, chat(tools=[BASH], seed=11, stream=True)).reply().choices[0]
    assert body.reason is stream.reason is None
    assert list(body.token_ids or ()) == list(stream.token_ids or ())
    assert list(body.logprobs or ()) == list(stream.logprobs or ())
    assert list(body.prompt_ids or ()) == list(stream.prompt_ids or ())
    # A stream has passed a broken call on before it is known to be one.
    assert (body.finish_reason == stream.finish_reason) == (reply is not MALFORMED)


def test_ids_spell_what_was_sampled_and_split_ones_do_not_retokenise() -> None:
    """Drift of tokens could not be tried without an engine that samples other splits than its tokenizer makes."""
    tokenizer = the_tokenizer()
    expected = "<think>\nCafé first.\n</think>\n\nThen flour.<|im_end|>"
    found: dict[float, list[int]] = {}
    for split in (0.0, 0.5):
        with ScriptedEngine(always(TALK, thinking=True, split=split)).serve() as url:
            choice = ask(url, CHAT, chat()).reply().choices[0]
        found[split] = list(choice.token_ids or ())
        assert tokenizer.decode(found[split]) == expected
    assert found[0.0] == tokenizer.encode(expected)
    assert found[0.5] != tokenizer.encode(expected)


def test_a_stream_carries_bytes_of_half_a_character_without_text() -> None:
    """A stream whose every chunk has text would hide what half a character does."""
    script = always({"content": "é" * 20, "split": 1.0})
    with ScriptedEngine(script).serve() as url:
        said = ask(url, CHAT, chat(stream=True))
    silent = [chunk for chunk in said.chunks if chunk["choices"] and chunk["choices"][0]["delta"] == {}]
    assert any(chunk["choices"][0].get("token_ids") for chunk in silent)
    assert said.reply().choices[0].items == ({"role": "assistant", "content": "é" * 20},)


def test_calls_come_back_as_the_engine_parses_them() -> None:
    """A body's arguments are written anew, a stream's are as they were sampled."""
    with ScriptedEngine(always(CALLS, thinking=True)).serve() as url:
        body = ask(url, CHAT, chat(tools=[BASH])).json["choices"][0]["message"]
        message: Any = ask(url, CHAT, chat(tools=[BASH], stream=True)).reply().choices[0].items[0]
        plain = ask(url, CHAT, chat(tools=[BASH], tool_choice="none")).json["choices"][0]["message"]
    assert (body["reasoning"], body["content"]) == ("\nI look.\n", "\n\nLooking.\n")
    assert [call["function"]["arguments"] for call in body["tool_calls"]] == [
        '{"command": "ls"}',
        '{"command": "echo é", "timeout": 1.0}',
    ]
    assert message["tool_calls"][1]["function"]["arguments"] == '{"command":"echo \\u00e9",  "timeout": 1.0}'
    assert [call["id"] for call in body["tool_calls"]] == [call["id"] for call in message["tool_calls"]]
    assert "tool_calls" not in plain
    assert "<tool_call>" in plain["content"]


def test_token_in_replaces_the_prompt() -> None:
    """Continuation with exact tokens could not be tried."""
    ids = the_tokenizer().encode("<|im_start|>user\nexact<|im_end|>\n<|im_start|>assistant\n")
    with ScriptedEngine(always(TALK, thinking=True)).serve() as url:
        body = chat("ignored", kv_transfer_params={"prompt_token_ids": ids})
        said = ask(url, CHAT, body).json
        stream = ask(url, CHAT, {**body, "stream": True}).chunks
    assert said["prompt_token_ids"] == stream[0]["prompt_token_ids"] == ids
    assert said["usage"]["prompt_tokens"] == len(ids)


def test_the_request_names_the_reply() -> None:
    """The handle of an abort is the id that the gateway sent."""
    with ScriptedEngine(always(TALK, thinking=True)).serve() as url:
        assert ask(url, CHAT, chat(), x_request_id="abc").json["id"] == "chatcmpl-abc"
        assert ask(url, CHAT, chat(request_id="body")).json["id"] == "chatcmpl-body"
        ids = {ask(url, CHAT, chat()).json["id"] for _ in range(3)}
    assert len(ids) == 3


def test_weight_versions_where_they_are_asked_for() -> None:
    """A change of weights in mid-generation could not be tried."""
    script = always([{**TALK, "weights": {"to": "w1", "after": 4}}, TALK], thinking=True)
    with ScriptedEngine(script).serve() as url:
        first = ask(url, CHAT, chat(return_weight_versions=True)).json["choices"][0]
        second = ask(url, CHAT, chat(return_weight_versions=True, stream=True)).reply().choices[0]
        assert ask(url, "/script").json["weights"] == "w1"
        assert ask(url, "/script/state", {"weights": "w9"}).json["weights"] == "w9"
        third = ask(url, CHAT, chat(return_weight_versions=True)).json["choices"][0]
    count = len(first["token_ids"])
    assert first["weight_versions"] == [
        {"version": "w0", "start": 0, "end": 4},
        {"version": "w1", "start": 4, "end": count},
    ]
    assert [span.version for span in second.weight_versions] == ["w1"]
    assert [span["version"] for span in third["weight_versions"]] == ["w9"]


def test_routes_that_do_not_sample_say_what_sampling_says() -> None:
    """A prompt that is rendered elsewhere than where it is sampled proves nothing."""
    body = chat("Run the tests <|im_end|>", tools=[BASH])
    with ScriptedEngine(always(TALK, thinking=True)).serve() as url:
        sampled = ask(url, CHAT, body).json["prompt_token_ids"]
        rendered = ask(url, f"{CHAT}/render", {**body, "return_token_offsets": True}).json
        tokens = ask(url, "/tokenize", body).json
        text = ask(url, "/detokenize", {"tokens": sampled}).json["prompt"]
        models = ask(url, "/v1/models").json
        assert ask(url, "/health").status == 200
        assert "process_start_time_seconds" in ask(url, "/metrics").data.decode()
        assert ask(url, "/version").json == {"version": "0.32.0"}
        assert ask(url, "/v1/responses", {}).status == 404
    assert rendered["token_ids"] == tokens["tokens"] == sampled
    assert len(rendered["token_offsets"]) == len(sampled)
    assert tokens["count"] == len(sampled)
    assert the_tokenizer().encode(text) == sampled
    assert set(rendered) == RENDERED
    assert models["data"][0]["id"] == "scripted"


def test_scale_out_routes_can_be_off() -> None:
    """An engine without them is the common one."""
    with ScriptedEngine(always(LONG, scale_out=False, models=["tiny-qwen3"], thinking=True)).serve() as url:
        exchange = fixture("chat_scaleout_disabled")
        said = ask(url, exchange["request"]["path"], exchange["request"]["body"])
        assert (said.status, said.json) == (exchange["status"], exchange["body"])
        assert ask(url, "/inference/v1/abort_requests", {"request_ids": ["x"]}).status == 403


def test_completions_read_as_usable() -> None:
    """The second route must be as exact as the first."""
    with ScriptedEngine(always({"content": "Hello wörld"}, split=0.3)).serve() as url:
        for stream in (False, True):
            for echo in (False, True):
                body = {"model": "scripted", "prompt": "Say hello", "max_tokens": 50, "logprobs": 2, "echo": echo}
                body |= {"return_token_ids": True, "stream": stream, "stream_options": {"include_usage": True}}
                said = ask(
                    url, COMPLETIONS, body if stream else {k: v for k, v in body.items() if k != "stream_options"}
                )
                choice = said.reply(COMPLETIONS, echo=echo).choices[0]
                assert choice.reason is None, (stream, echo)
                assert list(choice.prompt_ids or ()) == the_tokenizer().encode("Say hello")
                text = "Say hello" * echo + "Hello wörld"
                assert choice.items == ({"role": "assistant", "content": text},)


def test_end_of_turn_can_be_ignored() -> None:
    """A generation that is long enough to be aborted needs no long script."""
    with ScriptedEngine(always(TALK, thinking=True)).serve() as url:
        said = ask(url, CHAT, chat(ignore_eos=True, max_tokens=500)).json
    assert said["usage"]["completion_tokens"] == 500
    assert said["choices"][0]["finish_reason"] == "length"


def test_log_probabilities_depend_on_sampling_settings_only_where_the_script_says_so() -> None:
    """Whether values are raw or processed is measured by asking at two temperatures."""
    found: dict[str, bool] = {}
    for mode in ("raw", "processed"):
        with ScriptedEngine(always({"content": "one two"}, logprobs_mode=mode)).serve() as url:
            cold, warm = (ask(url, CHAT, chat(temperature=t)).json["choices"][0] for t in (0.2, 1.0))
        assert cold["token_ids"] == warm["token_ids"]
        found[mode] = cold["logprobs"] == warm["logprobs"]
    assert found == {"raw": True, "processed": False}


def test_a_reply_that_the_script_aborts_is_like_one_that_was_aborted() -> None:
    """The last chunk says so and has no ids."""
    script = always({"content": "one two three four", "cut": 3, "finish": "abort"})
    with ScriptedEngine(script).serve() as url:
        chunks = ask(url, CHAT, chat(stream=True)).chunks
        body = ask(url, CHAT, chat()).json["choices"][0]
    finish = chunks[-2]["choices"][0]
    assert (finish["finish_reason"], finish["token_ids"]) == ("abort", [])
    assert (body["finish_reason"], len(body["token_ids"])) == ("abort", 3)


def test_without_ids_a_chunk_without_text_is_not_sent() -> None:
    """vLLM sends nothing for a control token unless ids are asked for."""
    with ScriptedEngine(always(TALK, thinking=True)).serve() as url:
        with_ids = ask(url, CHAT, chat(stream=True)).chunks
        without = ask(url, CHAT, chat(stream=True, return_token_ids=False)).chunks
    assert len(without) < len(with_ids)
    assert all(chunk["choices"][0]["delta"] for chunk in without[:-2])


def test_tokens_of_text_and_text_of_tokens() -> None:
    """What cannot be tokenised or decoded is refused."""
    with ScriptedEngine(always({"content": "ok"})).serve() as url:
        strings = ask(url, "/tokenize", {"prompt": "run it", "return_token_strs": True}).json
        assert strings["token_strs"] == [the_tokenizer().decode((token,)) for token in strings["tokens"]]
        assert ask(url, "/tokenize", {}).status == 400
        assert ask(url, "/detokenize", {"tokens": "x"}).status == 400
        assert ask(url, "/detokenize", {"tokens": [10**6]}).status == 400
        rendered = ask(url, f"{COMPLETIONS}/render", {"model": "scripted", "prompt": ["a", "b"]}).json
        assert [one["token_ids"] for one in rendered] == [the_tokenizer().encode(text) for text in "ab"]
        assert ask(url, f"{COMPLETIONS}/render", {"model": "x", "prompt": "a"}).status == 404
