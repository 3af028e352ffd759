"""How a story is told: captured calls with exact tokens, the returned result, and what is right.

Tokens are toy ids. A prompt begins with the whole sequence of the call it continues, and ends with ids of its own; so
calls of one conversation share a row unless a story says that the prompt drifted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Json",
    "Story",
    "arguments",
    "call",
    "function_call",
    "lost",
    "message",
    "output",
    "reasoning",
    "refuses",
    "said",
    "selects",
    "tool_call",
    "tool_result",
    "tool_use",
    "tools",
    "user",
]

Json = dict[str, Any]


@dataclass(frozen=True)
class Story:
    """One rollout: what was captured and returned, and what must come of it."""

    name: str
    told: str
    calls: Sequence[Json]
    result: Json
    expect: Json

    def files(self) -> dict[str, str]:
        """Give the text of each file of the story's folder."""
        return {
            "STORY.md": f"# {self.name.replace('_', ' ').capitalize()}\n\n{_paragraph(self.told)}\n",
            "capture.jsonl": "".join(json.dumps(line) + "\n" for line in _with_tokens(self.calls)),
            "result.json": json.dumps(self.result, indent=1) + "\n",
            "expect.json": json.dumps(self.expect, indent=1) + "\n",
        }


def _paragraph(text: str) -> str:
    """Fill lines to 100 characters, so that the stories read well as files."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + len(word) >= 100:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


# Calls


def call(call_id: str, *items: Json, parent: str | None = None, **fields: Any) -> Json:
    """A finished call that served these items.

    Fields beside those of the capture format: `drifts` (the prompt does not extend the parent's tokens), `tokens_of`
    (sampled exactly what that call sampled, on the same prompt), `same_prompt_as`, `samples` (how many tokens).
    """
    return {"model_call_id": call_id, "output_items": list(items), "parent_call_id": parent, **fields}


def lost(call_id: str, *, parent: str | None = None, maybe_received: bool = False) -> Json:
    """A call that was admitted and has no outcome."""
    return {"kind": "lost", "model_call_id": call_id, "parent_call_id": parent, "maybe_received": maybe_received}


def _with_tokens(calls: Sequence[Json]) -> list[Json]:
    sequences: dict[str, tuple[list[int], list[int]]] = {}
    lines: list[Json] = []
    for number, told in enumerate(calls, 1):
        fields = dict(told)
        if fields.get("kind", "call") != "call":
            lines.append({"rollout_id": "story", **fields})
            continue
        drifts, twin = fields.pop("drifts", False), fields.pop("tokens_of", None)
        prompt_of, samples = fields.pop("same_prompt_as", None), fields.pop("samples", 2)
        call_id, parent = fields["model_call_id"], fields["parent_call_id"]
        if twin is not None:
            prompt, sampled = sequences[twin]
        else:
            before = [*sequences[parent][0], *sequences[parent][1]] if parent in sequences and not drifts else [1]
            prompt = [*before, 100 + number] if prompt_of is None else sequences[prompt_of][0]
            sampled = [1000 + 10 * number + index for index in range(samples)]
        sequences[call_id] = prompt, sampled
        line = {
            "kind": "call",
            "rollout_id": "story",
            "response_id": f"resp-{call_id}",
            "model": "policy",
            "response_status": "completed",
            "finish_reason": "stop",
            "prompt_token_ids": prompt,
            "generation_token_ids": sampled,
            "generation_log_probs": [-0.25 * (1 + token % 4) for token in sampled],
        }
        line |= fields
        lines.append({key: value for key, value in line.items() if value is not None})
    return lines


# Items


def said(text: str | None, **fields: Any) -> Json:
    """A Chat message of the assistant."""
    return {"role": "assistant", "content": text, **fields}


def tools(*calls: Json, text: str | None = None, **fields: Any) -> Json:
    """A Chat message of the assistant with tool calls."""
    return {"role": "assistant", "content": text, "tool_calls": list(calls), **fields}


def tool_call(call_id: str, name: str, given: str | None = "{}") -> Json:
    """One tool call of a Chat message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


def arguments(given: Any) -> Json:
    """A Responses call of one tool, always with the same id, for stories about its arguments."""
    return {"type": "function_call", "call_id": "call_1", "name": "run", "arguments": given}


def message(*texts: str, **fields: Any) -> Json:
    """A Responses message."""
    parts = [{"type": "output_text", "text": text} for text in texts]
    return {"type": "message", "role": "assistant", "content": parts, **fields}


def function_call(call_id: str, name: str, given: str = "{}", **fields: Any) -> Json:
    """A Responses tool call."""
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": given, **fields}


def reasoning(text: str, **fields: Any) -> Json:
    """A Responses reasoning item."""
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}], "summary": [], **fields}


def tool_use(call_id: str, name: str, given: Any) -> Json:
    """A tool call of an Anthropic message."""
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def user(text: str = "go on") -> Json:
    """A turn of the user: a bound."""
    return {"role": "user", "content": text}


def tool_result(call_id: str, text: str = "done") -> Json:
    """The result of a tool call: no bound."""
    return {"type": "function_call_output", "call_id": call_id, "output": text}


# Results and expectations


def output(*items: Json, response_id: str | None = None, **fields: Any) -> Json:
    """A result of one envelope."""
    body: Json = {"output": list(items)}
    if response_id is not None:
        body = {"id": response_id, **body}
    return {"response": body, "reward": 1.0, **fields}


def _run(policy: str, options: Mapping[str, str] | None, train_model: str | None) -> Json:
    run: Json = {"policy": policy}
    if options:
        run["options"] = dict(options)
    if train_model is not None:
        run["train_model"] = train_model
    return run


def selects(
    *calls: str,
    why: Mapping[str, str],
    terminal: str | None = None,
    rows: Sequence[Sequence[str]] | None = None,
    policy: str = "returned_history",
    options: Mapping[str, str] | None = None,
    train_model: str | None = None,
    **more: Any,
) -> Json:
    """The right answer is these calls in this order; `why` has the verdict code of every captured call.

    Without `terminal` it is the last call's response; without `rows` all calls make one row.
    """
    return {
        **_run(policy, options, train_model),
        "outcome": "rows",
        "calls": list(calls),
        "terminal": f"resp-{calls[-1]}" if terminal is None else terminal,
        "verdicts": dict(why),
        "rows": [list(row) for row in rows] if rows is not None else [list(calls)],
        **more,
    }


def refuses(
    code: str,
    *mentions: str,
    where: str = "$",
    policy: str = "returned_history",
    options: Mapping[str, str] | None = None,
    train_model: str | None = None,
    **more: Any,
) -> Json:
    """The right answer is this refusal: its message or evidence mentions these words."""
    return {
        **_run(policy, options, train_model),
        "outcome": "reject",
        "code": code,
        "where": where,
        "mentions": list(mentions),
        **more,
    }
