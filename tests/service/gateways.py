"""Gateways for tests: a scripted engine, a service in front of it, and raw requests to it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from gristmill.gateway.config import EngineSetting, GatewayConfig
from gristmill.gateway.keys import read_admin_key
from gristmill.scripted import ScriptedEngine
from gristmill.service.server import Service, ServiceThread

Json = dict[str, Any]

TOOL: Json = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}

SCRIPT: Json = {
    "rules": [
        {"when": {"last": "slow"}, "reply": {"content": "At last.", "delay_s": 30}},
        {
            "when": {"tools": True},
            "turns": [
                {"content": "Looking.", "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]},
                {"content": "Done."},
            ],
        },
        {"reply": {"content": "Hello."}},
    ]
}


class Answer(NamedTuple):
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """The code of an error, in whatever shape."""
        return self.json["error"]["code"]


def request(
    base_url: str,
    method: str,
    path: str,
    body: Any = None,
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    data: bytes | None = None,
    timeout_s: float = 20.0,
) -> Answer:
    """Send one request, its path as it is."""
    parts = urlsplit(base_url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    sent = dict(headers or {})
    if key is not None:
        sent["Authorization"] = f"Bearer {key}"
    if body is not None:
        data, sent["Content-Type"] = json.dumps(body).encode(), "application/json"
    try:
        connection.request(method, path, data, sent)
        answer = connection.getresponse()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


class Gateway(NamedTuple):
    """A service that runs, and its administrator's key."""

    service: Service
    admin_key: str

    @property
    def url(self) -> str:
        return self.service.address

    @property
    def ledger(self) -> Path:
        return self.service.config.ledger

    def admin(self, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        """Ask the admin API."""
        return request(self.url, method, f"/gristmill/v1{path}", body, **{"key": self.admin_key, **more})

    def mint(self, **asked: Any) -> Json:
        """Open a rollout."""
        answer = self.admin("POST", "/rollouts", asked)
        assert answer.status == 201, answer.body
        return answer.json

    def chat(self, key: str, *messages: Json, tools: bool = False, **more: Any) -> Answer:
        """Make a model call."""
        body: Json = {"model": "scripted", "messages": list(messages) or [user("hi")], **more}
        if tools:
            body["tools"] = [TOOL]
        return request(self.url, "POST", "/v1/chat/completions", body, key=key)


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def two_turns(gateway: Gateway, key: str) -> list[Json]:
    """Let an agent of two turns run, and return its history."""
    messages: list[Json] = [user("Do it.")]
    first = gateway.chat(key, *messages, tools=True).json["choices"][0]["message"]
    messages.append({name: first[name] for name in ("role", "content", "tool_calls")})
    messages.append({"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "a b"})
    second = gateway.chat(key, *messages, tools=True).json["choices"][0]["message"]
    messages.append({"role": "assistant", "content": second["content"]})
    return messages


def config_of(engine: str, ledger: Path, **more: Any) -> GatewayConfig:
    settings: Json = {"port": 0, "min_free_bytes": 0, "log_level": "error", **more}
    return GatewayConfig(upstreams=(EngineSetting(url=engine),), ledger=ledger, **settings)


@contextmanager
def gateway_over(engine: str, ledger: Path, **more: Any) -> Generator[Gateway]:
    """Run a gateway in front of an engine."""
    with ServiceThread(config_of(engine, ledger, **more)) as thread:
        yield Gateway(thread.service, read_admin_key(thread.service.config.admin_key_path))


@contextmanager
def scripted_gateway(ledger: Path, script: Json = SCRIPT, **more: Any) -> Generator[Gateway]:
    """Run a gateway in front of a scripted engine."""
    with ScriptedEngine(script).serve() as engine, gateway_over(engine, ledger, **more) as gateway:
        yield gateway


def wait_until(holds: Any, what: str, deadline_s: float = 15.0) -> None:
    """Wait for a condition; its coming decides, not the time."""
    until = monotonic() + deadline_s
    while not holds():
        assert monotonic() < until, f"not in {deadline_s} s: {what}"
        sleep(0.01)
