"""JSON values as texts that share what they have in common.

Invariant: a text with its references replaced is, byte for byte, what `captures.exact.dumps` writes: exact numbers,
repeated keys, lone surrogates and the order of keys are kept.

A conversation is sent again with every call, so a value is cut into pieces: long strings, members of lists, and runs
of sixteen neighbouring pieces of a list, then runs of sixteen runs. Equal pieces are stored once for an attempt. A
request that repeats a history of n messages therefore stores its new messages and some 16 × log16(n) references,
wherever the history forks and whatever else the attempt does in between.

A reference is `\\x01NUMBER\\x01`: JSON text holds no such character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, cast

from gristmill.canonical import JsonValue, RepeatedKeys, loads
from gristmill.captures.exact import dumps, plain_numbers, written_string
from gristmill.captures.reply import Unexpected
from gristmill.errors import Code, DecodeError, LedgerError

__all__ = ["Piece", "cut", "expander", "piece_digest", "written", "written_plain"]

DIGEST_BYTES: Final = 16

_LONG_TEXT: Final = 256
_MEMBER: Final = 64
_LONG_LIST: Final = 1024
_MEMBER_OF_LONG_LIST: Final = 4096
_RUN: Final = 16
_REFERENCE: Final = 6
_DEPTH: Final = 24

_reference = re.compile(rb"\x01(\d+)\x01")


class Piece:
    """A piece of JSON text: parts that are texts or pieces, and the digest that equal pieces share."""

    __slots__ = ("digest", "parts")

    def __init__(self, parts: Iterable[str | Piece]) -> None:
        merged: list[bytes | Piece] = []
        digested: list[bytes] = []
        texts: list[str] = []
        for part in parts:
            if isinstance(part, str):
                texts.append(part)
                continue
            if texts:
                text = "".join(texts).encode("ascii")
                merged.append(text)
                digested.append(text)
                texts.clear()
            merged.append(part)
            digested += (b"\x01", part.digest)
        if texts:
            text = "".join(texts).encode("ascii")
            merged.append(text)
            digested.append(text)
        self.parts: Final = merged
        self.digest: Final = piece_digest(digested)

    def text(self, number_of: Callable[[Piece], int]) -> bytes:
        """Write the piece with references to the pieces in it."""
        return b"".join(part if isinstance(part, bytes) else b"\x01%d\x01" % number_of(part) for part in self.parts)


def piece_digest(parts: Sequence[bytes]) -> bytes:
    """Digest texts, and digests of pieces with the character before them that no text holds."""
    whole = parts[0] if len(parts) == 1 else b"".join(parts)
    return sha256(whole).digest()[:DIGEST_BYTES]


def written_plain(value: Mapping[str, Any], where: str) -> bytes:
    """Write metadata, which is read back with plain numbers, and see that it can be.

    Raises:
        LedgerError: `option_invalid`, it is no JSON or nested too deep.
    """
    text = written(cast(JsonValue, dict(value)), where)
    try:
        plain_numbers(loads(text, where), where)
    except (Unexpected, DecodeError) as error:
        raise LedgerError(str(error), code=Code.OPTION_INVALID, where=where) from error
    return text


def written(value: JsonValue, where: str) -> bytes:
    """Write a JSON value as `dumps` does.

    Raises:
        LedgerError: `option_invalid`, it is no JSON value.
    """
    try:
        return dumps(value)
    # Boundary: whatever a caller hands over.
    except Exception as error:
        raise _not_json(where, error) from error


def cut(value: JsonValue, where: str) -> Piece:
    """Cut a JSON value into pieces.

    Raises:
        LedgerError: `option_invalid`, it is no JSON value.
    """
    try:
        return Piece(
            _object(cast("Mapping[str, JsonValue]", value), 0) if isinstance(value, dict) else _parts(value, 1)
        )
    except Exception as error:
        raise _not_json(where, error) from error


def _not_json(where: str, error: Exception) -> LedgerError:
    message = getattr(error, "message", None) or f"expected a JSON value, got one that cannot be written: {error}"
    return LedgerError(str(message), code=Code.OPTION_INVALID, where=where)


_Parts = list["str | Piece"]


def _size(parts: Sequence[str | Piece]) -> int:
    size = 0
    for part in parts:
        size += len(part) if isinstance(part, str) else _REFERENCE
    return size


def _parts(value: JsonValue, depth: int) -> _Parts:
    kind = cast("type[Any]", type(value))
    if kind is str:
        text = written_string(value)
        return [text] if len(text) < _LONG_TEXT else [Piece((text,))]
    if depth < _DEPTH:
        if kind is dict or kind is RepeatedKeys:
            return _object(cast("Mapping[str, JsonValue]", value), depth)
        if kind is list or kind is tuple:
            return _array(cast("Sequence[JsonValue]", value), depth)
    return [dumps(value).decode("ascii")]


def _object(members: Mapping[str, JsonValue], depth: int) -> _Parts:
    parts: _Parts = []
    texts: list[str] = []
    opening = "{"
    for key, member in members.pairs if isinstance(members, RepeatedKeys) else members.items():
        texts += (opening, written_string(key), ":")
        opening = ","
        if member.__class__ is str:
            text = written_string(member)
            if len(text) < _LONG_TEXT:
                texts.append(text)
            else:
                parts += ("".join(texts), Piece((text,)))
                texts.clear()
            continue
        inner = _parts(member, depth + 1)
        if not depth and _size(inner) >= _LONG_TEXT:
            inner = [Piece(inner)]
        for part in inner:
            if isinstance(part, str):
                texts.append(part)
            else:
                parts += ("".join(texts), part)
                texts.clear()
    texts.append("}" if opening == "," else "{}")
    parts.append("".join(texts))
    return parts


def _array(members: Sequence[JsonValue], depth: int) -> _Parts:
    """Cut a list from its beginning on, so that lists which begin alike are cut alike."""
    enough = _MEMBER if len(members) <= _LONG_LIST else _MEMBER_OF_LONG_LIST
    pieces: list[Piece] = []
    open_parts: _Parts = []
    size = 0
    for member in members:
        inner = _parts(member, depth + 1)
        if open_parts:
            open_parts.append(",")
        open_parts += inner
        size += _size(inner)
        if size >= enough or len(open_parts) >= 2 * enough:
            pieces.append(Piece(open_parts))
            open_parts, size = [], 0
    parts: _Parts = ["["]
    for piece in _runs(pieces):
        parts += [piece, ","]
    if open_parts:
        parts += open_parts
    elif pieces:
        parts.pop()
    parts.append("]")
    return parts


def _runs(pieces: list[Piece]) -> list[Piece]:
    """Join neighbours into runs, runs into longer runs; what fills no run stays behind them."""
    whole = len(pieces) // _RUN * _RUN
    if not whole:
        return pieces
    runs = [Piece(_joined(pieces[start : start + _RUN])) for start in range(0, whole, _RUN)]
    return [*_runs(runs), *pieces[whole:]]


def _joined(pieces: Sequence[Piece]) -> Iterator[str | Piece]:
    for position, piece in enumerate(pieces):
        if position:
            yield ","
        yield piece


def expander(texts: Mapping[int, bytes]) -> Callable[[bytes], bytes]:
    """Return a function that replaces the references in a text.

    Args:
        texts: stored pieces by number; a piece refers to smaller numbers only.

    The function raises KeyError for a reference to no piece.
    """
    whole: dict[int, bytes] = {}

    def body(match: re.Match[bytes]) -> bytes:
        number = int(match[1])
        found = whole.get(number)
        if found is None:
            found = whole[number] = expand(texts[number])
        return found

    def expand(text: bytes) -> bytes:
        return _reference.sub(body, text)

    return expand
