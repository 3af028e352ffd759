"""Which requests are the same request again.

Invariant: two requests have one digest exactly if their bodies are the same JSON value, apart from how they are
streamed and billed, and their senders name the same conversation. Bytes do not count: clients write keys in another
order when they try again. Whether a repetition is a retry takes more: the same parent.

Not here: whether a repetition is answered from the record (gateway).
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from math import isfinite
from typing import Any, Final, cast

import orjson

from gristmill.canonical import JsonNumber, JsonValue, RepeatedKeys, canonical_text
from gristmill.captures.exact import dumps
from gristmill.captures.headers import Session, billing_text
from gristmill.errors import SelectionError

__all__ = ["request_digest", "says_retry"]

_START: Final = b"gristmill-request-1\n"
_VOLATILE: Final = ("stream", "stream_options")
_COUNTS: Final = ("x-stainless-retry-count", "x-retry-count", "x-retry-attempt")
_OPTIONS: Final = orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_SUBCLASS


def request_digest(body: JsonValue, session: Session | None = None) -> str:
    """Digest what a request asks for: 64 hexadecimal digits.

    Left out are `stream`, `stream_options` and the system blocks that say what a call is billed as. Integers and
    fractions differ, 1 and 1.0; otherwise numbers count by value.

    Args:
        body: as decoded by `canonical.loads`, or with plain floats.
        session: what the headers say; subagents that are given the same task send the same body.

    Raises:
        InternalError: the body is no JSON value.
    """
    digest = sha256(_START)
    digest.update(orjson.dumps(_conversation(session)))
    digest.update(_written(_lasting(body)))
    return digest.hexdigest()


def _conversation(session: Session | None) -> tuple[str | None, ...]:
    """Return what tells the conversations of one client apart."""
    return () if session is None else (session.session_id, session.thread_id, session.agent_id)


def _lasting(body: JsonValue) -> JsonValue:
    """Leave out what changes when a client sends a request again."""
    if type(body) is not dict:
        return body
    lasting = {name: value for name, value in cast("dict[str, JsonValue]", body).items() if name not in _VOLATILE}
    system = lasting.get("system")
    if isinstance(system, list):
        blocks = cast("list[JsonValue]", system)
        lasting["system"] = [block for block in blocks if billing_text(block) is None]
    return lasting


def _written(value: JsonValue) -> bytes:
    try:
        return orjson.dumps(value, default=_unusual, option=_OPTIONS)
    except TypeError:
        # Deep nesting, long integers, lone surrogates.
        pass
    try:
        return b"exact " + canonical_text(value).encode()
    except SelectionError:
        pass
    # Deeper or larger than an item may be: the order of keys counts.
    return b"as written " + dumps(value)


def _unusual(value: Any) -> Any:
    if isinstance(value, JsonNumber):
        number = float(value.text)
        if repr(number) == value.text:
            return number
        # A number that no float holds keeps its own text, which is never a float's.
        held = isfinite(number) and canonical_text(number) == canonical_text(value)
        return number if held else orjson.Fragment(canonical_text(value))
    if isinstance(value, RepeatedKeys):
        return [orjson.Fragment(b'"repeated keys"!'), value.pairs]
    if isinstance(value, str):
        return str(value)
    raise TypeError


def says_retry(headers: Mapping[str, str]) -> bool:
    """Tell whether a client counts this request as a repetition; names in lower case.

    A count of 0 says nothing: Claude Code always says 0, and loops around a client start again at 0.
    """
    for name in _COUNTS:
        text = headers.get(name, "")
        if text.isascii() and text.isdigit() and int(text[:9]) > 0:
            return True
    return False
