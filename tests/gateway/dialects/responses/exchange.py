"""Replies of the engine's Chat route, recorded or made up, and what a client gets of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gristmill.captures.sse import DONE, parse_events
from gristmill.gateway.dialects.responses import RESPONSES
from gristmill.gateway.front import ServedNames, Translated

FIXTURES = Path(__file__).parents[3] / "fixtures"
NAMES = ServedNames("0a1b2c3d", "asked-model", 1_700_000_000)
BODY: dict[str, Any] = {"model": "asked-model", "input": "Explain setup.cfg.", "stream": True}

STREAMS = (
    "pause_abort_stream",
    "stream_basic",
    "stream_continuous_usage",
    "stream_include_reasoning_false",
    "stream_interval_8",
    "stream_no_logprobs",
    "stream_stop_string_include_false",
    "stream_tool_call",
    "stream_tool_call_parallel",
)
"""Recorded streams of one choice."""

BODIES = (
    "abort_api_nonstream",
    "chat_basic_stop",
    "chat_length",
    "chat_structured_json_schema",
    "chat_tool_call",
    "chat_tool_call_parallel",
    "chat_tool_call_with_content",
    "chat_tool_choice_named",
    "chat_tool_malformed",
)
"""Recorded bodies of one choice."""


class Reply(NamedTuple):
    """What a client got: bytes that went at once, bytes that were held, and the object that was recorded."""

    now: bytes
    held: bytes
    served: dict[str, Any]


def no_history(response_id: str) -> None:
    return None


def translated(body: dict[str, Any]) -> Translated:
    return RESPONSES.translate(body, no_history)


def recorded(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / "engine" / f"{name}.json").read_bytes())


def recorded_chunks(name: str) -> list[dict[str, Any]]:
    return [json.loads(event.data) for event in parse_events(recorded(name)["sse_raw"]) if event.data != DONE]


def harness_requests(name: str) -> list[dict[str, Any]]:
    lines = (FIXTURES / "harness" / f"{name}.jsonl").read_text().splitlines()
    exchanges = [json.loads(line) for line in lines]
    return [exchange["body"] for exchange in exchanges if exchange["path"].endswith("/responses")]


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **choice: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish, **choice}]}


def usage(**counts: Any) -> dict[str, Any]:
    return {
        "id": "x",
        "choices": [],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, **counts},
    }


def call(index: int, name: str, arguments: str, call_id: str = "") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": call_id or f"call-{index}", "type": "function", "function": function}


def encoder(body: dict[str, Any] | None = None) -> Any:
    asked = body or BODY
    return RESPONSES.encoder(asked, translated(asked), NAMES)


def streamed(chunks: Iterable[dict[str, Any]], body: dict[str, Any] | None = None) -> Reply:
    """Encode a stream that ended."""
    made = encoder(body)
    now, held = [made.begin()], list[bytes]()
    for each in chunks:
        said = made.chunk(each)
        (held if held else now).append(said.now)
        if said.held:
            held.append(said.held)
    end = made.end()
    held += [end.now, end.held]
    return Reply(b"".join(now), b"".join(held), made.served())


def whole(body: dict[str, Any], asked: dict[str, Any] | None = None) -> dict[str, Any]:
    """Encode a body."""
    made = encoder(asked)
    served = made.body(body)
    assert served == made.served()
    return served


def chat_body(message: dict[str, Any], finish: str | None = "stop", **root: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": None, **message}
    return {"id": "x", "choices": [{"index": 0, "message": said, "finish_reason": finish}], **root}


def events(data: bytes) -> list[dict[str, Any]]:
    """Read a stream, in which every event is named after its type."""
    read = parse_events(data)
    assert data == b"" or data.endswith(b"\n\n")
    decoded = [json.loads(event.data) for event in read]
    assert [event.event for event in read] == [event["type"] for event in decoded]
    return decoded


def kinds(data: bytes) -> list[str]:
    return [event["type"] for event in events(data)]


def output_types(served: dict[str, Any]) -> list[str]:
    return [item["type"] for item in served["output"]]


def messages_of(items: Sequence[Any], **fields: Any) -> list[dict[str, Any]]:
    """Translate a request that holds these items."""
    return translated({"model": "m", "input": list(items), **fields}).body["messages"]
