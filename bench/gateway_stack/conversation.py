"""A rollout of 40 turns with tools, of which engine and client each know their half: the same seed makes both.

Invariant: the prompt of a turn is the prompt of the one before, its sample, and the tokens of the tool's answer.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np

from bench.ledger import text_of

__all__ = ["MODEL", "TOOLS", "TURNS", "first_messages", "reply", "tool_answer"]

MODEL: Final = "agent"
TURNS: Final = 40
SAMPLED_T: Final = 150
_FIRST_T, _ANSWER_T, _VOCABULARY = 2000, 450, 150_000
_SEED: Final = 21


def _rng(*place: int) -> np.random.Generator:
    return np.random.default_rng((_SEED, *place))


TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{n}",
            "description": text_of(_rng(1, n), 300),
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for n in range(8)
]


def first_messages() -> list[dict[str, Any]]:
    """Return what the harness begins with."""
    return [
        {"role": "system", "content": text_of(_rng(2), 4000)},
        {"role": "user", "content": text_of(_rng(3), 800)},
    ]


def tool_answer(turn: int, call_id: str) -> dict[str, Any]:
    """Return what the tool of a turn says."""
    return {"role": "tool", "tool_call_id": call_id, "content": text_of(_rng(4, turn), 1400)}


def _ids(count: int, *place: int) -> list[int]:
    ids: list[int] = _rng(*place).integers(0, _VOCABULARY, count).tolist()
    return ids


@cache
def _prompt_ids(turn: int) -> list[int]:
    if not turn:
        return _ids(_FIRST_T, 5)
    return [*_prompt_ids(turn - 1), *_ids(SAMPLED_T, 6, turn - 1), *_ids(_ANSWER_T, 7, turn - 1)]


@cache
def reply(turn: int) -> dict[str, Any]:
    """Return the engine's body of a turn."""
    said = text_of(_rng(8, turn), 600)
    call = {"name": f"tool_{turn % len(TOOLS)}", "arguments": f'{{"path": "src/file_{turn}.py"}}'}
    message = {
        "role": "assistant",
        "content": said,
        "tool_calls": [{"id": f"call_{turn}", "type": "function", "function": call}],
    }
    prompt = _prompt_ids(turn)
    logprobs = -_rng(9, turn).random(SAMPLED_T, np.float32)
    entries = [{"token": "w", "logprob": float(nat), "bytes": [119], "top_logprobs": []} for nat in logprobs]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": entries},
        "finish_reason": "tool_calls",
        "stop_reason": None,
        "token_ids": _ids(SAMPLED_T, 6, turn),
    }
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": SAMPLED_T,
        "total_tokens": len(prompt) + SAMPLED_T,
    }
    return {
        "id": f"chatcmpl-{turn}",
        "object": "chat.completion",
        "created": 1_700_000_000 + turn,
        "model": MODEL,
        "choices": [choice],
        "usage": usage,
        "prompt_token_ids": prompt,
    }
