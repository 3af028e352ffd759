from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gristmill.errors import CaptureError, Code, ConfigError
from gristmill.ledger import AttemptKey
from gristmill.service.client import AdminClient
from gristmill.service.place import joined
from tests.service.gateways import Gateway, scripted_gateway


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with scripted_gateway(tmp_path / "run.gristmill") as running:
        yield running


@contextmanager
def answering(status: int, body: bytes, **headers: str) -> Iterator[tuple[str, list[str]]]:
    """Serve one answer to everything; gives the address and the paths that were asked."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_what_the_gateway_refuses_keeps_its_words(gateway: Gateway) -> None:
    """The code and the place are what a caller decides by."""
    client = AdminClient(gateway.url, gateway.admin_key)
    with pytest.raises(CaptureError) as caught:
        client.open(rollout_id="a/b")
    assert (caught.value.code, caught.value.where) == (Code.OPTION_INVALID, "$.rollout_id")
    with pytest.raises(CaptureError) as unknown:
        client.calls(AttemptKey("nobody"))
    assert unknown.value.code == Code.ROLLOUT_UNKNOWN
    with pytest.raises(CaptureError) as wrong:
        AdminClient(gateway.url, "gma_" + "x" * 43).open()
    assert wrong.value.code == Code.KEY_UNKNOWN
    assert "x" * 43 not in str(wrong.value)


def test_a_gateway_below_a_path(gateway: Gateway) -> None:
    """Behind a proxy a gateway has a path of its own."""
    with answering(200, b'{"rollouts": []}') as (address, asked):
        assert AdminClient(f"{address}/gate/", "k").rollouts(state="open") == []
        assert asked == ["/gate/gristmill/v1/rollouts?state=open"]


def test_the_admin_key_goes_nowhere_else(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A redirect or a proxy would be told the key."""
    with answering(200, b"{}") as (elsewhere, asked):
        monkeypatch.setenv("http_proxy", elsewhere)
        assert AdminClient(gateway.url, gateway.admin_key).rollouts() == []
        with answering(307, b"{}", Location=f"{elsewhere}/x") as (address, _), pytest.raises(CaptureError):
            AdminClient(address, "k").rollouts()
        assert asked == []


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>"),
        (502, b"Bad Gateway"),
        (200, b"[]"),
        (500, b"{}"),
        (404, b'{"detail": "Not Found"}'),
        (404, b'{"error": {"message": "no", "type": "NotFoundError", "code": 404}}'),
        (200, b'{"rollout": 1}'),
    ],
)
def test_something_else_at_the_address(status: int, body: bytes) -> None:
    """A wrong port must read as a wrong port."""
    with answering(status, body) as (address, _):
        client = AdminClient(address, "k")
        with pytest.raises(CaptureError) as caught:
            client.open()
    assert f"no gateway of ours answers at {address}" in caught.value.message
    assert caught.value.code == Code.OPTION_INVALID


def test_a_wrong_admin_key_names_its_file(gateway: Gateway, tmp_path: Path) -> None:
    """With three ledgers about, the question is which file it was."""
    file = tmp_path / "other.admin-key"
    file.write_text("gma_" + "x" * 43)
    file.chmod(0o600)
    client = joined(gateway.url, file).client
    with pytest.raises(CaptureError) as caught:
        client.open()
    assert caught.value.code == Code.KEY_UNKNOWN
    assert str(file) in caught.value.message
    assert "x" * 43 not in caught.value.message


def test_an_address_is_checked_first() -> None:
    """The key is sent to what was meant, or to nobody."""
    for address in ("localhost:1", "file:///x", "http:///x", "https://h/?q", "http://h/#f"):
        with pytest.raises(ConfigError):
            AdminClient(address, "k")


def test_a_gateway_that_is_ending_is_asked_again(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that looks whether it may end says no for a moment."""
    client = AdminClient(gateway.url, gateway.admin_key)
    gateway.service.rollouts.opening = False
    timer = threading.Timer(0.2, setattr, (gateway.service.rollouts, "opening", True))
    timer.start()
    assert client.open(rollout_id="again").attempt == 0
    timer.join()
    monkeypatch.setattr("gristmill.service.client._BUSY_s", 0.1)
    gateway.service.rollouts.opening = False
    with pytest.raises(CaptureError) as caught:
        client.open()
    assert caught.value.code == Code.GATEWAY_BUSY
