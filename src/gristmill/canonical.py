"""JSON by our own rules: exact loading, and one canonical text per JSON value.

Two JSON values have the same canonical text exactly if they are the same value: objects without order, numbers by
exact decimal value, `true` never 1, strings by code point. Numbers are never expanded: `1e999999999` is a short text.
Python's own `json` would merge `9007199254740993.0` with `...992.0` and drop repeated keys without a word.

Not here: which strings are JSON arguments and which are exact text (atoms).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

import msgspec

from gristmill.errors import Code, DecodeError, SelectionError

__all__ = [
    "MAX_DEPTH",
    "MAX_ITEM_CHARS",
    "JsonNumber",
    "JsonValue",
    "RepeatedKeys",
    "canonical_text",
    "canonical_text_of_json",
    "json_kind",
    "loads",
    "nesting_depth",
]

MAX_DEPTH = 128
"""Deepest nesting of arrays and objects inside one item."""

MAX_ITEM_CHARS = 16 * 1024 * 1024
"""Longest string of one item, in characters."""

_MAX_DOCUMENT_DEPTH = 400
_PLAIN_DIGITS = 18

JsonValue = Any
"""A JSON value as `loads` makes it: dict, list, str, int, bool, None, `JsonNumber` or `RepeatedKeys`."""

_Pair = tuple[str, JsonValue]


class JsonNumber(msgspec.Struct, frozen=True):
    """A number kept as the text it had, because a float would change it."""

    text: str


class RepeatedKeys(dict[str, JsonValue]):
    """An object in which a key occurs more than once; `pairs` keeps all of them in order."""

    def __init__(self, pairs: list[_Pair]) -> None:
        super().__init__(pairs)
        self.pairs = tuple(pairs)


def json_kind(value: object) -> str:
    """Name the JSON type of a value, for messages."""
    if isinstance(value, RepeatedKeys):
        return "an object with a repeated key"
    return _KINDS.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


class _NotPlain(Exception):
    """A string that is not JSON, or that holds a repeated key: it is compared as exact text."""


_KINDS: Mapping[type[Any], str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    JsonNumber: "a number",
    type(None): "null",
}
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_VALUE_STARTS = frozenset("{[")
# A string that does not end runs to the end of the text, so that nothing is looked at twice.
_nesting = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_number = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?)(\d+))?\Z", re.ASCII)


_LONG_EXPONENT: Final = 4000
"""Digits above which an exponent is reckoned with as text: `int()` costs the square of their number, or refuses."""
_LAST_DIGITS: Final = 18


def _exponent_text(sign: str, digits: str, shift: int) -> str:
    """Write the integer `sign digits` plus a small one, in decimal, in time that grows with its length."""
    digits = digits.lstrip("0")
    if len(digits) <= _LONG_EXPONENT:
        return str((int(digits) if digits else 0) * (-1 if sign == "-" else 1) + shift)
    carry, last = divmod(int(digits[-_LAST_DIGITS:]) + (-shift if sign == "-" else shift), 10**_LAST_DIGITS)
    head = digits[:-_LAST_DIGITS]
    if carry:
        # A carry of one runs through nines, a borrow through noughts.
        through, becomes = ("9", "0") if carry > 0 else ("0", "9")
        kept = head.rstrip(through)
        stepped = str(int(kept[-1]) + carry) if kept else "1"
        head = (kept[:-1] + stepped + becomes * (len(head) - len(kept))).lstrip("0")
    return f"{'-' if sign == '-' else ''}{head}{last:0{_LAST_DIGITS}}"


def _canonical_number(text: str) -> int | msgspec.Raw:
    """Give the one form of a number: an int below 10^18 if it is one, else `digits e exponent`."""
    match = _number.match(text)
    if match is None:
        raise _NotPlain
    sign, whole, fraction, exponent_sign, exponent_digits = match.groups()
    digits = whole + (fraction or "")
    significant = digits.lstrip("0")
    if not significant:
        return 0
    trimmed = significant.rstrip("0")
    shift = len(significant) - len(trimmed) - len(fraction or "")
    exponent = _exponent_text(exponent_sign or "", exponent_digits or "", shift)
    if len(exponent) <= 2 and exponent[0] != "-" and len(trimmed) + int(exponent) <= _PLAIN_DIGITS:
        return int(f"{sign}{trimmed}{'0' * int(exponent)}")
    return msgspec.Raw(f"{sign}{trimmed}e{exponent}".encode())


def _plain_int(text: str) -> int | msgspec.Raw:
    return int(text) if len(text) <= _PLAIN_DIGITS else _canonical_number(text)


def _unique_pairs(pairs: list[_Pair]) -> dict[str, JsonValue]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _NotPlain
    return made


def _no_constant(name: str) -> JsonValue:
    raise _NotPlain


def _refuse_constant(name: str) -> JsonValue:
    raise ValueError(f"{name} is not JSON")


_argument_decoder = json.JSONDecoder(
    object_pairs_hook=_unique_pairs,
    parse_int=_plain_int,
    parse_float=_canonical_number,
    parse_constant=_no_constant,
)
_decode_argument = _argument_decoder.decode
# The scanner reads one value at an index; JSONDecoder declares it without a type.
_scan_argument: Callable[[str, int], tuple[JsonValue, int]] = _argument_decoder.scan_once  # pyright: ignore


def canonical_text_of_json(text: str, where: str = "$") -> str | None:
    """Return the canonical text of a string that is JSON, None where it must be compared as exact text.

    A string that is not JSON (`NaN` is not), or that repeats a key at any depth, is exact text.

    Raises:
        SelectionError: `item_too_deep`, `item_too_large`.
    """
    if len(text) > MAX_ITEM_CHARS:
        raise SelectionError(
            Code.ITEM_TOO_LARGE,
            f"expected at most {MAX_ITEM_CHARS} characters, got {len(text)}",
            where=where,
        )
    if text.count("{") + text.count("[") > MAX_DEPTH and nesting_depth(text) > MAX_DEPTH:
        raise SelectionError(
            Code.ITEM_TOO_DEEP, f"expected JSON nested at most {MAX_DEPTH} deep, got more", where=where
        )
    try:
        if text[:1] in _VALUE_STARTS:
            value, end = _scan_argument(text, 0)
            if end != len(text) and text[end:].strip(" \t\n\r"):
                return None
        else:
            value = _decode_argument(text)
    except (_NotPlain, ValueError, StopIteration):
        return None
    try:
        return _encode_sorted(value).decode()
    except UnicodeEncodeError:
        return "".join(_pieces(value))


def nesting_depth(text: str) -> int:
    """Deepest nesting of a JSON text, brackets inside strings not counted."""
    depth = deepest = 0
    for match in _nesting.finditer(text):
        token = match.group()
        if token in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif token in "]}":
            depth -= 1
    return deepest


def canonical_text(value: JsonValue, where: str = "$") -> str:
    """Return the canonical text of a JSON value that is already decoded.

    Python floats stand for the shortest decimal that reads back as them. An object with repeated keys keeps its
    pairs in order and equals only its like.

    Raises:
        SelectionError: `item_too_deep`, `item_too_large`; `output_malformed` for what is not a JSON value.
    """
    encodable = _encodable(value, where, MAX_DEPTH)
    try:
        text = _encode_sorted(encodable).decode()
    except UnicodeEncodeError:
        text = "".join(_pieces(encodable))
    if len(text) > MAX_ITEM_CHARS:
        raise SelectionError(
            Code.ITEM_TOO_LARGE, f"expected at most {MAX_ITEM_CHARS} characters, got {len(text)}", where=where
        )
    return text


def _encodable(value: JsonValue, where: str, depth_left: int) -> JsonValue:
    """Copy a value so that its numbers are canonical and the encoder writes them as they are."""
    kind = value.__class__
    if kind is str or value is None or kind is bool:
        return value
    if depth_left <= 0:
        raise SelectionError(
            Code.ITEM_TOO_DEEP, f"expected JSON nested at most {MAX_DEPTH} deep, got more", where=where
        )
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise _not_json(key, where)
        return {key: _encodable(member, where, depth_left - 1) for key, member in value.items()}
    if kind is list or kind is tuple:
        return [_encodable(member, where, depth_left - 1) for member in value]
    if kind is RepeatedKeys:
        pairs = [[key, _encodable(member, where, depth_left - 1)] for key, member in value.pairs]
        return [msgspec.Raw(b'"repeated keys"!'), pairs]
    return _encodable_number(value, kind, where)


def _encodable_number(value: JsonValue, kind: type[Any], where: str) -> JsonValue:
    if kind is int:
        small = -(10**_PLAIN_DIGITS) < value < 10**_PLAIN_DIGITS
        return value if small else _canonical_number(_digits_of_int(value))
    if kind is float and math.isfinite(value):
        return _canonical_number(repr(value))
    if kind is JsonNumber:
        try:
            return _canonical_number(value.text)
        except _NotPlain as error:
            raise _not_json(value.text, where) from error
    if isinstance(value, str):
        return str(value)
    raise _not_json(value, where)


def _digits_of_int(value: int) -> str:
    """Decimal text of an int of any size; `str()` alone refuses more than 4,300 digits."""
    sign, rest, pieces = "-" if value < 0 else "", abs(value), list[str]()
    while rest >= 10**4000:
        rest, low = divmod(rest, 10**4000)
        pieces.append(str(low).zfill(4000))
    return sign + str(rest) + "".join(reversed(pieces))


def _not_json(value: object, where: str) -> SelectionError:
    return SelectionError(Code.OUTPUT_MALFORMED, f"expected a JSON value, got {json_kind(value)}", where=where)


def _pieces(value: JsonValue) -> Iterator[str]:
    """Write a value that holds a lone surrogate, which the fast encoder refuses; escapes keep it reversible."""
    if isinstance(value, dict):
        members = cast(dict[str, JsonValue], value)
        yield "{"
        for index, key in enumerate(sorted(members)):
            yield ("," if index else "") + json.dumps(key) + ":"
            yield from _pieces(members[key])
        yield "}"
    elif isinstance(value, list):
        yield "["
        for index, member in enumerate(cast(list[JsonValue], value)):
            yield "," if index else ""
            yield from _pieces(member)
        yield "]"
    elif isinstance(value, str):
        yield json.dumps(value)
    else:
        yield _encode_sorted(value).decode()


def _exact_int(text: str) -> int | JsonNumber:
    return int(text) if len(text) <= 4000 else JsonNumber(text)


def _pairs_seen(pairs: list[_Pair]) -> dict[str, JsonValue]:
    made = dict(pairs)
    return made if len(made) == len(pairs) else RepeatedKeys(pairs)


_document_decoder = json.JSONDecoder(
    object_pairs_hook=_pairs_seen,
    parse_int=_exact_int,
    parse_float=JsonNumber,
    parse_constant=_refuse_constant,
)


def loads(data: bytes | str, where: str = "$") -> JsonValue:
    """Decode one JSON document exactly: numbers keep their text, repeated keys are seen, surrogates are kept.

    Args:
        data: UTF-8 bytes or text.
        where: what the document is, for the error.

    Raises:
        DecodeError: `file_malformed` when it is not UTF-8, not JSON, or nested too deep.
    """
    try:
        text = data.decode() if isinstance(data, bytes) else data
    except UnicodeDecodeError as error:
        raise DecodeError(f"expected UTF-8, got byte {error.start} that is not", where=where) from error
    if text.count("{") + text.count("[") > _MAX_DOCUMENT_DEPTH and nesting_depth(text) > _MAX_DOCUMENT_DEPTH:
        raise DecodeError(f"expected JSON nested at most {_MAX_DOCUMENT_DEPTH} deep, got more", where=where)
    try:
        return _document_decoder.decode(text)
    except json.JSONDecodeError as error:
        message = f"expected JSON, got {error.msg} at line {error.lineno} column {error.colno}"
        raise DecodeError(message, where=where) from error
    except ValueError as error:
        raise DecodeError(f"expected JSON, got {error}", where=where) from error
