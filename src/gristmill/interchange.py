"""Which captured calls are equal in everything that training could tell.

Invariant: two calls are interchangeable only if their tokens, log-probabilities and all recorded evidence about them
are present and equal; then it makes no difference which of them a row is made of.

Not here: whether one of them is needed at all (selection, terminal).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

__all__ = ["interchange_groups"]

_COMPARED: Final = (
    "sequence_digest",
    "prompt_len",
    "cum_len",
    "logprobs_digest",
    "weight_versions",
    "model",
    "parent_call_id",
    "usable",
    "delivery",
)


def _key(record: Any) -> tuple[Any, ...] | None:
    """Give all that must be equal; None for a call that is never interchangeable."""
    if any(not hasattr(record, name) for name in _COMPARED):
        return None
    if record.sequence_digest is None or record.logprobs_digest is None or record.cum_len <= record.prompt_len:
        return None
    return tuple(getattr(record, name) for name in _COMPARED)


def interchange_groups(records: Sequence[Any], calls: Iterable[int], preferred: Collection[int] = ()) -> dict[int, int]:
    """Map each of the calls that has an interchangeable one to the one that stands for its group.

    That is a preferred one (identified, required or declared), else the one with the smallest model call id. Records
    without these attributes, and calls with absent or empty tokens, are never interchangeable.

    Args:
        records: captured calls in commit order.
        calls: positions to group.
        preferred: positions that stand for their group before others.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for call in calls:
        key = _key(records[call])
        if key is not None:
            groups.setdefault(key, []).append(call)
    representative: dict[int, int] = {}
    for members in groups.values():
        if len(members) > 1:
            first = min(members, key=lambda call: (call not in preferred, records[call].model_call_id))
            representative.update(dict.fromkeys(members, first))
    return representative
