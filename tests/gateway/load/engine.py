"""The engine of a load run, in a process of its own: `python -m tests.gateway.load.engine SCRIPT LOG [--port N]`.

It prints its address, serves until SIGTERM, and writes a line into LOG for every request that it was asked to sample:
what went over the wire to the gateway, read by the few lines here that share nothing with the code they judge.

Invariant: a line is made from the bytes that were handed to the connection, not from what the engine meant to send.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from hashlib import sha256
from io import BufferedWriter
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import orjson

from gristmill.scripted import ScriptedEngine

__all__ = ["EngineSaw", "SawChoice", "ids_digest", "read_log"]

Message = MutableMapping[str, Any]

_NONCE: Final = re.compile(rb"\[\[([^\[\]]+)\]\]")
_SAMPLES: Final = frozenset({"/v1/chat/completions", "/v1/completions"})


class SawChoice(msgspec.Struct):
    """One choice as it was sent: ids, log-probabilities, and why it ended, None where it did not."""

    ids: list[int] = []
    logprobs: list[float] = []
    finish: str | None = None


class EngineSaw(msgspec.Struct, kw_only=True):
    """One request that samples, and what was sent for it.

    Attributes:
        call_id: the gateway's name of the call.
        nonce: the last one in the request, empty without any.
        status: of the answer, 0 where none began.
        whole: everything up to the protocol's end was sent.
        prompt: digest of the prompt's ids, None where they were not sent.
        choices: by index.
    """

    call_id: str
    nonce: str = ""
    stream: bool = False
    status: int = 0
    whole: bool = False
    prompt: str | None = None
    choices: list[SawChoice] = []

    @property
    def finished(self) -> bool:
        """Whether every choice was said to have ended, and so was the answer."""
        return self.whole and all(choice.finish is not None for choice in self.choices)


def ids_digest(ids: Any) -> str:
    """Digest token ids."""
    return sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()


def read_log(path: Path) -> list[EngineSaw]:
    """Read what an engine has written."""
    decode = msgspec.json.Decoder(EngineSaw).decode
    with path.open("rb") as lines:
        return [decode(line) for line in lines]


class WatchedEngine(ScriptedEngine):
    """A scripted engine that writes down what it was asked and what it sent.

    Args:
        script: path of the script.
        log: where lines go.
    """

    def __init__(self, script: Path, log: BufferedWriter) -> None:
        super().__init__(script)
        self._lines = log

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] not in _SAMPLES:
            await super().__call__(scope, receive, send)
            return
        asked, sent, status = bytearray(), bytearray(), 0

        async def heard() -> Message:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def said(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            sent.extend(message.get("body", b""))
            await send(message)

        try:
            await super().__call__(scope, heard, said)
        finally:
            headers = dict(scope["headers"])
            saw = EngineSaw(call_id=headers.get(b"x-request-id", b"").decode("latin-1"), status=status)
            found = _NONCE.findall(bytes(asked))
            saw.nonce = found[-1].decode() if found else ""
            if status == 200:
                _read(saw, bytes(sent))
            self._lines.write(msgspec.json.encode(saw) + b"\n")
            self._lines.flush()


def _read(saw: EngineSaw, sent: bytes) -> None:
    """Read ids and log-probabilities from the bytes of an answer."""
    if sent.startswith(b"data:"):
        saw.stream = True
        saw.whole = sent.endswith(b"data: [DONE]\n\n")
        for chunk in _events(sent):
            _add(saw, chunk)
        return
    try:
        body = orjson.loads(sent)
    except orjson.JSONDecodeError:
        return
    saw.whole = True
    _add(saw, body)


def _events(sent: bytes) -> Iterator[dict[str, Any]]:
    for event in sent.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if data.startswith(b"{"):
            yield orjson.loads(data)


def _add(saw: EngineSaw, said: dict[str, Any]) -> None:
    prompt = said.get("prompt_token_ids")
    for given in said.get("choices", ()):
        prompt = prompt or given.get("prompt_token_ids")
        while len(saw.choices) <= given["index"]:
            saw.choices.append(SawChoice())
        choice = saw.choices[given["index"]]
        choice.ids += given.get("token_ids") or ()
        logprobs = given.get("logprobs") or {}
        choice.logprobs += [entry["logprob"] for entry in logprobs.get("content") or ()]
        choice.logprobs += logprobs.get("token_logprobs") or ()
        choice.finish = given.get("finish_reason") or choice.finish
    if prompt:
        saw.prompt = ids_digest(prompt)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gateway.load.engine")
    parser.add_argument("script", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with given.log.open("ab") as log, WatchedEngine(given.script, log).serve(port=given.port) as url:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        ended.wait()


if __name__ == "__main__":
    main()
