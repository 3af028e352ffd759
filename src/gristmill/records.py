"""The records that everything else reads: captured calls, their output items, their tokens, and results.

Invariant: records are frozen and token-free; tokens live beside them, per call, as a delta to a verified base, so
that a policy can never look at (or change) what was sampled. Field names follow NeMo RL's where it has one.

Not here: how records are made (captures, gateway), stored (ledger) or chosen (selection); what a result holds (result).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NewType, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from gristmill.continuation import Continuation, ContinuationReason, ContinuationState
from gristmill.errors import Code
from gristmill.result import Attribution, CallCredit, Failure, Result

__all__ = [
    "OLDEST_SCHEMA",
    "RECORD_SCHEMA",
    "UNLABELLED",
    "Atom",
    "Attribution",
    "CallCredit",
    "CallId",
    "CallRecord",
    "Capture",
    "CapturedCall",
    "CapturedItem",
    "Continuation",
    "ContinuationReason",
    "ContinuationState",
    "Delivery",
    "Dialect",
    "Exchange",
    "Failure",
    "Float32Array",
    "Int32Array",
    "ItemKind",
    "LogprobsMode",
    "LostCall",
    "MediaSpan",
    "OutputItem",
    "ParentResolution",
    "Purpose",
    "PurposeLabel",
    "ResponseStatus",
    "Result",
    "RolloutId",
    "Sampling",
    "TokenDelta",
    "UInt8Array",
    "WeightSpan",
    "schema_of",
]

OLDEST_SCHEMA = 1
RECORD_SCHEMA = 4
"""Version of the stored record kinds; readers accept older ones and refuse newer ones.

A record states the oldest version that has all of its fields (`schema_of`), so that a reader only refuses what it would
misunderstand, and the digest of an attempt does not change with the version that reads it. New in 2: what a gateway
knows of a call. New in 3: the credit of a result. New in 4: whether a call was continued.
"""

CallId = NewType("CallId", str)
RolloutId = NewType("RolloutId", str)

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]


class Dialect(StrEnum):
    """Wire format in which a call was served."""

    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COMPLETIONS = "completions"
    GENERATE = "generate"
    UNKNOWN = "unknown"


class ResponseStatus(StrEnum):
    """What the protocol's terminal event said; never inferred from silence."""

    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    UNKNOWN = "unknown"


class ParentResolution(StrEnum):
    """How sure the parent link is."""

    ROOT = "root"
    RESOLVED = "resolved"
    AMBIGUOUS = "ambiguous"
    UNRESOLVED = "unresolved"


class Delivery(StrEnum):
    """Whether the client got the reply."""

    DELIVERED = "delivered"
    PARTIAL = "partial"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class LogprobsMode(StrEnum):
    """`raw`: before temperature, top-k and top-p; `processed`: of the distribution that was sampled."""

    RAW = "raw"
    PROCESSED = "processed"
    UNKNOWN = "unknown"


class ItemKind(StrEnum):
    """What an output item is."""

    TEXT = "text"
    REASONING = "reasoning"
    REFUSAL = "refusal"
    TOOL_CALL = "tool_call"
    OTHER = "other"
    EMPTY = "empty"
    UNSUPPORTED = "unsupported"


class PurposeLabel(StrEnum):
    """Advice for policies and people; a label never removes a call."""

    AGENT = "agent"
    AUXILIARY = "auxiliary"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    UNKNOWN = "unknown"


class Atom(msgspec.Struct, frozen=True, gc=False, cache_hash=True, array_like=True):
    """One canonical piece of what a model authored; equal atoms mean the same, whatever the dialect.

    Attributes:
        kind: `text`, `refusal`, `reasoning`, `reasoning_payload`, `tool_call`, `other` or `empty`.
        text: the exact text; for tool calls and `other` the canonical JSON or the exact input.
        form: of a tool call's arguments: `json` (compared as a value) or `text` (compared exactly).
        tool: of a tool call: `function`, `custom`, `shell`, `local_shell`, `apply_patch` or `computer`.
        name: of a tool call: tool name, `namespace__name` where a namespace was given.
        call_id: of a tool call: the id that its result refers to.
    """

    kind: str
    text: str = ""
    form: str = ""
    tool: str = ""
    name: str = ""
    call_id: str = ""


