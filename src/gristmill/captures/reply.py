"""The normal form of an engine's reply, whatever the dialect and whether it came as a body or as a stream.

Invariant: everything in a `Reply` was said by the engine. A completion that was not said is `unknown`; ids
and log-probabilities that are not there are None, with the reason; nothing is repaired, padded or cut.

Not here: reading a dialect (its own module), tokens checked and stored (call).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gristmill.canonical import JsonValue
from gristmill.errors import Code
from gristmill.records import Dialect, ResponseStatus, WeightSpan

__all__ = [
    "ABORT_REASONS",
    "Reply",
    "ReplyChoice",
    "Unexpected",
    "Usage",
    "chat_status",
    "encodable",
    "failed_reply",
    "malformed_reply",
]

ABORT_REASONS = frozenset({"abort", "aborted", "cancelled", "canceled"})
"""Finish reasons of a generation that was stopped from outside."""

_COMPLETED = frozenset({"stop", "tool_calls", "function_call"})
_CUT = frozenset({"length", "content_filter"}) | ABORT_REASONS


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts as the engine reported them; `completion_tokens` is the sum over the choices."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class ReplyChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a reply.

    Attributes:
        index: the choice's own index.
        finish_reason: as served.
        response_status: what the finish reason says; `unknown` where the protocol's terminal event is
            missing.
        items: what the client was served, in its dialect.
        prompt_ids: token ids of the prompt, None where the reply has no complete list.
        token_ids: sampled token ids, None where the reply has no complete list.
        logprobs: nats, one per sampled token; NaN stands for an entry that is not a number.
        weight_versions: spans over the sampled tokens, as the engine gave them.
        stop_reason: the stop string, stop token id or stop sequence that was hit.
        reason: why the tokens may not be trained, as far as the reply alone tells.
        detail: one sentence for `reason`.
    """

    index: int = 0
    finish_reason: str | None = None
    response_status: ResponseStatus = ResponseStatus.UNKNOWN
    items: tuple[JsonValue, ...] = ()
    prompt_ids: Sequence[int] | None = None
    token_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    weight_versions: tuple[WeightSpan, ...] = ()
    stop_reason: str | int | None = None
    reason: Code | None = None
    detail: str | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine answered to one request.

    `status` is `failed` for an error, else the choices' common status, `unknown` where they differ. There is
    always at least one choice: a reply that failed or cannot be read has one without items.
    """

    response_id: str | None = None
    model: str | None = None
    dialect: Dialect
    status: ResponseStatus
    choices: tuple[ReplyChoice, ...]
    usage: Usage = Usage()
    error: str | None = None


class Unexpected(Exception):
    """Raised inside this package: something is not what its format says, at a JSON path."""

    def __init__(self, expected: str, got: str, where: str) -> None:
        self.message = encodable(f"expected {expected}, got {got}")
        self.where = encodable(where)
        super().__init__(f"{self.message} at {self.where}")


def encodable(text: str) -> str:
    """Escape lone surrogates: what is recorded about a reply must be writable, whatever the reply holds."""
    return text.encode("utf-8", "backslashreplace").decode()


def chat_status(finish_reason: str | None) -> ResponseStatus:
    """Read the status that a Chat, Completions or generate finish reason states, if it is a known one."""
    if finish_reason in _COMPLETED:
        return ResponseStatus.COMPLETED
    if finish_reason in _CUT:
        return ResponseStatus.INCOMPLETE
    if finish_reason == "error":
        return ResponseStatus.FAILED
    return ResponseStatus.UNKNOWN


def failed_reply(dialect: Dialect, error: str) -> Reply:
    """A reply that is an error."""
    error = encodable(error)
    choice = ReplyChoice(response_status=ResponseStatus.FAILED, reason=Code.CALL_FAILED, detail=error)
    return Reply(dialect=dialect, status=ResponseStatus.FAILED, choices=(choice,), error=error)


def malformed_reply(dialect: Dialect, detail: str) -> Reply:
    """A reply that cannot be read as its dialect."""
    detail = encodable(detail)
    choice = ReplyChoice(reason=Code.REPLY_MALFORMED, detail=detail)
    return Reply(dialect=dialect, status=ResponseStatus.UNKNOWN, choices=(choice,), error=detail)
