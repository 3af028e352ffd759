"""A plain client of the model routes, which can also go away in the middle of an answer.

Invariant: what an `Answer` holds is what came over the socket, decoded and nothing else.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Answer", "ask", "leave"]

Json = dict[str, Any]
TIMEOUT_S = 120


@dataclass
class Answer:
    """A whole answer: a body, or the data of its events in order."""

    status: int
    headers: Mapping[str, str]
    body: Any = None
    events: list[Any] = field(default_factory=list)
    done: bool = False

    @property
    def whole(self) -> str:
        """Everything the client was told, as text."""
        return json.dumps(self.events or self.body)


def ask(base: str, path: str, key: str, body: Json, headers: Mapping[str, str] | None = None) -> Answer:
    """Post a request and read the answer to its end."""
    connection, answer = _post(base, path, key, body, headers or {})
    try:
        told = Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()})
        if "event-stream" not in told.headers.get("content-type", ""):
            raw = answer.read()
            told.body = json.loads(raw) if raw else None
            return told
        for data in _events(answer):
            if data == "[DONE]":
                told.done = True
            else:
                told.events.append(json.loads(data))
        return told
    finally:
        connection.close()


def leave(base: str, path: str, key: str, body: Json, *, after_events: int) -> int:
    """Post a request, close the connection after so many events of the answer (0: before any), return how many came."""
    if after_events == 0:
        connection = _connect(base)
        _send(connection, base, path, key, body, {})
        connection.close()
        return 0
    connection, answer = _post(base, path, key, body, {})
    seen = 0
    for _ in _events(answer):
        seen += 1
        if seen == after_events:
            break
    connection.sock and connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    answer.close()
    return seen


def _connect(base: str) -> http.client.HTTPConnection:
    parts = urlsplit(base)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)


def _send(
    connection: http.client.HTTPConnection, base: str, path: str, key: str, body: Json, headers: Mapping[str, str]
) -> None:
    said = {"content-type": "application/json", "authorization": f"Bearer {key}", **headers}
    connection.request("POST", urlsplit(base).path + path, json.dumps(body), said)


def _post(
    base: str, path: str, key: str, body: Json, headers: Mapping[str, str]
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = _connect(base)
    _send(connection, base, path, key, body, headers)
    return connection, connection.getresponse()


def _events(answer: http.client.HTTPResponse) -> Iterator[str]:
    data: list[str] = []
    for raw in answer:
        line = raw.decode().rstrip("\r\n")
        if line.startswith("data:"):
            data.append(line[5:].lstrip(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []
