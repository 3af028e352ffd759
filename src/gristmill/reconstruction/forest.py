"""The token tree over the selected calls: which call's whole sequence does each prompt begin with?

Invariant: a parent is the selected call with the longest sequence that is a prefix of the call's prompt,
proved on ids, and shares a row only under the same model, tokenizer, adapter and media; the order of storage
and the split into deltas do not matter. All of it is checked against the recorded lengths and digests first.

Not here: membership (selection), and rows themselves (row). Unselected calls are only ever inside prompts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from gristmill.errors import Code, ReconstructionError
from gristmill.reconstruction.drift import Certificate, Decode, DriftCause, Relation, certify, conflict
from gristmill.records import CallRecord, Float32Array, TokenDelta
from gristmill.tokens import Place, PrefixTree, checked_delta, logprobs_digest, running_digest

_FEW: Final = 8  # places that are looked through faster than they are indexed

__all__ = ["Forest", "ForestCall", "build_forest"]


class ForestCall(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A selected call that sampled something, in its place.

    Attributes:
        record: its record.
        delta: its own tokens.
        position: its place in the selection, from 0.
        end: where its whole sequence ends in the tree of ids.
        parent: call id of the token parent, or None for the first call of a row.
        fork: why a call whose sequence the prompt begins with is not the parent, or None.
        certificate: how the prompt relates to the recorded parent, or None where none is recorded.
        sequence_digest, logprobs_digest: computed from the tokens, and equal to the recorded ones.
    """

    record: CallRecord
    delta: TokenDelta
    position: int
    end: Place
    parent: str | None
    fork: DriftCause | None
    certificate: Certificate | None
    sequence_digest: str
    logprobs_digest: str

    @property
    def logprobs_T(self) -> Float32Array:
        """float32[G] nats of the generation."""
        return self.delta.logprobs_T[self.record.prompt_len - self.record.prev_len :]


class Forest(msgspec.Struct, frozen=True, eq=False):
    """The selected calls by id, in selection order; `empty` are those set aside: they sampled nothing."""

    calls: dict[str, ForestCall]
    empty: tuple[str, ...]
    records: Mapping[str, CallRecord]
    tokens: Mapping[str, TokenDelta]
    tree: PrefixTree

    def leaves(self) -> list[ForestCall]:
        """Return the calls that no call has as parent, in selection order."""
        parents = {call.parent for call in self.calls.values()}
        return [call for call_id, call in self.calls.items() if call_id not in parents]

    def path(self, leaf: ForestCall) -> list[ForestCall]:
        """Return the calls from the root to a call."""
        path = [leaf]
        while (parent := path[-1].parent) is not None:
            path.append(self.calls[parent])
        path.reverse()
        return path


class _Sequences:
    """Whole sequences in one tree of ids; each call is placed once, after its base, and proved then."""

    def __init__(self, records: Mapping[str, CallRecord], tokens: Mapping[str, TokenDelta]) -> None:
        self.records = records
        self.tokens = tokens
        # Lengths are not proved yet, so no more room than there are tokens.
        longest = max((record.cum_len for record in records.values()), default=0)
        self.tree = PrefixTree(min(longest, sum(delta.ids_T.size for delta in tokens.values())))
        self._places: dict[str, Place] = {}
        self.digests: dict[str, str] = {}

    def place(self, call_id: str) -> Place:
        """Place a call and the bases it stands on.

        Raises:
            ReconstructionError: `tokens_unusable`: lengths, bases or digests contradict the tokens.
        """
        place = self._places.get(call_id)
        if place is not None:
            return place
        todo: list[tuple[CallRecord, TokenDelta]] = []
        at: str | None = call_id
        pending: set[str] = set()
        while at is not None and at not in self._places:
            if at in pending:
                raise _unusable(at, "expected bases that end, got a cycle")
            record, delta = checked_delta(self.records, self.tokens, at)
            todo.append((record, delta))
            pending.add(at)
            at = record.base_call_id
        for record, delta in reversed(todo):
            self._put(record, delta)
        return self._places[call_id]

    def _put(self, record: CallRecord, delta: TokenDelta) -> None:
        base_id = record.base_call_id
        base = None if base_id is None else self._places[base_id]
        place = self.tree.insert(self.tree.root if base is None else base, delta.ids_T)
        if place.digest is None:
            place.digest = running_digest(base.digest if base else None, delta.ids_T)
        digest = place.digest.hexdigest()
        if record.sequence_digest is not None and record.sequence_digest != digest:
            raise _unusable(record.model_call_id, "expected tokens of the recorded sequence_digest, got others")
        self._places[record.model_call_id] = place
        self.digests[record.model_call_id] = digest


