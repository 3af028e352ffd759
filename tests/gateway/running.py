"""A gateway that runs: under uvicorn on a loopback port, over a ledger in a folder of the test, before a given engine.

Everything of it lives on the test's own event loop, so that a test can look inside between two steps; a scripted engine
has a thread and a loop of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import uvicorn

from gristmill.errors import Code, LedgerError
from gristmill.gateway.app import Gateway
from gristmill.gateway.keys import key_digest, mint_key
from gristmill.gateway.settings import load_settings
from gristmill.ledger import AttemptKey, AttemptSetup, SqliteLedger
from gristmill.records import CallRecord, Capture, Dialect, Exchange
from gristmill.scripted import ScriptedEngine, Seen
from gristmill.service.connection import BoundedConnection
from tests.gateway.upstream.wire import FakeEngine, Wire, until
from tests.gateway.upstream.wire import Seen as Asked

__all__ = [
    "DIALECTS",
    "DONE",
    "PATHS",
    "Answer",
    "Asked",
    "HandEngine",
    "Rollout",
    "Running",
    "Wire",
    "body_of",
    "engine_of",
    "error_of",
    "gateway",
    "piece",
    "run",
    "sampled",
    "saw_finish",
    "spoken",
    "until",
    "usage",
]

DIALECTS: Final = (Dialect.CHAT, Dialect.COMPLETIONS, Dialect.RESPONSES, Dialect.MESSAGES)
PATHS: Final = {
    Dialect.CHAT: "/v1/chat/completions",
    Dialect.COMPLETIONS: "/v1/completions",
    Dialect.RESPONSES: "/v1/responses",
    Dialect.MESSAGES: "/v1/messages",
}
PROBE: Final = "Count from one"
"""What every request of a probe holds, and no request of a test."""


def run(main: Coroutine[Any, Any, None], *, deadline_s: float = 60.0) -> None:
    """Run a test's coroutine, with a deadline against hanging."""

    async def bounded() -> None:
        async with asyncio.timeout(deadline_s):
            await main

    asyncio.run(bounded())


# ---- engines ---------------------------------------------------------------------------------------------------------


def engine_of(*rules: Mapping[str, Any], **settings: Any) -> ScriptedEngine:
    """Make an engine of rules, each a whole one or a reply; before them stands one that answers probes."""
    listed = [rule if {"reply", "turns"} & rule.keys() else {"reply": rule} for rule in rules]
    probe = {"name": "probe", "when": {"user": PROBE}, "reply": {"content": "one two three four five six seven"}}
    return ScriptedEngine({"models": ["m"], **settings, "rules": [probe, *listed]})


def sampled(engine: ScriptedEngine) -> list[Seen]:
    """Return the requests that a scripted engine was asked to sample, without those of probes."""
    return [seen for seen in engine.requests if seen.rule != "probe" and PROBE not in json.dumps(seen.body)]


Play = Callable[[Asked, Wire], Awaitable[None]]


class HandEngine(FakeEngine):
    """An engine that looks like vLLM and whose every byte of an answer the test decides.

    Attributes:
        play: answers a request that samples; its argument is the route's `chunk` maker.
        calls: the requests that samples were asked by, without those of probes.
    """

    def __init__(self, play: Play) -> None:
        super().__init__()
        self.play = play
        self.calls: list[Asked] = []
        self.healthy = True
        card = {"id": "m", "owned_by": "vllm", "max_model_len": 32768}
        self.says("/v1/models", {"object": "list", "data": [card]})
        self.says("/version", {"version": "0.32.0"})
        self.on("/health", self._health)
        for path in ("/v1/chat/completions", "/v1/completions"):
            self.on(path, self._sample)

    async def _health(self, _: Asked, wire: Wire) -> None:
        await wire.json({}, 200 if self.healthy else 503)

    async def _sample(self, seen: Asked, wire: Wire) -> None:
        if PROBE in json.dumps(seen.body):
            await wire.json({"error": {"message": "no probes"}}, 400)
            return
        self.calls.append(seen)
        await self.play(seen, wire)


