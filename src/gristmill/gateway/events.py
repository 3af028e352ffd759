"""Server-sent events as they arrive: bytes in, whole events out.

Invariant: an event is given out when its closing empty line is there, unchanged, in order; the same events that
`captures.sse` finds in the whole stream. What is not closed is never given out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

from gristmill.gateway.upstream.protocol import UpstreamError, UpstreamFault

__all__ = ["Event", "EventSplitter"]


class Event(NamedTuple):
    """The name that the stream gave an event, `message` by default, and its data."""

    name: str
    data: bytes


# Past the constructor, which would be a tenth of what an event costs.
_named = partial(cast("Callable[[type[Event], tuple[str, bytes]], Event]", tuple.__new__), Event)


class EventSplitter:
    """Splits one stream.

    Args:
        limit_bytes: the largest event.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._rest: list[bytes] = []
        self._rest_bytes = 0
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
        self._rest.append(piece)
        self._rest_bytes += len(piece)
        if b"\n\n" not in piece and not piece.startswith(b"\n") and not self._first:
            # Nothing ends here. What waits is put together when something does, so that a long event costs no more.
            self._check_size()
            return []
        data = b"".join(self._rest) if len(self._rest) > 1 else piece
        if self._first and len(data) >= 3:
            self._first = False
            data = data.removeprefix(b"\xef\xbb\xbf")
        *blocks, rest = data.split(b"\n\n")
        self._rest, self._rest_bytes = [rest] if rest else [], len(rest)
        self._check_size()
        events: list[Event] = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                events.append(_named(("message", block[6:])))
            else:
                _add_fields(block, events)
        return events

    def _check_size(self) -> None:
        if self._rest_bytes > self._limit:
            raise UpstreamError(UpstreamFault.OVERSIZED, f"expected an event of at most {self._limit} bytes")

    def _with_line_feeds(self, piece: bytes) -> bytes:
        """Write every end of line as a line feed; a last carriage return may be half of one and is kept back."""
        data = b"\r" + piece if self._half_end else piece
        self._half_end = data.endswith(b"\r")
        return data[: -1 if self._half_end else None].replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _add_fields(block: bytes, events: list[Event]) -> None:
    """Add an event of any form; comments and blocks without data are none."""
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
