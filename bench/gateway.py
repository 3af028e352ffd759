"""The gateway: CPU and latency it adds to a call and to a chunk, against the same stack without capture.

The floor is uvicorn and aiohttp passing bytes on in the same run; a relay of raw sockets stands below it. CPU is that of
the proxy's whole process, threads included, as the kernel counts it. LiteLLM's proxy is measured where
`GRISTMILL_BENCH_LITELLM` names a Python that has it. The engine answers from memory.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["run"]

TOKENS = 8192
CALL_RATIO, CHUNK_s = 3.5, 8e-6
TICK_s = 1 / os.sysconf("SC_CLK_TCK")


class _Process:
    """One process of the stack, and the CPU it has used."""

    def __init__(self, module: str, *arguments: str, lines: int = 1) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"bench.gateway_stack.{module}", *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.said = [self._process.stdout.readline().strip() for _ in range(lines)]

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_s

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)


class _Answer(NamedTuple):
    first_s: float
    whole_s: float
    bytes: int


def _request(stream: bool, key: str | None, tokens: int, turn: int) -> bytes:
    body = b'{"model":"bench","messages":[{"role":"user","content":"Turn %d"}],"max_tokens":%d,"stream":%b%b}' % (
        turn,
        tokens,
        b"true" if stream else b"false",
        b"" if key is not None else b',"logprobs":true,"return_token_ids":true',
    )
    auth = b"" if key is None else b"authorization: Bearer %b\r\n" % key.encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n%bcontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (auth, len(body), body)
    )


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> _Answer:
    begin = time.perf_counter()
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head, head
    first, size = 0.0, 0
    lowered = head.lower()
    if b"content-length:" in lowered:
        length = int(lowered.partition(b"content-length:")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        return _Answer(time.perf_counter() - begin, time.perf_counter() - begin, length)
    while True:
        line = await reader.readuntil(b"\r\n")
        if not first:
            first = time.perf_counter() - begin
        chunk = int(line, 16)
        await reader.readexactly(chunk + 2)
        size += chunk
        if not chunk:
            return _Answer(first, time.perf_counter() - begin, size)


async def _load(port: int, keys: Sequence[str | None], calls: int, at_once: int, stream: bool) -> list[_Answer]:
    answers: list[_Answer] = []
    turns = iter(range(calls))

    async def worker(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        key = keys[number % len(keys)]
        for turn in turns:
            answers.append(await _ask(reader, writer, _request(stream, key, TOKENS, turn)))
        writer.close()

    await asyncio.gather(*(worker(number) for number in range(at_once)))
    return answers


class _Measured(NamedTuple):
    cpu_s: float
    first_s: float
    whole_s: float


def _measure(
    process: _Process, port: int, keys: Sequence[str | None], calls: int, stream: bool, at_once: int = 2
) -> _Measured:
    asyncio.run(_load(port, keys, 6, at_once, stream))
    before = process.cpu_s()
    answers = asyncio.run(_load(port, keys, calls, at_once, stream))
    cpu = process.cpu_s() - before
    firsts, wholes = sorted(a.first_s for a in answers), sorted(a.whole_s for a in answers)
    return _Measured(cpu / calls, firsts[len(firsts) // 2], wholes[len(wholes) // 2])


def run(quick: bool = False) -> Iterator[dict[str, Any]]:
    """Yield one result per measurement."""
    calls, streams = (60, 12) if quick else (300, 40)
    with ExitStack() as stack:
        engine = stack.enter_context(_Process("engine", str(TOKENS)))
        url = f"http://127.0.0.1:{engine.said[0]}"
        bare = stack.enter_context(_Process("pass_through", url))
        relay = stack.enter_context(_Process("relay", engine.said[0]))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ours = stack.enter_context(_Process("capturing", url, f"{folder}/bench.ledger", lines=2))
        keys = ours.said[0].split()
        for name, stream, number in (("body", False, calls), ("stream", True, streams)):
            floor = _measure(bare, int(bare.said[0]), [None], number, stream)
            below = _measure(relay, int(relay.said[0]), [None], number, stream)
            captured = _measure(ours, int(ours.said[1]), keys, number, stream)
            shape = f"{TOKENS} tokens, {name}"
            yield _result(f"CPU of a call, {shape}", captured.cpu_s, floor.cpu_s, CALL_RATIO if not stream else None)
            if stream:
                target = 1 + CHUNK_s * TOKENS / floor.cpu_s
                yield _result(
                    f"CPU of {TOKENS} chunks (target {CHUNK_s * 1e6:g} µs a chunk over the floor)",
                    captured.cpu_s,
                    floor.cpu_s,
                    target,
                )
                yield _result("first event", captured.first_s, floor.first_s, None)
            yield _result(f"latency of a call, {shape}", captured.whole_s, floor.whole_s, None)
            yield _result(f"CPU of a raw relay, {shape}", below.cpu_s, floor.cpu_s, None)


def _result(name: str, seconds: float, floor: float, target: float | None) -> dict[str, Any]:
    ratio = seconds / floor if floor else float("nan")
    return {
        "name": name,
        "seconds": seconds,
        "floor_seconds": floor,
        "ratio": ratio,
        "target": target,
        "ok": target is None or ratio <= target,
    }