IDS: Final = [11, 12, 13]


def piece(
    seen: Asked,
    text: str | None = None,
    ids: Iterable[int] = (),
    *,
    index: int = 0,
    finish: str | None = None,
    prompt: Iterable[int] | None = None,
    logprobs: Iterable[float] | None = None,
) -> bytes:
    """Return one chunk of a stream as vLLM writes it on the route that was asked."""
    listed = list(ids)
    values = [-0.5] * len(listed) if logprobs is None else list(logprobs)
    head: dict[str, Any] = {"id": "engine-id", "created": 1, "model": "m"}
    choice: dict[str, Any] = {"index": index, "finish_reason": finish, "token_ids": listed or None}
    if seen.path.endswith("/chat/completions"):
        head["object"] = "chat.completion.chunk"
        if prompt is not None:
            head["prompt_token_ids"] = list(prompt)
        choice["delta"] = {} if text is None else {"content": text}
        if prompt is not None:
            choice["delta"] = {"role": "assistant", "content": ""}
        choice["logprobs"] = {"content": [{"token": "x", "logprob": value, "top_logprobs": []} for value in values]}
    else:
        head["object"] = "text_completion"
        choice["text"] = text or ""
        choice["prompt_token_ids"] = None if prompt is None else list(prompt)
        choice["logprobs"] = {"tokens": ["x"] * len(values), "token_logprobs": values, "top_logprobs": None}
    return b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> bytes:
    """Return the chunk with the counts."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return b"data: " + json.dumps({"id": "engine-id", "model": "m", "choices": [], "usage": counts}).encode() + b"\n\n"


DONE: Final = b"data: [DONE]\n\n"


# ---- requests and replies --------------------------------------------------------------------------------------------


def body_of(dialect: Dialect, text: str = "Say hello.", *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """Return a request of a dialect with one user text."""
    body: dict[str, Any] = {"model": "asked-name"}
    match dialect:
        case Dialect.COMPLETIONS:
            body["prompt"] = text
        case Dialect.RESPONSES:
            body["input"] = text
        case Dialect.MESSAGES:
            body |= {"max_tokens": 64, "messages": [{"role": "user", "content": text}]}
        case _:
            body["messages"] = [{"role": "user", "content": text}]
    if stream:
        body["stream"] = True
    return {**body, **fields}


class Answer(NamedTuple):
    """What a client got: status, headers by lower-case name, and all bytes; `cut` where the connection broke."""

    status: int
    headers: dict[str, str]
    raw: bytes
    cut: bool = False

    @property
    def value(self) -> Any:
        return json.loads(self.raw)

    @property
    def events(self) -> list[Any]:
        """Return the data of the events of a stream, decoded, without `[DONE]`."""
        found: list[Any] = []
        for block in self.raw.decode().split("\n\n"):
            data = "".join(line[6:] for line in block.split("\n") if line.startswith("data: "))
            if data and data != "[DONE]":
                found.append(json.loads(data))
        return found

    @property
    def streamed(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def call_id(self) -> str:
        return self.headers["x-gristmill-call-id"]


def spoken(dialect: Dialect, answer: Answer) -> str:
    """Return the text of a reply, of choice 0."""
    if not answer.streamed:
        value = answer.value
        match dialect:
            case Dialect.COMPLETIONS:
                return value["choices"][0]["text"]
            case Dialect.RESPONSES:
                items = [item for item in value["output"] if item["type"] == "message"]
                return "".join(part["text"] for item in items for part in item["content"])
            case Dialect.MESSAGES:
                return "".join(block["text"] for block in value["content"] if block["type"] == "text")
            case _:
                return value["choices"][0]["message"]["content"]
    said: list[str] = []
    for event in answer.events:
        match dialect:
            case Dialect.RESPONSES:
                said.append(event["delta"] if event["type"] == "response.output_text.delta" else "")
            case Dialect.MESSAGES:
                delta = event.get("delta", {}) if event["type"] == "content_block_delta" else {}
                said.append(delta.get("text", ""))
            case _:
                for choice in event.get("choices", []):
                    if choice["index"] == 0:
                        text = choice["text"] if dialect is Dialect.COMPLETIONS else choice["delta"].get("content")
                        said.append(text or "")
    return "".join(said)


def saw_finish(dialect: Dialect, answer: Answer) -> bool:
    """Tell whether a client was told that its reply is complete."""
    if not answer.streamed:
        if answer.status != 200 or answer.cut or not answer.raw:
            return False
        value = answer.value
        return any(value.get(name) for name in ("choices", "stop_reason")) or value.get("status") == "completed"
    if dialect is Dialect.RESPONSES:
        kinds = {event["type"] for event in answer.events}
        return bool(kinds & {"response.completed", "response.incomplete"})
    if dialect is Dialect.MESSAGES:
        return any(event["type"] in {"message_delta", "message_stop"} for event in answer.events)
    finishes = [choice.get("finish_reason") for event in answer.events for choice in event.get("choices", [])]
    return any(finish is not None for finish in finishes) or b"data: [DONE]" in answer.raw


def error_of(dialect: Dialect, answer: Answer) -> dict[str, Any] | None:
    """Return the error that a client was told, None without one; what is in another dialect's shape fails."""
    if answer.streamed:
        if dialect is Dialect.RESPONSES:
            failed = [event for event in answer.events if event["type"] == "response.failed"]
            return failed[0]["response"]["error"] if failed else None
        found = [event for event in answer.events if "error" in event]
        if not found:
            return None
        value = found[0]
    elif answer.status < 400:
        return None
    else:
        value = answer.value
    if dialect is Dialect.MESSAGES:
        assert value["type"] == "error", value
        assert isinstance(value["error"]["type"], str)
    else:
        assert "type" not in value, value
        assert {"message", "type", "code"} <= value["error"].keys()
    assert isinstance(value["error"]["message"], str)
    return value["error"]


