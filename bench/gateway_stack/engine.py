"""An engine that costs next to nothing: raw asyncio, replies made before the first request.

`python -m bench.gateway_stack.engine TOKENS` prints its port. A body is what vLLM answers with ids and log-probabilities
on; a stream has one chunk a token. Requests that do not sample get what a probe asks for.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final

import orjson

MODEL: Final = "bench"
PROMPT_T: Final = 1000


def _entry(position: int) -> dict[str, Any]:
    return {
        "token": f" w{position % 977}",
        "logprob": -0.001 * (position % 4001) - 0.0004882,
        "bytes": [32, 119, 48 + position % 10],
        "top_logprobs": [],
    }


def body(tokens: int) -> bytes:
    """Return a whole reply."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "".join(f" w{n % 977}" for n in range(tokens)), "tool_calls": []},
        "logprobs": {"content": [_entry(n) for n in range(tokens)]},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": [(n * 7919) % 150_000 for n in range(tokens)],
    }
    return orjson.dumps(
        {
            "id": "chatcmpl-bench",
            "object": "chat.completion",
            "created": 1,
            "model": MODEL,
            "choices": [choice],
            "usage": {"prompt_tokens": PROMPT_T, "completion_tokens": tokens, "total_tokens": PROMPT_T + tokens},
            "prompt_token_ids": list(range(PROMPT_T)),
        }
    )


def stream(tokens: int) -> list[bytes]:
    """Return the events of a stream."""

    def event(value: dict[str, Any]) -> bytes:
        head = {"id": "chatcmpl-bench", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
        return b"data: " + orjson.dumps({**head, **value}) + b"\n\n"

    def choice(**said: Any) -> list[dict[str, Any]]:
        return [{"index": 0, "logprobs": None, "finish_reason": None, **said}]

    role = {"role": "assistant", "content": ""}
    events = [event({"choices": choice(delta=role), "prompt_token_ids": list(range(PROMPT_T))})]
    for n in range(tokens):
        said: dict[str, Any] = {
            "delta": {"content": f" w{n % 977}"},
            "logprobs": {"content": [_entry(n)]},
            "token_ids": [(n * 7919) % 150_000],
        }
        if n == tokens - 1:
            said |= {"finish_reason": "stop", "stop_reason": None}
        events.append(event({"choices": choice(**said)}))
    usage = {"prompt_tokens": PROMPT_T, "completion_tokens": tokens, "total_tokens": PROMPT_T + tokens}
    return [*events, event({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]


def _http(payload: bytes, kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(payload))
    return head + payload


class Engine(asyncio.Protocol):
    """One connection."""

    whole: bytes
    events: list[bytes]
    small: bytes
    small_events: list[bytes]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._waiting = b""

    def data_received(self, data: bytes) -> None:
        self._waiting += data
        while (end := self._waiting.find(b"\r\n\r\n")) >= 0:
            head = self._waiting[:end].lower()
            _, _, after = head.partition(b"content-length:")
            size = int(after.split(b"\r\n")[0]) if after else 0
            if len(self._waiting) < end + 4 + size:
                return
            sent = self._waiting[end + 4 : end + 4 + size]
            self._waiting = self._waiting[end + 4 + size :]
            self._answer(head.split(b" ")[1], sent)

    def _answer(self, path: bytes, sent: bytes) -> None:
        write = self._transport.write
        if path == b"/version":
            write(_http(b'{"version":"0.32.0"}'))
        elif path == b"/v1/models":
            write(_http(b'{"object":"list","data":[{"id":"bench","owned_by":"vllm","max_model_len":200000}]}'))
        elif path != b"/v1/chat/completions":
            write(_http(b"{}"))
        elif b'"stream":true' not in sent:
            write(self.small if b"probe" in sent or b'"max_tokens":1,' in sent else self.whole)
        else:
            write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            asyncio.ensure_future(self._stream())

    async def _stream(self) -> None:
        # A few events a write, as a busy engine's own server sends them; the loop turns in between.
        for event in self.events:
            self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
            await asyncio.sleep(0)
        self._transport.write(b"0\r\n\r\n")


async def _main(tokens: int) -> None:
    Engine.whole, Engine.small = _http(body(tokens)), _http(body(4))
    Engine.events = stream(tokens)
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
