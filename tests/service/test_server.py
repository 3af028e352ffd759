from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import urllib.request
from pathlib import Path

import pytest

from gristmill.errors import Code, ConfigError, LedgerError
from gristmill.ledger import SqliteLedger, SqliteReader, read_holder
from gristmill.scripted import ScriptedEngine
from gristmill.service.server import Service, ServiceThread, check_listener
from tests.service.gateways import SCRIPT, Answer, Gateway, config_of, gateway_over, scripted_gateway, user, wait_until

ENGINE = "http://127.0.0.1:1"


def test_the_ledger_names_the_gateway(tmp_path: Path) -> None:
    """Whoever finds the ledger taken has to know where to go."""
    with scripted_gateway(tmp_path / "run.gristmill") as gateway:
        holder = read_holder(gateway.ledger)
        assert holder is not None
        assert holder.address == gateway.url
        with pytest.raises(LedgerError) as caught:
            SqliteLedger(gateway.ledger)
        assert caught.value.code == Code.LEDGER_LOCKED
        assert gateway.url in str(caught.value.hint)
        with pytest.raises(LedgerError):
            ServiceThread(config_of(ENGINE, gateway.ledger))
    assert read_holder(tmp_path / "run.gristmill") is None
    SqliteLedger(tmp_path / "run.gristmill").close()


def test_nothing_is_left_of_a_start_that_failed(tmp_path: Path) -> None:
    """A second try must not meet the lock or the port of the first."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            ServiceThread(config_of(ENGINE, tmp_path / "run.gristmill", port=port))
        assert caught.value.where == "port"
        assert str(port) in caught.value.message
    for missing in ("cert.pem", "key.pem"):
        (tmp_path / missing).write_text("none")
    tls = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    with pytest.raises(ConfigError) as caught:
        ServiceThread(config_of(ENGINE, tmp_path / "run.gristmill", **tls))
    assert caught.value.where == "tls_cert"
    with gateway_over(ENGINE, tmp_path / "run.gristmill", port=port) as gateway:
        assert gateway.url.endswith(f":{port}")


def test_calls_in_flight_end_before_the_gateway_does(tmp_path: Path) -> None:
    """A deployment that restarts the gateway must not cost the replies that are under way."""
    script = {"rules": [{"reply": {"content": "In time.", "delay_s": 1.0}}]}
    answers: list[Answer] = []
    with scripted_gateway(tmp_path / "run.gristmill", script, drain_s=20) as gateway:
        minted = gateway.mint()
        thread = threading.Thread(target=lambda: answers.append(gateway.chat(minted["key"])))
        thread.start()
        path = f"/rollouts/{minted['rollout_id']}/0"
        wait_until(lambda: gateway.admin("GET", path).json["in_flight"] == 1, "the call is in flight")
    thread.join()
    assert answers[0].status == 200
    assert answers[0].json["choices"][0]["message"]["content"].strip() == "In time."
    with SqliteReader(tmp_path / "run.gristmill") as ledger:
        counts = ledger.counts()
    assert (counts.calls, counts.usable_calls, counts.lost) == (1, 1, 0)


def test_new_calls_are_refused_while_it_ends(tmp_path: Path) -> None:
    """A harness that is told 503 tries again elsewhere or later; one that hangs does not."""

    async def main(engine: str) -> None:
        service = Service(config_of(engine, tmp_path / "run.gristmill", drain_s=20))
        await service.start()
        gateway = Gateway(service, Path(service.config.admin_key_path).read_text().strip())
        minted = await asyncio.to_thread(gateway.mint)
        running = asyncio.ensure_future(asyncio.to_thread(gateway.chat, minted["key"], user("slow")))
        while not service.gateway.attempts.running():
            await asyncio.sleep(0.01)
        stopping = asyncio.ensure_future(service.stop())
        await asyncio.sleep(0)
        refused = await asyncio.to_thread(gateway.chat, minted["key"])
        assert refused.status == 503
        assert "retry-after" in refused.headers
        service.hurry()
        stopped = await stopping
        assert stopped.aborted == 1
        await running

    with ScriptedEngine(SCRIPT).serve() as engine:
        asyncio.run(main(engine))
    with SqliteReader(tmp_path / "run.gristmill") as ledger:
        counts = ledger.counts()
    assert counts.calls + counts.lost == 1


@pytest.mark.parametrize(
    ("settings", "good"),
    [
        ({}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "10.0.0.5", "public_url": "http://gate.example"}, False),
        ({"host": "0.0.0.0", "public_url": "https://gate.example"}, True),
        ({"host": "0.0.0.0", "insecure_http": True}, True),
        ({"host": "0.0.0.0", "tls_cert": Path("c"), "tls_key": Path("k")}, True),
    ],
)
def test_keys_do_not_travel_in_the_clear_unasked(tmp_path: Path, settings: dict[str, object], good: bool) -> None:
    """On a shared network everybody reads the key, and with it speaks as the agent."""
    config = config_of(ENGINE, tmp_path / "run.gristmill", **settings)
    if good:
        check_listener(config)
        return
    with pytest.raises(ConfigError) as caught:
        check_listener(config)
    assert "--insecure-http" in str(caught.value.hint)


def test_a_gateway_speaks_tls(tmp_path: Path) -> None:
    """Sandboxes on other machines send their keys over a network."""
    cert, key = self_signed(tmp_path)
    with ScriptedEngine(SCRIPT).serve() as engine:
        config = config_of(engine, tmp_path / "run.gristmill", tls_cert=cert, tls_key=key)
        with ServiceThread(config) as thread:
            assert thread.service.address.startswith("https://127.0.0.1:")
            context = ssl.create_default_context(cafile=str(cert))
            opener = urllib.request.build_opener(
                urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
            )
            with opener.open(f"{thread.service.address}/healthz", timeout=10) as answer:
                assert answer.status == 200


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for loopback."""
    import shutil
    import subprocess

    openssl = shutil.which("openssl")
    assert openssl is not None, "openssl makes the test's certificate"
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key
