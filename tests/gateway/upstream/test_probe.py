"""What a probe finds out, engine by engine and setting by setting, and what it says should be changed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gristmill.gateway.upstream.client import Client
from gristmill.gateway.upstream.identity import identify
from gristmill.gateway.upstream.probe import probe
from gristmill.gateway.upstream.protocol import Capabilities, EngineKind, Support, UpstreamError, UpstreamFault
from gristmill.gateway.upstream.sample import QUESTION
from gristmill.gateway.upstream.spec import UpstreamSettings, UpstreamSpec
from gristmill.records import LogprobsMode
from tests.gateway.upstream.toy import Toy, rendered
from tests.gateway.upstream.wire import FakeEngine, running

SETTINGS = UpstreamSettings(connect_timeout_s=2.0)
YES, NO, UNKNOWN = Support.YES, Support.NO, Support.UNKNOWN


def found(toy: Toy, *, timeout_s: float = 5.0, **spec: Any) -> Capabilities:
    """Probe a toy engine."""
    results = list[Capabilities]()

    async def main() -> None:
        async with FakeEngine() as server, Client(SETTINGS) as client:
            toy.dress(server)
            results.append(await probe(client, UpstreamSpec(server.url, **spec), timeout_s))
            for seen in server.seen:
                asked = seen.body or {}
                assert asked.get("max_tokens", 0) <= 8, "a probe must be cheap"

    running(main())
    [result] = results
    return result


def test_an_engine_with_everything() -> None:
    """The report of a good engine is short, and its adapter may use all of it."""
    everything = Capabilities(
        kind=EngineKind.VLLM,
        version="1.2.3",
        models=("m",),
        max_model_len=4096,
        prompt_ids=YES,
        token_ids=YES,
        token_ids_streamed=YES,
        logprobs=YES,
        stop_token_included=YES,
        logprobs_mode=LogprobsMode.PROCESSED,
        weight_versions=YES,
        routed_experts=NO,
        abort_by_id=YES,
        token_in=YES,
        render=YES,
        tokenize=YES,
        question_ids=tuple(rendered(list(QUESTION))),
        notes=(),
    )
    assert found(Toy("vllm", weight_versions=True, mode="processed")) == everything
    toy = Toy("sglang", weight_versions=True, mode="processed")
    said = found(toy)
    assert said.notes == (
        "Whole replies name their weight version, streams do not: announce each with POST /gristmill/v1/weights.",
    )
    assert msgspec.structs.replace(said, kind=EngineKind.VLLM, notes=()) == everything


@pytest.mark.parametrize(
    ("toy", "differs", "said"),
    [
        (Toy(), {"logprobs_mode": LogprobsMode.RAW}, "--logprobs-mode processed_logprobs"),
        (Toy("sglang"), {"logprobs_mode": LogprobsMode.RAW}, "SGLANG_RETURN_ORIGINAL_LOGPROB"),
        (Toy(mode="logits"), {"logprobs": NO}, "--logprobs-mode processed_logprobs"),
        (Toy(scale_out=False), {"abort_by_id": NO, "render": NO}, "--enable-scale-out"),
        (Toy("sglang", admin_key=True), {"abort_by_id": NO}, "its key does not permit"),
        (Toy(max_logprobs=2), {"logprobs_mode": LogprobsMode.UNKNOWN}, "--max-logprobs"),
        (Toy(tools=False), {}, "--enable-auto-tool-choice"),
        (Toy(stop_included=False), {"stop_token_included": NO}, "stop token is not among"),
        (Toy(renders_alike=False), {"render": NO}, "to other ids"),
        (Toy(takes_ids=False), {"token_in": NO}, ""),
        (Toy("sglang", parsers=False), {"token_ids_streamed": NO}, "--reasoning-parser"),
        (Toy(gives_ids=False), {"token_ids": NO, "prompt_ids": NO}, "something between strips them"),
        (Toy(gives_ids=False), {"token_ids": NO, "prompt_ids": NO}, "Connect to the engine itself"),
        (Toy(streams=False), {"token_ids_streamed": UNKNOWN}, "a stream was asked for and a body came"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_what_is_missing_is_found_and_what_to_do_is_said(toy: Toy, differs: dict[str, Any], said: str) -> None:
    """A user reads which flag to set, instead of finding rollouts without rows a day later."""
    result = found(toy)
    assert {name: getattr(result, name) for name in differs} == differs
    assert said in "\n".join(result.notes)


@pytest.mark.parametrize(
    ("toy", "said"),
    [
        (Toy(headers={"server": "uvicorn", "via": "1.1 gateway"}), "via '1.1 gateway'"),
        (Toy(headers={"server": "nginx/1.27"}), "'nginx/1.27', which is not vllm's own"),
        (Toy(owner="router", models=("m",)), "owned by router"),
        (Toy(version=None), "does not say its version"),
        (Toy(start_s=(1.0, 2.0)), "Several engines answer at this address"),
    ],
)
def test_what_stands_between_is_said(toy: Toy, said: str) -> None:
    """A router that strips fields, or spreads calls, is the usual reason why an engine seems to return less."""
    assert said in "\n".join(found(toy, kind=EngineKind.VLLM).notes)


def test_an_engine_that_wants_a_key_says_so() -> None:
    """Otherwise it looks like an engine without models."""

    async def main() -> None:
        async with Toy().dress(FakeEngine()) as server, Client(SETTINGS) as client:
            server.says("/v1/models", {"error": "Unauthorized"}, 401)
            result = await probe(client, UpstreamSpec(server.url), 5.0)
            assert "--upstream-key-env" in "\n".join(result.notes)

    running(main())


def test_a_plain_server() -> None:
    """It serves selection and exports of conversations; that it makes no rows is said before anything is run."""
    result = found(Toy("generic", refuses_unknown=True))
    assert (result.kind, result.token_ids, result.prompt_ids) == (EngineKind.GENERIC, NO, NO)
    assert result.token_ids_streamed is NO
    assert "Unrecognized request argument" in "\n".join(result.notes)


def test_a_server_of_unknown_kind_that_returns_ids() -> None:
    """Other engines adopt the fields; they are used where they are seen to work."""
    result = found(Toy("generic"))
    assert (result.kind, result.token_ids, result.token_ids_streamed) == (EngineKind.GENERIC, YES, YES)
    assert result.abort_by_id is NO


@pytest.mark.parametrize(
    ("toy", "kind"),
    [
        (Toy("vllm"), EngineKind.VLLM),
        (Toy("sglang"), EngineKind.SGLANG),
        (Toy("vllm", owner="someone"), EngineKind.VLLM),
        (Toy("sglang", owner="someone"), EngineKind.SGLANG),
        (Toy("vllm", owner="vllm", version=None), EngineKind.VLLM),
        (Toy("generic"), EngineKind.GENERIC),
        (Toy("vllm", models=()), EngineKind.VLLM),
    ],
)
def test_kinds_are_told_apart(toy: Toy, kind: EngineKind) -> None:
    """The wrong adapter asks in words that the engine ignores, or refuses."""
    assert found(toy).kind is kind


def test_a_kind_that_is_configured_is_believed() -> None:
    """Behind a proxy an engine may not look like what it is."""
    assert found(Toy("vllm"), kind=EngineKind.GENERIC).kind is EngineKind.GENERIC


def test_the_model_that_is_named_is_sampled() -> None:
    """Of several models behind one address, the trained one is the one to look at."""
    result = found(Toy(models=("other", "m")), models=("m",))
    assert (result.token_ids, result.models) == (YES, ("other", "m"))
    result = found(Toy(), models=("unknown",))
    assert result.token_ids is UNKNOWN
    assert "no such model" in "\n".join(result.notes)
    result = found(Toy(models=()))
    assert "name one with --model" in "\n".join(result.notes)


def test_a_paused_engine_is_not_called_unfit() -> None:
    """New requests to a paused engine wait: nothing is known, which is not the same as nothing returned."""
    result = found(Toy(answers=False), timeout_s=0.1)
    assert (result.kind, result.token_ids) == (EngineKind.VLLM, UNKNOWN)
    assert "Nothing was sampled" in "\n".join(result.notes)


@pytest.mark.parametrize(
    "answer",
    [
        "no json",
        "[]",
        '{"data": 3}',
        '{"data": [1, {"id": 2}, {"id": "m", "max_model_len": "x"}]}',
        '{"version": 3, "choices": 5, "tokens": "x"}',
        '{"choices": []}',
        '{"choices": [7]}',
        '{"choices": [{"message": {"role": "assistant"}, "logprobs": {"content": [{"top_logprobs": 1}]}}]}',
    ],
)
def test_strange_answers_say_nothing(answer: str) -> None:
    """Any server may stand behind an address; a probe ends in a report, whatever it answers."""

    async def main() -> None:
        async with FakeEngine() as server, Client(SETTINGS) as client:
            for path in ("/v1/models", "/version", "/server_info", "/metrics", "/v1/chat/completions", "/tokenize"):
                server.on(path, lambda _, wire: wire.text(answer))
            for kind in (None, *EngineKind):
                spec = UpstreamSpec(server.url, kind=kind, models=("m",))
                result = await probe(client, spec, 5.0)
                assert YES not in {result.token_ids, result.prompt_ids, result.logprobs}
                assert result.max_model_len is None

    running(main())


def test_a_server_that_is_broken_cannot_be_identified() -> None:
    """A gateway waits for it, instead of taking it for something that it is not."""

    async def main() -> None:
        async with FakeEngine() as server, Client(SETTINGS) as client:
            server.says("/v1/models", {}, 502)
            with pytest.raises(UpstreamError) as caught:
                await identify(client, UpstreamSpec(server.url), 5.0)
            assert caught.value.fault is UpstreamFault.UNREACHABLE

    running(main())
