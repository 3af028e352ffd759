from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gristmill
from gristmill.errors import CaptureError, Code, ConfigError
from gristmill.ledger import AttemptKey, AttemptState, SqliteReader
from gristmill.scripted import ScriptedEngine
from gristmill.service.rollout import Rollout
from tests.service.gateways import SCRIPT, Gateway, request, scripted_gateway, two_turns, user


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with scripted_gateway(tmp_path / "run.gristmill") as running:
        yield running


def say(rollout: Rollout) -> int:
    body = {"model": "scripted", "messages": [user("hi")]}
    return request(rollout.base_url, "POST", "/v1/chat/completions", body, key=rollout.key).status


def test_a_rollout_of_this_program(tmp_path: Path) -> None:
    """An agent that is a Python function is captured with three lines."""
    ledger = tmp_path / "own.gristmill"
    with (
        ScriptedEngine(SCRIPT).serve() as engine,
        gristmill.rollout(ledger=ledger, upstream=engine, group_id="g", settings={"min_free_bytes": 0}) as rollout,
    ):
        assert rollout.env["OPENAI_BASE_URL"] == rollout.openai_base_url == f"{rollout.base_url}/v1"
        assert rollout.env["ANTHROPIC_API_KEY"] == rollout.key
        assert say(rollout) == 200
        outcome = rollout.finish({"messages": [{"role": "assistant", "content": "Hello."}]}, reward=1.0)
        assert (outcome.outcome, outcome.rows, outcome.policy) == ("selected", 1, "returned_history")
        key, base_url = AttemptKey(rollout.rollout_id, rollout.attempt), rollout.base_url
    with SqliteReader(ledger) as store:
        [summary] = store.summaries()
    assert (summary.key, summary.reward, summary.group_id) == (key, 1.0, "g")
    with pytest.raises(ConnectionRefusedError):
        request(base_url, "GET", "/healthz")


def test_a_gateway_that_runs_is_used(gateway: Gateway) -> None:
    """A trainer runs one gateway for a thousand rollouts."""
    with gristmill.rollout(gateway=gateway.url, ledger=gateway.ledger, rollout_id="r", metadata={"a": 1}) as rollout:
        messages = two_turns(gateway, rollout.key)
        assert rollout.finish({"messages": messages}, 0.5, metadata={"b": 2}).funnel.trained_calls == 2
        assert rollout.finish({"messages": messages}, 0.5, metadata={"b": 2}).funnel.trained_calls == 2
        with pytest.raises(CaptureError) as caught:
            rollout.finish({"messages": messages}, 0.0)
        assert caught.value.code == Code.ATTEMPT_DIFFERS
        key = rollout.key
    assert gateway.chat(key).status == 401
    with gristmill.rollout(ledger=gateway.ledger, rollout_id="r") as second:
        assert second.attempt == 1
        assert second.base_url == gateway.url


def test_credit_goes_with_the_result(gateway: Gateway) -> None:
    """A judge of single turns lives in the same program as the agent."""
    with gristmill.rollout(gateway=gateway.url, ledger=gateway.ledger, rollout_id="credit") as rollout:
        messages = two_turns(gateway, rollout.key)
        with SqliteReader(gateway.ledger) as store:
            first = store.read(AttemptKey("credit"))[0].records[0].model_call_id
        credits = [
            gristmill.CallCredit(model_call_id=first, reward=1),
            gristmill.CallCredit(model_call_id="c", reward=1),
        ]
        failure = gristmill.Failure("sandbox gone", gristmill.Attribution.SCORE)
        outcome = rollout.finish({"messages": messages}, 0.5, advantage=1, credits=credits, failure=failure)
        assert (outcome.outcome, outcome.code) == ("rejected", "call_unknown")
    with SqliteReader(gateway.ledger) as store:
        _, result = store.read(AttemptKey("credit"))
    assert result is not None
    assert (result.advantage, result.credits, result.failure) == (1.0, tuple(credits), failure)


def test_a_result_that_is_no_object_is_refused(gateway: Gateway) -> None:
    """A bare list of messages must not become the result of a rollout that cannot be changed any more."""
    with gristmill.rollout(gateway=gateway.url, ledger=gateway.ledger) as rollout:
        messages = two_turns(gateway, rollout.key)
        with pytest.raises(ConfigError) as caught:
            rollout.finish(messages, 1.0)  # pyright: ignore[reportArgumentType]
        assert caught.value.code == Code.OPTION_INVALID
        assert '{"messages": […]}' in str(caught.value.hint)
        assert rollout.finish({"messages": messages}, 1.0).outcome == "selected"


