"""Requests that sample: room for them, their place in the attempt, and the engine that takes them.

Invariant: a request is refused, answered from the record, or becomes exactly one call. One that is refused for what it
is, or because no engine is there, is stored as a failed call, so that the rollout says that something was asked; one
that is only asked to come again later is not.

Not here: the path of a call (call).
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from time import monotonic, time
from typing import Final

from gristmill.captures import CallContext
from gristmill.errors import CaptureError, Code, LedgerError
from gristmill.gateway.asked import Asked, ask_engine_for, engine_model, marked_retry, read_request
from gristmill.gateway.attempts import Attempt
from gristmill.gateway.call import Call
from gristmill.gateway.config import CONTINUE
from gristmill.gateway.continuation.plan import Planner
from gristmill.gateway.desk import Desk
from gristmill.gateway.front import Front, RequestRefused
from gristmill.gateway.fronts import FRONTS
from gristmill.gateway.keeping import Order
from gristmill.gateway.outcome import as_failed, stored_calls
from gristmill.gateway.record_answers import conversations, replay
from gristmill.gateway.request import Request
from gristmill.gateway.upstream.replicas import Replicas
from gristmill.ledger import AttemptKey
from gristmill.ledger.writes import Admit, Commit, prepare_call
from gristmill.tokens import TokenBook

__all__ = ["Sampler"]

_FREE_EVERY_s: Final = 1.0
_MEASURED_s: Final = 30.0
"""How long a call waits for the measurement of its engine."""


class Sampler:
    """Takes requests that sample.

    Args:
        desk: what all calls share.
        replicas: the engines.
        planner: plans the prompts of calls that continue others.

    Attributes:
        admitting: False answers every request 503.
        running: requests on their way.
    """

    def __init__(self, desk: Desk, replicas: Replicas, planner: Planner) -> None:
        self._desk: Final = desk
        self._replicas: Final = replicas
        self._planner: Final = planner
        self.admitting = True
        self.running = 0
        self._free_bytes: int | None = 0
        self._free_at = float("-inf")

    async def serve(self, request: Request, key: AttemptKey) -> None:
        """Serve one request.

        Raises:
            RequestRefused: it was not served.
            LedgerError: it could not be admitted.
            CaptureError: no engine is there.
        """
        self._check_room()
        self.running += 1
        self._desk.metrics.in_flight.inc()
        try:
            async with self._desk.attempts.use(key) as attempt:
                await self._serve(request, attempt)
        finally:
            self.running -= 1
            self._desk.metrics.in_flight.dec()

    def _check_room(self) -> None:
        """Refuse calls that could not be kept."""
        config = self._desk.config
        if not self.admitting:
            raise RequestRefused(503, Code.GATEWAY_BUSY, "the gateway is shutting down")
        if self.running >= config.max_calls:
            raise RequestRefused(
                503, Code.GATEWAY_BUSY, f"{self.running} calls are in flight (setting max_calls); try again later"
            )
        now = monotonic()
        if now - self._free_at > _FREE_EVERY_s:
            self._free_bytes, self._free_at = self._desk.ledger.free_bytes(), now
            if self._free_bytes is not None:
                self._desk.metrics.free_bytes.set(self._free_bytes)
        if self._free_bytes is not None and self._free_bytes < config.min_free_bytes:
            raise RequestRefused(
                503,
                Code.DISK_LOW,
                f"expected {config.min_free_bytes} bytes free for the ledger (setting min_free_bytes), "
                f"got {self._free_bytes}",
            )

    async def _serve(self, request: Request, attempt: Attempt) -> None:
        front = FRONTS[request.found.route.dialect]
        call_id = secrets.token_hex(10)
        try:
            _check_open(attempt)
            raw = await request.body(self._desk.config.max_body_bytes)
            asked = await read_request(
                raw, request.headers, front, attempt, lambda named: conversations(self._desk, attempt, named)
            )
            past = marked_retry(asked, request.headers, attempt)
            if past is not None and await replay(self._desk, request, attempt, front, past, asked.translated.stream):
                return
            order = await self._order(attempt, asked, call_id)
            _check_open(attempt)
        except RequestRefused as refused:
            await self._keep_refused(attempt, front, call_id, refused.status, f"{refused.code}: {refused.message}")
            raise
        except CaptureError as error:
            await self._keep_refused(attempt, front, call_id, 503, f"{error.code}: {error.message}")
            raise
        await Call(self._desk, attempt, front, asked, request.client, order).run()

    async def _order(self, attempt: Attempt, asked: Asked, call_id: str) -> Order:
        config = self._desk.config
        known = [model for replica in self._replicas if replica.up for model in replica.capabilities.models]
        model = engine_model(config.models, asked.model, known)
        replica = self._replicas.for_attempt(attempt.key, model)
        # A call that was asked before it is known what the engine gives would lack it for good.
        await replica.measured(_MEASURED_s)
        overrides = {**config.overrides, **attempt.setup.overrides}
        body, notes = ask_engine_for(asked, model, overrides, replica.max_model_len)
        if overrides.get(CONTINUE, config.continuation) != "tokens":
            return Order(call_id, replica, body, notes)
        plan = await self._planner.plan(attempt, asked, replica, body)
        ordinary = None if plan.prompt is None else body
        return Order(call_id, replica, plan.body, notes, plan.continuation, plan.prompt, ordinary)

    async def _keep_refused(self, attempt: Attempt, front: Front, call_id: str, status: int, message: str) -> None:
        """Store a request that was refused as a failed call."""
        if attempt.closed:
            return
        key, now = attempt.key, time()
        context = CallContext(
            model_call_id=call_id,
            rollout_id=key.rollout_id,
            attempt=key.attempt,
            admitted_at=now,
            completed_at=now,
        )
        stored = stored_calls(as_failed(front.dialect, message, 1), context, TokenBook(), {"status": status}, {})
        with suppress(LedgerError):
            # Not hidden: the client is told of the refusal, and a ledger that takes no write says so to the next call.
            await self._desk.write(Admit(key, call_id, None))
            await self._desk.write(Commit(key, [prepare_call(key, call) for call in stored]))


def _check_open(attempt: Attempt) -> None:
    if attempt.closed:
        raise RequestRefused(409, Code.ATTEMPT_CLOSED, "the rollout has finished and takes no more calls")
