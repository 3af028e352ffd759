"""JSON by our own rules: one canonical text per value, and exact loading."""

from __future__ import annotations

import json
import sys
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill import canonical
from gristmill.canonical import (
    MAX_DEPTH,
    MAX_ITEM_CHARS,
    JsonNumber,
    RepeatedKeys,
    canonical_text,
    canonical_text_of_json,
    loads,
)
from gristmill.errors import Code, DecodeError, SelectionError

LONG = "7" * 5_000


def same(first: str, second: str) -> bool:
    one, other = canonical_text_of_json(first), canonical_text_of_json(second)
    assert one is not None
    assert other is not None
    return one == other


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("4200", "4200.0"),
        ("4200", "42e2"),
        ("4200", "42E+2"),
        ("0.5", "5e-1"),
        ("-0", "0"),
        ("-0.0", "0e999999999"),
        ("1e999999999", "10e999999998"),
        ("1e999999999", "0.1e1000000000"),
        (f"{LONG}", f"{LONG}.000"),
        (f"{LONG}0", f"{LONG}e1"),
        ("123456789012345678901", "12345678901234567890.1e1"),
        ('{"a":1,"b":2}', ' { "b" : 2.0 , "a" : 1 } '),
        ('"\\u0041"', '"A"'),
        ("[1,[2]]", "[1.0, [2e0]]"),
        (f"1e{'9' * 5000}", f"10e{'9' * 4999}8"),
    ],
)
def test_one_value_in_two_spellings(first: str, second: str) -> None:
    # A harness that loads and dumps arguments would lose its rollouts.
    assert same(first, second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("9007199254740993", "9007199254740992"),
        ("9007199254740993.0", "9007199254740992.0"),
        ("0.1", "0.1000000000000000055511151231257827"),
        ("1", "true"),
        ("0", "false"),
        ("1", '"1"'),
        ("-1", "1"),
        ("1e999999999", "1e999999998"),
        (LONG, LONG[:-1] + "8"),
        ("null", "{}"),
        ('{"a":null}', "{}"),
        ("[1,2]", "[2,1]"),
        ('"e\\u0301"', '"\\u00e9"'),
        ('"\\ud83d"', '"\\ud83e"'),
        (f"1e{'9' * 5000}", f"1e{'9' * 4999}8"),
        (f"1e-{'9' * 5000}", f"1e{'9' * 5000}"),
    ],
)
def test_two_values_that_look_alike(first: str, second: str) -> None:
    # Read through doubles, or Python's own equality, one call would be trained for another.
    assert not same(first, second)


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "Infinity",
        "-Infinity",
        '{"a":NaN}',
        "",
        "{",
        '{"a":1}x',
        "{'a':1}",
        '{"a":1,"a":1}',
        '[{"b":{"a":1,"a":2}}]',
        '{"a":"\n"}',
        "tru",
        "[",
        "01",
        "1.",
        "\u0661",
        "[1.\u0661]",
    ],
)
def test_what_is_not_json_is_exact_text(text: str) -> None:
    # Broken arguments of a reply that was cut must be compared as they are, not repaired.
    assert canonical_text_of_json(text) is None


def test_blanks_around_a_value() -> None:
    # Trailing white space of JSON is no content.
    assert same('{"a":1} \n', '{"a":1}')
    assert same(" 1 ", "1")


def test_lone_surrogates_are_kept() -> None:
    # Half of an emoji at the end of a reply must not break a run, nor equal another half.
    half = canonical_text_of_json('{"k\\ud83d":["\\ud83d",1.5,null,true]}')
    assert half == canonical_text({"k\ud83d": ["\ud83d", 1.5, None, True]})
    assert half != canonical_text({"k\ud83d": ["\ud83d", 1.5, None, False]})
    assert canonical_text("\ud83d") == '"\\ud83d"'


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_depth_has_a_limit(opening: str) -> None:
    # Arguments nested ten thousand deep must be a refusal and never a crash.
    closing = "]" if opening == "[" else "}"
    fits = opening * MAX_DEPTH + ("1" if opening != "[" else "") + closing * MAX_DEPTH
    assert canonical_text_of_json(fits) is not None
    for depth in (MAX_DEPTH + 1, 10_000):
        with pytest.raises(SelectionError) as caught:
            canonical_text_of_json(opening * depth + closing * depth, "$.here")
        assert (caught.value.code, caught.value.where) == (Code.ITEM_TOO_DEEP, "$.here")


def test_brackets_inside_strings_are_no_depth() -> None:
    # Code in an argument has many brackets.
    assert canonical_text_of_json('{"code":"' + "[" * 500 + '\\"{"}') is not None
    assert canonical_text_of_json("[" + ",".join(["[]"] * 300) + "]") is not None


@pytest.mark.parametrize("end", ["", "\\", '"', "]" * 500])
def test_a_string_that_does_not_end_is_read_once(end: str) -> None:
    # Thirty kilobytes of quotes stopped a gateway for seconds, and the time grew with the square of their number.
    hostile = "[" * 500 + '"' + '\\"' * 400_000 + end
    with pytest.raises(DecodeError):
        loads(hostile)
    with pytest.raises(SelectionError) as raised:
        canonical_text_of_json(hostile)
    assert raised.value.code is Code.ITEM_TOO_DEEP


def test_long_exponents_cost_their_length() -> None:
    # An agent that writes a million digits must not be waited for by everybody else.
    digits = "9" * 1_500_000
    assert same(f'{{"a":1e{digits}}}', f'{{"a":10e{digits[:-1]}8}}')
    assert same(f"1e-{digits}", f"0.1e-{digits[:-1]}8")
    assert not same(f"1e{digits}", f"1e-{digits}")


