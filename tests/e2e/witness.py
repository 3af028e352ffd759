"""A pass-through between gateway and engine that keeps what the engine really said.

Invariant: bytes pass unchanged in both directions, and what is kept is exactly what passed. Ids are read from it by the
few lines at the end of this file, which share nothing with the code they judge.

Not here: what is expected of the gateway (evidence).
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

__all__ = ["Fault", "Seen", "Witness", "sampled"]

_SAMPLING = ("/v1/chat/completions", "/v1/completions")
_CALL_ID = re.compile("[0-9a-f]{20}")
"""The gateway samples for itself too, when it finds out what an engine gives; those requests have other ids."""
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "host"}


@dataclass(frozen=True)
class Fault:
    """What to do to one request instead of passing it: answer `status`, or break off after `cut_after` bytes."""

    status: int | None = None
    cut_after: int | None = None


@dataclass
class Seen:
    """One request that reached the engine, and its answer."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    status: int = 0
    raw: bytearray = field(default_factory=bytearray)
    ended: str = "running"

    @property
    def call_id(self) -> str | None:
        """The gateway's id of the call."""
        return self.headers.get("x-request-id")

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def choices(self) -> int:
        return self.body.get("n") or 1

    @property
    def whole(self) -> bool:
        """Whether the engine said all it had to say."""
        if self.status != 200:
            return False
        if self.stream:
            return b"data: [DONE]" in self.raw
        try:
            json.loads(self.raw)
        except ValueError:
            return False
        return True


class Witness:
    """Runs in a thread of its own; `url` is the engine as the gateway sees it."""

    def __init__(self, engine_url: str) -> None:
        self.url = ""
        self.seen: list[Seen] = []
        self.fault: Callable[[Seen], Fault | None] = lambda _: None
        """Asked before a sampling request is passed on."""
        self._engine_url = engine_url
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    def __enter__(self) -> Witness:
        self._thread.start()
        if not self._ready.wait(20):
            raise RuntimeError("the witness did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        self._loop.close()

    def calls(self) -> list[Seen]:
        """Return the sampling requests that a call of the gateway made, in the order of arrival."""
        return [seen for seen in list(self.seen) if seen.path in _SAMPLING and _CALL_ID.fullmatch(seen.call_id or "")]

    async def _serve(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
            self._session = session
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=1)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            self._ready.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        sent = await request.read()
        try:
            body = json.loads(sent) if sent else {}
        except ValueError:
            body = {}
        headers = {name.lower(): value for name, value in request.headers.items()}
        seen = Seen(request.path, headers, body if isinstance(body, dict) else {})
        self.seen.append(seen)
        fault = self.fault(seen) if request.path in _SAMPLING else None
        if fault is not None and fault.status is not None:
            seen.status, seen.ended = fault.status, "fault"
            return web.json_response({"error": {"message": "made to fail", "code": fault.status}}, status=fault.status)
        try:
            return await self._relay(request, sent, seen, fault)
        except asyncio.CancelledError:
            seen.ended = "client gone"
            raise
        except (aiohttp.ClientError, ConnectionError) as error:
            seen.ended = f"broken: {error!r}"
            if request.transport is not None:
                request.transport.abort()  # what is broken on one side is broken on the other
            return web.Response(status=502)

    async def _relay(self, request: web.Request, sent: bytes, seen: Seen, fault: Fault | None) -> web.StreamResponse:
        kept = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        async with self._session.request(
            request.method, self._engine_url + request.path_qs, data=sent or None, headers=kept
        ) as answer:
            seen.status = answer.status
            passed = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
            response = web.StreamResponse(status=answer.status, headers=passed)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                limit = None if fault is None or fault.cut_after is None else fault.cut_after - len(seen.raw)
                part = piece[:limit]
                seen.raw += part
                await response.write(part)
                if limit is not None and len(part) == limit:
                    seen.ended = "fault"
                    assert request.transport is not None
                    request.transport.close()
                    return response
            await response.write_eof()
            seen.ended = "complete"
            return response


@dataclass
class Sampled:
    """What one choice of a reply holds, read from the bytes."""

    prompt_ids: list[int] | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


def sampled(seen: Seen) -> dict[int, Sampled]:
    """Read prompt ids, sampled ids and log-probabilities by choice from the bytes of an answer."""
    choices: dict[int, Sampled] = {}
    prompt: list[int] | None = None
    for part in _parts(seen):
        prompt = part.get("prompt_token_ids") or prompt
        for choice in part.get("choices", []):
            into = choices.setdefault(choice["index"], Sampled())
            ids = choice.get("token_ids") or []
            into.token_ids += ids
            into.prompt_ids = choice.get("prompt_token_ids") or into.prompt_ids
            into.finish_reason = choice.get("finish_reason") or into.finish_reason
            probs = choice.get("logprobs") or {}
            values = [entry["logprob"] for entry in probs["content"] or []] if "content" in probs else []
            values = values or probs.get("token_logprobs") or []
            into.logprobs += values[len(values) - len(ids) :] if ids else []
    for into in choices.values():
        into.prompt_ids = into.prompt_ids or prompt
    return choices


def _parts(seen: Seen) -> list[dict[str, Any]]:
    text = seen.raw.decode()
    if not seen.stream:
        return [json.loads(text)]
    lines = (line[len("data: ") :] for line in text.split("\n") if line.startswith("data: "))
    return [json.loads(line) for line in lines if line.strip() != "[DONE]"]
