"""Tiny requests that sample, as a probe makes them, and what came of each.

Invariant: a request asks for a few tokens and is like a call of a harness: the same adapter, route and reading.

Not here: what the answers show (probe).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from uuid import uuid4

import msgspec

from gristmill.captures import Reply, ReplyChoice, decode_reply
from gristmill.gateway.upstream.client import Answer, Client
from gristmill.gateway.upstream.protocol import Ask, Engine, UpstreamError
from gristmill.gateway.upstream.spec import UpstreamSpec
from gristmill.records import Dialect

__all__ = ["QUESTION", "Sample", "Sampler"]

JsonObject = dict[str, Any]

QUESTION: Final = ({"role": "user", "content": "Count from one to twenty in words."},)
"""What every probe asks; its answer goes on for longer than the few tokens that are sampled."""

_FEW: Final = 6


class _Body(msgspec.Struct):
    choices: list[JsonObject] = []


_decode = msgspec.json.Decoder(_Body).decode


class Sample(NamedTuple):
    """What came of one request: a reply, or why there is none.

    Attributes:
        status: of HTTP; 0 where there was no answer.
        reply: as captures reads it, None where there was no answer.
        choice: its first choice as it stood in a body; empty where it was streamed.
        error: what the engine or the connection said.
    """

    status: int = 0
    reply: Reply | None = None
    choice: Mapping[str, Any] = {}
    error: str | None = None

    @property
    def first(self) -> ReplyChoice:
        """The first choice as captures reads it; one without anything where there is no reply."""
        return self.reply.choices[0] if self.reply is not None else ReplyChoice()

    @property
    def refused(self) -> bool:
        """Whether the engine refused the request for what it asks."""
        return self.status in {400, 422}


class Sampler:
    """Asks one engine for samples of one model.

    Args:
        client: asks.
        spec: the engine.
        model: its own name of the model.
        timeout_s: of each request.
    """

    def __init__(self, client: Client, spec: UpstreamSpec, model: str, timeout_s: float) -> None:
        self._client = client
        self._spec = spec
        self._timeout_s = timeout_s
        self.model: Final = model

    async def body(self, engine: Engine, **fields: Any) -> Sample:
        """Sample without a stream; `fields` are added to the request."""
        return await self._sample(engine, False, fields)

    async def stream(self, engine: Engine, **fields: Any) -> Sample:
        """Sample as a stream."""
        return await self._sample(engine, True, fields)

    async def post(self, path: str, body: JsonObject) -> Answer | None:
        """Send a request that samples nothing; None where it was not answered."""
        try:
            return await self._client.answer(self._spec, Ask(path, body), self._timeout_s)
        except UpstreamError:
            return None

    async def _sample(self, engine: Engine, stream: bool, fields: Mapping[str, Any]) -> Sample:
        asked = {"model": self.model, "messages": list(QUESTION), "max_tokens": _FEW, "temperature": 0, **fields}
        ask = engine.ask(Dialect.CHAT, asked, f"probe-{uuid4().hex}", stream=stream)
        try:
            answer = await self._client.answer(self._spec, ask, self._timeout_s)
        except UpstreamError as error:
            return Sample(error=error.message)
        as_stream = stream and answer.status == 200
        if as_stream and not answer.headers.get("content-type", "").startswith("text/event-stream"):
            return Sample(answer.status, error="a stream was asked for and a body came")
        whole, events = (None, answer.body) if as_stream else (answer.body, None)
        reply = decode_reply(Dialect.CHAT.value, answer.status, whole, events)
        return Sample(answer.status, reply, {} if stream else _first_choice(answer.body), reply.error)


def _first_choice(body: bytes) -> JsonObject:
    try:
        choices = _decode(body).choices
    except msgspec.DecodeError:
        return {}
    return choices[0] if choices else {}
