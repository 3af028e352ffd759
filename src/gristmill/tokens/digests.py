"""Digests of token sequences, log-probabilities and chains of deltas.

Invariant: equal content, equal digest, on every platform and however a sequence was split into deltas. All
are sha256 in 64 hexadecimal digits, over a version line and then

    sequence_digest  the whole sequence as little-endian int32; a running hash continues the base's, so a call
                     costs the hash of its delta only
    logprobs_digest  the generation's log-probabilities as little-endian float32
    chain_digest     the base's chain digest, the three lengths, both digests above and the extras
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from gristmill.records import Float32Array, Int32Array

__all__ = [
    "NO_EXTRAS",
    "Extras",
    "RunningDigest",
    "chain_digest",
    "logprobs_digest",
    "running_digest",
    "sequence_digest",
]

Extras = Mapping[str, npt.NDArray[Any]]
NO_EXTRAS: Final[Extras] = MappingProxyType({})

_IDS: Final = np.dtype("<i4")
_LOGPROBS: Final = np.dtype("<f4")
_SEQUENCE_START: Final = sha256(b"gristmill-sequence-1\n")
_LOGPROBS_START: Final = sha256(b"gristmill-logprobs-1\n")


class RunningDigest(Protocol):
    """A hash that can be continued from a copy."""

    def copy(self) -> RunningDigest: ...
    def update(self, data: Any, /) -> None: ...
    def hexdigest(self) -> str: ...


def running_digest(base: RunningDigest | None, ids_T: Int32Array) -> RunningDigest:
    """Return the running digest of a base's sequence followed by int32[T] ids (base None: the ids alone)."""
    digest: RunningDigest = (_SEQUENCE_START if base is None else base).copy()
    digest.update(np.ascontiguousarray(ids_T, dtype=_IDS).data)
    return digest


def sequence_digest(ids_T: Int32Array) -> str:
    """Digest a whole token sequence, int32[T]."""
    return running_digest(None, ids_T).hexdigest()


def logprobs_digest(logprobs_T: Float32Array) -> str:
    """Digest the log-probabilities of one generation, float32[G] nats."""
    digest = _LOGPROBS_START.copy()
    digest.update(np.ascontiguousarray(logprobs_T, dtype=_LOGPROBS).data)
    return digest.hexdigest()


def chain_digest(base: str | None, lengths: tuple[int, int, int], sequence: str, logprobs: str, extras: Extras) -> str:
    """Digest one link: the base's chain digest, (prompt, prev, cum) lengths, both digests and the extras."""
    digest = sha256(f"gristmill-chain-1\n{base} {lengths} {sequence} {logprobs}\n".encode())
    for name in sorted(extras):
        values = extras[name]
        little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        digest.update(f"{name!r} {little.dtype.str} {values.shape}\n".encode())
        digest.update(little.tobytes())
    return digest.hexdigest()
