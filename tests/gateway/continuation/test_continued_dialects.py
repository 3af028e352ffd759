"""Conversations in the dialects that are translated are continued as those of Chat are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.records import Dialect
from tests.gateway.continuation.talk import ON, TOOLS, agent, outcomes, prompt_of, sent_prompts, sequence
from tests.gateway.running import PATHS, Answer, gateway, run

Json = dict[str, Any]

TURNS = 5
SCHEMA = TOOLS[0]["function"]["parameters"]


def replied(dialect: Dialect, answer: Answer) -> list[Json]:
    """Return the content blocks, or the output items, of a reply, streamed or not."""
    if dialect is Dialect.RESPONSES:
        if not answer.streamed:
            return answer.value["output"]
        [done] = [event for event in answer.events if event["type"] == "response.completed"]
        return done["response"]["output"]
    if not answer.streamed:
        return answer.value["content"]
    blocks: list[Json] = []
    for event in answer.events:
        match event["type"]:
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                for name, into in (("text", "text"), ("thinking", "thinking"), ("partial_json", "partial")):
                    block[into] = block.get(into, "") + delta[name] if name in delta else block.get(into, "")
            case _:
                pass
    return [_block(block) for block in blocks]


def _block(block: Json) -> Json:
    if block["type"] == "tool_use":
        return {**{name: block[name] for name in ("type", "id", "name")}, "input": json.loads(block["partial"] or "{}")}
    return {name: value for name, value in block.items() if name in {"type", "text", "thinking", "signature"} and value}


def next_turn(dialect: Dialect, said: list[Json], turn: int) -> list[Json]:
    """Return what a harness adds to its history: the reply, then results or a question."""
    if dialect is Dialect.RESPONSES:
        calls = [item for item in said if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "a b"} for call in calls]
        return [*said, *(results or [{"role": "user", "content": f"And {turn}?"}])]
    calls = [block for block in said if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "a b"} for call in calls]
    return [
        {"role": "assistant", "content": said},
        {"role": "user", "content": results or [{"type": "text", "text": f"And {turn}?"}]},
    ]


def body_of(dialect: Dialect, history: list[Json], stream: bool) -> Json:
    if dialect is Dialect.RESPONSES:
        tool = {"type": "function", "name": "shell", "description": "Run it.", "parameters": SCHEMA}
        return {"model": "m", "instructions": "Be brief.", "input": history, "tools": [tool], "stream": stream}
    tool = {"name": "shell", "description": "Run it.", "input_schema": SCHEMA}
    asked = {"model": "m", "system": "Be brief.", "messages": history, "tools": [tool], "max_tokens": 500}
    return {**asked, "stream": stream, "thinking": {"type": "enabled", "budget_tokens": 100}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", [Dialect.RESPONSES, Dialect.MESSAGES])
def test_a_conversation_of_any_dialect(tmp_path: Path, dialect: Dialect, stream: bool) -> None:
    """What goes to the engine is Chat in any case, and so is what continues it."""

    async def main() -> None:
        engine = agent()
        async with engine.serve() as url, gateway(tmp_path, url, **ON) as running:
            rollout = await running.begin()
            history: list[Json] = [{"role": "user", "content": "Look around, please."}]
            for turn in range(TURNS):
                answer = await rollout.post(PATHS[dialect], body_of(dialect, history, stream))
                assert answer.status == 200, answer.raw
                history += next_turn(dialect, replied(dialect, answer), turn)
                await rollout.settled(turn + 1)
            capture = rollout.capture()
            assert outcomes(capture.records) == ["no_parent", *["continued"] * (TURNS - 1)]
            given = sent_prompts(engine)
            for turn, record in enumerate(capture.records[1:], start=1):
                parent = sequence(capture, capture.records[turn - 1].model_call_id)
                prompt = prompt_of(capture, record)
                assert prompt[: len(parent)] == parent
                assert given[turn] == prompt
            rollout.sound()

    run(main(), deadline_s=120.0)