class Stream:
    """A streamed reply while it is read."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self._got = b""
        self._reading: asyncio.Task[None] = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for data in self.response.content.iter_any():
            self._got += data

    @property
    def so_far(self) -> Answer:
        """Return what has arrived."""
        return _answer(self.response, self._got)

    @property
    def ended(self) -> bool:
        return self._reading.done()

    async def whole(self) -> Answer:
        """Wait for the end."""
        try:
            await self._reading
        except aiohttp.ClientError:
            return _answer(self.response, self._got, cut=True)
        return self.so_far

    async def has(self, text: str) -> None:
        """Wait until a text has arrived."""
        await until(lambda: text.encode() in self._got or self._reading.done())
        assert text.encode() in self._got, self._got

    async def drop(self) -> None:
        """Close the connection, as a client does that has given up."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self.response.close()


def _answer(response: aiohttp.ClientResponse, raw: bytes, *, cut: bool = False) -> Answer:
    return Answer(response.status, {name.lower(): value for name, value in response.headers.items()}, raw, cut)


class Rollout:
    """A rollout with its key, as its harness has it."""

    def __init__(self, running: Running, key: AttemptKey, secret: str) -> None:
        self.running = running
        self.key = key
        self.secret = secret

    def headers(self, **more: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.secret}", **{n.replace("_", "-"): v for n, v in more.items()}}

    async def post(
        self, path: str, body: Any, *, headers: Mapping[str, str] | None = None, method: str = "POST"
    ) -> Answer:
        """Send a body to a path and read the whole answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json", **self.headers(), **(headers or {})}
        running = self.running
        async with running.client.request(method, running.url + path, data=data, headers=given) as response:
            raw = b""
            try:
                async for chunk in response.content.iter_any():
                    raw += chunk
            except aiohttp.ClientError:
                return _answer(response, raw, cut=True)
            return _answer(response, raw)

    async def ask(
        self,
        dialect: Dialect,
        text: str = "Say hello.",
        *,
        stream: bool = False,
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Answer:
        """Make a call and read the whole answer."""
        return await self.post(PATHS[dialect], body_of(dialect, text, stream=stream, **fields), headers=headers)

    async def open(self, dialect: Dialect, text: str = "Say hello.", **fields: Any) -> Stream:
        """Make a streamed call, whose answer is read in the background."""
        return await self.open_body(PATHS[dialect], body_of(dialect, text, stream=True, **fields))

    async def open_body(self, path: str, body: Mapping[str, Any]) -> Stream:
        given = {"content-type": "application/json", **self.headers()}
        data = json.dumps(body).encode()
        return Stream(await self.running.client.post(self.running.url + path, data=data, headers=given))

    def capture(self) -> Capture:
        """Read everything that the ledger has of it."""
        return self.running.ledger.read(self.key, exchanges=True)[0]

    def records(self) -> tuple[CallRecord, ...]:
        return self.capture().records

    def record(self, call_id: str) -> CallRecord:
        [found] = [record for record in self.records() if record.model_call_id == call_id]
        return found

    def exchange(self, call_id: str) -> Exchange:
        return self.capture().exchanges[call_id]

    async def settled(self, calls: int) -> tuple[CallRecord, ...]:
        """Wait until so many calls are stored and none is on its way; return them in commit order."""
        await until(lambda: len(self.records()) >= calls and self.running.gateway.attempts.running() == 0)
        await self.running.idle()
        records = self.records()
        assert len(records) == calls, records
        return records

    def sound(self) -> None:
        """Check what the ledger stores against itself."""
        assert self.running.ledger.check(self.key) == ()


class Running:
    """A gateway that serves.

    Attributes:
        gateway, ledger: as they are.
        url: where it listens.
        client: a client without keys, cookies or proxies.
    """

    def __init__(
        self, gateway: Gateway, ledger: SqliteLedger, port: int, client: aiohttp.ClientSession, server: uvicorn.Server
    ) -> None:
        self.gateway = gateway
        self.ledger = ledger
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.client = client
        self._server = server
        self.disks: list[Disk] = []

    def disk(self, *kinds: type[Any]) -> Disk:
        """Stand between the gateway and its ledger until the gateway ends."""
        disk = Disk(self.ledger, *kinds)
        self.disks.append(disk)
        return disk

    async def begin(self, rollout_id: str = "r", attempt: int = 0, **setup: Any) -> Rollout:
        """Open a rollout."""
        secret, key = mint_key(), AttemptKey(rollout_id, attempt)
        await self.gateway.attempts.begin(key, AttemptSetup(key_digest=key_digest(secret), **setup))
        return Rollout(self, key, secret)

    def again(self, rollout: Rollout) -> Rollout:
        """Take over a rollout that another gateway over the same ledger began."""
        return Rollout(self, rollout.key, rollout.secret)

    async def alone(self) -> None:
        """Wait until the gateway has seen every connection of a client close."""
        await until(lambda: not self._server.server_state.connections)
        for _ in range(5):
            await asyncio.sleep(0)

    def buffered(self) -> int:
        """Return how many bytes wait in the gateway for clients that do not read."""
        connections = list(self._server.server_state.connections)
        return sum(connection.transport.get_write_buffer_size() for connection in connections)

    async def measured(self) -> None:
        """Wait until the engines have been measured."""
        await until(lambda: all(engine["token_ids"] != "unknown" for engine in self.gateway.engines()))

    async def idle(self) -> None:
        """Wait until every request has been answered, and what nobody waits for is written."""
        assert await self.gateway.drained(10.0)
        await until(lambda: self.ledger.waiting() == 0)
        await self.gateway._desk.settle()

    async def get(self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> Answer:
        """Ask without a key."""
        async with self.client.request(method, self.url + path, headers=dict(headers or {})) as response:
            return _answer(response, await response.read())

    def metric(self, name: str, **labels: str) -> float:
        """Return a counter."""
        value = self.gateway.metrics.registry.get_sample_value(f"gristmill_{name}", labels)
        return 0.0 if value is None else value


class Disk:
    """Stands between a gateway and its ledger, to hold some writes back or to refuse them.

    Args:
        ledger: whose writes.
        kinds: which writes; others go through.

    Attributes:
        held: writes that wait for `release`.
        refused: how many were refused.
    """

    def __init__(self, ledger: SqliteLedger, *kinds: type[Any]) -> None:
        self._ledger = ledger
        self._submit = ledger.submit
        self._kinds = kinds
        self._refusals = 0
        self.held: list[tuple[Any, Future[Any]]] = []
        self.refused = 0
        setattr(ledger, "submit", self._stand_in)  # noqa: B010  the attribute of an instance is another's method

    def refuse(self, times: int) -> None:
        """Let so many writes fail, as on a full disk, and hold none."""
        self._refusals = times

    def _stand_in(self, write: Any) -> Future[Any]:
        if not isinstance(write, self._kinds):
            return self._submit(write)
        if self.refused < self._refusals:
            self.refused += 1
            failed: Future[Any] = Future()
            failed.set_exception(LedgerError("database or disk is full", code=Code.LEDGER_WRITE_FAILED))
            return failed
        if self._refusals:
            return self._submit(write)
        waits: Future[Any] = Future()
        self.held.append((write, waits))
        return waits

    async def holds(self, count: int) -> None:
        """Wait until so many writes are held."""
        await until(lambda: len(self.held) >= count)

    def release(self, error: LedgerError | None = None) -> None:
        """Make the held writes, or let them fail, and stand no longer between."""
        setattr(self._ledger, "submit", self._submit)  # noqa: B010  the attribute of an instance is another's method
        held, self.held = self.held, []
        for write, waits in held:
            if error is not None:
                waits.set_exception(error)
            else:
                self._submit(write).add_done_callback(lambda made, waits=waits: _pass_on(made, waits))


def _pass_on(made: Future[Any], waits: Future[Any]) -> None:
    error = made.exception()
    if error is not None:
        waits.set_exception(error)
    else:
        waits.set_result(made.result())


class _Server(uvicorn.Server):
    """A server that leaves the test's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@contextlib.asynccontextmanager
