"""Whether a captured call finished, read from its status and finish reason, never from silence.

Not here: what is done about it (all_captured, pipeline).
"""

from __future__ import annotations

from typing import Any, Final

from gristmill.records import ResponseStatus

__all__ = ["effective_status", "is_finished", "is_interrupted", "stopped_by_length"]

LENGTH_REASONS: Final = frozenset({"length", "max_tokens", "max_output_tokens"})
NORMAL_REASONS: Final = frozenset(
    {"stop", "tool_calls", "function_call", "end_turn", "tool_use", "stop_sequence", "eos", "stop_token"}
)
INTERRUPTED_REASONS: Final = frozenset(
    {
        "abort",
        "aborted",
        "cancel",
        "canceled",
        "cancelled",
        "cancellation",
        "error",
        "failed",
        "content_filter",
        "refusal",
    }
)


def effective_status(record: Any) -> str | None:
    """Return the status of a call; one without status but with a known reason has the status that implies."""
    status: str | None = record.response_status
    if status is not None:
        return str(status)
    reason = record.finish_reason
    if reason in LENGTH_REASONS:
        return str(ResponseStatus.INCOMPLETE)
    if reason in NORMAL_REASONS:
        return str(ResponseStatus.COMPLETED)
    if reason in INTERRUPTED_REASONS:
        return str(ResponseStatus.FAILED)
    return None


def is_interrupted(record: Any) -> bool:
    """Tell whether the finish reason is an abort, a cancellation, an error or a content filter."""
    return record.finish_reason in INTERRUPTED_REASONS


def stopped_by_length(record: Any) -> bool:
    """Tell whether the reply was cut by a token limit, and by nothing else."""
    return record.finish_reason in LENGTH_REASONS and effective_status(record) in {
        ResponseStatus.COMPLETED,
        ResponseStatus.INCOMPLETE,
    }


def is_finished(record: Any) -> bool:
    """Tell whether a call finished as far as `all_captured` is concerned.

    A call with neither status nor reason counts as finished here: it is kept, and the pipeline refuses it.
    """
    status, reason = record.response_status, record.finish_reason
    if is_interrupted(record):
        return False
    if status is None:
        return reason is None or reason in LENGTH_REASONS or reason in NORMAL_REASONS
    if status == ResponseStatus.INCOMPLETE:
        return reason in LENGTH_REASONS
    return status == ResponseStatus.COMPLETED
