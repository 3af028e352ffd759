"""Sends an answer as the script says: at once or slowly, whole or broken.

Invariant: without a fault every byte of the answer is sent, and its end; with one it is broken at the place that the
script names, and nowhere else.

Not here: what the answer is (answer, wire), breaking a connection (connection).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from gristmill.scripted.answer import Answer, chunks_of
from gristmill.scripted.connection import Connection, Interruption
from gristmill.scripted.script import Ended, Fault, Garbage, HttpStatus, Redirect, Reset, Silence, Truncated
from gristmill.scripted.wire import Event, Sent, Wire, dumps, ending, events

__all__ = ["GARBAGE", "Outcome", "deliver", "failed"]

GARBAGE: Final = b'data: {"choices": [\xff\xfe{\n\n'
_STREAM: Final = {"content-type": "text/event-stream; charset=utf-8"}
_JSON: Final = {"content-type": "application/json"}

Shorten = Callable[[Answer, Sequence[int]], Answer]
"""Makes the answer that was aborted after so many ids of each choice."""


class Outcome(NamedTuple):
    """What became of an answer: its HTTP status, how it ended, and how many ids of each choice were sent."""

    status: int | None
    ended: str
    ids: tuple[int, ...] = ()


async def failed(connection: Connection, fault: HttpStatus | Redirect) -> Outcome:
    """Send an error, or elsewhere."""
    if isinstance(fault, Redirect):
        await connection.head(fault.status, {"location": fault.location, "content-length": "0"})
        await connection.piece(b"", more=False)
        return Outcome(fault.status, "redirect")
    headers = {**_JSON, **{name.lower(): value for name, value in fault.headers.items()}}
    if fault.retry_after_s is not None:
        headers["retry-after"] = f"{fault.retry_after_s:g}"
    body = fault.body
    if body is None:
        message = {"message": f"scripted failure {fault.status}", "type": "ScriptedError", "param": None}
        body = {"error": {**message, "code": fault.status}}
    data = body.encode() if isinstance(body, str) else dumps(body)
    await connection.head(fault.status, {**headers, "content-length": str(len(data))})
    await connection.piece(data, more=False)
    return Outcome(fault.status, "status")


async def deliver(
    connection: Connection, wire: Wire, answer: Answer, interruption: Interruption, shorten: Shorten
) -> Outcome:
    """Send an answer.

    Args:
        connection: where to.
        wire: how it is written.
        answer: what is sent.
        interruption: ends it early.
        shorten: see `Shorten`.
    """
    behaviour = answer.behaviour
    fault = behaviour.fault
    if behaviour.delay_s or behaviour.gap_s or isinstance(fault, Silence):
        connection.watch()
    await interruption.pause(behaviour.delay_s or 0)
    if interruption.reason == "disconnected":
        return Outcome(None, "disconnected")
    if isinstance(fault, Reset | Silence) and fault.after_chunks is None:
        if isinstance(fault, Reset):
            await connection.drop(reset=True)
            return Outcome(None, "reset")
        await interruption.pause(None)
        return Outcome(None, interruption.reason or "silence")
    delivery = _Stream if answer.asked.stream else _Body
    return await delivery(connection, wire, answer, interruption, shorten).run()


class _Stream:
    """Sends an answer as events."""

    def __init__(
        self, connection: Connection, wire: Wire, answer: Answer, interruption: Interruption, shorten: Shorten
    ) -> None:
        self._connection = connection
        self._wire = wire
        self._answer = answer
        self._interruption = interruption
        self._gap_s = answer.behaviour.gap_s or 0
        self._fault: Fault | None = answer.behaviour.fault
        self._sent = Sent((0,) * len(answer.choices))

    async def run(self) -> Outcome:
        await self._connection.head(200, _STREAM, packed=bool(self._answer.behaviour.gzip))
        chunks = 0
        for event in events(self._wire, self._answer):
            if self._fault is not None:
                broken = await self._break(event, chunks)
                if broken is not None:
                    return Outcome(200, broken, tuple(self._sent.ids))
            if self._interruption.reason is not None and (event.counts or self._interruption.reason != "aborted"):
                return await self._interrupted()
            await self._connection.piece(event.data)
            self._sent = event.sent
            if event.counts:
                chunks += 1
                if self._gap_s:
                    await self._interruption.pause(self._gap_s)
        await self._connection.piece(b"", more=False)
        return Outcome(200, "complete", tuple(self._sent.ids))

    async def _interrupted(self) -> Outcome:
        if self._interruption.reason == "aborted":
            for event in ending(self._wire, self._answer, self._sent, aborted=True):
                await self._connection.piece(event.data)
            await self._connection.piece(b"", more=False)
        return Outcome(200, self._interruption.reason or "", tuple(self._sent.ids))

    async def _break(self, event: Event, chunks: int) -> str | None:
        """Break the stream off before an event, if this is the place."""
        fault, connection = self._fault, self._connection
        if fault is None or isinstance(fault, HttpStatus | Redirect) or fault.after_chunks is None:
            return None
        if chunks < fault.after_chunks:
            return None
        match fault:
            case Reset():
                await connection.drop(reset=True)
                return "reset"
            case Silence():
                await self._interruption.pause(None)
                return self._interruption.reason or "silence"
            case Ended():
                await connection.piece(b"", more=False)
                return "eof"
            case Truncated():
                await connection.piece(event.data[: len(event.data) // 2])
                await connection.drop(reset=False)
                return "truncate"
            case Garbage():
                await connection.piece(GARBAGE, more=False)
                return "garbage"


class _Body:
    """Sends an answer as one body; its time is that of its stream, and half of it stands for any number of chunks."""

    def __init__(
        self, connection: Connection, wire: Wire, answer: Answer, interruption: Interruption, shorten: Shorten
    ) -> None:
        self._connection = connection
        self._wire = wire
        self._answer = answer
        self._interruption = interruption
        self._shorten = shorten

    async def run(self) -> Outcome:
        answer = await self._generated()
        if answer is None:
            return Outcome(None, "disconnected")
        data = dumps(self._wire.body(answer))
        ids = tuple(len(choice.generation.sampled.ids) for choice in answer.choices)
        connection, packed = self._connection, bool(answer.behaviour.gzip)
        fault = answer.behaviour.fault
        whole = {**_JSON, "content-length": str(len(data))}
        half = data[: len(data) // 2]
        match fault:
            case Reset():
                await connection.head(200, whole)
                await connection.piece(half)
                await connection.drop(reset=True)
                return Outcome(200, "reset", ids)
            case Silence():
                await connection.head(200, whole)
                await connection.piece(half)
                await self._interruption.pause(None)
                return Outcome(200, self._interruption.reason or "silence", ids)
            case Ended():
                await connection.head(200, _JSON)
                await connection.piece(half, more=False)
                return Outcome(200, "eof", ids)
            case Truncated():
                await connection.head(200, whole)
                await connection.piece(half)
                await connection.drop(reset=False)
                return Outcome(200, "truncate", ids)
            case Garbage():
                await connection.head(200, {**_JSON, "content-length": str(len(GARBAGE))})
                await connection.piece(GARBAGE, more=False)
                return Outcome(200, "garbage", ids)
            case _:
                await connection.head(200, whole, packed=packed)
                await connection.piece(data, more=False)
                return Outcome(200, self._interruption.reason or "complete", ids)

    async def _generated(self) -> Answer | None:
        """Wait as long as the stream would take; None where the client has gone."""
        answer, gap_s = self._answer, self._answer.behaviour.gap_s or 0
        counts = [0] * len(answer.choices)
        if gap_s:
            plans = [chunks_of(answer, choice) for choice in answer.choices]
            for turn in range(max(map(len, plans))):
                if self._interruption.reason is not None:
                    break
                counts = [plan[min(turn, len(plan) - 1)].end for plan in plans]
                await self._interruption.pause(gap_s)
        if self._interruption.reason == "disconnected":
            return None
        return self._shorten(answer, counts) if self._interruption.reason == "aborted" else answer
