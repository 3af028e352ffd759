"""Tokens: checked or refused, stored as deltas to proved bases, and expanded to exactly what was captured."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import Code, InternalError, ReconstructionError
from gristmill.records import CallRecord, TokenDelta
from gristmill.tokens import (
    CheckedTokens,
    PrefixTree,
    StoredTokens,
    TokenBook,
    UnusableTokens,
    base_chain,
    chain_digest,
    check_tokens,
    expand,
    logprobs_digest,
    sequence_digest,
)
from gristmill.tokens.prefix_tree import common_prefix


def ids(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def nats(*values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, np.float32)


# ---- check -------------------------------------------------------------------------------------------------


def test_good_tokens_become_arrays() -> None:
    # A user's good capture must be trainable, with the ids as the engine gave them.
    checked = check_tokens([1, 2], (3, 4), [-0.5, 0], reported=2)
    assert isinstance(checked, CheckedTokens)
    assert checked.prompt_T.tolist() == [1, 2]
    assert checked.generation_T.dtype == np.int32
    assert checked.logprobs_T.tolist() == [-0.5, 0.0]


def test_arrays_of_any_integer_type_are_read() -> None:
    # Decoders hand over int64 buffers; their ids are the same ids.
    checked = check_tokens(
        np.array([1, 2], np.int64), np.array([3], ">u2"), np.array([-1.5], np.float64), reported=None
    )
    assert isinstance(checked, CheckedTokens)
    assert checked.generation_T.tolist() == [3]
    assert isinstance(check_tokens([np.int64(1)], [2], [np.float32(-1)]), CheckedTokens)


def test_nothing_sampled_is_usable() -> None:
    # An empty generation is reported as such later, not confused with missing ids.
    assert isinstance(check_tokens([1], [], [], reported=0), CheckedTokens)


@pytest.mark.parametrize(
    ("prompt", "generation", "logprobs", "reported", "reason"),
    [
        (None, [1], [-1.0], 1, Code.PROMPT_IDS_MISSING),
        ([], [1], [-1.0], 1, Code.PROMPT_IDS_MISSING),
        ("12", [1], [-1.0], 1, Code.PROMPT_IDS_MISSING),
        ([1, -1], [1], [-1.0], 1, Code.TOKEN_ID_INVALID),
        ([1], None, [-0.1, -0.2], 2, Code.TOKEN_IDS_MISSING),
        ([1], {"a": 1}, [-1.0], 1, Code.TOKEN_IDS_MISSING),
        ([1], np.zeros((1, 1), np.int32), [-1.0], 1, Code.TOKEN_IDS_MISSING),
        ([1], [True], [-1.0], 1, Code.TOKEN_ID_INVALID),
        ([1], np.array([True]), [-1.0], 1, Code.TOKEN_ID_INVALID),
        ([1], [1.0], [-1.0], 1, Code.TOKEN_ID_INVALID),
        ([1], [None], [-1.0], 1, Code.TOKEN_ID_INVALID),
        ([1], [[1]], [-1.0], 1, Code.TOKEN_ID_INVALID),
        ([1], [2**31], [-1.0], 1, Code.TOKEN_ID_INVALID),
        ([1], [2**90], [-1.0], 1, Code.TOKEN_ID_INVALID),
        ([1], [1], None, 1, Code.LOGPROBS_MISSING),
        ([1], [1], "x", 1, Code.LOGPROBS_MISSING),
        ([1], [11, 12], [-0.1, -0.2, -0.3], 3, Code.LOGPROB_COUNT_MISMATCH),
        ([1], [1], [-1.0], 2, Code.TOKEN_COUNT_MISMATCH),
        ([1], [1], [-1.0], True, Code.TOKEN_COUNT_MISMATCH),
        ([1], [1], [-1.0], "1", Code.TOKEN_COUNT_MISMATCH),
        pytest.param([1], [1], [-1.0], 10**5000, Code.TOKEN_COUNT_MISMATCH, id="huge-count"),
        ([1], [1], [float("nan")], 1, Code.LOGPROB_NOT_FINITE),
        ([1], [1], [float("-inf")], 1, Code.LOGPROB_NOT_FINITE),
        ([1], [1], [-1e300], 1, Code.LOGPROB_NOT_FINITE),
        pytest.param([1], [1], [-(10**400)], 1, Code.LOGPROB_NOT_FINITE, id="huge-logprob"),
        ([1], [1], ["-1"], 1, Code.LOGPROB_NOT_FINITE),
        ([1], [1], [False], 1, Code.LOGPROB_NOT_FINITE),
        ([1], [1], np.array([None]), 1, Code.LOGPROB_NOT_FINITE),
    ],
)
def test_anything_else_is_a_reason(
    prompt: object, generation: object, logprobs: object, reported: object, reason: Code
) -> None:
    # One malformed reply must cost one call, with a reason, and never an exception or a repaired token.
    got = check_tokens(prompt, generation, logprobs, reported=reported)
    assert isinstance(got, UnusableTokens)
    assert got.reason is reason


def test_detail_names_the_counts() -> None:
    # Stop handling in an engine left one log-probability too many: the user must see which count is off.
    got = check_tokens([1], [11, 12], [-0.1, -0.2, -0.3], reported=3)
    assert got == UnusableTokens(Code.LOGPROB_COUNT_MISMATCH, "2 token_ids, 3 logprobs, 3 reported")
    missing = check_tokens([1], None, [-0.1, -0.2], reported=2)
    assert isinstance(missing, UnusableTokens)
    assert "token_ids" in missing.detail
    assert "no token_ids, 2 logprobs, 2 reported" in missing.detail


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)


@given(json_values, json_values, json_values, json_values)
def test_check_never_raises(prompt: object, generation: object, logprobs: object, reported: object) -> None:
    # Whatever an engine sends, the gateway stores a call with a reason.
    assert isinstance(check_tokens(prompt, generation, logprobs, reported=reported), CheckedTokens | UnusableTokens)


# ---- digests -----------------------------------------------------------------------------------------------


def test_digests_are_stable() -> None:
    # Stored digests must verify on another machine and in a later version.
    assert sequence_digest(ids(1, 258)) == sha256(b"gristmill-sequence-1\n\1\0\0\0\2\1\0\0").hexdigest()
    assert logprobs_digest(nats(-1.0)) == sha256(b"gristmill-logprobs-1\n\0\0\x80\xbf").hexdigest()
    assert sequence_digest(ids(1, 2).astype(">i4")) == sequence_digest(ids(1, 2))


def test_chain_digest_covers_every_part() -> None:
    # A changed base, length, digest or extra array must not go unseen.
    extra = np.arange(4, dtype=np.int16).reshape(2, 2)
    digests = {
        chain_digest(None, (1, 0, 2), "s", "l", {}),
        chain_digest("b", (1, 0, 2), "s", "l", {}),
        chain_digest(None, (2, 0, 2), "s", "l", {}),
        chain_digest(None, (1, 0, 2), "t", "l", {}),
        chain_digest(None, (1, 0, 2), "s", "m", {}),
        chain_digest(None, (1, 0, 2), "s", "l", {"experts": extra}),
        chain_digest(None, (1, 0, 2), "s", "l", {"experts": extra.reshape(4)}),
        chain_digest(None, (1, 0, 2), "s", "l", {"experts": extra.astype(np.int32)}),
        chain_digest(None, (1, 0, 2), "s", "l", {"other": extra}),
    }
    assert len(digests) == 9
    big = extra.astype(">i2")
    assert chain_digest(None, (1, 0, 2), "s", "l", {"experts": big}) in digests


# ---- prefix tree -------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=14), st.data())
def test_tree_knows_every_sequence(sequences: list[list[int]], data: st.DataObject) -> None:
    # A wrong prefix means that a token is trained on a context that the engine never saw.
    tree = PrefixTree()
    places = []
    for number, sequence in enumerate(sequences):
        earlier = [at for at in range(number) if sequences[at] == sequence[: len(sequences[at])]]
        start, known = tree.root, 0
        if earlier:
            at = data.draw(st.sampled_from(earlier))
            start, known = places[at], len(sequences[at])
        places.append(tree.insert(start, ids(*sequence[known:])))
    for sequence, place in zip(sequences, places, strict=True):
        assert place.depth == len(sequence)
        assert tree.read(place, 0, len(sequence)).tolist() == sequence
        assert tree.read(place, 1, max(1, len(sequence) - 1)).tolist() == sequence[1:-1]
        for limit in range(-1, len(sequence) + 1):
            fits = [one for one in sequences if len(one) <= limit and one == sequence[: len(one)]]
            longest = tree.longest(place, limit)
            assert (longest.depth if longest else None) == max(map(len, fits), default=None)
        for other, other_place in zip(sequences, places, strict=True):
            assert (place is other_place) == (sequence == other)
            shared = 0
            while shared < min(len(sequence), len(other)) and sequence[shared] == other[shared]:
                shared += 1
            assert tree.shared_len(place, other_place) == shared


def test_tree_of_many_points_keeps_them_all() -> None:
    # Long conversations with forks everywhere: neither moving a tail aside nor branching may lose a place.
    tree = PrefixTree()
    trunk = np.arange(200, dtype=np.int32)
    places = {stop: tree.insert(tree.root, trunk[:stop]) for stop in range(10, 200, 5)}
    branches = {
        stop: tree.insert(tree.root, trunk[:stop], ids(9_000 + stop), ids(*range(30)))
        for stop in (*range(190, 100, -3), *range(20, 60, 4), 190, 187)
    }
    again = {stop: tree.insert(tree.root, trunk[:stop], ids(8_000), ids(1)) for stop in branches}
    for stop, place in places.items():
        assert tree.read(place, 0, stop).tolist() == trunk[:stop].tolist()
    for stop, place in branches.items():
        assert tree.read(place, 0, place.depth).tolist() == [*range(stop), 9_000 + stop, *range(30)]
        assert tree.shared_len(place, places[195]) == stop
        assert tree.shared_len(again[stop], place) == stop
        found = tree.longest(place, stop)
        assert found is not None
        assert found.depth == stop - stop % 5


def test_common_prefix_of_long_arrays() -> None:
    # The comparison runs in steps; a difference behind the first steps must be found.
    one = np.zeros(200_000, np.int32)
    other = one.copy()
    other[150_001] = 1
    assert common_prefix(one, other) == 150_001
    assert common_prefix(one, one[:100_000]) == 100_000


# ---- book --------------------------------------------------------------------------------------------------


def lengths(stored: StoredTokens) -> tuple[int, int, int, int, str | None]:
    return (stored.prompt_len, stored.prev_len, stored.delta_len, stored.cum_len, stored.base_call_id)


def test_base_is_the_longest_proved_prefix() -> None:
    # Storage stays linear in the conversation, and a wrong link cannot put wrong tokens before a generation.
    book = TokenBook()
    book.add("a", ids(1, 2), ids(3), nats(-1))
    book.add("b", ids(1, 2, 3, 4), ids(5), nats(-1), parent="a")
    longer = book.add("c", ids(1, 2, 3, 4, 5, 6), ids(7), nats(-1), parent="a")
    assert lengths(longer) == (6, 5, 2, 7, "b")
    assert longer.delta.ids_T.tolist() == [6, 7]
    assert longer.delta.mask_T.tolist() == [0, 1]
    assert longer.delta.logprobs_T.tolist() == [0.0, -1.0]
    edited = book.add("d", ids(1, 2, 9, 4), ids(5), nats(-1), parent="a")
    assert lengths(edited) == (4, 0, 5, 5, None)
    assert "d" in book
    assert "e" not in book


def test_recorded_parent_decides_between_equal_sequences() -> None:
    # Two samples of one prompt can be equal; the child must stand on the one that it continues.
    book = TokenBook()
    book.add("a", ids(1), ids(2), nats(-1))
    book.add("b", ids(1), ids(2), nats(-2))
    assert book.add("c", ids(1, 2, 3), ids(4), nats(-1), parent="b").base_call_id == "b"
    assert book.add("d", ids(1, 2, 3), ids(4), nats(-1), parent="x").base_call_id == "a"


def test_empty_generation_is_stored_and_can_be_a_base() -> None:
    # A reply that sampled nothing is kept, and the retry of the same prompt shares its tokens.
    book = TokenBook()
    assert lengths(book.add("a", ids(1, 2), ids(), nats())) == (2, 0, 2, 2, None)
    assert lengths(book.add("b", ids(1, 2), ids(), nats())) == (2, 2, 0, 2, "a")
    assert lengths(book.add("c", ids(1, 2), ids(3), nats(-1))) == (2, 2, 1, 3, "a")


def test_deltas_are_copies_that_cannot_change() -> None:
    # A reused receive buffer must not rewrite what was captured.
    book = TokenBook()
    prompt, extra = ids(1, 2), np.array([7])
    stored = book.add("a", prompt, ids(3), nats(-1), extras={"experts": extra})
    prompt[0] = extra[0] = 9
    assert stored.delta.ids_T.tolist() == [1, 2, 3]
    assert stored.delta.extras["experts"].tolist() == [7]
    with pytest.raises(ValueError, match="read-only"):
        stored.delta.ids_T[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        stored.delta.extras["experts"][0] = 1
    assert book.add("b", ids(1, 2, 3), ids(4), nats(-1)).base_call_id == "a"


def test_whole_sequences_are_read_back() -> None:
    # What a call is continued with is exactly what it was given and sampled, wherever its tokens are kept.
    book = TokenBook()
    book.add("a", ids(1, 2), ids(3), nats(-1))
    book.add("b", ids(1, 2, 3, 4), ids(5, 6), nats(-1, -2))
    book.extend("c", "a", ids(9), ids(), nats())
    sequences = {name: book.sequence(name).tolist() for name in "abc"}
    assert sequences == {"a": [1, 2, 3], "b": [1, 2, 3, 4, 5, 6], "c": [1, 2, 3, 9]}
    with pytest.raises(InternalError, match="expected a call that was added"):
        book.sequence("z")


def test_wrong_use_is_an_internal_error() -> None:
    # A gateway bug must stop, not store a call twice or with other lengths.
    book = TokenBook()
    book.add("a", ids(1), ids(2), nats(-1))
    with pytest.raises(InternalError, match="got it again"):
        book.add("a", ids(1), ids(2), nats(-1))
    with pytest.raises(InternalError, match="1 ids and 2 log-probabilities"):
        book.add("b", ids(1), ids(2), nats(-1, -2))
    with pytest.raises(InternalError, match="'x'"):
        book.extend("b", "x", ids(1), ids(2), nats(-1))


def records_of(stored: dict[str, StoredTokens]) -> tuple[dict[str, CallRecord], dict[str, TokenDelta]]:
    records = {}
    for call_id, one in stored.items():
        fields = {name: getattr(one, name) for name in one.__struct_fields__ if name != "delta"}
        records[call_id] = CallRecord(model_call_id=call_id, response_id=call_id, **fields)
    return records, {call_id: one.delta for call_id, one in stored.items()}


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.lists(st.integers(0, 1), max_size=3)),
        min_size=1,
        max_size=10,
    )
)
def test_stored_sequences_come_back(calls: list[tuple[list[int], list[int]]]) -> None:
    # What is trained must be what was captured, however it was split; and a base is as long as it can be.
    book, again = TokenBook(), TokenBook()
    stored: dict[str, StoredTokens] = {}
    for number, (prompt, generation) in enumerate(calls):
        nats_T = np.full(len(generation), -0.5 - number, np.float32)
        one = book.add(str(number), ids(*prompt), ids(*generation), nats_T)
        earlier = [p + g for p, g in calls[:number] if p + g == prompt[: len(p + g)]]
        assert one.prev_len == max(map(len, earlier), default=0)
        assert one.sequence_digest == sequence_digest(ids(*prompt, *generation))
        assert one.logprobs_digest == logprobs_digest(nats_T)
        stored[str(number)] = one
        # A restarted gateway reads deltas back, and must arrive at the same bases and digests.
        if one.base_call_id is None:
            twin = again.add(str(number), ids(*prompt), ids(*generation), nats_T)
        else:
            suffix = ids(*prompt[one.prev_len :])
            twin = again.extend(str(number), one.base_call_id, suffix, ids(*generation), nats_T)
        assert lengths(twin) == lengths(one)
        assert twin.chain_digest == one.chain_digest
        assert twin.delta.ids_T.tolist() == one.delta.ids_T.tolist()
    records, tokens = records_of(stored)
    for number, (prompt, generation) in enumerate(calls):
        assert expand(records, tokens, str(number)).tolist() == prompt + generation


def test_storage_is_linear_in_the_conversation() -> None:
    # 400 turns of 500 new tokens hold 200,000 distinct tokens; storing whole prompts would be 40 million.
    book = TokenBook()
    conversation = np.arange(400 * 500, dtype=np.int32)
    stored = {}
    for turn in range(400):
        prompt, generation = conversation[: turn * 500 + 300], conversation[turn * 500 + 300 : turn * 500 + 500]
        stored[f"c{turn}"] = book.add(f"c{turn}", prompt, generation, np.zeros(200, np.float32))
    assert sum(one.delta_len for one in stored.values()) == 200_000
    records, tokens = records_of(stored)
    assert np.array_equal(expand(records, tokens, "c399"), conversation)


# ---- expand ------------------------------------------------------------------------------------------------


def three_calls() -> tuple[dict[str, CallRecord], dict[str, TokenDelta]]:
    book = TokenBook()
    return records_of(
        {
            "a": book.add("a", ids(1, 2), ids(3), nats(-1)),
            "b": book.add("b", ids(1, 2, 3, 4), ids(5), nats(-1)),
            "c": book.add("c", ids(1, 2, 3, 4, 5), ids(6), nats(-1)),
        }
    )


@pytest.mark.parametrize(
    ("call_id", "fields", "match"),
    [
        ("b", {"base_call_id": "x"}, "no such record"),
        ("b", {"base_call_id": "c", "prev_len": 6, "prompt_len": 7, "cum_len": 8}, "cycle|lengths"),
        ("b", {"prev_len": 2}, "prev_len 2"),
        ("b", {"prompt_len": 2}, "prompt_len 2"),
        ("b", {"prompt_len": 6}, "prompt_len 6"),
        ("b", {"cum_len": 6}, "cum_len 6"),
        ("b", {"delta_len": 3}, "delta_len 3"),
        ("b", {"base_call_id": None}, "base of 0"),
    ],
)
def test_contradicting_records_are_refused(call_id: str, fields: dict[str, Any], match: str) -> None:
    # A damaged store must name the call, and never give back other tokens.
    records, tokens = three_calls()
    records[call_id] = msgspec.structs.replace(records[call_id], **fields)
    with pytest.raises(ReconstructionError, match=match) as caught:
        expand(records, tokens, "c")
    assert caught.value.code is Code.TOKENS_UNUSABLE
    assert caught.value.where.startswith("call=")


def test_missing_tokens_and_cycles_are_refused() -> None:
    # Neither a lost delta nor bases that go round in a circle may hang or crash a build.
    records, tokens = three_calls()
    with pytest.raises(ReconstructionError, match="no record"):
        expand(records, tokens, "x")
    del tokens["b"]
    with pytest.raises(ReconstructionError, match="no delta"):
        expand(records, tokens, "c")
    empty = TokenDelta(ids(), np.zeros(0, np.uint8), nats())
    circle = {
        name: CallRecord(model_call_id=name, response_id=name, base_call_id=base, prompt_len=3, prev_len=3, cum_len=3)
        for name, base in (("p", "q"), ("q", "p"))
    }
    with pytest.raises(ReconstructionError, match="cycle"):
        expand(circle, {"p": empty, "q": empty}, "p")


def test_known_calls_end_the_walk() -> None:
    # Checking every call of a long chain must not walk to the beginning each time.
    records, tokens = three_calls()
    links = base_chain(records, tokens, "c", known={"a"})
    assert [record.model_call_id for record, _ in links] == ["b", "c"]
