"""JSON of requests and replies: fast where that loses nothing, exact where it would.

Invariant: a text that the fast parser refuses (a lone surrogate) is read exactly, and is written back as it was.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from gristmill.canonical import loads, nesting_depth
from gristmill.captures import exact
from gristmill.captures.reply_json import loads_reply
from gristmill.errors import DecodeError

__all__ = ["MOST_NESTED", "dump", "parse", "parse_reply"]


MOST_NESTED: Final = 200
"""Deepest nesting of what an engine sends; the records that are made of it have to stay readable."""


def parse(text: bytes) -> Any:
    """Decode JSON; of a repeated key the last counts, as for engines.

    Raises:
        DecodeError: it is none.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return loads(text)


def parse_reply(text: bytes) -> Any:
    """Decode what an engine sent, numbers that are none among its log-probabilities included.

    Raises:
        DecodeError: it is no JSON, or nested deeper than what is kept of it could be read back.
    """
    if (
        text.count(b"{") + text.count(b"[") > MOST_NESTED
        and nesting_depth(text.decode("utf-8", "replace")) > MOST_NESTED
    ):
        raise DecodeError(f"expected JSON nested at most {MOST_NESTED} deep, got more")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return loads_reply(text)


def dump(value: Any) -> bytes:
    """Encode JSON."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return exact.dumps(value)
