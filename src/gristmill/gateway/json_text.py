"""JSON of requests and replies: fast where that loses nothing, exact where it would.

Invariant: a text that the fast parser refuses (a lone surrogate) is read exactly, and is written back as it was.
"""

from __future__ import annotations

from typing import Any

import orjson

from gristmill.canonical import loads
from gristmill.captures import exact
from gristmill.captures.reply_json import loads_reply

__all__ = ["dump", "parse", "parse_reply"]


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
        DecodeError: it is no JSON.
    """
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
