"""One attempt in a line of `ls`: what a ledger says of its own attempts, computed for captures in files.

Invariant: a capture counts the same in a file and in the ledger that it was imported into.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gristmill.cli.attempts import Attempt
    from gristmill.ledger import Summary

__all__ = ["summary_of"]


def summary_of(attempt: Attempt) -> Summary:
    """Return the summary of an attempt; one in files is frozen, and `touched_at` is not known."""
    from gristmill.ledger import AttemptKey, AttemptState, Summary

    if attempt.summary is not None:
        return attempt.summary
    capture, result = attempt.capture, attempt.result
    records = capture.records
    admitted = [record.admitted_at for record in records if record.admitted_at is not None]
    completed = [record.completed_at for record in records if record.completed_at is not None]
    return Summary(
        key=AttemptKey(capture.rollout_id, capture.attempt),
        state=AttemptState.FROZEN,
        calls=len(records),
        lost=len(capture.lost),
        usable_calls=sum(record.usable for record in records),
        sampled_tokens=sum(record.cum_len - record.prompt_len for record in records),
        prompt_tokens=sum(record.prompt_len for record in records),
        models=tuple(dict.fromkeys(record.model for record in records if record.model is not None)),
        reward=result.reward,
        group_id=result.group_id,
        has_result=attempt.has_result,
        first_at=min(admitted, default=None),
        last_at=max(completed, default=None),
    )
