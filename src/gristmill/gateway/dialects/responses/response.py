"""The response object: what was asked, what was said, how it ended.

Invariant: nothing is completed that the engine did not say was; an aborted or broken generation has failed, so that a
client asks again instead of going on with half an answer.

Not here: items (items), events (events).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from gristmill.captures.fields import count_at, object_at
from gristmill.captures.reply import ABORT_REASONS
from gristmill.gateway.dialects.responses.items import COMPLETED, IN_PROGRESS, INCOMPLETE, response_id
from gristmill.gateway.front import JsonObject, ServedNames

__all__ = ["FAILED", "Ending", "ending_of", "error_code", "error_type", "failed", "opening", "usage_of"]

FAILED: Final = "failed"

_INCOMPLETE: Final = {"length": "max_output_tokens"}
_COMPLETED: Final = frozenset({"stop", "tool_calls", "function_call"})
_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_DEFAULTS: Final[Mapping[str, Any]] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "service_tier": None,
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": None,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""What a response repeats of its request, with what stands there if the request does not say."""


class Ending(NamedTuple):
    """How a reply ended: status of the response, of an item that was not done, and the details."""

    status: str
    item_status: str
    reason: str | None = None
    error: JsonObject | None = None


def opening(body: JsonObject, names: ServedNames) -> JsonObject:
    """Make a response as it is before anything was said."""
    asked = {name: default if body.get(name) is None else body[name] for name, default in _DEFAULTS.items()}
    return {
        "id": response_id(names.token),
        "object": "response",
        "created_at": names.created_s,
        "status": IN_PROGRESS,
        "model": names.model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "usage": None,
        **asked,
    }


def failed(code: str, message: str) -> Ending:
    """Make the ending of a reply that failed."""
    return Ending(FAILED, INCOMPLETE, error={"code": code, "message": message})


def error_type(status: int) -> str:
    """Name the kind of an error by its HTTP status."""
    return _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_code(status: int) -> str:
    """Give the code of a response that failed: one of those that clients know as worth another try."""
    return "rate_limit_exceeded" if status == 429 else "server_error"


def ending_of(finish_reason: str | None) -> Ending:
    """Say what a finish reason of Chat means."""
    if finish_reason in _COMPLETED:
        return Ending(COMPLETED, COMPLETED)
    if finish_reason is None:
        return failed("server_error", "the engine's reply ended without a finish reason")
    if finish_reason == "error":
        return failed("server_error", "the engine failed while it generated")
    if finish_reason in ABORT_REASONS:
        return failed("server_error", "the generation was aborted")
    return Ending(INCOMPLETE, INCOMPLETE, reason=_INCOMPLETE.get(finish_reason, finish_reason))


def usage_of(value: Any) -> JsonObject | None:
    """Turn the usage of a Chat reply into that of a response.

    Raises:
        Unexpected: it is none of Chat's.
    """
    if value is None:
        return None
    usage = object_at(value, "$.usage")
    counts = {name: count_at(usage, name, "$.usage") or 0 for name in ("prompt_tokens", "completion_tokens")}
    read = _detail(usage, "prompt", "cached_tokens")
    wrote = _detail(usage, "prompt", "created_cache_tokens")
    thought = _detail(usage, "completion", "reasoning_tokens")
    total = count_at(usage, "total_tokens", "$.usage")
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": read, "cache_write_tokens": wrote},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": sum(counts.values()) if total is None else total,
    }


def _detail(usage: Mapping[str, Any], side: str, name: str) -> int:
    key = f"{side}_tokens_details"
    details = usage.get(key)
    if details is None:
        return 0
    return count_at(object_at(details, f"$.usage.{key}"), name, f"$.usage.{key}") or 0
