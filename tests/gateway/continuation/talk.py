"""Conversations with a gateway that continues calls, and what its engine should have been given, told independently."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gristmill.records import CallRecord, Capture
from gristmill.scripted import ScriptedEngine
from gristmill.scripted.tokenizer import the_tokenizer
from gristmill.tokens import expand
from tests.gateway.running import Answer, Rollout, engine_of, sampled

__all__ = ["ON", "TOOLS", "Chat", "agent", "oracle", "outcomes", "prompt_of", "sent_prompts", "sequence"]

Json = dict[str, Any]

ON: Final[Mapping[str, Any]] = {"continue": "tokens"}
TOOLS: Final[list[Json]] = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Run it.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}, "x": {"type": "number"}}},
        },
    }
]
_CALL: Final = {"name": "shell", "arguments": '{"x":1.0 ,  "command": "ls \\u00e9"}'}


def agent(**settings: Any) -> ScriptedEngine:
    """An engine whose replies a template would not write again as they were: thoughts, odd JSON, split tokens."""
    turns = [
        {"reasoning": "First I look.", "content": "Looking.", "tool_calls": [_CALL]},
        {"reasoning": "There it is.", "tool_calls": [_CALL, _CALL]},
        {"reasoning": "Enough.", "content": "\n\nIt is  done. "},
        {"reasoning": "Again?", "content": "Yes, again."},
        {"content": "Bye {{choice}}."},
        {"content": "Still here."},
    ]
    return engine_of({"turns": turns}, **{"thinking": True, "split": 0.3, **settings})


class Chat:
    """A harness that speaks Chat Completions.

    Args:
        rollout: whose it is.
        system: what it begins with.
        fields: of every request.
    """

    def __init__(self, rollout: Rollout, system: str | None = "Be brief.", **fields: Any) -> None:
        self.rollout = rollout
        self.messages: list[Json] = [] if system is None else [{"role": "system", "content": system}]
        self.messages.append({"role": "user", "content": "Look around, please."})
        self.fields: Json = {"tools": TOOLS, **fields}

    async def call(self, **fields: Any) -> Answer:
        """Ask for the next reply."""
        body = {"model": "m", "messages": self.messages, **self.fields, **fields}
        return await self.rollout.post("/v1/chat/completions", body)

    async def step(self, *, echo: Sequence[str] = ("content", "tool_calls", "reasoning"), **fields: Any) -> str:
        """Ask for the next reply, take it into the history, and answer it; return the call's id."""
        answer = await self.call(**fields)
        assert answer.status == 200, answer.raw
        self.take(answer.value["choices"][0]["message"], echo=echo)
        return answer.call_id

    def take(self, message: Json, *, echo: Sequence[str] = ("content", "tool_calls", "reasoning")) -> None:
        """Take a reply into the history, and answer it."""
        said = {name: message[name] for name in echo if message.get(name)}
        self.messages.append({"role": "assistant", "content": None, **said})
        calls = message.get("tool_calls") or []
        if calls:
            self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": "a b"} for call in calls]
        else:
            self.messages.append({"role": "user", "content": f"And now, {len(self.messages)}?"})


def sequence(capture: Capture, call_id: str) -> list[int]:
    """Return the whole sequence of a call."""
    by_id = {record.model_call_id: record for record in capture.records}
    return expand(by_id, capture.tokens, call_id).tolist()


def prompt_of(capture: Capture, record: CallRecord) -> list[int]:
    """Return the prompt of a call."""
    return sequence(capture, record.model_call_id)[: record.prompt_len]


def sent_prompts(engine: ScriptedEngine) -> list[list[int] | None]:
    """Return the ids that the engine was given in each call, None where it rendered."""
    found: list[list[int] | None] = []
    for seen in sampled(engine):
        params = seen.body.get("kv_transfer_params") or {}
        found.append(params.get("prompt_token_ids") or seen.body.get("input_ids"))
    return found


def oracle(parent: Sequence[int], new: Sequence[Json], *, thinks: bool = True) -> list[int]:
    """Say what the engine has to be given: one text that was never interrupted, written here by hand.

    Args:
        parent: the parent's whole sequence.
        new: the messages after its reply; results of tools are of a user, together.
        thinks: the reply is asked for with nothing after its role.
    """
    tokenizer = the_tokenizer()
    end = tokenizer.control("<|im_end|>")
    text, at = "\n", 0
    while at < len(new):
        role, content = new[at]["role"], new[at]["content"]
        if role != "tool":
            text += f"<|im_start|>{role}\n{content}<|im_end|>\n"
            at += 1
            continue
        text += "<|im_start|>user"
        while at < len(new) and new[at]["role"] == "tool":
            text += f"\n<tool_response>\n{new[at]['content']}\n</tool_response>"
            at += 1
        text += "<|im_end|>\n"
    text += "<|im_start|>assistant\n" + ("" if thinks else "<think>\n\n</think>\n\n")
    return [*parent, *([] if parent[-1] == end else [end]), *tokenizer.encode(text)]


def outcomes(records: Sequence[CallRecord]) -> list[str]:
    """Return what became of continuing each call."""
    said = [record.continuation for record in records]
    return ["none" if one is None else str(one.reason or one.state) for one in said]


def dumped(arguments: str, **options: Any) -> str:
    """Write arguments another way."""
    return json.dumps(json.loads(arguments), **options)