class OutputItem(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One thing the model authored in a reply.

    `atoms` is None for foreign records that carry fingerprints only, and for unsupported items.
    """

    kind: ItemKind
    fingerprint: str
    id: str | None = None
    atoms: tuple[Atom, ...] | None = None
    type: str | None = None


class WeightSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights that sampled the half-open span [start, end) of a call's generation (token indices)."""

    version: str
    start: int
    end: int


class MediaSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one medium stands in a call's prompt: `length` placeholder tokens from `offset`."""

    digest: str
    offset: int
    length: int


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling settings of a call, as far as they are recorded."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.UNKNOWN


class Purpose(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A label of a call and the evidence for it."""

    label: PurposeLabel = PurposeLabel.UNKNOWN
    evidence: str = ""


UNLABELLED = Purpose()
"""Purpose of a call that nobody labelled: this one object is left out of what is written."""


class CallRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One captured model call, one per sampled choice, without its tokens.

    Token lengths: the prompt is `prompt_len` tokens; the first `prev_len` of them are the whole sequence of
    `base_call_id` (0 and None: stored whole); the stored delta is `delta_len = cum_len - prev_len` tokens and ends
    with the generation, so `cum_len - prompt_len` tokens were sampled.

    `sequence_digest` is over the ids of the whole sequence, `logprobs_digest` over the generation's float32
    log-probabilities, `chain_digest` over the base's chain digest and this delta; all None where tokens are absent.

    Of a call through the gateway (schema 2): `requested_model` is the name the client asked for, `upstream` the label
    of the engine that answered and `upstream_id` that engine's id of the reply; `engine_epoch` counts the engine's
    starts; `weights_at_start` and `weights_at_end` are the last versions that were announced at dispatch and at
    completion, which is weaker than `weight_versions`; `changes` are notes of what the gateway changed in the request,
    each `verb:what`. `retry_of` names the earlier call whose request this one repeats, and `request_digest` is what
    equal requests share.

    `continuation` (schema 4) is None where continuing the call by tokens was not asked for.
    """

    model_call_id: str
    response_id: str
    rollout_id: str = ""
    attempt: int = 0
    choice_index: int = 0
    ordinal: int = 0
    parent_call_id: str | None = None
    parent_resolution: ParentResolution | None = None
    dialect: Dialect = Dialect.UNKNOWN
    model: str | None = None
    adapter: str | None = None
    tokenizer: str | None = None
    session_id: str | None = None
    parent_session_id: str | None = None
    response_status: str | None = None
    finish_reason: str | None = None
    output_items: tuple[OutputItem, ...] = ()
    context_digest: str | None = None
    continuation_digest: str | None = None
    continuation_digest_bare: str | None = None
    system_digest: str | None = None
    tools_digest: str | None = None
    fingerprint_version: int = 1
    prompt_len: int = 0
    prev_len: int = 0
    delta_len: int = 0
    cum_len: int = 0
    base_call_id: str | None = None
    sequence_digest: str | None = None
    logprobs_digest: str | None = None
    chain_digest: str | None = None
    usable: bool = False
    unusable_reason: Code | None = None
    unusable_detail: str | None = None
    weight_versions: tuple[WeightSpan, ...] = ()
    sampling: Sampling = Sampling()
    media: tuple[MediaSpan, ...] = ()
    request_media: tuple[str, ...] = ()
    delivery: Delivery = Delivery.UNKNOWN
    admitted_at: float | None = None
    completed_at: float | None = None
    purpose: Purpose = UNLABELLED
    requested_model: str | None = None
    upstream: str | None = None
    upstream_id: str | None = None
    engine_epoch: int | None = None
    weights_at_start: str | None = None
    weights_at_end: str | None = None
    changes: tuple[str, ...] = ()
    retry_of: str | None = None
    request_digest: str | None = None
    continuation: Continuation | None = None
    schema: int = OLDEST_SCHEMA


def schema_of(record: CallRecord) -> int:
    """Return the oldest schema that has all of a record's fields, or the one it states where that is newer."""
    added = (
        record.requested_model,
        record.upstream,
        record.upstream_id,
        record.engine_epoch,
        record.weights_at_start,
        record.weights_at_end,
        record.changes or None,
        record.retry_of,
        record.request_digest,
    )
    oldest = OLDEST_SCHEMA if added == _NOTHING_ADDED else 2
    return max(record.schema, oldest if record.continuation is None else 4)


_NOTHING_ADDED = (None,) * 9


class LostCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A call that was admitted and has no stored outcome.

    `maybe_received` is True when the harness may have got the reply (an imported capture that cannot say);
    our own gateway withholds the last event until the record is durable, so there it is False.
    """

    model_call_id: str
    parent_call_id: str | None = None
    reason: str = "no outcome was stored"
    maybe_received: bool = False
    schema: int = OLDEST_SCHEMA


class TokenDelta(msgspec.Struct, frozen=True):
    """Tokens of one call after its base: prompt suffix, then generation.

    Attributes:
        ids_T: int32[T] token ids as the engine gave them.
        mask_T: uint8[T], 1 where the token was sampled.
        logprobs_T: float32[T], nats; 0.0 where the mask is 0.
        extras: optional arrays by name (routed experts), each with its own meaning.
    """

    ids_T: Int32Array
    mask_T: UInt8Array
    logprobs_T: Float32Array
    extras: Mapping[str, npt.NDArray[Any]] = {}


class Exchange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went over the wire for a call: request body, served reply body, allow-listed headers."""

    model_call_id: str
    request: Any = None
    reply: Any = None
    headers: Mapping[str, str] = {}
    status: int | None = None


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """Everything captured of one attempt.

    Attributes:
        records: committed calls in commit order.
        tokens: token delta by call id; a call without tokens is absent.
        lost: admitted calls without an outcome.
        exchanges: request and reply by call id, where they were kept.
    """

    rollout_id: str
    attempt: int = 0
    records: tuple[CallRecord, ...] = ()
    tokens: Mapping[str, TokenDelta] = {}
    lost: tuple[LostCall, ...] = ()
    exchanges: Mapping[str, Exchange] = {}


@runtime_checkable
class CapturedItem(Protocol):
    """What a policy reads of an output item; NeMo RL's records satisfy it."""

    @property
    def id(self) -> str | None: ...
    @property
    def fingerprint(self) -> str: ...


@runtime_checkable
class CapturedCall(Protocol):
    """What a policy reads of a record; NeMo RL's records satisfy it."""

    @property
    def model_call_id(self) -> str: ...
    @property
    def response_id(self) -> str: ...
    @property
    def parent_call_id(self) -> str | None: ...
    @property
    def output_items(self) -> tuple[Any, ...]: ...
    @property
    def response_status(self) -> str | None: ...
    @property
    def finish_reason(self) -> str | None: ...
