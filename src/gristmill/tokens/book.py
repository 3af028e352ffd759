"""Token sequences of one attempt, in commit order, to deltas against verified bases.

Invariant: a base is proved by comparing ids, never assumed from a link; a base never crosses attempts, since
every attempt has a book of its own.
"""

from __future__ import annotations

import msgspec
import numpy as np

from gristmill.errors import InternalError
from gristmill.records import Float32Array, Int32Array, TokenDelta
from gristmill.tokens.digests import NO_EXTRAS, Extras, chain_digest, logprobs_digest, running_digest
from gristmill.tokens.prefix_tree import Place, PrefixTree

__all__ = ["StoredTokens", "TokenBook"]


class StoredTokens(msgspec.Struct, frozen=True, gc=False):
    """How the tokens of one call are stored: the fields of `CallRecord` of these names, and the delta."""

    prompt_len: int
    prev_len: int
    delta_len: int
    cum_len: int
    base_call_id: str | None
    sequence_digest: str
    logprobs_digest: str
    chain_digest: str
    delta: TokenDelta


class TokenBook:
    """Turns the token sequences of one attempt, added in commit order, into deltas.

    The base of a call is the call with the longest earlier sequence that its prompt begins with, whether or
    not it is the recorded parent; the link only decides between equal sequences. Arguments are copied.
    """

    def __init__(self) -> None:
        self._tree = PrefixTree()
        self._places: dict[str, Place] = {}
        self._chains: dict[str, str] = {}

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._places

    def add(
        self,
        call_id: str,
        prompt_T: Int32Array,
        generation_T: Int32Array,
        logprobs_T: Float32Array,
        *,
        parent: str | None = None,
        extras: Extras = NO_EXTRAS,
    ) -> StoredTokens:
        """Add a call by its whole prompt.

        Args:
            call_id: unique in the attempt.
            prompt_T: int32[P] ids of the whole prompt.
            generation_T: int32[G] sampled ids.
            logprobs_T: float32[G] nats.
            parent: recorded parent, preferred among calls of equal sequences.
            extras: arrays by name, stored with the delta as they are.

        Raises:
            InternalError: the call was added before, or the lengths of ids and log-probabilities differ.
        """
        return self._add(call_id, self._tree.root, prompt_T, generation_T, logprobs_T, parent, extras)

    def extend(
        self,
        call_id: str,
        base: str,
        suffix_T: Int32Array,
        generation_T: Int32Array,
        logprobs_T: Float32Array,
        *,
        parent: str | None = None,
        extras: Extras = NO_EXTRAS,
    ) -> StoredTokens:
        """Add a call whose prompt is the whole sequence of `base`, then int32[S] ids, as a store holds it.

        The same as `add` with the whole prompt, at the cost of the new tokens only.

        Raises:
            InternalError: as `add`, or `base` was not added.
        """
        start = self._places.get(base)
        if start is None:
            raise InternalError(f"call {call_id!r}: expected a base that was added before, got {base!r}")
        return self._add(call_id, start, suffix_T, generation_T, logprobs_T, parent, extras)

    def sequence(self, call_id: str) -> Int32Array:
        """Return a call's whole sequence, prompt and generation, as a copy of int32[T] ids.

        Raises:
            InternalError: the call was not added.
        """
        place = self._places.get(call_id)
        if place is None:
            raise InternalError(f"call {call_id!r}: expected a call that was added before")
        return self._tree.read(place, 0, place.depth)

    def _add(
        self,
        call_id: str,
        start: Place,
        prompt_T: Int32Array,
        generation_T: Int32Array,
        logprobs_T: Float32Array,
        parent: str | None,
        extras: Extras,
    ) -> StoredTokens:
        if call_id in self._places:
            raise InternalError(f"call {call_id!r}: expected a call that is new to the book, got it again")
        if generation_T.size != logprobs_T.size:
            got = f"{generation_T.size} ids and {logprobs_T.size} log-probabilities"
            raise InternalError(f"call {call_id!r}: expected one log-probability per sampled id, got {got}")
        begin = start.depth
        prompt_len = begin + prompt_T.size
        place = self._tree.insert(start, prompt_T, generation_T)
        base = self._base(place, prompt_len)
        prev_len = base.depth if base else 0
        base_id = None if base is None else parent if parent in base.calls else base.calls[0]
        delta = _delta(prompt_T[prev_len - begin :], generation_T, logprobs_T, extras)
        if place.digest is None:
            place.digest = running_digest(base.digest if base else None, delta.ids_T)
        place.calls += (call_id,)
        sequence, logprobs = place.digest.hexdigest(), logprobs_digest(logprobs_T)
        chain = chain_digest(
            self._chains[base_id] if base_id is not None else None,
            (prompt_len, prev_len, place.depth),
            sequence,
            logprobs,
            delta.extras,
        )
        self._places[call_id], self._chains[call_id] = place, chain
        return StoredTokens(
            prompt_len, prev_len, delta.ids_T.size, place.depth, base_id, sequence, logprobs, chain, delta
        )

    def _base(self, place: Place, prompt_len: int) -> Place | None:
        found = self._tree.longest(place, prompt_len)
        if found is place and not place.calls:
            # A call that sampled nothing ends where its prompt ends, and is not its own base.
            found = self._tree.longest(place, prompt_len - 1)
        return found


def _delta(suffix_T: Int32Array, generation_T: Int32Array, logprobs_T: Float32Array, extras: Extras) -> TokenDelta:
    context, size = suffix_T.size, suffix_T.size + generation_T.size
    ids_T = np.empty(size, np.int32)
    ids_T[:context] = suffix_T
    ids_T[context:] = generation_T
    mask_T = np.zeros(size, np.uint8)
    mask_T[context:] = 1
    values_T = np.zeros(size, np.float32)
    values_T[context:] = logprobs_T
    ids_T.flags.writeable = mask_T.flags.writeable = values_T.flags.writeable = False
    if not extras:
        return TokenDelta(ids_T, mask_T, values_T)
    copies = {name: np.array(values) for name, values in extras.items()}
    for array in copies.values():
        array.flags.writeable = False
    return TokenDelta(ids_T, mask_T, values_T, copies)
