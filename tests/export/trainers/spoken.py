"""A rollout with everything that may be said in one: reasoning, tool calls, their results, a helper, a new question."""

from __future__ import annotations

import json
from typing import Any

from gristmill.captures import read_lines
from gristmill.pipeline import RebuiltRollout, run_rollout
from gristmill.records import Capture, Result
from gristmill.selection import resolve_selection_policy

__all__ = ["RETURNED", "rebuilt", "story"]

Json = dict[str, Any]


def story() -> Capture:
    """An agent that thinks, calls a tool with two readings of its arguments, is told the result, and asks a helper."""
    arguments = '{"limit": 3, "limit": 4}'
    tool = {"type": "function", "function": {"name": "list_names", "parameters": {}}}
    system = {"role": "system", "content": "Be short."}
    asked = [system, {"role": "user", "content": "Which names?"}]
    acting = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "A list first.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "list_names", "arguments": '{"sorted": true}'}},
            {"id": "c2", "type": "function", "function": {"name": "list_names", "arguments": arguments}},
        ],
    }
    told = [
        {"role": "tool", "tool_call_id": "c1", "content": "Ada, Bo"},
        {"role": "tool", "tool_call_id": "c2", "content": "-"},
    ]
    answer = {"role": "assistant", "content": "Ada and Bo."}
    calls: list[tuple[str, list[Json], Json, list[int], list[int], Json]] = [
        ("a", asked, acting, [1, 2], [3, 4], {}),
        (
            "h",
            [{"role": "user", "content": "Help."}],
            {"role": "assistant", "content": "Here."},
            [7],
            [8],
            {"purpose": {"label": "subagent", "evidence": "header"}, "session_id": "helper"},
        ),
        ("b", [*asked, acting, *told], answer, [1, 2, 3, 4, 5], [6], {}),
        ("c", [system, {"role": "user", "content": "In other words?"}], answer, [1, 9], [10], {}),
    ]
    lines: list[bytes] = []
    for call_id, messages, reply, prompt, sampled, more in calls:
        choice = {"index": 0, "message": reply, "finish_reason": "stop"}
        line = {
            "model_call_id": call_id,
            "response_id": f"resp-{call_id}",
            "dialect": "chat",
            "model": "m",
            "response_status": "completed",
            "finish_reason": "stop",
            "output_items": [reply],
            "prompt_token_ids": prompt,
            "generation_token_ids": sampled,
            "generation_log_probs": [-0.5] * len(sampled),
            "request": {"model": "m", "messages": messages, "tools": [tool], "temperature": 0.5},
            "reply": {"id": f"resp-{call_id}", "model": "m", "choices": [choice]},
            **more,
        }
        lines.append(json.dumps(line).encode())
    [rollout] = read_lines(lines).rollouts.values()
    return rollout.capture


def rebuilt(capture: Capture, result: Result) -> RebuiltRollout:
    outcome = run_rollout(capture, result, resolve_selection_policy("all_captured"), advantage=0.25)
    assert isinstance(outcome, RebuiltRollout)
    return outcome


RETURNED = Result(value={"terminal_response_id": "resp-c", "messages": []}, reward=0.75, group_id="names")
