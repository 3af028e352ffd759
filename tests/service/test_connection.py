from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from gristmill.service.connection import BoundedConnection
from tests.service.gateways import Gateway, request, scripted_gateway, user


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with scripted_gateway(tmp_path / "run.gristmill") as running:
        yield running


def connect(gateway: Gateway) -> socket.socket:
    parts = urlsplit(gateway.url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 0), timeout=20)


def sent_until_closed(connection: socket.socket, piece: bytes, most: int) -> int:
    """Send a piece again and again; return how many bytes were taken."""
    sent = 0
    try:
        while sent < most:
            connection.sendall(piece)
            sent += len(piece)
    except OSError:
        return sent
    return sent


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"X-A: " + b"a" * 4000 + b"\r\n"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: ", b"a" * 4000),
        (b"GET /", b"a" * 4000),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X-A: aaaaaaaa\r\n" * 300),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"a=b;" * 1000),
        (b"", b"\r\n" * 2000),
    ],
    ids=["headers", "one header", "path", "trailers", "chunk extension", "blank lines"],
)
def test_what_is_no_request_is_not_piled_up(gateway: Gateway, begin: bytes, piece: bytes) -> None:
    """An agent without any key must not be able to take the gateway's memory."""
    most = 64 * 1024 * 1024
    with connect(gateway) as connection:
        connection.sendall(begin)
        assert sent_until_closed(connection, piece, most) < most
    assert request(gateway.url, "GET", "/healthz").status == 200


def test_a_head_that_is_too_large_is_told_so(gateway: Gateway) -> None:
    """A client with a huge cookie should know what was wrong."""
    with connect(gateway) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 70_000)
        answer = connection.recv(100)
    assert answer.startswith(b"HTTP/1.1 431 ")


def until_closed(connection: socket.socket) -> None:
    """Read until the other side has closed; it does so in time, or the test fails."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        return


def test_a_request_that_does_not_come_is_not_waited_for(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand connections that say nothing are a thousand that others do not get."""
    monkeypatch.setattr(BoundedConnection, "silent_s", 0.2)
    body = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    key = gateway.mint()["key"].encode()
    body += b"Authorization: Bearer " + key + b"\r\n\r\n"
    for begin in (b"", b"GET / HTTP/1.1\r\nHost: lo", body, body + b"{"):
        with connect(gateway) as connection:
            connection.sendall(begin)
            until_closed(connection)
    parts = urlsplit(gateway.url)
    assert parts.hostname is not None
    kept = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    kept.request("GET", "/healthz")
    kept.getresponse().read()
    assert kept.sock is not None
    kept.sock.sendall(b"GET /healthz HT")
    until_closed(kept.sock)
    kept.close()


def test_a_slow_answer_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation takes minutes; its client says nothing meanwhile, or begins its next request."""
    monkeypatch.setattr(BoundedConnection, "silent_s", 0.2)
    script = {"rules": [{"reply": {"content": "At last.", "delay_s": 1.0}}]}
    with scripted_gateway(tmp_path / "slow.gristmill", script) as gateway:
        key = gateway.mint()["key"]
        assert gateway.chat(key).status == 200
        body = json.dumps({"model": "scripted", "messages": [user("hi")]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        with connect(gateway) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body + b"GET /healthz HT")
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


def test_ordinary_requests_are_not_bounded(gateway: Gateway) -> None:
    """Long prompts, and many requests on one connection, are what the gateway is for."""
    key = gateway.mint()["key"]
    parts = urlsplit(gateway.url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "X-Note": "n" * 8000}
    for _ in range(12):
        connection.request("GET", "/v1/models", headers=headers)
        answer = connection.getresponse()
        assert (answer.status, len(answer.read()) > 0) == (200, True)
    body = json.dumps({"model": "scripted", "messages": [user("word " * 100_000)]}).encode()
    connection.request("POST", "/v1/chat/completions", body, headers)
    answer = connection.getresponse()
    answer.read()
    assert answer.status in {200, 400}
    connection.close()
