"""Server-sent events: raw stream text to events, by the WHATWG rules.

Invariant: an event that is not closed by an empty line was never dispatched, so it is not here: a cut stream
simply ends earlier. Lines end with CRLF, LF or CR only; U+2028 and friends are ordinary text.

Not here: what an event means (the module of its dialect).
"""

from __future__ import annotations

import re

import msgspec

from gristmill.errors import Code, DecodeError

__all__ = ["DONE", "ServerEvent", "parse_events"]

DONE = "[DONE]"
"""Data of the event that closes a Chat, Completions or generate stream."""

_line_end = re.compile(r"\r\n|\n|\r")


class ServerEvent(msgspec.Struct, frozen=True):
    """One dispatched event; `event` is `message` where the stream names none."""

    event: str
    data: str


def parse_events(stream: bytes | str) -> list[ServerEvent]:
    """Split a raw event stream into its dispatched events.

    Args:
        stream: everything that was received, as bytes or as text.

    Raises:
        DecodeError: `reply_malformed` when a complete line is not UTF-8.
    """
    text = _text(stream) if isinstance(stream, bytes) else stream
    lines = _line_end.split(text.removeprefix("\ufeff"))
    lines.pop()  # what follows the last line end is an unfinished line
    events: list[ServerEvent] = []
    name, data = "", list[str]()
    for line in lines:
        if not line:
            if data:
                events.append(ServerEvent(name or "message", "\n".join(data)))
            name, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
    return events


def _text(stream: bytes) -> str:
    # A stream may be cut inside a character; that character is in an unfinished line, which is dropped
    # anyway.
    end = max(stream.rfind(b"\n"), stream.rfind(b"\r")) + 1
    try:
        return stream[:end].decode()
    except UnicodeDecodeError as error:
        message = f"expected an event stream in UTF-8, got byte {error.start} that is not"
        raise DecodeError(message, code=Code.REPLY_MALFORMED) from error
