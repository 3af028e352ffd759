"""Bytes that the ledger holds of a rollout of 40 turns with tools, captured through the gateway.

The rollout is frozen, as that of a service is in the end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import orjson
import uvloop

from bench.gateway_stack import conversation
from bench.gateway_stack.client import ask_one, request
from bench.gateway_stack.process import Gateway, Server
from bench.ledger import TOKEN_bytes, _row_bytes
from gristmill.captures.exact import dumps
from gristmill.ledger import AttemptKey, SqliteLedger
from gristmill.ledger.schema import BODIES, EXCHANGES, TOKENS

__all__ = ["stored_bytes"]

TARGETS = {"tokens": 1.2, "bodies": 1.5}


async def _rollout(port: int, key: str) -> None:
    """Talk as a harness does, the whole history every time."""
    messages = conversation.first_messages()
    for turn in range(conversation.TURNS):
        more = {"messages": messages, "tools": conversation.TOOLS, "temperature": 1}
        sent = request("chat", key, model=conversation.MODEL, stream=False, max_tokens=4096, **more)
        answer = orjson.loads((await ask_one(port, sent)).body)
        said = answer["choices"][0]["message"]
        messages += [said, conversation.tool_answer(turn, said["tool_calls"][0]["id"])]


def _sizes(path: Path, key: AttemptKey) -> dict[str, tuple[int, int]]:
    """Return what tokens and bodies take, and what is unique of them."""
    with SqliteLedger(path) as ledger:
        ledger.freeze(key)
        capture, _ = ledger.read(key, exchanges=True)
        with ledger._reading() as connection:
            taken = {table.name: sum(map(_row_bytes, table.rows(connection))) for table in (TOKENS, EXCHANGES, BODIES)}
    unusable = [record.unusable_reason for record in capture.records if not record.usable]
    if len(capture.records) != conversation.TURNS or unusable:
        raise RuntimeError(f"expected {conversation.TURNS} usable calls, got {len(capture.records)}; {unusable}")
    pieces: set[bytes] = set()
    for exchange in capture.exchanges.values():
        asked = cast(dict[str, Any], exchange.request)
        pieces.add(dumps(exchange.reply))
        pieces.add(dumps({**asked, "messages": [], "tools": []}))
        pieces.update(map(dumps, (*asked["messages"], *asked["tools"])))
    unique_T = sum(record.delta_len for record in capture.records)
    return {
        "tokens": (taken["tokens"], TOKEN_bytes * unique_T),
        "bodies": (taken["exchanges"] + taken["bodies"], sum(map(len, pieces))),
    }


def stored_bytes() -> Iterator[dict[str, Any]]:
    """Yield a result for tokens and one for bodies; not seconds but bytes stand in them."""
    with tempfile.TemporaryDirectory() as folder, Server("engine", "4") as engine:
        with Gateway(engine.url, Path(folder) / "bench.ledger") as gateway:
            [(attempt, key)] = gateway.open(1).items()
            uvloop.run(_rollout(gateway.port, key))
            gateway.admin.finish(attempt, {"done": True}, 1.0)
        for kind, (taken, unique) in _sizes(gateway.ledger, attempt).items():
            ratio, target = taken / unique, TARGETS[kind]
            yield {
                "name": f"bytes of {kind}, {conversation.TURNS} turns through the gateway",
                "seconds": taken,
                "floor_seconds": unique,
                "ratio": ratio,
                "target": target,
                "ok": ratio <= target,
            }