def test_an_exception_is_kept_and_goes_on(gateway: Gateway) -> None:
    """A rollout that crashed has no reward; it must neither be lost nor count as 0."""

    def crash() -> None:
        with gristmill.rollout(gateway=gateway.url, ledger=gateway.ledger, rollout_id="crash") as rollout:
            say(rollout)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crash()
    with SqliteReader(gateway.ledger) as store:
        _, result = store.read(AttemptKey("crash"))
        summary = store.summary(AttemptKey("crash"))
    assert summary.state is AttemptState.FINISHED
    assert result is not None
    assert result.reward is None
    assert result.metadata["error"] == "ZeroDivisionError"


def test_an_exception_after_finish_changes_nothing(gateway: Gateway) -> None:
    """What was rewarded stays rewarded."""

    def crash() -> None:
        with gristmill.rollout(gateway=gateway.url, ledger=gateway.ledger, rollout_id="late") as rollout:
            rollout.finish(reward=1.0, policy="final_context")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crash()
    with SqliteReader(gateway.ledger) as store:
        _, result = store.read(AttemptKey("late"))
    assert result is not None
    assert result.reward == 1.0
    assert "error" not in result.metadata


def test_a_block_that_does_not_finish(gateway: Gateway) -> None:
    """Leaving the block ends the rollout, with nothing handed back."""
    with gristmill.rollout(gateway=gateway.url, ledger=gateway.ledger, rollout_id="open") as rollout:
        say(rollout)
    with SqliteReader(gateway.ledger) as store:
        _, result = store.read(AttemptKey("open"))
    assert result is not None
    assert (result.value, result.reward) == (None, None)


def test_async_programs_use_the_same_object(gateway: Gateway) -> None:
    """An agent on an event loop must not block it to open and finish."""

    async def main() -> list[str]:
        async def one(number: int) -> str:
            opened = gristmill.rollout(gateway=gateway.url, ledger=gateway.ledger, rollout_id=f"async-{number}")
            async with opened as rollout:
                assert await asyncio.to_thread(say, rollout) == 200
                outcome = await rollout.finish_async(reward=float(number), policy="final_context")
            return outcome.outcome

        return await asyncio.gather(*map(one, range(5)))

    assert asyncio.run(main()) == ["selected"] * 5


def test_outside_its_block_there_is_no_rollout(gateway: Gateway) -> None:
    """A key that does not exist yet must not read as an empty one."""
    rollout = gristmill.rollout(gateway=gateway.url, ledger=gateway.ledger)
    for name in ("key", "base_url", "env", "rollout_id"):
        with pytest.raises(ConfigError) as caught:
            getattr(rollout, name)
        assert "with gristmill.rollout" in str(caught.value.hint)


def test_a_client_of_openais(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual client with the rollout's key and address, and nothing to copy."""
    made: list[dict[str, Any]] = []
    module = ModuleType("openai")
    module.OpenAI = lambda **options: made.append(options)
    with gristmill.rollout(gateway=gateway.url, ledger=gateway.ledger) as rollout:
        monkeypatch.setitem(sys.modules, "openai", None)
        with pytest.raises(ConfigError) as caught:
            rollout.openai()
        assert "openai_base_url" in str(caught.value.hint)
        monkeypatch.setitem(sys.modules, "openai", module)
        rollout.openai(max_retries=0)
        assert made == [{"base_url": rollout.openai_base_url, "api_key": rollout.key, "max_retries": 0}]


def test_a_setting_that_is_none_is_refused(tmp_path: Path) -> None:
    """A misspelt setting that is ignored is a limit that does not hold."""
    opened = gristmill.rollout(ledger=tmp_path / "x", upstream="http://127.0.0.1:1", settings={"idle_timout_s": 1})
    with pytest.raises(ConfigError), opened:
        pass
    with pytest.raises(ConfigError) as caught, gristmill.rollout(ledger=tmp_path / "x"):
        pass
    assert "upstreams" in f"{caught.value.where} {caught.value.message}"


def test_importing_gristmill_needs_no_server() -> None:
    """The library is for programs that have no gateway, too."""
    source = (
        "import json, sys, gristmill; heavy = ['aiohttp', 'starlette', 'uvicorn', 'prometheus_client', 'asyncio'];"
        "before = [name for name in heavy if name in sys.modules];"
        "print(json.dumps([before, callable(gristmill.rollout), 'rollout' in gristmill.__all__]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, env=environment)
    assert json.loads(done.stdout) == [[], True, True]
