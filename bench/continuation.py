"""Token-in continuation: what it saves in rows and context, and what it adds to a call.

A scripted engine, whose template drops earlier reasoning as those of reasoning models do and whose sampled tokens are
not always those that its text comes back as, holds conversations of tool calls and questions through two gateways: one
as it is by default, which is the floor, and one with `--continue tokens`. Both are asked in turns, call by call. The
harness sends no reasoning back, and writes arguments its own way.

Rows are those of the whole conversation. The time of a call is that of its client; the renderings of a continued call,
by the engine's own route, are in it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
import uvloop

from bench.gateway_stack.client import ask_one, request
from bench.gateway_stack.process import Gateway, Process
from bench.ledger import text_of
from gristmill.continuation import ContinuationState
from gristmill.ledger import AttemptKey, SqliteReader
from gristmill.pipeline import RebuiltRollout, run_rollout
from gristmill.reconstruction import Relation
from gristmill.records import Capture, Result
from gristmill.selection.all_captured import AllCaptured

__all__ = ["run"]

Json = dict[str, Any]

SPLIT: Final = 0.05
CALL_RATIO: Final = 2.0
_SEED: Final = 61
_RUN: Final = "import sys; from gristmill.cli import main; sys.exit(main())"
_TOOL: Final[Json] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def _text(*place: int, size: int) -> str:
    return text_of(np.random.default_rng((_SEED, *place)), size)


def _script(turns: int) -> Json:
    """Make a script: three tool calls, then an answer, and again."""
    replies: list[Json] = []
    for turn in range(turns):
        reply: Json = {"reasoning": _text(1, turn, size=400)}
        if turn % 4 == 3:
            reply["content"] = _text(2, turn, size=600)
        else:
            arguments = json.dumps({"command": f"sed -n {turn},{turn + 9}p mill.py"})
            reply |= {"content": "I look at it.", "tool_calls": [{"name": "bash", "arguments": arguments}]}
        replies.append(reply)
    return {"thinking": True, "split": SPLIT, "models": ["policy"], "rules": [{"turns": replies}]}


class _Conversation:
    """One rollout through one gateway; `last_id` is that of the last reply."""

    def __init__(self, gateway: Gateway, attempt: AttemptKey, key: str, number: int) -> None:
        self.attempt = attempt
        self.last_id = ""
        self._gateway = gateway
        self._key = key
        self._messages: list[Json] = [
            {"role": "system", "content": _text(3, size=2000)},
            {"role": "user", "content": f"Task {number}. {_text(4, number, size=600)}"},
        ]

    async def turn(self, turn: int) -> float:
        """Ask, go on as a harness does, and return the seconds that the call took."""
        more: Json = {"messages": self._messages, "tools": [_TOOL], "temperature": 1.0}
        sent = request("chat", self._key, model="policy", stream=False, max_tokens=2000, **more)
        answer = await ask_one(self._gateway.port, sent)
        reply = orjson.loads(answer.body)
        self.last_id, said = reply["id"], reply["choices"][0]["message"]
        calls = said.get("tool_calls") or []
        echoed: Json = {"role": "assistant", "content": said["content"]}
        if calls:
            echoed["tool_calls"] = [{**call, "function": _rewritten(call["function"])} for call in calls]
        behind: Json = {"role": "user", "content": _text(5, turn, size=300)}
        if calls:
            behind = {"role": "tool", "tool_call_id": calls[0]["id"], "content": _text(6, turn, size=1200)}
        self._messages += [echoed, behind]
        return answer.whole_s

    def finish(self) -> None:
        """End the rollout with its last reply as the scored one."""
        self._gateway.admin.finish(self.attempt, {"terminal_response_id": self.last_id}, 1.0)


def _rewritten(function: Json) -> Json:
    return {**function, "arguments": json.dumps(json.loads(function["arguments"]), separators=(",", ":"))}


class _Run(NamedTuple):
    """What one gateway captured."""

    turns: int
    forked: int
    continued: int
    rows: int
    row_tokens: int


def _captured(ledger: Path, attempts: Sequence[AttemptKey]) -> _Run:
    turns = forked = continued = rows = row_tokens = 0
    with SqliteReader(ledger) as reader:
        for attempt in attempts:
            capture, result = reader.read(attempt)
            outcome = _rebuilt(capture, result or Result())
            certificates = [span.certificate for row in outcome.rows for span in row.spans if span.certificate]
            turns += len(certificates)
            forked += sum(certificate.relation is Relation.FORKED for certificate in certificates)
            told = [record.continuation for record in capture.records]
            continued += sum(said is not None and said.state is ContinuationState.CONTINUED for said in told)
            rows += len(outcome.rows)
            row_tokens += sum(row.token_ids.size for row in outcome.rows)
    return _Run(turns, forked, continued, rows, row_tokens)


def _rebuilt(capture: Capture, result: Result) -> RebuiltRollout:
    outcome = run_rollout(capture, result, AllCaptured())
    if not isinstance(outcome, RebuiltRollout):
        raise SystemExit(f"expected the rows of {capture.rollout_id}, got {outcome}")
    return outcome


async def _talk(pairs: Sequence[Sequence[_Conversation]], turns: int) -> list[list[float]]:
    """Hold conversations, each turn with every gateway; return the seconds of all calls behind the first of each."""
    seconds: list[list[float]] = [[] for _ in pairs[0]]
    for conversations in pairs:
        for turn in range(turns):
            for found, conversation in zip(seconds, conversations, strict=True):
                took_s = await conversation.turn(turn)
                if turn:
                    found.append(took_s)
    return seconds


def _result(name: str, ours: float, floor: float, target: float | None = None) -> Json:
    ratio = ours / floor if floor else float("nan")
    met = target is None or ratio <= target
    return {"name": name, "seconds": ours, "floor_seconds": floor, "ratio": ratio, "target": target, "ok": met}


def run(quick: bool = False) -> Iterator[Json]:
    """Yield breaks, rows and row tokens, and the time of a call; some seconds if quick, else half a minute."""
    rollouts, turns = (4 if quick else 12), 40
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gristmill-bench-")))
        script = folder / "script.json"
        script.write_text(json.dumps(_script(turns)))
        engine = stack.enter_context(
            Process(sys.executable, "-c", _RUN, "engine", "--script", str(script), "--json", silent=True)
        )
        url = json.loads(engine.line())["url"]
        gateways = [
            stack.enter_context(Gateway(url, folder / "plain.ledger")),
            stack.enter_context(Gateway(url, folder / "continued.ledger", "--continue", "tokens")),
        ]
        opened = [gateway.open(rollouts) for gateway in gateways]
        pairs = [
            [_Conversation(gateway, *one, number) for gateway, one in zip(gateways, both, strict=True)]
            for number, both in enumerate(zip(*(one.items() for one in opened), strict=True))
        ]
        plain_s, ours_s = (median(found) for found in uvloop.run(_talk(pairs, turns)))
        for conversation in (one for pair in pairs for one in pair):
            conversation.finish()
        plain, ours = (_captured(gateway.ledger, list(one)) for gateway, one in zip(gateways, opened, strict=True))
    expected = rollouts * (turns - 1)
    if (ours.continued, plain.continued) != (expected, 0):
        raise SystemExit(
            f"expected {expected} continued calls and none without, got {ours.continued}, {plain.continued}"
        )
    what = f"{rollouts} rollouts of {turns} turns, continued"
    yield _result(f"number of turns of {expected} that fork, {what}", ours.forked, plain.forked, 0.0)
    yield _result(f"number of rows, {what}", ours.rows, plain.rows, rollouts / plain.rows)
    yield _result(f"number of row tokens, {what}", ours.row_tokens, plain.row_tokens)
    yield _result(f"time of a call, {turns} turns, continued, rendered by the engine", ours_s, plain_s, CALL_RATIO)