async def gateway(
    folder: Path,
    *engines: str,
    measured: bool = True,
    clock: Callable[[], float] | None = None,
    most_waiting: int = 4096,
    **settings: Any,
) -> AsyncIterator[Running]:
    """Run a gateway over the ledger in a folder; entering it again is a restart.

    Args:
        folder: of the ledger and the admin key.
        engines: their addresses.
        measured: wait until the engines have been measured.
        clock, most_waiting: of the ledger.
        settings: of the gateway.
    """
    given = {"upstreams": list(engines), "ledger": folder / "calls.ledger", "min_free_bytes": 0, **settings}
    config = load_settings(
        {"connect_timeout_s": 2.0, "health_timeout_s": 1.0, "abort_wait_s": 2.0, **given}, environment={}
    )
    options: dict[str, Any] = {} if clock is None else {"clock": clock}
    ledger = SqliteLedger(config.ledger, most_waiting=most_waiting, **options)
    app = Gateway(config, ledger)
    await app.start()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    server = _Server(
        uvicorn.Config(
            app.app,
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    client = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False)
    running = Running(app, ledger, listener.getsockname()[1], client, server)
    try:
        await until(lambda: server.started)
        if measured:
            await running.measured()
        yield running
    finally:
        for disk in running.disks:
            disk.release()
        await client.close()
        await app.close(drain_s=1.0)
        server.should_exit = True
        await serving
        listener.close()
        await asyncio.to_thread(ledger.close)
