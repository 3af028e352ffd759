"""The requests: every dialect, streamed and not, with what changes the shape of a reply.

Invariant: a request asks for no more than 200 tokens, and no two of one rollout need be equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.vllm.engine import MODEL

__all__ = ["PATHS", "Asking", "askings"]

Json = dict[str, Any]

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
_SCHEMA: Json = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "times": {"type": "integer"}},
    "required": ["command"],
    "additionalProperties": False,
}
_USER = [{"role": "user", "content": "Mend the mill: the wheel has no teeth. Ça va?"}]
_SYSTEM = {"role": "system", "content": "You mend mills."}
_PLAIN: Json = {"chat_template_kwargs": {"enable_thinking": False}}


@dataclass(frozen=True)
class Asking:
    """One request and what its client must see."""

    name: str
    dialect: str
    body: Json
    asks_ids: bool = False
    hides_reasoning: bool = False
    ends: frozenset[str] = field(default_factory=frozenset)

    @property
    def path(self) -> str:
        return PATHS[self.dialect]


def askings() -> Iterator[Asking]:
    """Yield every request, not streamed and streamed."""
    for asking in (*_chat(), *_completions(), *_responses(), *_messages()):
        for stream in (False, True):
            body = {"model": MODEL, **asking.body, **({"stream": True} if stream else {})}
            name = f"{asking.dialect} {asking.name}{' streamed' if stream else ''}"
            yield Asking(name, asking.dialect, body, asking.asks_ids, asking.hides_reasoning, asking.ends)


def _chat() -> Iterator[Asking]:
    tool = {"type": "function", "function": {"name": "bash", "description": "Run it", "parameters": _SCHEMA}}
    schema = {"type": "json_schema", "json_schema": {"name": "step", "schema": _SCHEMA}}

    def asking(name: str, extra: Json, *, plain: bool = True, **expected: Any) -> Asking:
        body = {"messages": [_SYSTEM, *_USER], "max_tokens": 120, **(_PLAIN if plain else {}), **extra}
        return Asking(name, "chat", body, **expected)

    yield asking("text", {})
    yield asking("reasoning", {}, plain=False)
    yield asking("hidden reasoning", {"include_reasoning": False}, plain=False, hides_reasoning=True)
    yield asking("tool required", {"tools": [tool], "tool_choice": "required", "max_tokens": 200})
    yield asking("tool named", {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "bash"}}})
    yield asking("tool auto", {"tools": [tool], "parallel_tool_calls": False}, plain=False)
    yield asking("schema", {"response_format": schema, "max_tokens": 200})
    yield asking("stop string", {"stop": ["e", "i"]}, ends=frozenset({"stop"}))
    yield asking("stop token", {"stop_token_ids": [330, 1], "min_tokens": 3}, plain=False)
    yield asking("length", {"max_tokens": 5, "min_tokens": 5}, ends=frozenset({"length"}))
    yield asking("two choices", {"n": 2})
    yield asking("log-probabilities", {"logprobs": True, "top_logprobs": 3})
    yield asking("its own ids", {"return_token_ids": True, "stream_options": {}}, asks_ids=True)
    yield asking("greedy", {"temperature": 0.0, "max_completion_tokens": 12, "max_tokens": None})


def _completions() -> Iterator[Asking]:
    def asking(name: str, extra: Json, **expected: Any) -> Asking:
        return Asking(name, "completions", {"prompt": "The wheel of the mill", "max_tokens": 60, **extra}, **expected)

    yield asking("text", {})
    yield asking("ids as prompt", {"prompt": [785, 13962, 315, 279, 2983]})
    yield asking("two choices", {"n": 2})
    yield asking("stop string", {"stop": "e"}, ends=frozenset({"stop"}))
    yield asking("length", {"max_tokens": 4, "min_tokens": 4}, ends=frozenset({"length"}))
    yield asking("echo", {"echo": True})
    yield asking("echo with log-probabilities", {"echo": True, "logprobs": 2})
    yield asking("its own ids", {"return_token_ids": True}, asks_ids=True)


def _responses() -> Iterator[Asking]:
    tool = {"type": "function", "name": "bash", "description": "Run it", "parameters": _SCHEMA, "strict": False}
    form = {"format": {"type": "json_schema", "name": "step", "schema": _SCHEMA, "strict": True}}

    def asking(name: str, extra: Json, *, plain: bool = True, **expected: Any) -> Asking:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": _USER[0]["content"]}]}
        body = {"instructions": "You mend mills.", "input": [item], "max_output_tokens": 120, **extra}
        return Asking(name, "responses", body | ({"reasoning": {"effort": "none"}} if plain else {}), **expected)

    yield asking("text", {})
    yield asking("plain input", {"input": "Mend the mill."})
    yield asking("reasoning", {"reasoning": {"effort": "medium"}}, plain=False)
    yield asking("tool required", {"tools": [tool], "tool_choice": "required", "max_output_tokens": 200})
    yield asking("tool auto", {"tools": [tool], "tool_choice": "auto"}, plain=False)
    yield asking("schema", {"text": form, "max_output_tokens": 200})
    yield asking("length", {"max_output_tokens": 5}, ends=frozenset({"incomplete", "completed"}))
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    yield asking("log-probabilities", include)


def _messages() -> Iterator[Asking]:
    tool = {"name": "bash", "description": "Run it", "input_schema": _SCHEMA}
    form = {"format": {"type": "json_schema", "schema": _SCHEMA}}

    def asking(name: str, extra: Json, *, plain: bool = True, **expected: Any) -> Asking:
        body = {"system": "You mend mills.", "messages": _USER, "max_tokens": 120, **extra}
        return Asking(name, "messages", body | ({"thinking": {"type": "disabled"}} if plain else {}), **expected)

    yield asking("text", {})
    yield asking("thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, plain=False)
    yield asking("tool any", {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 200})
    yield asking("tool auto", {"tools": [tool]}, plain=False)
    yield asking("schema", {"output_config": form, "max_tokens": 200})
    yield asking("stop sequence", {"stop_sequences": ["e"]}, ends=frozenset({"stop_sequence"}))
    yield asking("length", {"max_tokens": 5}, ends=frozenset({"max_tokens", "end_turn"}))
