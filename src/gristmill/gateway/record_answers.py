"""Answers from the record: a conversation that a request refers to, and a reply that never arrived.

Invariant: what comes from here was captured in this very attempt; nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from gristmill.gateway.attempts import Attempt, PastCall
from gristmill.gateway.client import HeaderList
from gristmill.gateway.desk import Desk
from gristmill.gateway.front import Front, JsonObject
from gristmill.gateway.json_text import dump
from gristmill.gateway.request import Request
from gristmill.records import Delivery, Exchange

__all__ = ["conversations", "replay"]


async def _exchanges(desk: Desk, attempt: Attempt) -> Mapping[str, Exchange]:
    capture, _ = await desk.blocking(lambda: desk.ledger.read(attempt.key, tokens=False, exchanges=True))
    return capture.exchanges


async def conversations(desk: Desk, attempt: Attempt, response_ids: Sequence[str]) -> dict[str, list[Any]]:
    """Read back the conversations that end with responses, each its input, then its output; those captured."""
    known = {named: calls[0] for named in response_ids if (calls := attempt.calls_of(named))}
    exchanges: Mapping[str, Exchange] = await _exchanges(desk, attempt) if known else {}
    found: dict[str, list[Any]] = {}
    for named, call_id in known.items():
        exchange = exchanges.get(call_id)
        if exchange is None or not isinstance(exchange.request, Mapping) or not isinstance(exchange.reply, Mapping):
            continue
        given = cast(JsonObject, exchange.request).get("input")
        items: list[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else list(given or ())
        found[named] = [*items, *(cast(JsonObject, exchange.reply).get("output") or ())]
    return found


async def replay(desk: Desk, request: Request, attempt: Attempt, front: Front, past: PastCall, stream: bool) -> bool:
    """Answer a retry with the reply that was withheld from it; False where the record does not hold it.

    Args:
        desk: what all calls share.
        request: the retry.
        attempt: whose it is.
        front: of its dialect.
        past: the call it repeats.
        stream: an event stream is wanted.
    """
    exchange = (await _exchanges(desk, attempt)).get(past.call_id)
    if exchange is None or not isinstance(exchange.reply, Mapping):
        return False
    served = cast(JsonObject, exchange.reply)
    headers: HeaderList = [
        (b"x-gristmill-call-id", past.call_id.encode()),
        (b"x-gristmill-notes", b"replayed:the reply had not been delivered"),
    ]
    client = request.client
    client.watch(lambda: None)
    try:
        if stream:
            await client.start(200, [(b"content-type", b"text/event-stream; charset=utf-8"), *headers])
            for event in front.replay(served):
                await client.write(event)
            delivered = await client.end()
        else:
            delivered = await client.answer(200, dump(served), headers)
    finally:
        await client.stop_watching()
    desk.metrics.replays.inc()
    if delivered:
        for call_id in attempt.calls_of(past.response_id):
            attempt.deliver(call_id, Delivery.DELIVERED)
            desk.deliver(attempt.key, call_id, Delivery.DELIVERED)
    desk.log.info("replayed", call_id=past.call_id, delivered=delivered, **desk.names(attempt.key))
    return True
