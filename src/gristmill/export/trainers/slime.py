"""slime's and miles' `Sample`: whole token sequence, and mask and log-probabilities over the response.

Invariant: `response_length`, `loss_mask` and `rollout_log_probs` cover exactly the tokens after the prompt of the row's
first call. All rows of a rollout have one reward; a rollout of several rewards is refused.

Not here: slime's batches (slime makes them of samples), and text: `prompt` and `response` stay empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, Final

import numpy as np

from gristmill.export.trainers.layout import (
    EXTRAS_DROPPED,
    SPANS_DROPPED,
    WEIGHT_DROPPED,
    joined,
    one_reward,
    prompt_response,
    refuse_media,
)
from gristmill.export.trainers.projection import Kept, Projection, Sample, Source
from gristmill.reconstruction import Row

__all__ = ["MILES", "SLIME"]

_LOSSES: Final = {
    "spans": SPANS_DROPPED,
    "loss_weight": WEIGHT_DROPPED,
    "extras": EXTRAS_DROPPED,
    "text": "Samples without the text of prompt and response: only tokens are trained.",
}


def _samples(name: str, source: Source, losses: Counter[str]) -> Sequence[Sample]:
    reward = one_reward(source.rows)
    made: list[Sample] = []
    for row in source.rows:
        refuse_media(row, name)
        losses["spans"] += 1
        losses["text"] += 1
        losses["loss_weight"] += row.row_count > 1
        losses["extras"] += len(row.extras.arrays)
        made.append(Sample((row.row_id,), _fields(row, reward)))
    return made


def _fields(row: Row, reward: float) -> dict[str, Any]:
    cut = prompt_response(row)
    versions = dict.fromkeys(span.weight_version for span in row.spans if span.weight_version is not None)
    return {
        "group_index": _number(row.group_id if row.group_id is not None else row.rollout_id),
        "index": _number(row.row_id),
        "rollout_id": _number(f"{row.rollout_id}\0{row.attempt}"),
        "tokens": row.token_ids,
        "response_length": int(cut.response_ids.size),
        "reward": reward,
        "loss_mask": cut.response_mask,
        "weight_versions": list(versions),
        "rollout_log_probs": cut.response_logprobs,
        "status": "truncated" if row.truncated else "completed",
        "metadata": {"rollout_id": row.rollout_id, "attempt": row.attempt, "row_id": row.row_id},
    }


def _number(text: str) -> int:
    """Return a number of 53 bits that stands for an id: the trainer compares them only for equality."""
    return int.from_bytes(sha256(text.encode("utf-8", "surrogatepass")).digest()[:7]) >> 3


def _restore(fields: Mapping[str, Any]) -> Sequence[Kept]:
    tokens = np.asarray(fields["tokens"], np.int32)
    at = tokens.size - fields["response_length"]
    return (joined(tokens[:at], tokens[at:], fields["loss_mask"], fields["rollout_log_probs"]),)


SLIME: Final = Projection(
    name="slime",
    title="slime: one Sample a row.",
    made_for="slime 0.3",
    losses=_LOSSES,
    samples=partial(_samples, "slime"),
    restore=_restore,
)
MILES: Final = Projection(
    name="miles",
    title="miles: one Sample a row.",
    made_for="miles-rl 0.0.2",
    losses=_LOSSES,
    samples=partial(_samples, "miles"),
    restore=_restore,
)