@given(
    st.integers(min_value=10**4000, max_value=10**4005)
    | st.builds(lambda n, k: 10**n - k, st.integers(4000, 4040), st.integers(-3, 3)),
    st.sampled_from(["", "+", "-"]),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_long_exponents_are_reckoned_exactly(exponent: int, sign: str, zeros: int, places: int) -> None:
    # One that is a digit off would make two numbers one.
    set_limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        value = (-exponent if sign == "-" else exponent) + zeros - places
        text = "7" + "0" * zeros if not places else "7" + "0" * zeros + "." + "0" * places
        spelled = f"{text}e{sign}{exponent}"
        moved = (-exponent if sign == "-" else exponent) + zeros
        assert canonical_text_of_json(spelled) == canonical_text_of_json(f"7e{moved}") == f"7e{moved}"
        assert canonical_text_of_json(f"0.{'0' * places}7e{value}") == f"7e{value - places - 1}"
    finally:
        sys.set_int_max_str_digits(set_limit)


def test_depth_of_decoded_values() -> None:
    # The same limit holds for tool inputs that come as objects.
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert canonical_text(value[0])
    with pytest.raises(SelectionError) as caught:
        canonical_text([value])
    assert caught.value.code is Code.ITEM_TOO_DEEP


def test_size_has_a_limit() -> None:
    # A gigabyte of arguments must be refused before it is parsed.
    with pytest.raises(SelectionError) as caught:
        canonical_text_of_json('"' + "x" * MAX_ITEM_CHARS + '"', "$.big")
    assert (caught.value.code, caught.value.where) == (Code.ITEM_TOO_LARGE, "$.big")
    with pytest.raises(SelectionError) as caught:
        canonical_text({"a": "x" * MAX_ITEM_CHARS})
    assert caught.value.code is Code.ITEM_TOO_LARGE


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (10**17, "1" + "0" * 17),
        (10**18, "1e18"),
        (-(10**18) - 1, "-1000000000000000001e0"),
        (10**5000, "1e5000"),
        (10**5000 + 1, f"1{'0' * 4999}1e0"),
        (1.5, "15e-1"),
        (2.0, "2"),
        (1e300, "1e300"),
        (JsonNumber("0.10"), "1e-1"),
        ((1, 2), "[1,2]"),
        (Code.USAGE, '"usage"'),
        ({"b": 1, "a": [None, True, "x"]}, '{"a":[null,true,"x"],"b":1}'),
    ],
    ids=[str(number) for number in range(12)],
)
def test_decoded_values(value: Any, text: str) -> None:
    # Inputs that come as objects equal the same input as a string.
    assert canonical_text(value) == text


def test_repeated_keys_equal_only_their_like() -> None:
    # A key that repeats must neither be dropped nor taken for a list.
    first = loads('{"a":1,"a":2}')
    assert isinstance(first, RepeatedKeys)
    assert canonical_text(first) == canonical_text(loads('{ "a":1.0, "a":2 }'))
    assert canonical_text(first) != canonical_text(loads('{"a":2,"a":1}'))
    assert canonical_text(first) != canonical_text({"a": 2})
    assert canonical_text(first) != canonical_text([["a", 1], ["a", 2]])


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), {1: 2}, {1, 2}, b"x", object(), JsonNumber("x"), JsonNumber("NaN"), [b""]]
)
def test_what_is_no_json_value(value: Any) -> None:
    # Python objects in a result must be a refusal with their place, not a TypeError.
    with pytest.raises(SelectionError) as caught:
        canonical_text(value, "$.v")
    assert (caught.value.code, caught.value.where) == (Code.OUTPUT_MALFORMED, "$.v")


def test_loads_is_exact() -> None:
    # A number that passes through a float is another number.
    value = loads(b'{"a":9007199254740993.0,"b":12,"c":1e5}')
    assert value == {"a": JsonNumber("9007199254740993.0"), "b": 12, "c": JsonNumber("1e5")}
    assert loads(LONG) == JsonNumber(LONG)
    assert canonical_text(loads(LONG)) == canonical_text_of_json(LONG)
    assert loads('"\\ud83d"') == "\ud83d"


@pytest.mark.parametrize("data", [b"", b"\xff", b"{", b"NaN", b"[Infinity]", "nul", b"[" * 500, b"\xef\xbb\xbf[]"])
def test_loads_refuses_with_the_name_of_the_document(data: bytes | str) -> None:
    # The error must say which file or line.
    with pytest.raises(DecodeError) as caught:
        loads(data, "line 7")
    assert (caught.value.code, caught.value.where) == (Code.FILE_MALFORMED, "line 7")


def test_loads_has_a_depth_limit() -> None:
    # A file of brackets must not crash the command.
    with pytest.raises(DecodeError, match="400 deep"):
        loads("[" * 401 + "]" * 401)
    assert loads("[" * 400 + "]" * 400)


def test_all_is_sorted_and_there() -> None:
    # Names that others import must exist.
    assert all(hasattr(canonical, name) for name in canonical.__all__)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.binary() | st.text())
def test_fuzz_loads(data: bytes | str) -> None:
    # Any bytes give a value or a DecodeError.
    try:
        value = loads(data)
    except DecodeError:
        return
    canonical_text(value)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.text(st.sampled_from('{}[]",:\\01.eE+-tfn uNaI\n\ud83d')))
def test_fuzz_json_texts(text: str) -> None:
    # Any string gives a canonical text or exact text, and agrees with Python on what JSON is.
    found = canonical_text_of_json(text)
    if found is None:
        return
    json.loads(text)
    assert canonical_text(loads(text)) == found


NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(NUMBERS, NUMBERS)
def test_numbers_agree_with_decimal(first: str, second: str) -> None:
    # Equal text exactly if equal value, by an arithmetic that is not ours.
    assert same(first, second) is (Decimal(first) == Decimal(second))
