from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import Code, ConfigError, GristmillError
from gristmill.scripted import ScriptedEngine, check_loopback
from tests.scripted.talk import CHAT, TIMEOUT_S, always, ask, chat

WORDS = {"content": "ok"}
PROGRAM = [sys.executable, "-c", "import sys; from gristmill.cli import main; sys.exit(main())", "engine"]


def test_several_engines_at_once_and_one_after_another() -> None:
    """Tests serve many engines in one process."""
    engine = ScriptedEngine(always(WORDS))
    before = threading.active_count()
    for _ in range(2):
        with engine.serve() as url, ScriptedEngine(always({"content": "other"})).serve() as other:
            assert url != other
            assert ask(url, CHAT, chat()).json["choices"][0]["message"]["content"] == "ok"
            assert ask(other, CHAT, chat()).json["choices"][0]["message"]["content"] == "other"
        with pytest.raises(OSError, match="refused"):
            ask(url, CHAT, chat())
    assert threading.active_count() == before


def test_what_was_asked_can_be_looked_at() -> None:
    """A test asserts on what reached the engine, from its own thread or over HTTP, and keys stay out of it."""
    engine = ScriptedEngine({"rules": [{"name": "only", "reply": WORDS}]})
    with engine.serve() as url:
        ask(url, CHAT, chat("hello"), authorization="Bearer gm_secret", x_session="s", x_request_id="r1")
        seen = engine.requests[0]
        listed = ask(url, "/script/requests").json
        state = ask(url, "/script").json
    assert (seen.rule, seen.turn, seen.status, seen.ended, seen.id) == ("only", 0, 200, "complete", "chatcmpl-r1")
    assert seen.body["messages"][0]["content"] == "hello"
    assert seen.headers["x-session"] == "s"
    assert "gm_secret" not in json.dumps(listed)
    assert listed["requests"][0]["try"] == 0
    assert state["by_rule"] == {"only": 1}
    assert state["completion_tokens"] == seen.ids[0] > 0


def test_a_served_engine_in_an_async_test() -> None:
    """The server has a loop of its own, so that a blocked test cannot block it."""

    async def once() -> int:
        async with ScriptedEngine(always(WORDS)).serve() as url:
            return (await asyncio.to_thread(ask, url, CHAT, chat())).status

    assert asyncio.run(once()) == 200


def test_a_raw_application() -> None:
    """An ASGI test client needs no socket; a connection is broken off by an exception there."""

    async def once(script: dict[str, Any]) -> list[Any]:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps(chat()).encode()}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [(b"x-a", b"b")]}
        await ScriptedEngine(script)(scope, receive, send)
        return sent

    sent = asyncio.run(once(always(WORDS)))
    assert sent[0]["status"] == 200
    with pytest.raises(ConnectionAbortedError):
        asyncio.run(once(always({"fault": {"kind": "reset"}})))


def test_the_lifespan_of_an_application() -> None:
    """A server that waits for the application to start would wait for ever."""

    async def once() -> list[str]:
        messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
        said: list[str] = []

        async def receive() -> dict[str, Any]:
            return next(messages)

        async def send(message: Any) -> None:
            said.append(message["type"])

        await ScriptedEngine(always(WORDS))({"type": "lifespan"}, receive, send)
        return said

    assert asyncio.run(once()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org", ""])
def test_it_is_for_this_machine_only(host: str) -> None:
    """It answers anybody, so it must not be reachable by anybody."""
    with pytest.raises(ConfigError) as refused:
        ScriptedEngine(always(WORDS)).serve(host)
    assert refused.value.code is Code.OPTION_INVALID
    for good in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        check_loopback(good)


def test_a_port_that_is_taken() -> None:
    """The message names the port, and a way out."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(GristmillError, match=str(port)) as refused:
            ScriptedEngine(always(WORDS)).serve(port=port).start()
    assert refused.value.hint


def test_bodies_that_are_no_request() -> None:
    """A broken request ends itself and nothing else."""
    with ScriptedEngine(always(WORDS)).serve() as url:
        for body in ([], {"model": "scripted"}, {"messages": []}, chat(messages=[3]), chat(n=0), chat(max_tokens=0)):
            assert ask(url, CHAT, body).status in (400, 404), body
        for more in ({"top_logprobs": -1}, {"tools": [{}]}, {"max_tokens": "3"}):
            assert ask(url, CHAT, chat(**more)).status == 400
        assert ask(url, CHAT, chat()).status == 200


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_it_is_stopped(tmp_path: Path, number: signal.Signals) -> None:
    """A script that starts it needs its address, and a clean end."""
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"rules": [{"name": "only", "reply": {**WORDS, "fault": {"kind": "silence"}}}]}))
    with subprocess.Popen(
        [*PROGRAM, "--script", str(path), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert ask(told["url"], "/health").status == 200
        process.send_signal(number)
        rest, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert rest == ""
    assert told == {**told, "profile": "vllm", "models": ["scripted"], "rules": ["only"], "script": str(path)}
    assert told["url"] in errors
    assert "Traceback" not in errors


@pytest.mark.e2e
def test_the_command_refuses_what_it_cannot_serve(tmp_path: Path) -> None:
    """Exit codes and messages are those of the other commands."""
    path = tmp_path / "script.json"
    path.write_text('{"rules": [{"reply": {"kontent": "x"}}]}')
    for arguments, code, word in (
        (["--script", str(path)], 1, "kontent"),
        (["--script", "agent", "--host", "0.0.0.0"], 2, "loopback"),
        (["--script", str(tmp_path / "none.json")], 3, "none.json"),
        ([], 2, "--script"),
    ):
        ran = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert (ran.returncode, word in ran.stderr) == (code, True), (arguments, ran.stderr)