def build_forest(
    records: Iterable[CallRecord],
    tokens: Mapping[str, TokenDelta],
    selected: Sequence[str],
    *,
    decode: Decode | None = None,
) -> Forest:
    """Build the token tree over the selected calls of one attempt.

    Args:
        records: every captured call of the attempt, in any order.
        tokens: token delta by call id; bases need not be selected.
        selected: call ids in selection order.
        decode: ids to text, for certificates only.

    Raises:
        ReconstructionError: `nothing_to_train`; `tokens_unusable` where a selected call (`call=ID`) or a base
            is not usable, or its tokens contradict its record; `selection_duplicated`.
    """
    by_id = {record.model_call_id: record for record in records}
    for call_id, count in Counter(selected).items():
        if count > 1:
            message = f"{call_id}: expected each selected call once, got it {count} times"
            raise ReconstructionError(Code.SELECTION_DUPLICATED, message, where=f"call={call_id}")
    sequences = _Sequences(by_id, tokens)
    ends: dict[str, Place] = {}
    empty: list[str] = []
    for call_id in selected:
        record = by_id.get(call_id)
        if record is None or not record.usable:
            raise _not_usable(call_id, record)
        end = sequences.place(call_id)
        if record.cum_len == record.prompt_len:
            empty.append(call_id)
            continue
        end.calls += (call_id,)
        ends[call_id] = end
    if not ends:
        raise ReconstructionError(
            Code.NOTHING_TO_TRAIN,
            f"expected a selected call that sampled a token, got {len(empty)} empty generations",
            evidence={"empty_generation": empty},
        )
    certificates = {call_id: _certificate(sequences, by_id[call_id], end, decode) for call_id, end in ends.items()}
    marks = _Marks(sequences.tree)
    calls = {
        call_id: _linked(sequences, marks, position, call_id, ends[call_id], certificates[call_id])
        for position, call_id in enumerate(selected)
        if call_id in ends
    }
    return Forest(calls, tuple(empty), by_id, tokens, sequences.tree)


def _certificate(sequences: _Sequences, record: CallRecord, end: Place, decode: Decode | None) -> Certificate | None:
    parent_id = record.parent_call_id
    if parent_id is None:
        return None
    try:
        parent_end = sequences.place(parent_id)
    except ReconstructionError:
        # A parent that is not selected is only compared with; without proved tokens there is nothing to say.
        return Certificate(Relation.UNKNOWN, parent_id)
    return certify(sequences.tree, sequences.records[parent_id], parent_end, record, end, decode)


def _linked(
    sequences: _Sequences,
    marks: _Marks,
    position: int,
    call_id: str,
    end: Place,
    certificate: Certificate | None,
) -> ForestCall:
    record, delta = sequences.records[call_id], sequences.tokens[call_id]
    parent, fork = _token_parent(sequences.records, record, marks.longest(end, record.prompt_len))
    logprobs = logprobs_digest(delta.logprobs_T[record.prompt_len - record.prev_len :])
    if record.logprobs_digest is not None and record.logprobs_digest != logprobs:
        raise _unusable(call_id, "expected log-probabilities of the recorded logprobs_digest, got others")
    sequence = sequences.digests[call_id]
    return ForestCall(record, delta, position, end, parent, fork, certificate, sequence, logprobs)


def _token_parent(
    records: Mapping[str, CallRecord], record: CallRecord, found: Place | None
) -> tuple[str | None, DriftCause | None]:
    """Choose among the calls of the longest prefix: the recorded parent, else the least call id."""
    if found is None:
        return None, None
    fork: DriftCause | None = None
    chosen: str | None = None
    for call_id in sorted(found.calls):
        cause = conflict(records[call_id], record)
        if cause is not None:
            fork = fork or cause
        elif chosen is None or call_id == record.parent_call_id:
            chosen = call_id
    return chosen, fork if chosen is None else None


class _Marks:
    """The places of selected calls on each lane of a finished tree."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._lanes: dict[int, tuple[list[int], list[Place]]] = {}

    def longest(self, end: Place, limit: int) -> Place | None:
        """Return the deepest end of a selected call within `limit` tokens on the path to a place."""
        number = end.lane
        while number >= 0:
            lane = self._tree.lanes[number]
            if len(lane.places) > _FEW:
                depths, places = self._lane(number)
                at = bisect_right(depths, limit)
                if at:
                    return places[at - 1]
            else:
                for place in reversed(lane.places):
                    if place.calls and place.depth <= limit:
                        return place
            limit = min(limit, lane.start)
            number = lane.parent
        return None

    def _lane(self, number: int) -> tuple[list[int], list[Place]]:
        marks = self._lanes.get(number)
        if marks is None:
            places = [place for place in self._tree.lanes[number].places if place.calls]
            marks = self._lanes[number] = ([place.depth for place in places], places)
        return marks


def _not_usable(call_id: str, record: CallRecord | None) -> ReconstructionError:
    if record is None:
        return _unusable(call_id, "expected a captured call, got none of this id")
    return ReconstructionError(
        Code.TOKENS_UNUSABLE,
        f"{call_id}: expected usable tokens, got {record.unusable_reason or 'a record without'}",
        where=f"call={call_id}",
        evidence={"reason": record.unusable_reason, "detail": record.unusable_detail},
    )


def _unusable(call_id: str, message: str) -> ReconstructionError:
    return ReconstructionError(Code.TOKENS_UNUSABLE, f"{call_id}: {message}", where=f"call={call_id}")
