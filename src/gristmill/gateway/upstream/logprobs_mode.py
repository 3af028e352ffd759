"""Whether an engine's log-probabilities are those of the model or of the distribution that was sampled.

The first token is sampled at two temperatures. Values of the model do not change with it, values of the sampled
distribution do; tokens in both top lists are compared. Where a token is nearly certain at both, nothing can be told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from gristmill.gateway.upstream.protocol import Engine, EngineKind
from gristmill.gateway.upstream.sample import Sample, Sampler
from gristmill.records import LogprobsMode

__all__ = ["measure_mode"]

_TOP: Final = 5
_TEMPERATURES: Final = (0.5, 2.0)
_SAME_nats: Final = 0.05
_OTHER_nats: Final = 0.2
_MASKED_nats: Final = -1000.0
_REMEDIES: Final[Mapping[EngineKind, str]] = {
    EngineKind.VLLM: "start vLLM with --logprobs-mode processed_logprobs",
    EngineKind.SGLANG: "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB",
}


class _Entry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[_Entry] = []


class _Logprobs(msgspec.Struct):
    content: list[_Entry] | None = None


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None


async def measure_mode(sampler: Sampler, engine: Engine, kind: EngineKind, notes: list[str]) -> LogprobsMode:
    """Tell the mode of an engine's log-probabilities, and add what follows from it to the notes."""
    tops = list[Mapping[str, float]]()
    for temperature in _TEMPERATURES:
        sample = await sampler.body(engine, max_tokens=1, temperature=temperature, seed=1, top_logprobs=_TOP)
        if sample.refused:
            remedy = " with vLLM's --max-logprobs" if kind is EngineKind.VLLM else ""
            notes.append(
                f"The mode of its log-probabilities was not measured: {sample.error}. Harnesses that ask for top"
                f" log-probabilities are refused likewise; allow more{remedy}."
            )
            return LogprobsMode.UNKNOWN
        tops.append(_top(sample))
    mode = _mode(*tops)
    if mode is LogprobsMode.RAW:
        remedy = _REMEDIES.get(kind)
        notes.append(
            "Its log-probabilities are the model's own, whatever the temperature: they are those that were sampled from"
            f" at temperature 1 without top-k and top-p alone{f'; else {remedy}' if remedy else ''}."
        )
    return mode


def _top(sample: Sample) -> Mapping[str, float]:
    """Return the first token's list of candidates, by token."""
    try:
        logprobs = msgspec.convert(sample.choice, _Choice).logprobs
    except msgspec.ValidationError:
        return {}
    entries = logprobs.content[0].top_logprobs if logprobs is not None and logprobs.content else []
    return {f"{entry.token} {entry.bytes}": entry.logprob for entry in entries}


def _mode(first: Mapping[str, float], second: Mapping[str, float]) -> LogprobsMode:
    # What a filter of the engine's own took out is -9999 or so under both temperatures, and says nothing.
    shared = [token for token in first if token in second and min(first[token], second[token]) > _MASKED_nats]
    apart = [abs(first[token] - second[token]) for token in shared]
    if apart and max(apart) > _OTHER_nats:
        return LogprobsMode.PROCESSED
    telling = any(first[token] < -_OTHER_nats for token in shared)
    return LogprobsMode.RAW if telling and max(apart) <= _SAME_nats else LogprobsMode.UNKNOWN
