"""The path of one call: admitted, sent on, served as it comes, durable, and only then finished for the client.

Invariant: no call is sent to an engine before its intent is durable, and no client learns of a finish before the record
is. Whatever happens in between has a record or leaves the intent, which counts as lost. An interruption (the client
gone, the attempt closed) never reaches into a commit.

Not here: which request becomes a call (app), what it means (asked), what is stored of it (outcome).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from enum import StrEnum
from time import monotonic, time
from typing import Any, Final

from gristmill.captures import Reply
from gristmill.errors import Code
from gristmill.gateway.asked import Asked
from gristmill.gateway.attempts import Attempt
from gristmill.gateway.client import Client, HeaderList
from gristmill.gateway.desk import Desk
from gristmill.gateway.exchange import EngineSaid, Exchange
from gristmill.gateway.front import Front, JsonObject
from gristmill.gateway.json_text import dump
from gristmill.gateway.keeping import Ended, Intent, Order, keep
from gristmill.gateway.outcome import admitted_ids, as_aborted, as_broken, as_failed
from gristmill.gateway.upstream.protocol import UpstreamError, UpstreamFault
from gristmill.ledger.writes import Admit, AdmitAll
from gristmill.records import CallRecord, Delivery, Dialect

__all__ = ["Call", "Ending"]

_FAULT_STATUS: Final = {
    UpstreamFault.UNREACHABLE: 502,
    UpstreamFault.RESET: 502,
    UpstreamFault.SILENT: 504,
    UpstreamFault.OVERSIZED: 502,
    UpstreamFault.PROTOCOL: 502,
}
_BROKEN: Final = frozenset({Code.ENGINE_LOST, Code.ENGINE_UNREACHABLE, Code.NOT_DURABLE})
"""A stream that breaks for these ends as a broken stream does: every harness asks again then, and some take an error
event for the end of their run. Responses has an event for it that its clients ask again after."""


class Ending(StrEnum):
    """Why a call was broken off."""

    CLIENT_GONE = "the client closed its connection"
    ATTEMPT_CLOSED = "the rollout was finished while the call ran"
    SHUTDOWN = "the gateway was shut down"


class Call:
    """One call from admission to delivery; used once.

    Args:
        desk: what all calls share.
        attempt: whose call it is.
        front: of the client's dialect.
        asked: the request.
        client: who is answered.
        order: how it is sent on.
    """

    def __init__(
        self,
        desk: Desk,
        attempt: Attempt,
        front: Front,
        asked: Asked,
        client: Client,
        order: Order,
    ) -> None:
        self._desk: Final = desk
        self._attempt: Final = attempt
        self._front: Final = front
        self._asked: Final = asked
        self._client: Final = client
        self._order: Final = order
        self._id: Final = order.call_id
        self._replica: Final = order.replica
        self._exchange: Final = Exchange(desk.config, front, asked, order, client, self._headers())
        self._task: asyncio.Task[Any] | None = None
        self._ending: Ending | None = None
        self._open_to_interruption = False
        self._intent = Intent(front.dialect, time(), None)
        self._began = monotonic()
        self._records: tuple[CallRecord, ...] = ()

    # ---- from outside ------------------------------------------------------------------------------------------------

    def interrupt(self, ending: Ending) -> None:
        """Break the call off as soon as it is not committing; the first reason counts."""
        if self._ending is not None:
            return
        self._ending = ending
        if self._open_to_interruption and self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Take the call all the way.

        Raises:
            LedgerError: it could not be admitted; nothing was sent anywhere.
        """
        self._task = asyncio.current_task()
        desk, attempt = self._desk, self._attempt
        # Counted in before the first wait, so that whoever closes the attempt waits for this call.
        attempt.enter(self._id, lambda going: self.interrupt(Ending.SHUTDOWN if going else Ending.ATTEMPT_CLOSED))
        try:
            await self._admit()
            self._intent = self._intent._replace(weights=desk.weights(self._replica.label))
            self._client.watch(lambda: self.interrupt(Ending.CLIENT_GONE))
            await self._serve()
        finally:
            attempt.leave(self._id)
            await self._client.stop_watching()
            await self._exchange.let_go()

    async def _admit(self) -> None:
        """Make the intent of every choice durable."""
        choices, parent = self._asked.translated.choices, self._asked.parent.parent_call_id
        key = self._attempt.key
        await self._desk.write(AdmitAll([Admit(key, call_id, parent) for call_id in admitted_ids(self._id, choices)]))

    # ---- the stages --------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            reply = await self._interruptible(self._exchange.run())
        except EngineSaid as error:
            await self._engine_failed(error)
        except UpstreamError as error:
            self._desk.metrics.engine_errors.labels(self._replica.label, error.fault).inc()
            await self._engine_broke(error)
        except _Interrupted:
            await self._broken_off()
        else:
            await self._complete(reply)

    async def _interruptible(self, work: Any) -> Any:
        self._open_to_interruption = True
        try:
            if self._ending is not None:
                work.close()
                raise _Interrupted
            return await work
        except asyncio.CancelledError:
            task = self._task
            if self._ending is None or task is None or task.uncancel() > 0:
                raise
            raise _Interrupted from None
        finally:
            self._open_to_interruption = False

    # ---- endings -----------------------------------------------------------------------------------------------------

    async def _complete(self, reply: Reply) -> None:
        """Make the call durable, then give the client the rest."""
        cut = next((choice for choice in reply.choices if choice.reason is Code.STREAM_TRUNCATED), None)
        if cut is not None:
            self._desk.metrics.engine_errors.labels(self._replica.label, "cut").inc()
            await self._finish_badly(reply, 502, Code.ENGINE_LOST, cut.detail or "the stream ended early")
            return
        if self._aborted_body(reply):
            await self._finish_badly(reply, 503, Code.ABORTED, "the engine aborted the generation")
            return
        if not await self._commit(reply, self._exchange.encoder.served(), 200):
            await self._fail_client(503, Code.NOT_DURABLE, "the call could not be made durable; its reply is withheld")
            return
        await self._release()

    def _aborted_body(self, reply: Reply) -> bool:
        """Tell whether a whole reply is of a generation that the engine aborted, which not every dialect can say."""
        aborted = any(choice.reason is Code.ABORTED for choice in reply.choices)
        return aborted and not self._client.started and self._front.dialect is not self._asked.translated.route

    async def _release(self) -> None:
        held = b"".join(self._exchange.held)
        if self._client.started:
            delivered = await self._client.end(held)
        else:
            delivered = await self._client.answer(200, held, self._headers())
        self._delivered(Delivery.DELIVERED if delivered else Delivery.PARTIAL)
        self._log("served", 200)

    async def _engine_failed(self, error: EngineSaid) -> None:
        self._desk.metrics.engine_errors.labels(self._replica.label, "malformed" if error.malformed else "error").inc()
        if self._exchange.begun:
            reply = self._exchange.partial()
        else:
            said = error.message if error.malformed else f"HTTP {error.status}: {error.message}"
            reason = Code.REPLY_MALFORMED if error.malformed else Code.CALL_FAILED
            reply = as_failed(self._front.dialect, said, self._asked.translated.choices, reason)
        await self._finish_badly(reply, error.status, error.code, error.message, retry_after=error.retry_after)

    async def _engine_broke(self, error: UpstreamError) -> None:
        code = Code.ENGINE_UNREACHABLE if error.fault is UpstreamFault.UNREACHABLE else Code.ENGINE_LOST
        if self._exchange.begun:
            reply = as_broken(self._exchange.partial(), f"{code}: {error.message}")
        else:
            reply = as_failed(self._front.dialect, f"{code}: {error.message}", self._asked.translated.choices)
        await self._finish_badly(reply, _FAULT_STATUS[error.fault], code, error.message)

    async def _broken_off(self) -> None:
        """Abort the generation; keep what had been sampled where the engine says it."""
        ending = self._ending or Ending.CLIENT_GONE
        self._desk.metrics.aborts.labels(ending.name.lower()).inc()
        said = await self._exchange.abort()
        reply = as_aborted(self._exchange.partial() if said is None else said, ending, self._asked.translated.choices)
        served = self._exchange.served()
        complete = said is not None and all(choice.reason is None for choice in reply.choices)
        if served is None and complete:
            # It came to its own end while nobody was left to read it: a retry is answered with it.
            served = self._exchange.encoder.served()
        await self._commit(reply, served, 200 if complete else None)
        if not self._client.gone:
            await self._fail_client(503 if ending is Ending.SHUTDOWN else 409, Code.ATTEMPT_CLOSED, ending)
        self._delivered(Delivery.PARTIAL if self._client.started else Delivery.ABORTED)
        self._log("aborted", 499, ending=ending.name.lower())

    async def _finish_badly(
        self, reply: Reply, status: int, code: str, message: str, *, retry_after: str | None = None
    ) -> None:
        """Store what there is, and tell the client."""
        served = self._exchange.served()
        await self._commit(reply, served, status)
        await self._fail_client(status, code, message, retry_after=retry_after)
        self._delivered(Delivery.PARTIAL)
        self._log("failed", status, code=code)

    async def _fail_client(self, status: int, code: str, message: str, *, retry_after: str | None = None) -> None:
        if self._client.gone:
            return
        if self._client.started:
            if code not in _BROKEN or self._front.dialect is Dialect.RESPONSES:
                await self._client.end(self._exchange.encoder.failure(status, message))
            else:
                self._client.drop()
            return
        headers = self._headers()
        if retry_after is not None or status == 503:
            headers.append((b"retry-after", (retry_after or "1").encode("latin-1", "replace")))
        await self._client.answer(status, dump(self._front.error(status, code, message)), headers)

    # ---- the record --------------------------------------------------------------------------------------------------

    async def _commit(self, reply: Reply, served: JsonObject | None, status: int | None) -> bool:
        """Store the outcome; False where it could not be made durable, and the call stays lost."""
        records = await keep(
            self._desk, self._attempt, self._asked, self._exchange.order, self._intent, Ended(reply, served, status)
        )
        if records is None:
            return False
        self._records = records
        # Settled: what the client now does with its reply keeps nobody waiting.
        self._attempt.leave(self._id)
        return True

    def _delivered(self, delivery: Delivery) -> None:
        self._desk.metrics.deliveries.labels(str(delivery)).inc()
        for record in self._records:
            self._attempt.deliver(record.model_call_id, delivery)
            self._desk.deliver(self._attempt.key, record.model_call_id, delivery)

    def _headers(self) -> HeaderList:
        headers: HeaderList = [(b"x-gristmill-call-id", self._id.encode())]
        if self._order.notes:
            headers.append((b"x-gristmill-notes", _notes_header(self._order.notes)))
        return headers

    def _log(self, event: str, status: int, **said: Any) -> None:
        desk = self._desk
        seconds = monotonic() - self._began
        desk.metrics.seconds.labels(str(self._front.dialect)).observe(seconds)
        desk.log.info(
            event,
            call_id=self._id,
            dialect=str(self._front.dialect),
            status=status,
            seconds=round(seconds, 4),
            stream=self._asked.translated.stream,
            engine=self._replica.label,
            usable=all(record.usable for record in self._records) if self._records else False,
            **desk.names(self._attempt.key),
            **said,
        )


class _Interrupted(Exception):
    """The call was broken off while it could be."""


def _notes_header(notes: Sequence[str]) -> bytes:
    """Write notes as a header's value: printable ASCII whatever a request named its fields, and of bounded length."""
    safe = (re.sub(r"[^!-+\--~ ]", "?", note)[:200] for note in notes)
    return ",".join(safe).encode("ascii")[:4000]
