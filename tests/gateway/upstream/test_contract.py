"""What every adapter must do, on every engine: ask for the tokens, and change nothing else."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.captures import Reply, decode_reply
from gristmill.errors import Code, InternalError
from gristmill.gateway.upstream.adapters import engine_for
from gristmill.gateway.upstream.client import Client
from gristmill.gateway.upstream.probe import probe
from gristmill.gateway.upstream.protocol import Ask, Capabilities, Engine, EngineKind, Support
from gristmill.gateway.upstream.spec import UpstreamSettings, UpstreamSpec
from gristmill.records import Dialect
from tests.gateway.upstream.toy import Toy, rendered
from tests.gateway.upstream.wire import FakeEngine, running, until

KINDS = ["vllm", "sglang", "generic"]
ROUTES = [Dialect.CHAT, Dialect.COMPLETIONS]
FIXTURES = Path(__file__).parents[2] / "fixtures" / "engine"
SETTINGS = UpstreamSettings(connect_timeout_s=2.0)

kinds = pytest.mark.parametrize("kind", KINDS)
routes = pytest.mark.parametrize("route", ROUTES)
streams = pytest.mark.parametrize("stream", [False, True])


def body_of(route: Dialect, **fields: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": "say it in words"}]}
    return {"model": "m", **(said if route is Dialect.CHAT else {"prompt": "say it in words"}), **fields}


def seen_to_work(kind: str, **found: Any) -> Engine:
    """An adapter after a probe that found the engine to give everything."""
    everything = {"token_ids": Support.YES, "logprobs": Support.YES, "abort_by_id": Support.YES}
    return engine_for(Capabilities(kind=EngineKind(kind), **{**everything, **found}))


async def well() -> bool:
    return True


async def sampled(client: Client, server: FakeEngine, ask: Ask) -> Reply:
    """Send an ask and read the reply as captures does."""
    reply = await client.open(UpstreamSpec(server.url), ask, well)
    data = b"".join([piece async for piece in reply.pieces()])
    await reply.close()
    assert ask.body is not None
    stream = reply.headers.get("content-type") == "text/event-stream"
    route = "chat" if "messages" in ask.body else "completions"
    return decode_reply(route, reply.status, None if stream else data, data if stream else None)


@kinds
@routes
@streams
def test_ids_and_logprobs_come_back(kind: str, route: Dialect, stream: bool) -> None:
    """Without a field of theirs engines return no ids, and the whole rollout makes no rows."""

    async def main() -> None:
        async with FakeEngine() as server, Client(SETTINGS) as client:
            Toy(kind).dress(server)
            ask = seen_to_work(kind).ask(route, body_of(route, max_tokens=40), "c-1", stream=stream)
            reply = await sampled(client, server, ask)
            assert reply.error is None
            [choice] = reply.choices
            assert choice.reason is None, choice.detail
            assert (len(choice.token_ids or ()), choice.finish_reason) == (13, "stop")
            prompt = rendered(body_of(route)["messages"]) if route is Dialect.CHAT else [103, 102, 102, 105]
            assert list(choice.prompt_ids or ()) == prompt
            assert reply.usage.completion_tokens == 13

    running(main())


@kinds
@routes
@streams
def test_a_request_keeps_what_it_says(kind: str, route: Dialect, stream: bool) -> None:
    """An adapter that loses or changes a setting changes what is sampled."""
    options = {"stream_options": {"continuous_usage_stats": True}} if stream else {}
    top = {"top_logprobs": 3, "logprobs": True} if route is Dialect.CHAT else {"logprobs": 3}
    body = body_of(route, temperature=0.7, n=2, seed=5, user="u", vendor={"a": [1]}, **options, **top)
    before = copy.deepcopy(body)
    ask = seen_to_work(kind).ask(route, body, "c-1", stream=stream)
    assert body == before
    assert ask.body is not None
    assert ask.method == "POST"
    assert ask.path == ("/v1/chat/completions" if route is Dialect.CHAT else "/v1/completions")
    assert ask.headers == {"x-request-id": "c-1"}
    assert {**ask.body, **{key: value for key, value in body.items() if key != "stream_options"}} == ask.body
    assert ask.body["stream"] is stream
    if stream:
        assert ask.body["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}
    else:
        assert "stream_options" not in ask.body


@kinds
@pytest.mark.parametrize("asked", [None, False, 0, 1, 5])
def test_completions_ask_for_as_many_logprobs_as_the_client(kind: str, asked: Any) -> None:
    """Zero is the sampled token's own, which is enough; fewer than the client asked for would be its loss."""
    body = body_of(Dialect.COMPLETIONS, logprobs=asked)
    made = seen_to_work(kind).ask(Dialect.COMPLETIONS, body, "c", stream=False).body
    assert made is not None
    assert made["logprobs"] == (asked or 0)
    assert type(made["logprobs"]) is int


