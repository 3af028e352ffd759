"""Plans a call: continued by its parent's exact tokens, or as the engine renders it, with the reason.

Invariant: a planned prompt begins with the parent's whole sequence, and what follows is proved; whatever is not proved
in time leaves the body as it was. Of engines that answered from another prompt than was sent, none is given any.

Not here: what a proof is (proof), whether the engine then used the prompt (keeping).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from gristmill.gateway.asked import Asked
from gristmill.gateway.attempts import Attempt
from gristmill.gateway.continuation.cache import RenderingCache
from gristmill.gateway.continuation.conditions import Told, condition, digest_of, told_of
from gristmill.gateway.continuation.engine_renderer import EngineRenderer
from gristmill.gateway.continuation.proof import ParentEnd, Proof, prove
from gristmill.gateway.continuation.renderer import Renderer, RenderFailed, Rendering
from gristmill.gateway.log import Log
from gristmill.gateway.metrics import Metrics
from gristmill.gateway.upstream.replicas import Replica
from gristmill.gateway.upstream.sample import QUESTION
from gristmill.records import Continuation, ContinuationReason, ContinuationState, Int32Array
from gristmill.tokens.prefix_tree import common_prefix

__all__ = ["Plan", "Planner", "refused"]

JsonObject = dict[str, Any]
Reason = ContinuationReason


class Plan(NamedTuple):
    """How a call is sent on.

    Attributes:
        body: for the engine.
        continuation: for the record.
        prompt: the ids that the engine has to sample from; None where it renders.
    """

    body: JsonObject
    continuation: Continuation
    prompt: Sequence[int] | None = None


class Planner:
    """Plans calls.

    Args:
        metrics: counters.
        log: the log.
        timeout_s: of all renderings for one call.
        local: renders for engines that have no route for it.
    """

    def __init__(self, metrics: Metrics, log: Log, timeout_s: float, local: Renderer | None = None) -> None:
        self._metrics: Final = metrics
        self._log: Final = log
        self._timeout_s: Final = timeout_s
        self._local: Final = local
        self._cache: Final = RenderingCache()
        self._alike: dict[tuple[str, int], bool] = {}

    async def plan(self, attempt: Attempt, asked: Asked, replica: Replica, body: JsonObject) -> Plan:
        """Plan a call.

        Args:
            attempt: whose it is.
            asked: the request.
            replica: the engine that takes it.
            body: for the engine, whole.
        """
        began = monotonic()
        told = told_of(body)
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._plan(attempt, asked, replica, body, told)
        except RenderFailed as failed:
            self._log.debug("not rendered", engine=replica.label, why=failed.message)
            found = Reason.RENDER_FAILED
        except TimeoutError:
            found = Reason.RENDER_FAILED
        self._metrics.continuation_seconds.observe(monotonic() - began)
        return found if isinstance(found, Plan) else Plan(body, refused(found, told))

    async def _plan(
        self, attempt: Attempt, asked: Asked, replica: Replica, body: JsonObject, told: Told
    ) -> Plan | Reason:
        parent_id = asked.parent.parent_call_id or ""
        past = attempt.continuable.get(parent_id)
        reason = condition(asked.translated.route, asked.parent, past, told)
        if reason is not None:
            return reason
        renderer = await self._renderer(replica, told.model)
        if renderer is None:
            return Reason.ENGINE_UNABLE
        if not replica.continues:
            return Reason.ENGINE_OFF
        parent_T = await self._sequence(attempt, parent_id)
        if parent_T is None:
            return Reason.PARENT_LOST
        ended = past is not None and past.said is not None and past.said.ended
        proof = await prove(
            lambda messages, asks: self._rendered(renderer, replica, told, messages, asks=asks),
            told.messages,
            told.reply,
            ParentEnd(int(parent_T[-1]), ended),
        )
        if not isinstance(proof, Proof):
            return proof
        return self._continued(replica, body, told, parent_id, parent_T, proof)

    def _continued(
        self, replica: Replica, body: JsonObject, told: Told, parent_id: str, parent_T: Int32Array, proof: Proof
    ) -> Plan | Reason:
        closed = int(parent_T[-1]) != proof.end_id
        added = [*([proof.end_id] if closed else []), *proof.suffix_T.tolist()]
        prompt = [*parent_T.tolist(), *added]
        if not replica.engine.fits(body, len(prompt)):
            return Reason.TOO_LONG
        given = replica.engine.given(body, prompt)
        if given is None:
            return Reason.ENGINE_UNABLE
        alike = common_prefix(parent_T, proof.whole_T)
        said = Continuation(
            state=ContinuationState.CONTINUED,
            parent_call_id=parent_id,
            closed=closed,
            suffix_len=len(added),
            fork=alike if alike < parent_T.size else None,
            model=told.model,
            settings_digest=told.digest,
        )
        return Plan(given, said, prompt)

    async def _sequence(self, attempt: Attempt, call_id: str) -> Int32Array | None:
        # A call that is just being stored may change the tree under the reader.
        async with attempt.writing:
            book = attempt.book
            sequence_T = book.sequence(call_id) if call_id in book else None
        return None if sequence_T is None or not sequence_T.size else sequence_T

    async def _renderer(self, replica: Replica, model: str) -> Renderer | None:
        """Return what renders as this engine does, None where nothing was seen to."""
        if replica.engine.given({}, ()) is None:
            return None
        if replica.engine.render(Rendering(model, (), None, {})) is not None:
            return EngineRenderer(replica)
        if self._local is None:
            return None
        key = replica.label, replica.epoch
        alike = self._alike.get(key)
        if alike is None:
            expected = replica.capabilities.question_ids
            if not expected:
                return None
            alike = tuple(await self._local.render(Rendering(model, QUESTION, None, {}))) == expected
            self._alike[key] = alike
            if not alike:
                self._log.warning("the tokenizer does not render as the engine does", engine=replica.label)
        return self._local if alike else None

    async def _rendered(
        self, renderer: Renderer, replica: Replica, told: Told, messages: Sequence[JsonObject], *, asks: bool
    ) -> Int32Array:
        settings: Mapping[str, Any] = told.settings if asks else {**told.settings, "add_generation_prompt": False}
        asked = Rendering(told.model, messages, told.tools, settings)
        written = [renderer.name, replica.label, replica.epoch, *msgspec.structs.astuple(asked)]
        digest = digest_of(written)
        kept_T = self._cache.get(digest)
        if kept_T is not None:
            self._metrics.renders.labels(renderer.name, "kept").inc()
            return kept_T
        began = monotonic()
        try:
            rendered_T = np.array(await renderer.render(asked), np.int32)
        except (RenderFailed, OverflowError) as error:
            self._metrics.renders.labels(renderer.name, "failed").inc()
            if isinstance(error, RenderFailed):
                raise
            raise RenderFailed("an id has more than 32 bits") from error
        self._metrics.renders.labels(renderer.name, "rendered").inc()
        self._metrics.render_seconds.labels(renderer.name).observe(monotonic() - began)
        self._cache.put(digest, rendered_T)
        return rendered_T


def refused(reason: ContinuationReason, told: Told) -> Continuation:
    """Say why a call is not continued, and what continuing it depends on itself."""
    return Continuation(state=ContinuationState.REFUSED, reason=reason, model=told.model, settings_digest=told.digest)
