"""`gristmill doctor`: what it says of an engine, to people and to programs."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from tests.cli.stories import run
from tests.gateway.upstream.toy import Toy
from tests.gateway.upstream.wire import FakeEngine, Seen, Wire

MEASURED = {
    *("prompt_ids", "token_ids", "token_ids_streamed", "logprobs", "stop_token_included", "logprobs_mode"),
    *("weight_versions", "routed_experts", "abort_by_id", "token_in", "render", "tokenize"),
}


@contextmanager
def served(toy: Toy) -> Generator[FakeEngine]:
    """Serve a toy engine from a thread, as the command has an event loop of its own."""
    engine, ready, loop = toy.dress(FakeEngine()), threading.Event(), asyncio.new_event_loop()
    done = asyncio.Event()

    async def main() -> None:
        async with engine:
            ready.set()
            await done.wait()

    def body() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=body)
    thread.start()
    try:
        assert ready.wait(10)
        yield engine
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(10)


def test_a_good_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """All is well is said in one look, and what to do next."""
    with served(Toy(mode="processed")) as engine:
        ran = run(capsys, "doctor", "--upstream", f"{engine.url}/v1")
        assert ran.code == 0
        assert ran.out.startswith(f"{engine.url}  vLLM 1.2.3\nmodels: m, 4,096 tokens\n")
        assert "sampled ids           yes        rows: what is trained\n" in ran.out
        assert ran.out.endswith("Fit for training capture.\n")
        assert ran.err == f"next: gristmill serve --upstream {engine.url}\n"


def test_an_unfit_engine_ends_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    """A script stops before a night of rollouts that make no rows."""
    with served(Toy("generic", refuses_unknown=True)) as engine:
        ran = run(capsys, "doctor", "--upstream", engine.url)
        assert ran.code == 1
        assert "Not fit for training capture (engine_unfit): prompt ids, sampled ids, both, in streams" in ran.out
        assert "make no rows" in ran.out
        assert ran.err == ""
        told = run(capsys, "doctor", "--upstream", engine.url, "--json")
        assert (told.code, told.json["fit"]) == (1, False)
        assert told.json["lacking"] == ["prompt_ids", "token_ids", "token_ids_streamed", "logprobs"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Programs read the documented keys."""
    with served(Toy("sglang")) as engine:
        told = run(capsys, "doctor", "--upstream", engine.url, "--engine", "sglang", "--json").json
        assert set(told) == {"upstream", "fit", "lacking", "engine"}
        assert (told["upstream"], told["fit"], told["lacking"]) == (engine.url, True, [])
        assert set(told["engine"]) == {"kind", "version", "models", "max_model_len", "notes"} | MEASURED
        assert told["engine"]["kind"] == "sglang"


def test_a_key_comes_from_the_environment_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key on a command line is in the history, and in the process list."""
    monkeypatch.setenv("MY_KEY", "sk-secret")
    with served(Toy()) as engine:
        ran = run(capsys, "doctor", "--upstream", engine.url, "--upstream-key-env", "MY_KEY")
        assert ran.code == 0
        assert {seen.headers.get("authorization") for seen in engine.seen} == {"Bearer sk-secret"}
        assert "sk-secret" not in ran.out + ran.err
        engine.seen.clear()
        monkeypatch.setenv("GRISTMILL_UPSTREAM_KEY", "sk-other")
        assert run(capsys, "doctor", "--upstream", engine.url).code == 0
        assert {seen.headers.get("authorization") for seen in engine.seen} == {"Bearer sk-other"}


def test_what_is_mistyped(capsys: pytest.CaptureFixture[str]) -> None:
    """The message says which option is wrong."""
    for arguments in (
        ["--upstream", "localhost:8000"],
        ["--upstream", "http://127.0.0.1:1", "--upstream-key-env", "NOT_SET_ANYWHERE"],
        ["--upstream", "http://127.0.0.1:1", "--engine", "tgi"],
        [],
    ):
        ran = run(capsys, "doctor", *arguments)
        assert ran.code == 2, arguments
        assert ran.err.startswith("error: ")


def test_the_named_model_is_sampled(capsys: pytest.CaptureFixture[str]) -> None:
    """One address may serve several."""
    with served(Toy(models=("a", "b"))) as engine:
        run(capsys, "doctor", "--upstream", engine.url, "--model", "b")
        assert {seen.body["model"] for seen in engine.asked("/v1/chat/completions")} == {"b"}


def test_an_engine_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Not running is another matter than unfit."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        ran = run(capsys, "doctor", "--upstream", url)
        assert "cannot connect to the engine" in ran.err
        assert "hint: start the engine" in ran.err
        assert ran.code == 3
        told = run(capsys, "doctor", "--upstream", url, "--json").json
        assert told["error"]["code"] == "engine_unreachable"


@pytest.mark.parametrize("html", [False, True])
def test_an_address_without_routes(capsys: pytest.CaptureFixture[str], html: bool) -> None:
    """A base that ends in a route, or a web page's, is a typing error and not an unfit engine."""
    with served(Toy()) as engine:
        url = f"{engine.url}/v1/chat/completions"
        if html:

            async def page(_: Seen, wire: Wire) -> None:
                await wire.text("<html>Welcome</html>", content_type="text/html")

            for path in ("/v1/models", "/v1/chat/completions"):
                engine.on(f"/app{path}", page)
            url = f"{engine.url}/app"
        ran = run(capsys, "doctor", "--upstream", url)
        assert ran.code == 3
        assert "no such route: is the address right?" in ran.err
        assert "not measured" not in ran.out


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions"])
def test_a_key_that_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Who has the wrong key is not helped by talk of models."""
    with served(Toy()) as engine:
        engine.says(path, {"error": "Unauthorized"}, 401)
        ran = run(capsys, "doctor", "--upstream", engine.url)
        assert ran.code == 3
        assert "the engine answered 401: its key is missing" in ran.err
        assert "GRISTMILL_UPSTREAM_KEY" in ran.err
        assert "model" not in ran.out + ran.err
        monkeypatch.setenv("GRISTMILL_UPSTREAM_KEY", "sk-wrong")
        assert "its key is wrong" in run(capsys, "doctor", "--upstream", engine.url).err


def test_a_model_that_is_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """The name that a harness uses is not always the engine's."""
    with served(Toy(models=("a", "b"))) as engine:
        ran = run(capsys, "doctor", "--upstream", engine.url, "--model", "gpt")
        assert "The model 'gpt' was asked for, which it does not list: it lists a, b." in ran.out


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_the_mode_is_named_once(capsys: pytest.CaptureFixture[str], mode: str) -> None:
    """`raw  processed: …` on one line reads as a contradiction."""
    with served(Toy(mode=mode)) as engine:
        [line] = [
            line
            for line in run(capsys, "doctor", "--upstream", engine.url).out.splitlines()
            if line.startswith("log-probability mode")
        ]
        assert [name for name in ("raw", "processed") if name in line] == [mode]


def test_names_from_an_engine_reach_no_terminal_raw(capsys: pytest.CaptureFixture[str]) -> None:
    """A model's name may hold control characters, of a server that nobody vouches for."""
    with served(Toy(models=("\x1b[2Jm",))) as engine:
        ran = run(capsys, "doctor", "--upstream", engine.url)
        assert "\x1b" not in ran.out
        assert "\\x1b[2Jm" in ran.out
