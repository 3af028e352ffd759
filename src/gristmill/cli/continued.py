"""What continuing calls by tokens did for a run, and what it could do.

Invariant: what was saved is what records say: a continued call whose own rendering would have left its parent's
sequence. What could be saved is counted for forks whose continuation nothing known forbids; the two witnesses of a
template are asked when it is tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gristmill.continuation import ContinuationReason, ContinuationState
from gristmill.records import CallRecord, Dialect, ParentResolution

__all__ = ["ContinuationCounts"]

_OF_THE_ENGINE = frozenset({ContinuationReason.ENGINE_UNABLE, ContinuationReason.ENGINE_OFF})
_CONVERSATIONS = frozenset({Dialect.CHAT, Dialect.RESPONSES, Dialect.MESSAGES})


class ContinuationCounts(msgspec.Struct):
    """Counts over calls.

    Attributes:
        continued, closed, suffix_tokens: calls whose prompt is their parent's sequence and more; those of them whose
            parent's turn had to be ended; tokens behind the parents' sequences.
        refused, refused_tokens: calls that were not continued though it was asked for, and the context that their forks
            paid again, by reason.
        saved, saved_tokens: continued calls whose own rendering would have forked, and the context of their rows that
            it would have repeated.
        could_save, could_save_tokens: forks that continuation could have prevented, and what they paid again.
    """

    continued: int = 0
    closed: int = 0
    suffix_tokens: int = 0
    refused: Counter[str] = msgspec.field(default_factory=Counter[str])
    refused_tokens: Counter[str] = msgspec.field(default_factory=Counter[str])
    saved: int = 0
    saved_tokens: int = 0
    could_save: int = 0
    could_save_tokens: int = 0

    @property
    def asked(self) -> bool:
        """Whether continuation was asked for at all."""
        return bool(self.continued or self.refused)

    def add(self, calls: Iterable[str], records: Mapping[str, CallRecord], paid_again: Mapping[str, int]) -> None:
        """Count the calls of an attempt.

        Args:
            calls: which of them.
            records: of the attempt, by call id.
            paid_again: context tokens that a forked call paid again.
        """
        for call_id in calls:
            record, tokens = records[call_id], paid_again.get(call_id, 0)
            told = record.continuation
            if told is not None and told.state is ContinuationState.CONTINUED:
                self.continued += 1
                self.closed += told.closed
                self.suffix_tokens += told.suffix_len
                if told.fork is not None:
                    self.saved += 1
                    self.saved_tokens += record.prompt_len - told.suffix_len
            elif told is not None:
                reason = str(told.reason)
                self.refused[reason] += 1
                self.refused_tokens[reason] += tokens
            if tokens and _could_be_continued(record, records):
                self.could_save += 1
                self.could_save_tokens += tokens

    def as_json(self) -> dict[str, Any]:
        """Return the counts under their documented keys."""
        return {
            "continued": self.continued,
            "closed": self.closed,
            "suffix_tokens": self.suffix_tokens,
            "refused": {
                reason: {"calls": count, "paid_again_tokens": self.refused_tokens[reason]}
                for reason, count in sorted(self.refused.items())
            },
            "saved": {"turns": self.saved, "context_tokens": self.saved_tokens},
            "could_save": {"turns": self.could_save, "context_tokens": self.could_save_tokens},
        }


def _could_be_continued(record: CallRecord, records: Mapping[str, CallRecord]) -> bool:
    """Say whether nothing that is recorded of a fork forbids to continue its parent."""
    told = record.continuation
    if told is not None and told.reason not in _OF_THE_ENGINE:
        return False
    parent = None if record.parent_call_id is None else records.get(record.parent_call_id)
    return (
        parent is not None
        and parent.usable
        and record.dialect in _CONVERSATIONS
        and record.parent_resolution is ParentResolution.RESOLVED
        and record.model == parent.model
        and record.system_digest == parent.system_digest
        and record.tools_digest == parent.tools_digest
        and not (record.media or record.request_media or parent.media)
    )
