"""Whether the tokens of one choice may be trained.

Invariant: ids and log-probabilities are what the engine gave, or there is a reason and no tokens. Nothing is
repaired, padded, truncated or tokenised again, and no input raises, whatever its type.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import error as StructError
from struct import pack
from typing import Any, Final, cast

import msgspec
import numpy as np
import numpy.typing as npt

from gristmill.errors import Code
from gristmill.records import Float32Array, Int32Array

__all__ = ["CheckedTokens", "FloatList", "IntList", "UnusableTokens", "check_tokens"]

_MAX_ID: Final = 2**31 - 1


class IntList(list[int]):
    """A list whose maker knows that it holds integers alone, no boolean among them: a typed decoder's for example."""

    __slots__ = ()


class FloatList(list[float]):
    """The same of floats."""

    __slots__ = ()


class CheckedTokens(msgspec.Struct, frozen=True):
    """Tokens of one choice that may be trained: int32[P] prompt, int32[G] generation, float32[G] nats."""

    prompt_T: Int32Array
    generation_T: Int32Array
    logprobs_T: Float32Array


class UnusableTokens(msgspec.Struct, frozen=True):
    """Why the tokens of a choice may not be trained; `detail` names the counts that were found."""

    reason: Code
    detail: str


def check_tokens(
    prompt_ids: object, generation_ids: object, logprobs: object, *, reported: object = None
) -> CheckedTokens | UnusableTokens:
    """Decide whether the tokens of one choice may be trained.

    Args:
        prompt_ids: list, tuple or array of the prompt's token ids.
        generation_ids: the same of the sampled token ids.
        logprobs: one log-probability (nats) per sampled id.
        reported: `usage.completion_tokens` where the request had a single choice, else None.

    Returns the arrays, or the first rule that does not hold: prompt ids, sampled ids, one log-probability
    each, reported count, finite log-probabilities. Never raises, whatever the types.
    """
    counts = ", ".join(
        (f"{_count(generation_ids)} token_ids", f"{_count(logprobs)} logprobs")
        + (() if reported is None else (f"{_shown(reported)} reported",))
    )
    prompt = _ids(prompt_ids, Code.PROMPT_IDS_MISSING, "prompt ids", counts)
    if isinstance(prompt, UnusableTokens):
        return prompt
    if not prompt.size:
        return UnusableTokens(Code.PROMPT_IDS_MISSING, f"prompt ids: expected at least one, got 0; {counts}")
    generation = _ids(generation_ids, Code.TOKEN_IDS_MISSING, "token_ids", counts)
    if isinstance(generation, UnusableTokens):
        return generation
    if not _is_list(logprobs):
        return UnusableTokens(Code.LOGPROBS_MISSING, counts)
    if _count(logprobs) != generation.size:
        return UnusableTokens(Code.LOGPROB_COUNT_MISMATCH, counts)
    if reported is not None and (type(reported) is not int or reported != generation.size):
        return UnusableTokens(Code.TOKEN_COUNT_MISMATCH, counts)
    values = _logprobs(logprobs)
    if values is None:
        return UnusableTokens(Code.LOGPROB_NOT_FINITE, f"a logprob is not a finite number; {counts}")
    return CheckedTokens(prompt, generation, values)


def _is_list(values: object) -> bool:
    return isinstance(values, list | tuple) or (isinstance(values, np.ndarray) and values.ndim == 1)


def _count(values: object) -> str | int:
    return len(cast(Sequence[object], values)) if _is_list(values) else "no"


def _shown(reported: object) -> str:
    # Digits of a huge number are refused by Python itself, and say nothing.
    return str(reported) if type(reported) is int and abs(reported) < 2**63 else f"a {type(reported).__name__}"


def _numbers(values: object, kinds: str, python_types: tuple[type, ...]) -> npt.NDArray[Any] | None:
    """Return the values as an array[T] if each is of one of the numpy kinds and types, else None."""
    if isinstance(values, np.ndarray):
        array = cast(npt.NDArray[Any], values)
        return array if array.dtype.kind in kinds else None
    items = cast(Sequence[object], values)
    plain, dtype, code, known = (float, np.float64, "d", FloatList) if "f" in kinds else (int, np.int64, "q", IntList)
    try:
        if items and (type(items) is known or list(map(type, items)).count(plain) == len(items)):
            # The same numbers in less than half the time, which of a long reply is a part of every call.
            return np.frombuffer(pack(f"{len(items)}{code}", *items), dtype)
        for kind in set(map(type, items)):
            if kind is bool or not issubclass(kind, python_types):
                return None
        return np.array(items, dtype=dtype)
    except (OverflowError, StructError):
        return None


def _ids(values: object, missing: Code, name: str, counts: str) -> Int32Array | UnusableTokens:
    if not _is_list(values):
        got = "none" if values is None else f"a {type(values).__name__}"
        return UnusableTokens(missing, f"{name}: expected a list, got {got}; {counts}")
    array = _numbers(values, "iu", (int, np.integer))
    if array is None or (array.size and (array.min() < 0 or array.max() > _MAX_ID)):
        expected = f"expected integers from 0 to {_MAX_ID}"
        return UnusableTokens(Code.TOKEN_ID_INVALID, f"{name}: {expected}; {counts}")
    return np.ascontiguousarray(array, dtype=np.int32)


def _logprobs(values: object) -> Float32Array | None:
    array = _numbers(values, "fiu", (int, float, np.integer, np.floating))
    if array is None:
        return None
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(array, dtype=np.float32)
    return narrow if np.isfinite(narrow).all() else None
