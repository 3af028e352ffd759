"""slime's `Sample`: whole token sequence, and mask and log-probabilities over the response.

Invariant: `response_length`, `loss_mask` and `rollout_log_probs` cover exactly the tokens after the prompt of the row's
first call. All rows of a rollout have one reward and one `rollout_id`, by which slime adds their tokens up to one
rollout: that is `loss_weight`. A rollout of several rewards is refused.

Not here: slime's batches (slime makes them of samples), and text: `prompt` and `response` stay empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from gristmill.errors import Code, ReconstructionError
from gristmill.export.trainers.layout import (
    METADATA,
    ROUTED_EXPERTS,
    group_of,
    joined,
    metadata_of,
    number_of,
    one_reward,
    prompt_response,
    refuse_media,
    rollout_number,
    routed_experts_of,
)
from gristmill.export.trainers.losses import dropped, statements
from gristmill.export.trainers.objects import fields_of, trainer_module
from gristmill.export.trainers.projection import Kept, Projection, Sample, Source
from gristmill.reconstruction import Row, SpanRole

__all__ = [
    "DROPPED",
    "LOSSES",
    "SLIME",
    "advantages",
    "made_of",
    "restore_sample",
    "sample_rows",
    "samples",
]

DROPPED: Final = ("spans", "extras", "credits", "group")
LOSSES: Final = statements(*DROPPED, text="Samples without the text of prompt and response: only tokens are trained.")
_INSTALL: Final = "install slime from its repository, THUDM/slime: the package of this name on PyPI is another one"


def sample_rows(name: str, names: Sequence[str], source: Source, losses: Counter[str]) -> Sequence[Sample]:
    """Make a sample of each row.

    Args:
        name: of the trainer, for refusals.
        names: of the losses that all formats know.
        source: the attempt.
        losses: counts up what was dropped.

    Raises:
        ReconstructionError: `reward_missing`, `rewards_differ`, `not_expressible`.
    """
    reward = one_reward(source.rows)
    made: list[Sample] = []
    for row in source.rows:
        refuse_media(row, name)
        fields = _fields(row, reward)
        kept = (ROUTED_EXPERTS,) if "rollout_routed_experts" in fields else ()
        losses.update(dropped(row, names, kept_extras=kept))
        losses["text"] += 1
        made.append(Sample((row.row_id,), fields))
    return made


def _fields(row: Row, reward: float) -> dict[str, Any]:
    cut = prompt_response(row)
    trained = [span.weight_version for span in row.spans if span.role is SpanRole.SAMPLED]
    experts = routed_experts_of(row)
    return {
        "group_index": number_of(group_of(row)),
        "index": number_of(row.row_id),
        "rollout_id": rollout_number(row),
        "tokens": row.token_ids,
        "response_length": int(cut.response_ids.size),
        "reward": reward,
        "loss_mask": cut.response_mask,
        "weight_versions": [version for version in trained if version is not None],
        "rollout_log_probs": cut.response_logprobs,
        **({} if experts is None else {"rollout_routed_experts": experts}),
        "status": "truncated" if row.truncated else "completed",
        "session_id": row.rollout_id,
        "metadata": {METADATA: metadata_of(row)},
    }


def restore_sample(fields: Mapping[str, Any]) -> Sequence[Kept]:
    """Read back what a sample keeps of its row."""
    tokens = np.asarray(fields["tokens"], np.int32)
    at = tokens.size - fields["response_length"]
    return (joined(tokens[:at], tokens[at:], fields["loss_mask"], fields["rollout_log_probs"]),)


SLIME: Final = Projection(
    name="slime",
    title="slime: one Sample a row; the rows of a rollout share its rollout_id.",
    made_for="slime 0.4.0",
    losses=LOSSES,
    samples=partial(sample_rows, "slime", DROPPED),
    restore=restore_sample,
)


def samples(rows: Iterable[Row]) -> list[Any]:
    """Make slime's own samples, `slime.utils.types.Sample`.

    Args:
        rows: rollouts in a piece.

    Raises:
        ConfigError: `trainer_missing`.
        ReconstructionError: `reward_missing`, `rewards_differ`, `not_expressible`.
        ExportError: `row_missing`.
    """
    return made_of(trainer_module("slime.utils.types", _INSTALL).Sample, SLIME, rows)


def made_of(sample_class: Any, projection: Projection, rows: Iterable[Row]) -> list[Any]:
    """Make samples of a class through its own `from_dict`; token ids, mask and log-probabilities are lists."""
    lists = ("tokens", "loss_mask", "rollout_log_probs")
    return [
        sample_class.from_dict({**fields, **{name: fields[name].tolist() for name in lists}})
        for fields in fields_of(projection, rows)
    ]


def advantages(args: object, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Give slime and miles the advantages that the rows came with, for `--custom-reward-post-process-path`.

    Their own normalisation compares samples by position, as if every rollout were one sample.

    Returns:
        the rewards, and the advantages in their place, as the hook returns them.

    Raises:
        ReconstructionError: `advantage_required`.
    """
    given = [sample.metadata[METADATA]["advantage"] for sample in samples]
    for sample, advantage in zip(samples, given, strict=True):
        if advantage is None:
            row = sample.metadata[METADATA]
            message = f"expected rollout {row['rollout_id']!r} to have an advantage, it has none"
            raise ReconstructionError(Code.ADVANTAGE_REQUIRED, message, where=f"row={row['row_id']}")
    return [sample.reward for sample in samples], given
