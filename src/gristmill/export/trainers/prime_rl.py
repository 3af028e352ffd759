"""prime-rl's `TrainingSample`: a row as flat arrays, in an order that is the wire format.

Invariant: a sample is a list whose places are the fields of `FIELDS`; what stands in none of them stays null. Every
trained token has the temperature that it was sampled at, because the trainer divides logits by it; where that is not
known, or does not fit the log-probabilities, the rollout is refused.

Not here: micro-batches, which prime-rl packs of samples itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from types import GenericAlias
from typing import Any, Final, cast

import msgspec
import numpy as np

from gristmill.errors import Code, ConfigError, ReconstructionError
from gristmill.export.trainers.layout import advantages_of, as_float32, by_rollout, joined, refuse_media
from gristmill.export.trainers.losses import dropped, statements
from gristmill.export.trainers.objects import trainer_module
from gristmill.export.trainers.projection import Kept, Projection, Sample, Source
from gristmill.reconstruction import Row, Span, SpanRole
from gristmill.records import Float32Array, LogprobsMode

__all__ = ["ENV_NAME", "FIELDS", "PRIME_RL", "to_bytes", "training_samples"]

FIELDS: Final = (
    "token_ids",
    "mask",
    "logprobs",
    "temperatures",
    "env_name",
    "ref_logprobs",
    "mm_kwargs",
    "routed_experts",
    "mm_token_type_ids",
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
    "advantages",
)
"""The fields in their order. Later versions call the seventh `mm_refs` and append others: they read this too."""

ENV_NAME: Final = "gristmill"
"""The environment that samples name, which prime-rl groups its metrics by, where no other is given."""

_DROPPED: Final = ("spans", "extras", "reward", "credit_rewards")


def _samples(source: Source, losses: Counter[str]) -> Sequence[Sample]:
    made: list[Sample] = []
    for row in source.rows:
        made.append(Sample((row.row_id,), _fields(row, ENV_NAME, None)))
        losses.update(dropped(row, _DROPPED))
    return made


def _fields(row: Row, env_name: str, temperature: float | None) -> list[Any]:
    refuse_media(row, "prime-rl")
    values = {
        "token_ids": row.token_ids,
        "mask": row.loss_mask.astype(np.bool_),
        "logprobs": row.logprobs,
        "temperatures": _temperatures(row, temperature),
        "env_name": env_name,
        "advantages": advantages_of(row),
    }
    return [values.get(name) for name in FIELDS]


def _temperatures(row: Row, stated: float | None) -> Float32Array:
    """Return the temperature of every token, float32[T]; 1.0 where nothing is trained."""
    temperatures = np.ones(row.token_ids.size)
    for span in row.spans:
        if span.role is SpanRole.SAMPLED:
            temperatures[span.start : span.end] = _temperature(row, span, stated)
    return as_float32(temperatures, row, "temperatures")


def _temperature(row: Row, span: Span, stated: float | None) -> float:
    value = stated if span.temperature is None else span.temperature
    if value is None:
        problem = "none is recorded; `gristmill serve --override temperature=1.0` records one"
    elif as_float32(value, row, "the temperature") <= 0:
        problem = f"{value} is none that logits can be divided by"
    elif value != 1 and span.logprobs_mode is LogprobsMode.RAW:
        problem = f"{value} does not fit log-probabilities from before the temperature"
    else:
        return value
    message = f"expected the temperature of call {span.call_id}: {problem}"
    raise ReconstructionError(Code.NOT_EXPRESSIBLE, message, where=f"row={row.row_id}")


def _restore(fields: Sequence[Any]) -> Sequence[Kept]:
    ids, mask, logprobs = fields[:3]
    return (joined((), ids, mask, logprobs),)


PRIME_RL: Final = Projection(
    name="prime-rl",
    title="prime-rl: one TrainingSample a row, as the list that its wire format is.",
    made_for="prime-rl 0.9.0",
    losses=statements(*_DROPPED),
    samples=_samples,
    restore=_restore,
)


def to_bytes(rows: Iterable[Row], *, env_name: str = ENV_NAME, temperature: float | None = None) -> bytes:
    """Write rows as MessagePack that decodes as `list[TrainingSample]`.

    Args:
        rows: rollouts in a piece.
        env_name: of the environment, for prime-rl's metrics; `all` is its own.
        temperature: of calls for which none is recorded, if you know it.

    Raises:
        ConfigError: `option_invalid`: the environment is called `all`.
        ReconstructionError: `advantage_required`, `not_expressible`.
        ExportError: `row_missing`.
    """
    if env_name == "all":
        raise ConfigError("expected the name of an environment, got 'all', which prime-rl keeps", where="env_name")
    made = [_fields(row, env_name, temperature) for rollout in by_rollout(rows) for row in rollout]
    return msgspec.msgpack.encode(made, enc_hook=_listed)


def _listed(value: object) -> object:
    return cast(Any, value).tolist()


def training_samples(rows: Iterable[Row], *, env_name: str = ENV_NAME, temperature: float | None = None) -> list[Any]:
    """Make prime-rl's own samples, `prime_rl.transports.batch.types.TrainingSample`; otherwise as `to_bytes`.

    Raises:
        ConfigError: `trainer_missing`, `option_invalid`.
        ReconstructionError: `advantage_required`, `not_expressible`.
        ExportError: `row_missing`.
    """
    install = "install prime-rl from its repository, PrimeIntellect-ai/prime-rl"
    sample_class = trainer_module("prime_rl.transports.batch.types", install).TrainingSample
    data = to_bytes(rows, env_name=env_name, temperature=temperature)
    decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(GenericAlias(list, (sample_class,)))
    return decoder.decode(data)
