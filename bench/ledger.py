"""The ledger: durable appends by several writers, reading back, stored bytes, latency against history.

The floor of an append is a file to which the same number of bytes is written and synced with `fdatasync`, for as many
records at a time as there are writers: what any store has to do that acknowledges durably. The floor of reading is the
same attempt from a `MemoryLedger`. Targets in records a second are given as a ratio to the floor of the same run.

Where a PostgreSQL server is installed, one is started on the same disk, durable as servers are, and does the same; its
floor is what SQLite takes for it, in turns.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from gristmill.captures.exact import dumps
from gristmill.ledger import AttemptKey, LedgerWriter, MemoryLedger, SqliteLedger, StoredCall
from gristmill.ledger.schema import BODIES, EXCHANGES, TOKENS
from gristmill.records import Atom, CallRecord, Exchange, ItemKind, OutputItem
from gristmill.tokens import TokenBook

SEED = 20
RECORDS = 1536
RECORD_bytes = 35_000
ALONE_per_s, TOGETHER_per_s = 3000, 5000
WRITERS = (1, 4, 8, 16, 64)
TOKEN_bytes = 8
WORDS = (
    "the",
    "agent",
    "reads",
    "a",
    "file",
    "edits",
    "one",
    "line",
    "runs",
    "every",
    "test",
    "and",
    "looks",
    "failed",
)


def text_of(rng: np.random.Generator, chars: int) -> str:
    """Make words of about this many characters."""
    return " ".join(WORDS[n] for n in rng.integers(0, len(WORDS), chars // 5))[:chars]


def record_of(call_id: str, text: str, fields: dict[str, Any]) -> CallRecord:
    """Make a record that holds its text as output."""
    item = OutputItem(ItemKind.TEXT, "f" * 64, atoms=(Atom("text", text),))
    return CallRecord(
        model_call_id=call_id, response_id=call_id, model="m", output_items=(item,), usable=True, **fields
    )


def rollout(turns: int, *, said_chars: int = 600, tool_chars: int = 1400, new_T: int = 600) -> list[StoredCall]:
    """Make a conversation in which every call sends the whole history again."""
    rng = np.random.default_rng(SEED)
    book = TokenBook()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text_of(rng, 4000)},
        {"role": "user", "content": text_of(rng, 800)},
    ]
    tools = [
        {"type": "function", "function": {"name": f"tool_{n}", "description": text_of(rng, 300)}} for n in range(8)
    ]
    calls: list[StoredCall] = []
    suffix_T = rng.integers(0, 150_000, 2000, dtype=np.int32)
    for turn in range(turns):
        call_id = f"c{turn}"
        sampled_T = rng.integers(0, 150_000, new_T // 4, dtype=np.int32)
        logprobs_T = -rng.random(sampled_T.size, np.float32)
        if turn:
            stored = book.extend(call_id, f"c{turn - 1}", suffix_T, sampled_T, logprobs_T)
        else:
            stored = book.add(call_id, suffix_T, sampled_T, logprobs_T)
        suffix_T = rng.integers(0, 150_000, new_T - sampled_T.size, dtype=np.int32)
        said = text_of(rng, said_chars)
        reply = {
            "id": f"chatcmpl-{turn}",
            "object": "chat.completion",
            "created": 1_700_000_000 + turn,
            "model": "m",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "tool_calls"}],
        }
        request = {"model": "m", "temperature": 1, "messages": list(messages), "tools": tools, "stream": False}
        fields = {name: getattr(stored, name) for name in stored.__struct_fields__ if name != "delta"}
        exchange = Exchange(model_call_id=call_id, request=request, reply=reply, status=200)
        calls.append(StoredCall(record=record_of(call_id, said, fields), tokens=stored.delta, exchange=exchange))
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "tool", "tool_call_id": f"t{turn}", "content": text_of(rng, tool_chars)})
    return calls


def lone_call(call_id: str) -> StoredCall:
    """Make a call whose stored form takes about `RECORD_bytes`."""
    rng = np.random.default_rng(SEED)
    prompt_T, sampled_T = (rng.integers(0, 150_000, size, dtype=np.int32) for size in (2000, 1000))
    stored = TokenBook().add(call_id, prompt_T, sampled_T, -rng.random(1000, np.float32))
    fields = {name: getattr(stored, name) for name in stored.__struct_fields__ if name != "delta"}
    text = text_of(rng, 4000)
    messages = [{"role": "user", "content": f"{call_id} {text_of(rng, 10_000)}"}]
    exchange = Exchange(
        model_call_id=call_id,
        request={"model": "m", "messages": messages},
        reply={"choices": [{"message": {"content": f"{text} {call_id}"}}]},
    )
    return StoredCall(record=record_of(call_id, text, fields), tokens=stored.delta, exchange=exchange)


@contextmanager
def ledger() -> Iterator[SqliteLedger]:
    """Make a ledger in a folder of its own; TMPDIR says on which disk."""
    with tempfile.TemporaryDirectory() as folder, SqliteLedger(Path(folder) / "bench.ledger") as made:
        yield made


def result(name: str, work_s: float, floor_s: float, target: float) -> dict[str, Any]:
    """Report one benchmark; `target` is a ratio to the floor."""
    ratio = work_s / floor_s
    return {
        "name": name,
        "seconds": work_s,
        "floor_seconds": floor_s,
        "ratio": ratio,
        "target": target,
        "ok": ratio <= target,
    }


Made = Callable[[], AbstractContextManager[LedgerWriter]]


def append_s(writers: int, records: int = RECORDS, made_by: Made = ledger) -> float:
    """Append records from several threads, each to attempts of its own; seconds a record."""
    each = records // writers
    calls = [[lone_call(f"c{writer}-{n}") for n in range(each)] for writer in range(writers)]
    with made_by() as made:

        def work(writer: int) -> None:
            for n, call in enumerate(calls[writer]):
                made.commit(AttemptKey(f"r{writer}-{n // 40}"), call)

        threads = [threading.Thread(target=work, args=(writer,)) for writer in range(writers)]
        start = perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (perf_counter() - start) / (each * writers)


def floor_append_s(writers: int, records: int = RECORDS) -> float:
    """Write and sync the same bytes to a bare file; seconds a record."""
    data = os.urandom(RECORD_bytes * writers)
    with tempfile.TemporaryFile() as file:
        number = file.fileno()
        start = perf_counter()
        for at in range(records // writers):
            os.pwrite(number, data, at % 400 * len(data))
            os.fdatasync(number)
        return (perf_counter() - start) / (records // writers * writers)


def appends() -> list[dict[str, Any]]:
    """Durable appends of 35 kB records."""
    results: list[dict[str, Any]] = []
    for writers in WRITERS:
        floors_s, works_s = [], []
        for _ in range(3):
            floors_s.append(floor_append_s(writers))
            works_s.append(append_s(writers))
        work_s, floor_s = median(works_s), median(floors_s)
        limit = ALONE_per_s if writers < 8 else TOGETHER_per_s
        name = f"append 35 kB, {writers} writers: {1 / work_s:,.0f}/s of {limit:,}/s"
        results.append(result(name, work_s, floor_s, 1 / limit / floor_s))
    return results


def read_back() -> list[dict[str, Any]]:
    """Read 100 attempts of 40 turns, tokens included."""
    calls = rollout(40)
    memory = MemoryLedger()
    keys = [AttemptKey(f"r{n}") for n in range(100)]
    with ledger() as made:
        for key in keys:
            for call in calls:
                memory.commit(key, call)
        made.import_attempts(memory.read(key, exchanges=True) for key in keys)
        times_s: dict[str, float] = {}
        for name, store in (("work", made), ("floor", memory)):
            start = perf_counter()
            for key in keys:
                store.read(key)
            times_s[name] = (perf_counter() - start) / len(keys)
        start = perf_counter()
        listed = sum(1 for _ in made.summaries())
        summary_s = (perf_counter() - start) / listed
    floor_s = times_s["floor"]
    return [
        result("read an attempt of 40 turns, 10 ms", times_s["work"], floor_s, 0.010 / floor_s),
        result("one line of ls, 50 µs", summary_s, floor_s, 50e-6 / floor_s),
    ]


def stored_bytes() -> list[dict[str, Any]]:
    """Bytes stored for 40 and 400 turns; not seconds but bytes stand in the result."""
    results: list[dict[str, Any]] = []
    for turns in (40, 400):
        sizes = sizes_of(rollout(turns))
        for kind, target in (("tokens", 1.2), ("bodies", 1.5)):
            name = f"bytes of {kind}, {turns} turns"
            results.append(result(name, sizes[kind], sizes[f"unique_{kind}"], target))
    return results


def sizes_of(calls: list[StoredCall]) -> dict[str, int]:
    """Store one rollout and return what its tokens and bodies take, and what is unique of them, in bytes."""
    key = AttemptKey("r")
    with ledger() as made:
        for call in calls:
            made.commit(key, call)
        made.freeze(key)
        with made._reading() as connection:
            taken = {table.name: sum(map(_row_bytes, table.rows(connection))) for table in (TOKENS, EXCHANGES, BODIES)}
    pieces: set[bytes] = set()
    for call in calls:
        exchange = call.exchange
        if exchange is not None:
            pieces.add(dumps(exchange.reply))
            pieces.add(dumps({**exchange.request, "messages": [], "tools": []}))
            pieces.update(map(dumps, (*exchange.request["messages"], *exchange.request["tools"])))
    return {
        "tokens": taken["tokens"],
        "unique_tokens": TOKEN_bytes * sum(call.record.delta_len for call in calls),
        "bodies": taken["exchanges"] + taken["bodies"],
        "unique_bodies": sum(map(len, pieces)),
    }


def _row_bytes(row: tuple[Any, ...]) -> int:
    """Count a row's values; eight bytes for a number, six for the row's header."""
    return 6 + sum(len(value) if isinstance(value, bytes | str) else 8 for value in row)


def latency() -> list[dict[str, Any]]:
    """Commit to an attempt of 1,000 calls, against one of 10 calls."""
    with ledger() as made:
        times_s: dict[int, list[float]] = {10: [], 1000: []}
        for history in times_s:
            for n in range(history):
                made.commit(AttemptKey(f"r{history}"), lone_call(f"c{n}"))
        for n in range(200):
            for history, found in times_s.items():
                call = lone_call(f"d{n}")
                start = perf_counter()
                made.commit(AttemptKey(f"r{history}"), call)
                found.append(perf_counter() - start)
    return [result("commit behind 1,000 calls against 10", median(times_s[1000]), median(times_s[10]), 1.2)]


@contextmanager
def postgres_server() -> Iterator[Made | None]:
    """Start a server, and say how to make a ledger in it; None where none is installed."""
    try:
        from gristmill.ledger.postgres import PostgresLedger  # noqa: PLC0415  an extra
        from tests.ledger.server import NO_SERVER, PostgresServer, binaries  # noqa: PLC0415
    except ModuleNotFoundError as error:
        print(f"not beside PostgreSQL: {error.name} is not installed", file=sys.stderr)
        yield None
        return
    if binaries() is None:
        print(f"not beside PostgreSQL: {NO_SERVER}", file=sys.stderr)
        yield None
        return
    with closing(PostgresServer(durable=True)) as server:
        schemas = itertools.count()
        yield lambda: PostgresLedger(server.url(f"bench_{next(schemas)}"))


def beside(name: str, works_s: list[float], floors_s: list[float]) -> dict[str, Any]:
    """Report what PostgreSQL takes beside SQLite; there is no target for it."""
    return {**result(name, median(works_s), median(floors_s), 0.0), "target": None, "ok": True}


def beside_postgres() -> list[dict[str, Any]]:
    """Append, import and read in PostgreSQL, SQLite being the floor."""
    results: list[dict[str, Any]] = []
    with postgres_server() as made_by:
        if made_by is None:
            return results
        for writers in (1, 8, 64):
            works_s, floors_s = [], []
            for _ in range(3):
                floors_s.append(append_s(writers, RECORDS // 2))
                works_s.append(append_s(writers, RECORDS // 2, made_by))
            rate = 1 / median(works_s)
            results.append(beside(f"PostgreSQL: append 35 kB, {writers} writers: {rate:,.0f}/s", works_s, floors_s))
        memory = MemoryLedger()
        for key in (keys := [AttemptKey(f"r{n}") for n in range(50)]):
            for call in rollout(40):
                memory.commit(key, call)
        taken: dict[str, dict[Made, list[float]]] = {what: {made_by: [], ledger: []} for what in ("import", "read")}
        for _ in range(3):
            for make in (ledger, made_by):
                with make() as made:
                    start = perf_counter()
                    made.import_attempts(memory.read(key, exchanges=True) for key in keys)
                    taken["import"][make].append((perf_counter() - start) / len(keys))
                    start = perf_counter()
                    for key in keys:
                        made.read(key)
                    taken["read"][make].append((perf_counter() - start) / len(keys))
        for what, times_s in taken.items():
            results.append(beside(f"PostgreSQL: {what} an attempt of 40 turns", times_s[made_by], times_s[ledger]))
    return results


def run() -> list[dict[str, Any]]:
    """Run them all; about two minutes."""
    return [*appends(), *read_back(), *stored_bytes(), *latency(), *beside_postgres()]
