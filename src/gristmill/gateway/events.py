"""Server-sent events as they arrive: bytes in, whole events out.

Invariant: an event is given out when its closing empty line is there, unchanged, in order; the same events that
`captures.sse` finds in the whole stream. What is not closed is never given out.
"""

from __future__ import annotations

from typing import NamedTuple

from gristmill.gateway.upstream.protocol import UpstreamError, UpstreamFault

__all__ = ["Event", "EventSplitter"]


class Event(NamedTuple):
    """The name that the stream gave an event, `message` by default, and its data."""

    name: str
    data: bytes


class EventSplitter:
    """Splits one stream.

    Args:
        limit_bytes: the largest event.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._rest = b""
        self._limit = limit_bytes
        self._first = True
        self._half_end = False

    def feed(self, piece: bytes) -> list[Event]:
        """Return the events that a piece completes.

        Raises:
            UpstreamError: `oversized`.
        """
        if self._half_end or b"\r" in piece:
            piece = self._with_line_feeds(piece)
        data = self._rest + piece if self._rest else piece
        if self._first and len(data) >= 3:
            self._first = False
            data = data.removeprefix(b"\xef\xbb\xbf")
        events: list[Event] = []
        start = 0
        while (end := data.find(b"\n\n", start)) >= 0:
            self._add(data[start:end], events)
            start = end + 2
        self._rest = data[start:]
        if len(self._rest) > self._limit:
            raise UpstreamError(UpstreamFault.OVERSIZED, f"expected an event of at most {self._limit} bytes")
        return events

    def _with_line_feeds(self, piece: bytes) -> bytes:
        """Write every end of line as a line feed; a last carriage return may be half of one and is kept back."""
        data = b"\r" + piece if self._half_end else piece
        self._half_end = data.endswith(b"\r")
        return data[: -1 if self._half_end else None].replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    @staticmethod
    def _add(block: bytes, events: list[Event]) -> None:
        if block.startswith(b"data: ") and b"\n" not in block:
            events.append(Event("message", block[6:]))
            return
        name, data = "", list[bytes]()
        for line in block.split(b"\n"):
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                data.append(value)
            elif field == b"event":
                name = value.decode("utf-8", "replace")
        if data:
            events.append(Event(name or "message", b"\n".join(data)))
