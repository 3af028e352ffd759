"""NeMo's records as our policies read them: a view of each, which knows the record it stands for.

Invariant: a view only repeats what its record says. What a call served is read from the items themselves where the
record holds them (`TokenEntry`), from their fingerprints where it holds those (`CallRecord` with `output_items`), and
is unknown, never empty, where it holds neither (`CallRecord` of a manifest).

Not here: choosing (policies), and the function that made the fingerprints (fingerprints).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import msgspec
import numpy as np

from gristmill.fingerprint import output_items
from gristmill.records import CapturedItem, Delivery
from gristmill.selection.completion import is_interrupted
from gristmill.tokens import logprobs_digest, sequence_digest

__all__ = ["NemoCall", "plain", "views_of"]


class _Evidence(msgspec.Struct, frozen=True):
    """A served item by its fingerprint, as a manifest that was read from JSON holds it."""

    id: str | None
    fingerprint: str


class NemoCall:
    """One of NeMo's records, with the attributes that our policies read.

    Attributes:
        record: the record itself.
        known: whether the record says what the call served.
        output_items: our items with their atoms, or theirs with their fingerprints.
    """

    def __init__(self, record: Any) -> None:
        self.record = record
        self.model_call_id: str = record.model_call_id
        # A record without one is named by no result, and two of them are not the same reply.
        self.response_id: str = getattr(record, "response_id", None) or f"(none of call {self.model_call_id})"
        self.parent_call_id: str | None = getattr(record, "parent_call_id", None)
        self.response_status: str | None = getattr(record, "response_status", None)
        self.finish_reason: str | None = getattr(record, "finish_reason", None)
        self.choice_index: int = getattr(record, "choice_index", 0) or 0
        self.model: str | None = getattr(record, "model", None) or None
        self.weight_versions: Any = getattr(record, "weight_version", None)
        self.delivery = Delivery.UNKNOWN
        items = _items_of(record)
        # A call that failed served nothing that could stand in a history.
        self.known = items is not None or self.response_status == "failed" or is_interrupted(self)
        self.output_items: tuple[Any, ...] = items or ()

    @property
    def by_fingerprint(self) -> bool:
        """Whether its items are known by fingerprints only."""
        return any(getattr(item, "atoms", None) is None and not hasattr(item, "kind") for item in self.output_items)

    # What tells interchangeable calls from others: only a record that holds all its tokens can prove it.

    @cached_property
    def _generation(self) -> Sequence[int] | None:
        ids = getattr(self.record, "generation_token_ids", None)
        whole = getattr(self.record, "prompt_token_ids", None) is not None
        return None if ids is None or not whole or getattr(self.record, "prompt_is_delta", False) else ids

    @property
    def usable(self) -> bool:
        """Whether the record holds the call's tokens."""
        return self._generation is not None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt; 0 where they are not held."""
        return 0 if self._generation is None else len(self.record.prompt_token_ids)

    @property
    def cum_len(self) -> int:
        """Tokens of prompt and generation; 0 where they are not held."""
        return 0 if self._generation is None else self.prompt_len + len(self._generation)

    @cached_property
    def sequence_digest(self) -> str | None:
        """Digest of prompt and generation; None where they are not held."""
        if self._generation is None:
            return None
        return sequence_digest(np.asarray([*self.record.prompt_token_ids, *self._generation], np.int32))

    @cached_property
    def logprobs_digest(self) -> str | None:
        """Digest of the log-probabilities; None where they are not held."""
        given = getattr(self.record, "generation_log_probs", None)
        return None if self._generation is None or given is None else logprobs_digest(np.asarray(given, np.float32))


def plain(value: Any) -> Any:
    """Return a record or a result of theirs as JSON values, whichever class it is of."""
    dump = getattr(value, "model_dump", None)
    return value if dump is None else dump(mode="json")


def _items_of(record: Any) -> tuple[Any, ...] | None:
    """Return what a call served; None where the record does not say."""
    given = getattr(record, "output_items", None)
    if given is None:
        return None
    items = [item if isinstance(item, CapturedItem) else plain(item) for item in cast("Sequence[Any]", given)]
    held = [cast("Mapping[str, Any]", item) for item in items if isinstance(item, Mapping)]
    if not held:
        return tuple(items)
    if all("fingerprint" in item for item in held):
        return tuple(_Evidence(item.get("id"), item["fingerprint"]) for item in held)
    return output_items(items)


def views_of(records: Sequence[Any]) -> list[NemoCall]:
    """Make a view of each record, in their order."""
    return [NemoCall(record) for record in records]
