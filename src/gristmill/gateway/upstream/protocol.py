"""What an engine adapter must do: ask for tokens in the engine's own words, and say what it can.

Invariant: an adapter asks and says; it never reads or repairs a reply (captures does). What it cannot ask for has a
reason that the call's record repeats.

Not here: any engine (vllm, sglang, generic), connections (client), which engine takes a call (replicas).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import msgspec

from gristmill.gateway.continuation.renderer import Rendering
from gristmill.records import Dialect, LogprobsMode

__all__ = ["Ask", "Capabilities", "Engine", "EngineKind", "Support", "UpstreamError", "UpstreamFault", "UpstreamReply"]

JsonObject = dict[str, Any]


class EngineKind(StrEnum):
    """Which adapter speaks to an engine."""

    VLLM = "vllm"
    SGLANG = "sglang"
    GENERIC = "generic"


class Ask(NamedTuple):
    """One request to an engine: a path of ours below its base address, headers, and a JSON body (None: no body)."""

    path: str
    body: JsonObject | None = None
    headers: Mapping[str, str] = {}
    method: str = "POST"


class Support(StrEnum):
    """Whether an engine gives something: measured by asking it."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine was found to give. `notes` says in sentences what stands between and what to switch on.

    `render` and `tokenize` say whether these routes make of messages what the engine samples from; `question_ids` is
    what it samples from where it is asked the probe's question.
    """

    kind: EngineKind
    version: str | None = None
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    prompt_ids: Support = Support.UNKNOWN
    token_ids: Support = Support.UNKNOWN
    token_ids_streamed: Support = Support.UNKNOWN
    logprobs: Support = Support.UNKNOWN
    stop_token_included: Support = Support.UNKNOWN
    logprobs_mode: LogprobsMode = LogprobsMode.UNKNOWN
    weight_versions: Support = Support.UNKNOWN
    routed_experts: Support = Support.UNKNOWN
    abort_by_id: Support = Support.UNKNOWN
    token_in: Support = Support.UNKNOWN
    render: Support = Support.UNKNOWN
    tokenize: Support = Support.UNKNOWN
    question_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


class UpstreamFault(StrEnum):
    """How an engine failed to answer."""

    UNREACHABLE = "unreachable"
    RESET = "reset"
    SILENT = "silent"
    OVERSIZED = "oversized"
    PROTOCOL = "protocol"


class UpstreamError(Exception):
    """The engine did not answer, or its answer broke off."""

    def __init__(self, fault: UpstreamFault, message: str) -> None:
        self.fault = fault
        self.message = message
        super().__init__(message)


class UpstreamReply(Protocol):
    """An answer whose body is read piece by piece."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]:
        """Header fields, names in lower case."""
        ...

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives.

        Raises:
            UpstreamError: `reset`, `silent`, `oversized`.
        """
        ...

    async def read(self) -> bytes:
        """Return the whole body; raises as `pieces`."""
        ...

    async def close(self) -> None:
        """Drop the connection if the body was not read to its end, else give it back."""
        ...


class Engine(Protocol):
    """The adapter of one kind of engine."""

    @property
    def kind(self) -> EngineKind: ...

    def ask(self, route: Dialect, body: JsonObject, call_id: str, *, stream: bool) -> Ask:
        """Return the request that samples, with everything asked for that a capture needs; `body` is not changed.

        Args:
            route: `chat` or `completions`.
            body: what `Translated.body` holds, model name already the engine's.
            call_id: travels as `X-Request-Id`.
            stream: an event stream is wanted; then usage is always asked for.
        """
        ...

    def abort(self, route: Dialect, call_id: str) -> Ask | None:
        """Return the request that ends a generation so that it answers with what it sampled; None: it cannot."""
        ...

    def count(self, body: JsonObject) -> Ask:
        """Return the request that tokenises a chat body (messages, tools) without sampling."""
        ...

    def given(self, body: JsonObject, prompt: Sequence[int]) -> JsonObject | None:
        """Return a Chat body whose prompt is these ids, whatever its messages are; None: the engine takes none.

        Args:
            body: of the request; not changed.
            prompt: token ids.
        """
        ...

    def fits(self, body: JsonObject, prompt_len: int) -> bool:
        """Say whether the engine takes a prompt of so many tokens with what the body asks to sample after it."""
        ...

    def render(self, asked: Rendering) -> Ask | None:
        """Return the request that renders without sampling; None: it was not seen to have a route for that."""
        ...

    def missing(self) -> str | None:
        """Say why this engine's replies have no token ids, None where it was asked for them."""
        ...
