"""Clients of the stack: requests of three dialects over raw sockets, and when what came of them arrived.

The answer is only looked at for its end and for the times that the engine wrote into it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import orjson
import uvloop

__all__ = ["ROUTES", "Answer", "Together", "ask_all", "ask_one", "post", "request", "run_load"]

ROUTES: Final = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
_SENT: Final = re.compile(rb"@(\d{8}\.\d{6})@")
_KEPT_bytes: Final = 16  # a time that was cut in two is found with the next piece
_START_EVERY_s: Final = 0.004


class Answer(NamedTuple):
    """When an answer came, in seconds after its request, and what it was.

    Attributes:
        began_at: of the request, on the monotonic clock.
        first_s: of the first byte of its body.
        whole_s: of its end.
        bytes: size of its body as sent.
        sent_at, came_at: when each event that says so was sent by the engine and arrived here, on the monotonic clock.
        body: kept where it was asked for.
    """

    began_at: float
    first_s: float
    whole_s: float
    bytes: int
    sent_at: Sequence[float]
    came_at: Sequence[float]
    body: bytes

    def delays_s(self) -> list[float]:
        """Return how long each event was on its way."""
        return [came - sent for sent, came in zip(self.sent_at, self.came_at, strict=True)]


def request(
    dialect: str,
    key: str | None,
    *,
    model: str,
    stream: bool,
    max_tokens: int,
    said: str = "Go.",
    ids: bool = False,
    **more: Any,
) -> bytes:
    """Return a request; with `ids`, asked of an engine as the gateway would."""
    turn = [{"role": "user", "content": said}]
    body: dict[str, Any] = {"model": model, "stream": stream, **more}
    if dialect == "responses":
        body |= {"input": turn, "max_output_tokens": max_tokens}
    else:
        body.setdefault("messages", turn)
        body["max_tokens"] = max_tokens
    if ids:
        body |= {"logprobs": True, "return_token_ids": True}
    return post(ROUTES[dialect], key, body)


def post(path: str, key: str | None, body: Any) -> bytes:
    """Return a request of any kind."""
    sent = orjson.dumps(body)
    bearer = "" if key is None else f"authorization: Bearer {key}\r\n"
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{bearer}content-type: application/json\r\n"
        f"content-length: {len(sent)}\r\n\r\n"
    )
    return head.encode() + sent


class _Connection(asyncio.Protocol):
    """One connection, on which one answer is waited for at a time."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._done: asyncio.Future[Answer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def close(self) -> None:
        self._transport.close()

    async def ask(self, sent: bytes, *, keep: bool = False) -> Answer:
        self._done = asyncio.get_running_loop().create_future()
        self._keep = keep
        self._head, self._length = b"", -1
        self._first_s = 0.0
        self._size = 0
        self._tail = b""
        self._pieces: list[bytes] = []
        self._sent_at: list[float] = []
        self._came_at: list[float] = []
        self._began = time.monotonic()
        self._transport.write(sent)
        return await self._done

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self._length < 0:
            self._head += data
            if b"\r\n\r\n" not in self._head:
                return
            head, _, data = self._head.partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 20"):
                self._fail(RuntimeError(f"expected success, got {head[:400]!r} {data[:400]!r}"))
                return
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            self._length = int(length.group(1)) if length else 0
            if not data:
                return
        self._first_s = self._first_s or now - self._began
        self._size += len(data)
        if self._keep:
            self._pieces.append(data)
        if not self._length:
            looked = self._tail + data
            for found in _SENT.finditer(looked):
                self._sent_at.append(float(found.group(1)))
                self._came_at.append(now)
            self._tail = looked[-_KEPT_bytes:] if b"@" in looked[-_KEPT_bytes:] else looked[-5:]
            ended = looked.endswith(b"0\r\n\r\n")
        else:
            ended = self._size >= self._length
        if ended and self._done is not None and not self._done.done():
            whole_s = now - self._began
            body = b"".join(self._pieces)
            self._done.set_result(
                Answer(
                    self._began, self._first_s, whole_s, self._size, tuple(self._sent_at), tuple(self._came_at), body
                )
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(RuntimeError(f"the connection was closed: {exc!r}"))

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


async def _connect(port: int) -> _Connection:
    _, connection = await asyncio.get_running_loop().create_connection(_Connection, "127.0.0.1", port)
    return connection


async def ask_one(port: int, sent: bytes) -> Answer:
    """Ask once and keep the body."""
    connection = await _connect(port)
    try:
        return await connection.ask(sent, keep=True)
    finally:
        connection.close()


class Together(NamedTuple):
    """Answers that were asked for at once, and two looks: when the last was asked for, and when the first was there."""

    answers: list[Answer]
    opened_at: float
    opened: float
    ended_at: float
    ended: float

    @property
    def all_open(self) -> bool:
        """Whether there was a time at which all of them were open."""
        return self.opened_at < min(one.began_at + one.whole_s for one in self.answers)

    def delays_s(self) -> list[float]:
        """Return how long each event was on its way that was sent while all were open, in order of length."""
        pairs = ((sent, came) for one in self.answers for sent, came in zip(one.sent_at, one.came_at, strict=True))
        return sorted(came - sent for sent, came in pairs if self.opened_at <= sent <= self.ended_at)


async def ask_all(port: int, requests: Sequence[bytes], look: Callable[[], float]) -> Together:
    """Ask everything at once, each on a connection of its own; `look` is called at both ends of that time."""
    connections: list[_Connection] = []
    for _ in requests:
        connections.append(await _connect(port))
    asked: list[asyncio.Task[Answer]] = []
    for connection, sent in zip(connections, requests, strict=True):
        asked.append(asyncio.ensure_future(connection.ask(sent)))
        await asyncio.sleep(_START_EVERY_s)
    opened_at, opened = time.monotonic(), look()
    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    ended_at, ended = time.monotonic(), look()
    answers = await asyncio.gather(*asked)
    for connection in connections:
        connection.close()
    return Together(answers, opened_at, opened, ended_at, ended)


async def _load(port: int, requests: Sequence[bytes], at_once: int) -> list[Answer]:
    waiting = iter(requests)
    answers: list[Answer] = []

    async def work() -> None:
        connection = await _connect(port)
        for sent in waiting:
            answers.append(await connection.ask(sent))
        connection.close()

    await asyncio.gather(*(work() for _ in range(at_once)))
    return answers


def run_load(port: int, requests: Sequence[bytes], at_once: int) -> list[Answer]:
    """Ask everything, so many at a time."""
    return uvloop.run(_load(port, requests, at_once))
