"""Decoding a big engine reply: 8,192 sampled tokens with their log-prob entries, some 770 kB of JSON.

The floor is what a general JSON decoder costs that makes Python objects of everything: msgspec without types, and
orjson. Typed decoding must be cheaper, because it skips what no row needs.
"""

from __future__ import annotations

import json
from statistics import median
from time import perf_counter
from typing import Any

import msgspec
import orjson

from gristmill.captures import CallContext, calls_from_reply, decode_reply
from gristmill.tokens import TokenBook

TOKENS = 8192
ROUNDS = 15


def chat_reply(tokens: int = TOKENS) -> bytes:
    """Make a Chat Completions body as vLLM writes it, one log-prob entry per token."""
    entries = [
        {
            "token": f" tok{n % 97}",
            "logprob": -0.001 * (n % 811) - 0.25,
            "bytes": [32, 116, 111, 107],
            "top_logprobs": [],
        }
        for n in range(tokens)
    ]
    body = {
        "id": "chatcmpl-bench",
        "object": "chat.completion",
        "created": 1796057339,
        "model": "bench",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": " tok" * tokens, "reasoning": None, "tool_calls": None},
                "logprobs": {"content": entries},
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": [(n * 7919) % 151_669 for n in range(tokens)],
            }
        ],
        "usage": {"prompt_tokens": 512, "total_tokens": tokens + 512, "completion_tokens": tokens},
        "prompt_token_ids": list(range(512)),
    }
    return json.dumps(body, separators=(",", ":")).encode()


def chat_stream(tokens: int = TOKENS) -> bytes:
    """Make the event stream of such a reply, one token a chunk."""
    events = ['data: {"id":"s","choices":[{"index":0,"delta":{"role":"assistant"}}],"prompt_token_ids":[1,2]}']
    for n in range(tokens):
        finish = '"stop"' if n == tokens - 1 else "null"
        events.append(
            'data: {"id":"s","choices":[{"index":0,"delta":{"content":" tok"},"logprobs":{"content":[{"token":" tok",'
            f'"logprob":-0.25,"bytes":[32,116],"top_logprobs":[]}}]}},"finish_reason":{finish},"token_ids":[{n}]}}]}}'
        )
    events.append(f'data: {{"choices":[],"usage":{{"completion_tokens":{tokens}}}}}')
    return ("\n\n".join([*events, "data: [DONE]"]) + "\n\n").encode()


def _call(body: bytes) -> None:
    reply = decode_reply("chat", body=body)
    [made] = calls_from_reply(reply, CallContext(model_call_id="c"), TokenBook())
    if not made.record.usable:
        raise SystemExit(f"the benchmark's reply is not usable: {made.record.unusable_detail}")


def _decode(body: bytes) -> None:
    if decode_reply("chat", body=body).choices[0].reason is not None:
        raise SystemExit("the benchmark's reply was not decoded")


def _events(stream: bytes) -> list[Any]:
    return [orjson.loads(line[6:]) for line in stream.split(b"\n") if line[:7] == b"data: {"]


def _paired(job: Any, floor: Any, data: bytes) -> tuple[float, float]:
    """Time both in turns, so that a busy machine slows both; return their medians in seconds."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for kept, run_once in zip(times, (job, floor), strict=True):
            start = perf_counter()
            run_once(data)
            kept.append(perf_counter() - start)
    return median(times[0]), median(times[1])


def run() -> list[dict[str, Any]]:
    """Run the benchmark; each row is one job with its floor, ratio and target."""
    body, stream = chat_reply(), chat_stream()
    untyped = msgspec.json.decode
    jobs: list[tuple[str, Any, Any, bytes, float | None]] = [
        ("decode 8,192-token chat body, floor msgspec untyped", _decode, untyped, body, 1.0),
        ("decode 8,192-token chat body, floor orjson", _decode, orjson.loads, body, 1.0),
        ("body to record and token delta, floor orjson", _call, orjson.loads, body, None),
        (
            "decode 8,192-chunk chat stream, floor orjson per event",
            lambda data: decode_reply("chat", sse=data),
            _events,
            stream,
            None,
        ),
    ]
    rows: list[dict[str, Any]] = []
    for name, job, floor, data, target in jobs:
        seconds, floor_seconds = _paired(job, floor, data)
        ratio = seconds / floor_seconds
        rows.append(
            {
                "name": name,
                "seconds": seconds,
                "floor_seconds": floor_seconds,
                "ratio": ratio,
                "target": target,
                "ok": target is None or ratio <= target,
            }
        )
    return rows


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
