"""What the tests of this folder share: encoding a reply, and adding a stream up as a client does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from gristmill.captures.exact import dumps
from gristmill.gateway.dialects.messages import MESSAGES
from gristmill.gateway.front import Encoder, ServedNames, Translated

Json = dict[str, Any]

FIXTURES = Path(__file__).parents[3] / "fixtures"
NAMES = ServedNames("t0k3n", "asked-model", 1_700_000_000)
USER: Json = {"role": "user", "content": "Hi"}


def no_history(response_id: str) -> None:
    raise AssertionError(f"the dialect refers to no response, asked for {response_id}")


def translate(*messages: Json, **fields: Any) -> Translated:
    body = {"model": "m", "max_tokens": 9, "messages": list(messages) or [USER], **fields}
    return MESSAGES.translate(body, no_history)


def encoder() -> Encoder:
    return MESSAGES.encoder({}, translate(), NAMES)


def engine(name: str) -> Json:
    return json.loads((FIXTURES / "engine" / f"{name}.json").read_bytes())


def chunks_of(fixture: Json) -> list[Json]:
    lines = fixture["sse_raw"].split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


ONE_CHOICE = sorted(
    path.stem
    for path in (FIXTURES / "engine").glob("*stream*.json")
    if (recorded := engine(path.stem))["request"]["path"] == "/v1/chat/completions"
    and recorded["status"] == 200
    and "sse_raw" in recorded
    and recorded["request"]["body"].get("n", 1) == 1
)
"""Names of the recorded Chat streams of one choice."""


def harness(name: str) -> list[Json]:
    lines = (FIXTURES / "harness" / f"{name}.jsonl").read_text().splitlines()
    calls = [json.loads(line) for line in lines]
    return [call for call in calls if call["body"] is not None]


class Streamed(NamedTuple):
    """One encoded stream: what could go at once, what was held, and the encoder that made it."""

    now: bytes
    held: bytes
    encoder: Encoder

    @property
    def message(self) -> Json:
        """The served message as plain JSON."""
        return plain(self.encoder.served())

    def events(self) -> list[Json]:
        return events(self.now + self.held)


def stream(*chunks: Json, end: bool = True) -> Streamed:
    """Encode chunks, and check that nothing goes at once after something was held."""
    made = encoder()
    now, held = made.begin(), b""
    for chunk in chunks:
        served = made.chunk(chunk)
        assert not (held and served.now)
        now, held = now + served.now, held + served.held
    if end:
        served = made.end()
        assert not served.now
        held += served.held
    return Streamed(now, held, made)


def plain(value: Any) -> Any:
    return json.loads(dumps(value))


def events(raw: bytes) -> list[Json]:
    """Read a stream the way the event stream format says, and check that names and types agree."""
    text = raw.decode()
    assert not text or text.endswith("\n\n")
    read: list[Json] = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        event = json.loads(data[6:])
        assert event["type"] == name[7:]
        read.append(event)
    return read


class Added(NamedTuple):
    """What a stream adds up to, and the error that ended it."""

    message: Json
    stopped: bool
    error: Json | None


def add_up(read: list[Json]) -> Added:
    """Add up a stream by its published rules; any break of them fails."""
    message: Json = {}
    inputs: dict[int, str] = {}
    opened: int | None = None
    for event in read:
        kind = event["type"]
        if kind == "message_start":
            assert not message
            message = event["message"]
        elif kind == "content_block_start":
            assert opened is None
            opened = event["index"]
            assert opened == len(message["content"])
            message["content"].append(event["content_block"])
        elif kind == "content_block_delta":
            assert event["index"] == opened
            delta, block = event["delta"], message["content"][opened]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            elif delta["type"] == "thinking_delta":
                block["thinking"] += delta["thinking"]
            elif delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
            else:
                assert delta["type"] == "input_json_delta"
                inputs[opened] = inputs.get(opened, "") + delta["partial_json"]
        elif kind == "content_block_stop":
            assert event["index"] == opened
            if inputs.get(opened):
                message["content"][opened]["input"] = json.loads(inputs[opened])
            opened = None
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] = {**message["usage"], **event["usage"]}
        elif kind == "error":
            assert event is read[-1]
            return Added(message, False, event["error"])
        else:
            assert kind == "message_stop"
            assert event is read[-1]
            return Added(message, True, None)
    return Added(message, False, None)


# Chat replies


def piece(delta: Json, **choice: Any) -> Json:
    return {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta, **choice}]}


def start() -> Json:
    return {**piece({"role": "assistant", "content": ""}), "prompt_token_ids": [1, 2, 3]}


def finish(reason: str = "stop", stop_reason: Any = None) -> Json:
    return piece({}, finish_reason=reason, stop_reason=stop_reason, token_ids=[7])


def usage(prompt: int = 3, completion: int = 5, **details: int) -> Json:
    counts: Json = {"prompt_tokens": prompt, "completion_tokens": completion}
    if details:
        counts["prompt_tokens_details"] = details
    return {"choices": [], "usage": counts}


def called(index: int = 0, call_id: str | None = None, name: str | None = None, arguments: str | None = None) -> Json:
    """One piece of a tool call in a delta."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    call: Json = {"index": index, "function": function}
    if call_id is not None:
        call |= {"id": call_id, "type": "function"}
    return piece({"tool_calls": [call]})


def chat_body(message: Json, reason: str = "stop", stop_reason: Any = None) -> Json:
    choice = {
        "index": 0,
        "message": {"role": "assistant", **message},
        "finish_reason": reason,
        "stop_reason": stop_reason,
        "token_ids": [7],
        "logprobs": {"content": [{"token": "x", "logprob": -1.0}]},
    }
    return {"id": "chatcmpl-1", "prompt_token_ids": [1, 2, 3], "choices": [choice], "usage": usage()["usage"]}
