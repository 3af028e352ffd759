"""Whether a call was continued by tokens: what its record says of the prompt that the engine was given.

Invariant: a call that was not continued names its reason, out of a closed set; one that was names the call whose whole
token sequence its prompt begins with.

Not here: deciding it (gateway.continuation), and what becomes of prompts that were rendered anew (reconstruction).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

__all__ = ["REASON_MEANINGS", "Continuation", "ContinuationReason", "ContinuationState"]


class ContinuationState(StrEnum):
    """Whether the engine was given the exact tokens of the parent, or rendered the conversation itself."""

    CONTINUED = "continued"
    REFUSED = "refused"


class ContinuationReason(StrEnum):
    """Why a call was not continued, in the order in which it is asked."""

    ROUTE = "route"
    NO_PARENT = "no_parent"
    PARENT_AMBIGUOUS = "parent_ambiguous"
    PARENT_UNRESOLVED = "parent_unresolved"
    PARENT_UNUSABLE = "parent_unusable"
    PARENT_LOST = "parent_lost"
    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    MODEL_CHANGED = "model_changed"
    SETTINGS_CHANGED = "settings_changed"
    MEDIA = "media"
    NOTHING_NEW = "nothing_new"
    ENGINE_UNABLE = "engine_unable"
    ENGINE_OFF = "engine_off"
    RENDER_FAILED = "render_failed"
    END_OF_TURN_UNKNOWN = "end_of_turn_unknown"
    WITNESSES_DISAGREE = "witnesses_disagree"
    TOO_LONG = "too_long"


REASON_MEANINGS: Mapping[ContinuationReason, str] = {
    ContinuationReason.ROUTE: "The call does not go through the engine's Chat route, and has no conversation.",
    ContinuationReason.NO_PARENT: "The call begins a conversation.",
    ContinuationReason.PARENT_AMBIGUOUS: "Several captured calls end where the new messages begin.",
    ContinuationReason.PARENT_UNRESOLVED: "The history is not that of one captured call up to its last reply: "
    "something in it was edited, inserted or left out.",
    ContinuationReason.PARENT_UNUSABLE: "The parent was aborted, failed, or has no tokens that can be trusted.",
    ContinuationReason.PARENT_LOST: "The parent's tokens, or what its prompt was rendered with, are not at hand.",
    ContinuationReason.SYSTEM_CHANGED: "The system text is another one than in the parent's request.",
    ContinuationReason.TOOLS_CHANGED: "The tools are other ones than in the parent's request.",
    ContinuationReason.MODEL_CHANGED: "The engine is asked for another model than for the parent.",
    ContinuationReason.SETTINGS_CHANGED: "The template's settings are other ones than in the parent's request, or the "
    "last message is to be written on.",
    ContinuationReason.MEDIA: "The conversation holds media, whose placeholders are no tokens of a text.",
    ContinuationReason.NOTHING_NEW: "No message comes after the parent's reply.",
    ContinuationReason.ENGINE_UNABLE: "The engine takes no prompts as tokens, or nothing renders as it does.",
    ContinuationReason.ENGINE_OFF: "The engine answered from other tokens than it was given, and is not asked again "
    "until it restarts.",
    ContinuationReason.RENDER_FAILED: "A rendering was refused, or took too long.",
    ContinuationReason.END_OF_TURN_UNKNOWN: "What ends a turn in this template could not be proved, or is not what "
    "the parent ended with.",
    ContinuationReason.WITNESSES_DISAGREE: "The two renderings do not prove one text for the new messages.",
    ContinuationReason.TOO_LONG: "The prompt, with what may be sampled after it, is longer than the model takes.",
}
"""Each reason in a sentence; the reference page is made from it."""


class Continuation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What became of continuing a call by tokens, and what continuing the call itself depends on.

    Attributes:
        state: `continued`: the prompt is the parent's whole sequence and `suffix_len` tokens.
        reason: why it was refused; None where it was not.
        parent_call_id: whose sequence the prompt begins with; None where it was refused.
        closed: the first token after the parent's sequence ends its turn, because it was cut before it did so itself.
        suffix_len: tokens of the prompt after the parent's sequence, the closing one included.
        fork: the first place at which the engine's own rendering of the request differs from the parent's sequence;
            None where it begins with all of it, or where the call was not continued.
        model: the engine's name of the model that was asked.
        settings_digest: SHA-256 of the template's settings, 64 hexadecimal digits.
        ended: the engine ended the reply with a token of its own choice: neither length nor a stop that was asked for.
    """

    state: ContinuationState
    reason: ContinuationReason | None = None
    parent_call_id: str | None = None
    closed: bool = False
    suffix_len: int = 0
    fork: int | None = None
    model: str | None = None
    settings_digest: str | None = None
    ended: bool = False
