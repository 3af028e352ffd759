"""Bodies are cut into shared pieces and put together again, byte for byte; what is sent again is stored once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.ledger import rollout, sizes_of
from gristmill.canonical import RepeatedKeys, loads
from gristmill.captures.exact import dumps
from gristmill.errors import Code, LedgerError
from gristmill.ledger.bodies import Piece, cut, expander, written
from tests.ledger.attempts import ODD_JSON


class Shelf:
    """Stores pieces as the writer does, in a dictionary."""

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}
        self.texts: dict[int, bytes] = {}

    def number_of(self, piece: Piece) -> int:
        number = self.numbers.get(piece.digest)
        if number is None:
            text = piece.text(self.number_of)
            number = self.numbers[piece.digest] = len(self.numbers)
            self.texts[number] = text
        return number

    def back(self, value: Any) -> bytes:
        return expander(self.texts)(cut(value, "$").text(self.number_of))


texts = st.one_of(
    st.text(max_size=8),
    st.text(st.sampled_from('ab\x01\x00\ud800é\\"'), max_size=12),
    st.integers(200, 300).map(lambda size: "x" * size),
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts,
    st.sampled_from(["1.10", "1e999", "-0.0", "12345678901234567890.5"]).map(loads),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.lists(inner, max_size=3).map(lambda members: members * 20),
        st.dictionaries(texts, inner, max_size=4),
        st.lists(st.tuples(texts, inner), max_size=4).map(RepeatedKeys),
    ),
    max_leaves=30,
)


@settings(deadline=None)
@given(st.lists(values, max_size=4))
def test_every_value_comes_back_as_the_same_text(given_values: list[Any]) -> None:
    # A number or key that came back changed would no longer match the call that sent it.
    shelf = Shelf()
    for value in [*given_values, given_values, {"messages": given_values * 30}]:
        assert shelf.back(value) == dumps(value)


@settings(deadline=None)
@given(values, values)
def test_different_values_have_different_pieces(one: Any, other: Any) -> None:
    same = dumps(one) == dumps(other)
    assert (cut(one, "$").digest == cut(other, "$").digest) is same


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 255, 256, 257, 1023, 1025, 5000])
def test_lists_of_every_length(size: int) -> None:
    shelf = Shelf()
    value = {"messages": [{"role": "user", "content": f"message {n} " * (n % 9)} for n in range(size)]}
    assert shelf.back(value) == dumps(value)
    numbers = {"token_ids": list(range(size)), "logprobs": [{"token": str(n), "logprob": -n} for n in range(size)]}
    assert shelf.back(numbers) == dumps(numbers)


def test_odd_values() -> None:
    deep: Any = "x"
    for _ in range(390):
        deep = [deep]
    for value in (ODD_JSON, [ODD_JSON] * 400, {"a": ODD_JSON}, deep, {"k": (1, 2)}, "\x01" * 300, "", [], {}, None):
        assert Shelf().back(value) == dumps(value)


@pytest.mark.parametrize("value", [object(), {1: 2}, float("nan"), [{"a": {3}}], 10**5000], ids=lambda value: "")
def test_what_is_no_json_is_refused(value: Any) -> None:
    for work in (cut, written):
        with pytest.raises(LedgerError) as caught:
            work(value, "call=c")
        assert caught.value.code == Code.OPTION_INVALID
        assert caught.value.where == "call=c"


def growth(shelf: Shelf, request: Mapping[str, Any]) -> int:
    before = sum(map(len, shelf.texts.values()))
    skeleton = cut(request, "$").text(shelf.number_of)
    return len(skeleton) + sum(map(len, shelf.texts.values())) - before


def test_a_history_that_is_sent_again_costs_nearly_nothing() -> None:
    # Stored naively, a rollout of n turns takes n² bytes.
    shelf = Shelf()
    messages = [{"role": "user", "content": f"{n} " + "word " * 40} for n in range(2000)]
    shelf.back({"messages": messages[:1000]})
    assert growth(shelf, {"messages": messages[:1000]}) < 400
    assert growth(shelf, {"messages": messages[:1010]}) < 3500
    # A fork, and a moved cache mark, cost what changed.
    assert growth(shelf, {"messages": [*messages[:500], messages[1999]]}) < 1000
    marked = {**messages[300], "cache_control": {"type": "ephemeral"}}
    assert growth(shelf, {"messages": [*messages[:300], marked]}) < 1000


@pytest.mark.parametrize("turns", [40, 400])
def test_stored_bytes_stay_near_what_is_unique(turns: int) -> None:
    sizes = sizes_of(rollout(turns))
    assert sizes["tokens"] <= 1.2 * sizes["unique_tokens"]
    assert sizes["bodies"] <= 1.5 * sizes["unique_bodies"]