@kinds
def test_a_route_that_carries_no_ids_is_never_asked(kind: str) -> None:
    """Responses and Messages routes of engines lose ids: nobody may end up there."""
    with pytest.raises(InternalError):
        seen_to_work(kind).ask(Dialect.RESPONSES, {}, "c", stream=False)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@routes
@streams
def test_an_aborted_call_answers_with_its_tokens(kind: str, route: Dialect, stream: bool) -> None:
    """What was sampled for a client that left was paid for, and is recorded."""

    async def main() -> None:
        async with FakeEngine() as server, Client(SETTINGS) as client:
            toy = Toy(kind)
            toy.dress(server)
            engine = seen_to_work(kind)
            ask = engine.ask(route, body_of(route, max_tokens=5000), "c-1", stream=stream)
            waiting = asyncio.create_task(sampled(client, server, ask))
            await until(lambda: bool(toy.running))
            abort = engine.abort(route, "c-1")
            assert abort is not None
            answer = await client.answer(UpstreamSpec(server.url), abort, 5.0)
            assert answer.status == 200
            [choice] = (await waiting).choices
            assert (choice.finish_reason, choice.reason) == ("abort", Code.ABORTED)
            assert (len(choice.token_ids or ()), len(choice.logprobs or ())) == (5, 5)

    running(main())


def test_nothing_is_aborted_that_cannot_be() -> None:
    """A route that is not there would answer 403, and the tokens of the call would be waited for in vain."""
    assert seen_to_work("vllm", abort_by_id=Support.NO).abort(Dialect.CHAT, "c") is None
    assert seen_to_work("vllm", abort_by_id=Support.UNKNOWN).abort(Dialect.CHAT, "c") is None
    assert seen_to_work("sglang", abort_by_id=Support.NO).abort(Dialect.CHAT, "c") is None
    assert seen_to_work("generic").abort(Dialect.CHAT, "c") is None


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_messages_are_counted_as_they_are_rendered(kind: str) -> None:
    """Claude Code counts tokens before it sends; a wrong count makes it compact too early or too late."""

    async def main() -> None:
        async with FakeEngine() as server, Client(SETTINGS) as client:
            Toy(kind).dress(server)
            tools = [{"type": "function", "function": {"name": "f"}}]
            body = body_of(Dialect.CHAT, tools=tools, max_tokens=5, temperature=1.0, tool_choice=None)
            ask = seen_to_work(kind).count(body)
            assert ask.body == {"model": "m", "messages": body["messages"], "tools": tools}
            answer = await client.answer(UpstreamSpec(server.url), ask, 5.0)
            assert json.loads(answer.body)["count"] == len(rendered(body["messages"]))

    running(main())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_these_engines_are_asked_for_ids_before_any_probe(kind: str) -> None:
    """The first calls after a start are rows like any other."""
    engine = engine_for(Capabilities(kind=EngineKind(kind)))
    assert engine.missing() is None
    body = engine.ask(Dialect.CHAT, body_of(Dialect.CHAT), "c", stream=False).body
    assert body is not None
    assert body["return_token_ids"] is True
    assert "return_weight_versions" not in body


@kinds
def test_the_reason_for_missing_ids_is_said(kind: str) -> None:
    """A rollout without rows must say why, or its user looks for the fault in the harness."""
    refused = seen_to_work(kind, token_ids=Support.NO)
    assert (refused.missing() or "").startswith("not supported: ")
    assert seen_to_work(kind).missing() is None


