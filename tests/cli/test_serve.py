from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gristmill.cli.serve import _OPTIONS, _serve, takes_settings
from gristmill.gateway.config import GatewayConfig
from gristmill.gateway.settings import SETTINGS
from gristmill.ledger import SqliteLedger, SqliteReader
from gristmill.scripted import ScriptedEngine
from tests.cli.stories import run
from tests.service.gateways import SCRIPT, config_of, request, user

MAIN = "import sys; from gristmill.cli import main; sys.exit(main(sys.argv[1:]))"


@contextmanager
def started(*arguments: Any, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command in a process of its own, and end it."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.fixture
def engine() -> Iterator[str]:
    with ScriptedEngine(SCRIPT).serve() as url:
        yield url


def test_every_setting_has_a_flag() -> None:
    """A setting that only a file can say is one that nobody finds."""
    assert set(_OPTIONS) == set(SETTINGS)


def read(flags: Mapping[str, Any], file: Path | None = None) -> GatewayConfig:
    """Read settings as the command does."""
    found: list[GatewayConfig] = []

    def command(*, settings: Any) -> None:
        found.append(settings())

    given = {**dict.fromkeys(SETTINGS), "upstreams": (), "models": (), "overrides": (), "allowed_hosts": (), **flags}
    wrapped: Any = takes_settings()(command)
    wrapped(config=file, **given)
    return found[0]


def test_flags_go_over_variables_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment's file, a shell's variable and a hand-typed flag each have their place."""
    file = tmp_path / "gateway.toml"
    file.write_text('upstreams = ["http://file:1"]\nport = 1\nmax_calls = 7\n[models]\n"*" = "file"\n')
    monkeypatch.setenv("GRISTMILL_PORT", "2")
    monkeypatch.setenv("GRISTMILL_IDLE_TIMEOUT_S", "9")
    config = read({"idle_timeout_s": 5.0, "overrides": ("temperature=1.0",), "models": ("a=b", "c")}, file)
    assert config.upstreams[0].url == "http://file:1"
    assert (config.port, config.max_calls, config.idle_timeout_s) == (2, 7, 5.0)
    assert dict(config.models) == {"a": "b", "c": None}
    assert dict(config.overrides) == {"temperature": 1.0}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--upstream", "http://127.0.0.1:1", "--override", "x"], "--override"),
        (["--upstream", "http://127.0.0.1:1", "--override", "top_q=1"], "top_q"),
        (["--upstream", "http://127.0.0.1:1", "--override", "=1"], "--override"),
        (["--upstream", "http://127.0.0.1:1", "--host", "0.0.0.0"], "TLS"),
        (["--upstream", "http://127.0.0.1:1", "--port", "-1"], "--port"),
        (["--config", "none.toml"], "none.toml"),
        ([], "upstreams"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    """A gateway that starts with half its settings is worse than none."""
    monkeypatch.chdir(tmp_path)
    ran = run(capsys, "serve", *arguments)
    assert ran.code in {2, 3}
    assert told in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base install has no server; the hint is the command that adds it."""
    monkeypatch.delitem(sys.modules, "gristmill.service.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    ran = run(capsys, "serve", "--upstream", "http://127.0.0.1:1")
    assert ran.code == 2
    assert "uvicorn" in ran.err
    assert "pip install 'gristmill[gateway]'" in ran.err


@pytest.mark.e2e
def test_it_listens_says_where_and_ends_cleanly(tmp_path: Path, engine: str) -> None:
    """The first thing that anybody sees of the gateway, and the last."""
    ledger = tmp_path / "run.gristmill"
    arguments = ["serve", "--upstream", engine, "--ledger", ledger, "--port", "0", "--min-free-bytes", "0"]
    with started(*arguments, "--json") as process:
        told = json.loads(first_line(process))
        assert set(told) == {"address", "base_url", "ledger", "admin_key_file", "pid", "engines"}
        assert told["pid"] == process.pid
        assert told["engines"][0]["engine"] == engine
        key = Path(told["admin_key_file"]).read_text().strip()
        minted = request(told["base_url"], "POST", "/gristmill/v1/rollouts", {}, key=key).json
        body = {"model": "scripted", "messages": [user("hi")]}
        assert request(told["base_url"], "POST", "/v1/chat/completions", body, key=minted["key"]).status == 200
        second = subprocess.run(
            [sys.executable, "-c", MAIN, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert second.returncode == 3
        assert told["address"] in second.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""
    with SqliteReader(ledger) as store:
        assert store.counts().calls == 1


@pytest.mark.e2e
def test_people_are_told_what_comes_next(tmp_path: Path, engine: str) -> None:
    """Address, key and the next command are all that one needs."""
    ledger = tmp_path / "run.gristmill"
    arguments = ["--ledger", ledger, "--port", "0", "--log-level", "error"]
    with started("serve", *arguments, GRISTMILL_UPSTREAMS=engine) as process:
        address = first_line(process)
        assert address.startswith("gateway  http://127.0.0.1:")
        assert first_line(process) == f"ledger   {ledger}\n"
        assert first_line(process) == f"admin    key in {ledger}.admin-key\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 0
    assert f"next: gristmill run --ledger {ledger}" in err
    assert "stopped" in err


@pytest.mark.e2e
def test_a_second_signal_does_not_wait(tmp_path: Path, engine: str) -> None:
    """Whoever presses Ctrl-C twice has no time."""
    import threading

    ledger = tmp_path / "run.gristmill"
    arguments = ["--upstream", engine, "--ledger", ledger, "--port", "0", "--min-free-bytes", "0", "--drain-s", "600"]
    with started("serve", *arguments, "--json") as process:
        told = json.loads(first_line(process))
        key = Path(told["admin_key_file"]).read_text().strip()
        minted = request(told["base_url"], "POST", "/gristmill/v1/rollouts", {}, key=key).json
        body = {"model": "scripted", "messages": [user("slow")]}
        answers: list[int] = []

        def ask() -> None:
            answer = request(told["base_url"], "POST", "/v1/chat/completions", body, key=minted["key"], timeout_s=60)
            answers.append(answer.status)

        thread = threading.Thread(target=ask)
        thread.start()
        path = f"/gristmill/v1/rollouts/{minted['rollout_id']}/0"
        while request(told["base_url"], "GET", path, key=key).json["in_flight"] == 0:
            pass
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        said = ""
        while "at most 600 s; a second" not in said:
            said = process.stderr.readline()
        assert said.startswith("note: stopping: waiting for 1 call, "), said
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
        rest = process.stderr.read()
        assert "note: not waiting any longer: 1 call aborted" in rest
        assert _aborted(rest) == 1
        thread.join()
    with SqliteReader(ledger) as store:
        counts = store.counts()
    assert counts.calls + counts.lost == 1


def _aborted(log: str) -> int:
    """Return what the gateway's log says of calls that were aborted at its end."""
    [count] = re.findall(r"stopped.*aborted\W+(\d+)", log)
    return int(count)


def serve_here(
    config: GatewayConfig, capfd: pytest.CaptureFixture[str], signals: int, *, as_json: bool
) -> tuple[int, str]:
    """Serve in this process until it has said where, then send signals to it."""

    async def main() -> tuple[int, str]:
        serving = asyncio.ensure_future(_serve(config, as_json=as_json))
        said = ""
        # It takes signals from its first step on.
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            while signals and not (said.endswith("\n") and ("admin" in said or as_json)):
                await asyncio.sleep(0.01)
                said += capfd.readouterr().out
            for _ in range(max(1, signals)):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0)
            return await serving, said

    return asyncio.run(main())


def test_serving_in_this_process(tmp_path: Path, engine: str, capfd: pytest.CaptureFixture[str]) -> None:
    """What it prints is an address that works, for people and for programs."""
    config = config_of(engine, tmp_path / "run.gristmill")
    code, said = serve_here(config, capfd, 1, as_json=True)
    assert code == 0
    assert json.loads(said)["ledger"] == str(config.ledger)
    code, said = serve_here(config, capfd, 1, as_json=False)
    assert code == 0
    assert said.startswith("gateway  http://127.0.0.1:")
    assert f"admin    key in {config.admin_key_path}" in said
    code, _ = serve_here(config, capfd, 2, as_json=False)
    assert code == 130


def test_engines_that_are_not_up_yet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A gateway may be started before its engines; it says so, and does not guess what they are."""
    config = config_of("http://127.0.0.1:1", tmp_path / "run.gristmill")

    async def main() -> str:
        serving = asyncio.ensure_future(_serve(config, as_json=False))
        said = ""
        async with asyncio.timeout(30):
            while "next: " not in said:
                await asyncio.sleep(0.01)
                read = capfd.readouterr()
                said += read.out + read.err
            os.kill(os.getpid(), signal.SIGTERM)
            await serving
        return said

    said = asyncio.run(main())
    assert "engine   http://127.0.0.1:1  unknown  down" in said
    assert "no engine is up yet" in said


def test_a_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another program on the port is a matter of the machine, not of the command line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--upstream", "http://127.0.0.1:1", "--ledger", tmp_path / "l", "--port", port]
        ran = run(capsys, "serve", *options)
    assert ran.code == 3
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in ran.err
    assert "--port" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_signal_before_it_listens(tmp_path: Path, engine: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A deployment that is stopped at once must leave the ledger free."""
    ledger = tmp_path / "run.gristmill"
    code, said = serve_here(config_of(engine, ledger), capfd, 0, as_json=True)
    assert (code, said) == (0, "")
    SqliteLedger(ledger).close()
