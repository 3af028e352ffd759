"""Event streams as they arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.captures.sse import parse_events
from gristmill.gateway.events import Event, EventSplitter
from gristmill.gateway.upstream.protocol import UpstreamError

_lines = st.sampled_from(
    [
        "data: {}",
        "data:x",
        "data",
        ": comment",
        "event: error",
        "event:ping",
        "id: 7",
        "data: é\u2028",
        "",
        "",
        "retry: 1",
    ]
)
_ends = st.sampled_from(["\n", "\r\n", "\r"])


@given(st.lists(st.tuples(_lines, _ends), max_size=24), st.lists(st.integers(0, 200), max_size=8), st.booleans())
def test_any_cut_gives_the_events_of_the_whole(lines: list[tuple[str, str]], cuts: list[int], mark: bool) -> None:
    # Where the network cuts a stream would decide what a harness receives and what is recorded.
    stream = (("\ufeff" if mark else "") + "".join(line + end for line, end in lines)).encode()
    splitter, found = EventSplitter(1 << 20), list[Event]()
    places = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    for start, stop in pairwise(places):
        found += splitter.feed(stream[start:stop])
    whole = [Event(event.event, event.data.encode()) for event in parse_events(stream)]
    # A last carriage return may be half an end of line; what it would close is told with the next byte.
    assert found == whole or (stream.endswith(b"\r") and found == whole[:-1])


def test_an_endless_event_is_refused() -> None:
    # An engine that never ends an event would fill the memory.
    splitter = EventSplitter(10)
    with pytest.raises(UpstreamError, match="at most 10 bytes"):
        splitter.feed(b"data: 0123456789")