def test_a_plain_server_is_asked_for_nothing_that_it_may_not_know() -> None:
    """OpenAI refuses an unknown field with a 400: every call of the rollout would fail."""

    async def main() -> None:
        async with FakeEngine() as server, Client(SETTINGS) as client:
            Toy("generic", refuses_unknown=True).dress(server)
            engine = engine_for(Capabilities(kind=EngineKind.GENERIC))
            assert (engine.missing() or "").startswith("not requested: ")
            for _ in range(2):
                for stream in (False, True):
                    ask = engine.ask(Dialect.CHAT, body_of(Dialect.CHAT, max_tokens=40), "c", stream=stream)
                    reply = await sampled(client, server, ask)
                    assert reply.error is None
                    assert reply.choices[0].reason is Code.TOKEN_IDS_MISSING
                found = await probe(client, UpstreamSpec(server.url), 5.0)
                engine = engine_for(found)
                assert (engine.missing() or "").startswith("not supported: ")

    running(main())


def test_vllm_is_never_asked_to_hide_what_was_thought() -> None:
    """With `include_reasoning: false` vLLM hides the ids of the whole reply."""

    async def main() -> None:
        async with FakeEngine() as server, Client(SETTINGS) as client:
            Toy("vllm").dress(server)
            body = body_of(Dialect.CHAT, include_reasoning=False)
            for stream in (False, True):
                ask = seen_to_work("vllm").ask(Dialect.CHAT, body, "c", stream=stream)
                reply = await sampled(client, server, ask)
                assert reply.choices[0].reason is None

    running(main())


def test_vllm_is_asked_for_weight_versions_where_it_has_them() -> None:
    """A reply that spans a weight update says so itself only if it was asked."""
    engine = seen_to_work("vllm", weight_versions=Support.YES)
    for route in ROUTES:
        body = engine.ask(route, body_of(route), "c", stream=False).body
        assert body is not None
        assert body["return_weight_versions"] is True


def test_sglang_reads_what_was_thought_under_its_own_name() -> None:
    """It ignores `reasoning`: the prompt of every later turn would differ from what the harness echoed."""
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "hm"},
        {"role": "assistant", "content": "c", "reasoning": "x", "reasoning_content": "y"},
        {"role": "assistant", "content": "d", "reasoning_content": "z"},
        {"role": "assistant", "content": "e", "reasoning": None},
    ]
    body = body_of(Dialect.CHAT, messages=turns)
    engine = seen_to_work("sglang")
    ask = engine.ask(Dialect.CHAT, body, "c", stream=True)
    assert ask.body is not None
    sent = ask.body["messages"]
    assert sent[1] == {"role": "assistant", "content": "b", "reasoning_content": "hm"}
    assert [sent[place] for place in (0, 2, 3, 4)] == [turns[place] for place in (0, 2, 3, 4)]
    assert "reasoning" in turns[1]
    assert engine.count(body).body == {"model": "m", "messages": sent}
    plain = engine.ask(Dialect.CHAT, body_of(Dialect.CHAT), "c", stream=True).body
    assert plain is not None
    assert plain["messages"] == body_of(Dialect.CHAT)["messages"]


@pytest.mark.parametrize(
    "name", ["stream_basic", "stream_tool_call_parallel", "stream_n2", "stream_interval_8", "completions_stream"]
)
def test_a_recorded_stream_passes_unchanged(name: str) -> None:
    """What is read is what the engine sent, byte for byte, however the network cut it up."""
    fixture = json.loads((FIXTURES / f"{name}.json").read_bytes())

    async def main() -> None:
        async with FakeEngine() as server, Client(SETTINGS) as client:
            path = fixture["request"]["path"]
            server.on(path, lambda _, wire: wire.events(fixture["sse_raw"], size=997))
            reply = await client.open(UpstreamSpec(server.url), Ask(path, fixture["request"]["body"]), well)
            assert (await reply.read()).decode() == fixture["sse_raw"]
            assert server.seen[0].body == fixture["request"]["body"]

    running(main())
