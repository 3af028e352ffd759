"""An engine that costs next to nothing: raw asyncio, replies made before the first request.

`python -m bench.gateway_stack.engine TOKENS [CHUNKS PAUSE_s]` prints its port. A request's model says what it gets:
`bench`, as fast as it goes, a body as vLLM writes it with ids and log-probabilities on, or a stream of one chunk a
token; `paced`, a stream of chunks that say when they were sent; `agent`, the next turn of a conversation.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any, Final

import numpy as np
import orjson
import uvloop

from bench.gateway_stack import conversation

__all__ = ["MODEL", "PACED", "PROMPT_T"]

MODEL, PACED = "bench", "paced"
PROMPT_T: Final = 2000
_SMALL_T: Final = 4


def _ids(count: int) -> list[int]:
    return [(n * 7919) % 150_000 for n in range(count)]


def _word(position: int) -> str:
    return f" w{position % 10}"


def _entry(position: int) -> dict[str, Any]:
    # Engines write a float32 with the digits of a float64.
    nat = float(np.float32(-0.001 * (position % 4001) - 0.0004882))
    word = _word(position)
    return {"token": word, "logprob": nat, "bytes": list(word.encode()), "top_logprobs": []}


def _usage(sampled: int) -> dict[str, int]:
    return {"prompt_tokens": PROMPT_T, "completion_tokens": sampled, "total_tokens": PROMPT_T + sampled}


def body(tokens: int) -> bytes:
    """Return a whole reply."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "".join(map(_word, range(tokens))), "tool_calls": []},
        "logprobs": {"content": [_entry(n) for n in range(tokens)]},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": _ids(tokens),
    }
    head = {"id": "chatcmpl-bench", "object": "chat.completion", "created": 1, "model": MODEL}
    rest = {"usage": _usage(tokens), "prompt_token_ids": list(range(PROMPT_T))}
    return orjson.dumps({**head, "choices": [choice], **rest})


def event(value: dict[str, Any]) -> bytes:
    """Return one event of a stream."""
    head = {"id": "chatcmpl-bench", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return b"data: " + orjson.dumps({**head, **value}) + b"\n\n"


def _choice(**said: Any) -> list[dict[str, Any]]:
    return [{"index": 0, "logprobs": None, "finish_reason": None, **said}]


def first_event() -> bytes:
    """Return the event that a stream begins with."""
    role = {"role": "assistant", "content": ""}
    return event({"choices": _choice(delta=role), "prompt_token_ids": list(range(PROMPT_T))})


def stream(tokens: int) -> list[bytes]:
    """Return the events of a stream."""
    events = [first_event()]
    for n, token in enumerate(_ids(tokens)):
        said: dict[str, Any] = {
            "delta": {"content": _word(n)},
            "logprobs": {"content": [_entry(n)]},
            "token_ids": [token],
        }
        if n == tokens - 1:
            said |= {"finish_reason": "stop", "stop_reason": None}
        events.append(event({"choices": _choice(**said)}))
    return [*events, event({"choices": [], "usage": _usage(tokens)}), b"data: [DONE]\n\n"]


def _http(payload: bytes, kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(payload))
    return head + payload


def _chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


_MODELS: Final = _http(
    orjson.dumps(
        {
            "object": "list",
            "data": [
                {"id": name, "owned_by": "vllm", "max_model_len": 200_000}
                for name in (MODEL, PACED, conversation.MODEL)
            ],
        }
    )
)
_STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_STAMP: Final = b"@00000000.000000@"
_STAMPED: Final = event(
    {"choices": _choice(delta={"content": _STAMP.decode()}, logprobs={"content": [_entry(0)]}, token_ids=[7])}
)


class Engine(asyncio.Protocol):
    """One connection."""

    whole: bytes
    events: list[bytes]
    small: bytes
    chunks: int
    pause_s: float

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._waiting = b""
        self._streaming: asyncio.Future[None] | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._streaming is not None:
            self._streaming.cancel()

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
            write(_MODELS)
        elif path != b"/v1/chat/completions":
            write(_http(b"{}"))
        else:
            self._sample(orjson.loads(sent))

    def _sample(self, asked: dict[str, Any]) -> None:
        write = self._transport.write
        model = asked["model"]
        if not asked.get("stream"):
            if model == conversation.MODEL and "tools" in asked:
                turn = sum(message["role"] == "assistant" for message in asked["messages"])
                write(_http(orjson.dumps(conversation.reply(turn))))
            else:
                # What measures an engine asks for a few tokens.
                write(self.whole if asked.get("max_tokens", 0) > 64 else self.small)
            return
        write(_STREAM_HEAD)
        self._streaming = asyncio.ensure_future(self._paced() if model == PACED else self._stream())

    async def _stream(self) -> None:
        # A few events a write, as a busy engine's own server sends them; the loop turns in between.
        for sent in self.events:
            self._transport.write(_chunk(sent))
            await asyncio.sleep(0)
        self._transport.write(b"0\r\n\r\n")

    async def _paced(self) -> None:
        loop = asyncio.get_running_loop()
        write = self._transport.write
        write(_chunk(first_event()))
        at = loop.time()
        before, _, after = _STAMPED.partition(_STAMP)
        for _ in range(self.chunks):
            at += self.pause_s
            await asyncio.sleep(at - loop.time())
            write(_chunk(b"%b@%015.6f@%b" % (before, time.monotonic(), after)))
        last = _choice(delta={}, finish_reason="stop")
        usage = event({"choices": [], "usage": _usage(self.chunks)})
        write(b"".join(map(_chunk, (event({"choices": last}), usage, b"data: [DONE]\n\n"))) + b"0\r\n\r\n")


async def _main(tokens: int, chunks: int = 0, pause_s: float = 0.0) -> None:
    Engine.whole, Engine.small = _http(body(tokens)), _http(body(_SMALL_T))
    Engine.events = stream(tokens)
    Engine.chunks, Engine.pause_s = chunks, pause_s
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    tokens, *pace = sys.argv[1:]
    uvloop.run(_main(int(tokens), *(int(pace[0]), float(pace[1])) if pace else ()))
