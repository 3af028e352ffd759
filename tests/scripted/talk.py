"""Talks to a scripted engine over HTTP, whole and piece by piece."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gristmill.captures import Reply, decode_reply

FIXTURES = Path(__file__).parents[1] / "fixtures" / "engine"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TIMEOUT_S = 20.0

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a shell command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
            "required": ["command"],
        },
    },
}


class Said(NamedTuple):
    """An answer."""

    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def chunks(self) -> list[Any]:
        """The events of a stream, decoded, without `[DONE]`."""
        events = [event.removeprefix("data: ") for event in self.data.decode().split("\n\n") if event]
        return [json.loads(event) for event in events if event != "[DONE]"]

    @property
    def stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def reply(self, path: str = CHAT, *, echo: bool = False) -> Reply:
        """Read it as a capture does."""
        if self.stream:
            return decode_reply(path, self.status, sse=self.data, echo=echo)
        return decode_reply(path, self.status, self.data, echo=echo)


@contextmanager
def connected(url: str) -> Generator[http.client.HTTPConnection]:
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
    try:
        yield connection
    finally:
        connection.close()


def ask(url: str, path: str, body: Any = None, **headers: str) -> Said:
    """Post a body, or get where there is none; header names are written with underscores."""
    with connected(url) as connection:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        data = None if body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, data, {"content-type": "application/json", **sent})
        response = connection.getresponse()
        return Said(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def chat(content: str = "hi", **more: Any) -> dict[str, Any]:
    """A Chat request that asks for everything."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": content}], "return_token_ids": True}
    body |= {"logprobs": True, "top_logprobs": 2, **more}
    if body.get("stream") and "stream_options" not in body:
        body["stream_options"] = {"include_usage": True}
    return body


def always(reply: dict[str, Any] | list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """A script with one reply for everything."""
    return {**settings, "rules": [{"reply": reply}]}


@contextmanager
def begun(url: str, path: str, body: Any, **headers: str) -> Generator[http.client.HTTPResponse]:
    """Post a body and give the response when its head has come."""
    with connected(url) as connection:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", path, json.dumps(body).encode(), {"content-type": "application/json", **sent})
        yield connection.getresponse()


def events_of(response: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the data of events as they come."""
    while line := response.readline():
        text = line.decode().strip()
        if text:
            yield text.removeprefix("data: ")


def fixture(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / f"{name}.json").read_bytes())
