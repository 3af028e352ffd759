"""What a projection to a trainer is: rows of one attempt in, samples under the trainer's own field names out.

Invariant: a projection keeps token ids, mask and log-probabilities as they are, or refuses: `restore` gives them back
equal. Everything else that it drops or changes is counted under a name that it has a statement for.

Not here: the projections (a module each), files of samples (samples), helpers on rows (layout).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from gristmill.reconstruction import Row
from gristmill.records import Capture, Float32Array, Int32Array, Result, UInt8Array

__all__ = ["Kept", "Projection", "Sample", "Source"]


class Source(msgspec.Struct, frozen=True, eq=False):
    """One attempt that is projected.

    Attributes:
        rows: all its rows, in their order.
        capture: the attempt with its exchanges, for formats that hold text; None where only rows are at hand.
        result: what the harness handed back, likewise.
    """

    rows: Sequence[Row]
    capture: Capture | None = None
    result: Result | None = None


class Sample(NamedTuple):
    """One record of a format.

    Attributes:
        rows: ids of the rows that it holds.
        fields: JSON values, numpy arrays among them, under the trainer's names; a list where the order is the format.
    """

    rows: tuple[str, ...]
    fields: Mapping[str, Any] | Sequence[Any]


class Kept(NamedTuple):
    """What a sample keeps of a row of T tokens: ids int32[T], mask uint8[T], float32[T] nats (None: not kept)."""

    token_ids: Int32Array
    loss_mask: UInt8Array
    logprobs: Float32Array | None


class Projection(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer's format.

    Attributes:
        name: as given to `--to`.
        title: one sentence.
        made_for: trainer and version whose classes or documents it follows; stamped on every record.
        losses: the statements that its loss report can make, by name.
        samples: makes the records of one attempt and counts losses; raises `ReconstructionError` to refuse it.
        restore: reads the `fields` of a record as they come out of JSON; gives what is kept of each of its rows.
        text: whether it wants the exchanges in `Source.capture`.
    """

    name: str
    title: str
    made_for: str
    losses: Mapping[str, str]
    samples: Callable[[Source, Counter[str]], Sequence[Sample]]
    restore: Callable[[Any], Sequence[Kept]]
    text: bool = False
