"""Conversations: every dialect echoes the engine's random replies in its own way, and each turn continues the last."""

from __future__ import annotations

import json
from typing import Any

from gristmill.records import ParentResolution
from tests.e2e.client import Answer, ask
from tests.e2e.evidence import check_all_captured, check_tokens, records_of
from tests.e2e.vllm.asking import PATHS
from tests.e2e.vllm.engine import MODEL
from tests.e2e.vllm.scene import Scene

__all__ = ["conversations"]

Json = dict[str, Any]
TURNS = 5
_SCHEMA: Json = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


def conversations(scene: Scene) -> None:
    """Five turns in each dialect, streamed and not, with tools and without."""
    for dialect in ("chat", "responses", "messages"):
        for stream in (False, True):
            for tools in (False, True):
                _conversation(scene, dialect, stream=stream, tools=tools)


def _conversation(scene: Scene, dialect: str, *, stream: bool, tools: bool) -> None:
    checks = scene.checks
    name = f"{dialect}{'-tools' if tools else ''}{'-streamed' if stream else ''}"
    rollout = scene.gateway.begin(f"turns-{name}")
    history: list[Any] = [_user(dialect, "Mend the mill.")]
    asked: list[str] = []
    for turn in range(TURNS):
        body = _body(dialect, history, turn, stream=stream, tools=tools and turn % 2 == 0)
        answer = ask(rollout.base, PATHS[dialect], rollout.key, body)
        if answer.status != 200:
            checks.check(f"{name}: turn {turn} is served", False, answer.whole)
            return
        asked.append(answer.headers["x-gristmill-call-id"])
        history += [*_echo(dialect, answer), *_next(dialect, answer, turn)]
    outcome = scene.gateway.finish(rollout, _result(dialect, history), reward=0.5)
    scene.rollouts.append(rollout)
    capture = scene.gateway.captured(rollout)
    seen = [call for call in scene.witness.calls() if call.call_id in asked]
    check_all_captured(checks, capture, seen)
    check_tokens(checks, capture, seen)
    records = records_of(capture, seen)
    parents = [record.parent_call_id for record in records]
    checks.equal(f"{name}: each turn continues the one before", [None, *asked[:-1]], parents)
    checks.equal(
        f"{name}: the returned history selects all of them",
        ("selected", TURNS),
        (outcome["outcome"], outcome["funnel"]["selected_calls"]),
    )
    sure = {ParentResolution.RESOLVED, ParentResolution.ROOT}
    checks.check(f"{name}: and that is sure", all(r.parent_resolution in sure for r in records), records)


def _result(dialect: str, history: list[Any]) -> Json:
    return {"response": {"output": history}} if dialect == "responses" else {"messages": history}


def _user(dialect: str, text: str) -> Json:
    if dialect == "responses":
        return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    return {"role": "user", "content": text}


def _body(dialect: str, history: list[Any], turn: int, *, stream: bool, tools: bool) -> Json:
    body: Json = {"model": MODEL, "stream": stream, "temperature": 1.0}
    if dialect == "chat":
        body |= {"messages": list(history), "max_tokens": 160}
        body["tools"] = [{"type": "function", "function": {"name": "bash", "parameters": _SCHEMA}}]
        body["tool_choice"] = "required" if tools else "none"
        body["chat_template_kwargs"] = {"enable_thinking": not tools}
    elif dialect == "responses":
        body |= {"input": list(history), "max_output_tokens": 160, "instructions": "You mend mills."}
        body["tools"] = [{"type": "function", "name": "bash", "parameters": _SCHEMA}]
        body["tool_choice"] = "required" if tools else "none"
        body["reasoning"] = {"effort": "none" if tools else "medium"}
    else:
        body |= {"messages": list(history), "max_tokens": 160, "system": "You mend mills."}
        body["tools"] = [{"name": "bash", "input_schema": _SCHEMA}]
        body["tool_choice"] = {"type": "any" if tools else "none"}
        body["thinking"] = {"type": "disabled"} if tools else {"type": "enabled", "budget_tokens": 1024}
    return body


def _echo(dialect: str, answer: Answer) -> list[Any]:
    """The reply as a client of the dialect puts it into its history."""
    if dialect == "responses":
        return (answer.events[-1]["response"] if answer.events else answer.body)["output"]
    if dialect == "messages":
        content = _blocks(answer.events) if answer.events else answer.body["content"]
        return [{"role": "assistant", "content": content}]
    if not answer.events:
        return [{k: v for k, v in answer.body["choices"][0]["message"].items() if v is not None}]
    message: Json = {"role": "assistant", "content": None}
    calls: dict[int, Json] = {}
    for event in answer.events:
        for choice in event["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning"):
                if delta.get(key):
                    message[key] = (message.get(key) or "") + delta[key]
            for call in delta.get("tool_calls") or []:
                function = calls.setdefault(
                    call["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                function["id"] += call.get("id") or ""
                function["function"]["name"] += call["function"].get("name") or ""
                function["function"]["arguments"] += call["function"].get("arguments") or ""
    return [message | ({"tool_calls": [calls[index] for index in sorted(calls)]} if calls else {})]


def _blocks(events: list[Json]) -> list[Json]:
    blocks: dict[int, Json] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for key, value in delta.items():
                if key == "partial_json":
                    block["_json"] = block.get("_json", "") + value
                elif key != "type":
                    block[key] = (block.get(key) or "") + value
    for block in blocks.values():
        if "_json" in block:
            block["input"] = json.loads(block.pop("_json") or "{}")
    return [blocks[index] for index in sorted(blocks)]


def _next(dialect: str, answer: Answer, turn: int) -> list[Any]:
    """Results of the tools that were called, then a new question."""
    results: list[Any] = []
    for item in _echo(dialect, answer):
        if dialect == "responses" and item["type"] == "function_call":
            results.append({"type": "function_call_output", "call_id": item["call_id"], "output": f"done {turn}"})
        elif dialect == "chat":
            results += [
                {"role": "tool", "tool_call_id": call["id"], "content": f"done {turn}"}
                for call in item.get("tool_calls") or []
            ]
        elif dialect == "messages":
            parts = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": f"done {turn}"}
                for block in item["content"]
                if block["type"] == "tool_use"
            ]
            results += [{"role": "user", "content": parts}] if parts else []
    return results or [_user(dialect, f"And now the stone number {turn}.")]
