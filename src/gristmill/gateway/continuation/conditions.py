"""Whether a request may be continued, as far as that is known without rendering anything.

Invariant: pure; the first condition that does not hold is the reason. What is not known forbids.

Not here: what the engine can (plan) and what renderings prove (proof).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple, cast

import orjson

from gristmill.captures.exact import dumps
from gristmill.lineage import ParentLink
from gristmill.records import CallRecord, Continuation, ContinuationReason, Dialect, ParentResolution

__all__ = ["Past", "Told", "condition", "digest_of", "told_of"]

JsonObject = dict[str, Any]
Reason = ContinuationReason

_RENDERED: Final = (
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "reasoning_effort",
    "tool_choice",
)
"""Fields of a Chat body, beside model, messages and tools, that reach a template in some engine."""

_DEFAULTS: Final[Mapping[str, Any]] = {
    "add_generation_prompt": True,
    "chat_template_kwargs": {},
    "continue_final_message": False,
}
_ABSENT: Final = object()

_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_UNSURE: Final[Mapping[ParentResolution, Reason]] = {
    ParentResolution.ROOT: Reason.NO_PARENT,
    ParentResolution.AMBIGUOUS: Reason.PARENT_AMBIGUOUS,
    ParentResolution.UNRESOLVED: Reason.PARENT_UNRESOLVED,
}


class Past(NamedTuple):
    """A committed call, as far as continuing it depends on its record."""

    usable: bool
    media: bool
    said: Continuation | None

    @staticmethod
    def of(record: CallRecord) -> Past:
        """Return what a record says."""
        return Past(record.usable, bool(record.media or record.request_media), record.continuation)


class Told(NamedTuple):
    """A request to be continued, by the body for the engine.

    Attributes:
        model: the engine's name of it.
        messages: of the conversation.
        tools: None where there are none.
        settings: other fields that a rendering depends on.
        digest: of the settings.
        reply: index of the last message that a model wrote, -1 where there is none.
    """

    model: str
    messages: Sequence[JsonObject]
    tools: Sequence[Any] | None
    settings: JsonObject
    digest: str
    reply: int


def told_of(body: Mapping[str, Any]) -> Told:
    """Read a Chat body."""
    given = body.get("messages")
    messages = [
        cast(JsonObject, message) if isinstance(message, dict) else {}
        for message in (cast("list[Any]", given) if isinstance(given, list) else ())
    ]
    tools = body.get("tools")
    settings = {name: body[name] for name in _RENDERED if body.get(name) is not None}
    return Told(
        model=str(body.get("model")),
        messages=messages,
        tools=cast("list[Any]", tools) if isinstance(tools, list) and tools else None,
        settings=settings,
        digest=digest_of(_compared(settings)),
        reply=max((at for at, message in enumerate(messages) if message.get("role") == "assistant"), default=-1),
    )


def _compared(settings: JsonObject) -> JsonObject:
    """Leave out what says nothing, and of the choice of a tool what cannot change which tools a template shows."""
    said = {name: value for name, value in settings.items() if _DEFAULTS.get(name, _ABSENT) != value}
    choice = said.pop("tool_choice", None)
    if isinstance(choice, dict):
        function: Any = cast(JsonObject, choice).get("function")
        name = cast(JsonObject, function).get("name") if isinstance(function, dict) else None
        return {**said, "tool_choice": [name]}
    return {**said, "tool_choice": choice} if choice == "none" else said


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a JSON value, 64 hexadecimal digits."""
    try:
        written = orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_SUBCLASS)
    except orjson.JSONEncodeError:
        # Lone surrogates and the like, in the order in which they came.
        written = dumps(value)
    return sha256(written).hexdigest()


def condition(route: Dialect, parent: ParentLink, past: Past | None, told: Told) -> Reason | None:
    """Return the first condition that a request does not meet, None where it meets all.

    Args:
        route: the engine's.
        parent: of the request.
        past: the parent; None where it is not at hand.
        told: the request.
    """
    if route is not Dialect.CHAT:
        return Reason.ROUTE
    if parent.resolution is ParentResolution.ROOT and told.reply >= 0:
        # It has a history, of which nothing was captured as it stands there.
        return Reason.PARENT_UNRESOLVED
    if parent.resolution is not ParentResolution.RESOLVED:
        return _UNSURE[parent.resolution]
    if past is None:
        return Reason.PARENT_LOST
    if not past.usable:
        return Reason.PARENT_UNUSABLE
    said = past.said
    if said is None or said.settings_digest is None:
        return Reason.PARENT_LOST
    if parent.system_changed:
        return Reason.SYSTEM_CHANGED
    if parent.tools_changed:
        return Reason.TOOLS_CHANGED
    if said.model != told.model:
        return Reason.MODEL_CHANGED
    if said.settings_digest != told.digest or told.settings.get("continue_final_message"):
        return Reason.SETTINGS_CHANGED
    if past.media or any(map(_holds_media, told.messages)):
        return Reason.MEDIA
    return _of_messages(told)


def _of_messages(told: Told) -> Reason | None:
    if told.reply == len(told.messages) - 1:
        return Reason.NOTHING_NEW
    if told.reply < 1 or told.messages[told.reply - 1].get("role") == "assistant":
        # A turn in several messages is rendered as several turns, which the model did not write.
        return Reason.PARENT_UNRESOLVED
    return None


def _holds_media(message: JsonObject) -> bool:
    content = message.get("content")
    if not isinstance(content, list):
        return message.get("audio") is not None
    parts = [cast(JsonObject, part) for part in cast("list[Any]", content) if isinstance(part, dict)]
    return any(part.get("type") not in _TEXT_PARTS for part in parts)
