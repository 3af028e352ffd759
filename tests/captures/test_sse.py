from __future__ import annotations

import pytest

from gristmill.captures.sse import ServerEvent, parse_events
from gristmill.errors import Code, DecodeError


def events(stream: bytes | str) -> list[tuple[str, str]]:
    return [(event.event, event.data) for event in parse_events(stream)]


# A server or proxy that ends lines in another way would make every streamed call look truncated.
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_line_end_of_the_standard_ends_a_line(end: str) -> None:
    stream = end.join(["event: a", "data: 1", "", "data: 2", "", ""])
    assert events(stream) == [("a", "1"), ("message", "2")]
    assert events(stream.encode()) == events(stream)


# A JSON document split over data lines would be cut in half.
def test_data_lines_of_one_event_are_joined() -> None:
    assert events("data: {\ndata:  1}\n\n") == [("message", "{\n 1}")]


# Keep-alive comments, ids and retry hints of proxies would break the decoding.
def test_comments_and_other_fields_are_passed_over() -> None:
    assert events(": ping\nid: 3\nretry: 5\ndata:x\n\nevent: alone\n\n:\n\ndata\n\n") == [
        ("message", "x"),
        ("message", ""),
    ]


# An event without its empty line was never delivered to any client: it must not count as served.
def test_an_unfinished_event_is_dropped() -> None:
    assert events("data: 1\n\ndata: 2\n") == [("message", "1")]
    assert events("data: 1\n\ndata: 2") == [("message", "1")]


# Text of the model may hold U+2028 or a form feed; a wider notion of line would cut it.
def test_only_the_standard_line_ends_split() -> None:
    assert events("data: a\u2028b\x0cc\x85d\n\n") == [("message", "a\u2028b\x0cc\x85d")]


# A byte order mark in front would hide the first event.
def test_a_byte_order_mark_is_removed() -> None:
    assert parse_events("\ufeffdata: 1\n\n") == [ServerEvent("message", "1")]
    assert parse_events("\ufeffdata: 1\n\n".encode()) == [ServerEvent("message", "1")]


# A stream cut in the middle of a character is a truncated stream, not a malformed one.
def test_a_cut_character_belongs_to_the_unfinished_line() -> None:
    assert events("data: 1\n\ndata: é".encode()[:-1]) == [("message", "1")]


# Replacing bytes that are not UTF-8 would change what the model said without a word.
def test_bytes_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(DecodeError) as caught:
        parse_events(b"data: \xff\n\n")
    assert caught.value.code is Code.REPLY_MALFORMED
