"""NeMo's records, rebuilt: classes with the field names of its models, and nothing of ours.

`Entry` has the fields of Gym's `TokenEntry`, `ManifestCall` those of the `CallRecord` that a manifest holds, and
`EvidenceCall` the same with what a call served as fingerprints of its items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from typing import Any

__all__ = ["Entry", "Evidence", "EvidenceCall", "ManifestCall", "Parent", "Served", "their_fingerprint"]


class Parent(Enum):
    """How a parent was resolved: an enumeration of theirs, not of ours."""

    ROOT = "root"
    RESOLVED = "resolved"


@dataclass
class Entry:
    """One call with its tokens and what it served."""

    model_call_id: str
    output_items: list[dict[str, Any]]
    response_id: str | None = None
    parent_call_id: str | None = None
    rollout_id: str = "0-0"
    model: str = "policy"
    prompt_token_ids: Sequence[int] = (1, 2)
    generation_token_ids: Sequence[int] = (3,)
    generation_log_probs: Sequence[float] = (-0.5,)
    prompt_is_delta: bool = False
    parent_resolution: Parent = Parent.ROOT


@dataclass
class ManifestCall:
    """One line of a manifest: no tokens, and nothing of what was served."""

    model_call_id: str
    response_id: str
    parent_call_id: str | None = None
    prev_len: int = 0
    delta_len: int = 3
    cum_len: int = 3
    weight_version: int = 4


@dataclass
class Evidence:
    """A served item as its fingerprint."""

    fingerprint: str
    id: str | None = None


@dataclass
class EvidenceCall:
    """One call with the fingerprints of what it served."""

    model_call_id: str
    response_id: str
    output_items: list[Any] | None
    parent_call_id: str | None = None
    response_status: str | None = "completed"
    finish_reason: str | None = None


@dataclass
class Served:
    """What a model of theirs looks like: it gives its JSON by `model_dump`."""

    value: dict[str, Any] = field(default_factory=dict[str, Any])

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        """Give the JSON values."""
        assert mode == "json"
        return self.value


def their_fingerprint(item: Mapping[str, Any]) -> str:
    """Fingerprints by a rule that is not ours: the text alone."""
    text = item.get("content")
    if not isinstance(text, str):
        raise ValueError(f"cannot read {type(text).__name__}")
    return sha256(text.encode()).hexdigest()
