"""Engines that sample a toy model, in the shapes of vLLM (recorded), of SGLang (by its source) and of a plain server.

The model is an arithmetic: what comes next depends on the prompt's ids alone, so that asking twice gives the same.
`Toy` holds what engines, settings and proxies differ in; each test changes what it is about.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.gateway.upstream.wire import FakeEngine, Seen, Wire

Json = dict[str, Any]

LOGITS = (2.0, 1.0, 0.5, 0.0, -1.0, -2.0)
STOP = 7
"""The model's own stop token; it has no text."""
LENGTH = 12


@dataclass
class Toy:
    """What can differ."""

    kind: str = "vllm"
    version: str | None = "1.2.3"
    models: tuple[str, ...] = ("m",)
    owner: str | None = None
    start_s: tuple[float, ...] = (1000.0,)
    mode: str = "raw"
    scale_out: bool = True
    admin_key: bool = False
    max_logprobs: int = 20
    tools: bool = True
    weight_versions: bool = False
    stop_included: bool = True
    parsers: bool = True
    renders_alike: bool = True
    takes_ids: bool = True
    refuses_unknown: bool = False
    gives_ids: bool = True
    drops_unknown_reply_fields: bool = False
    streams: bool = True
    answers: bool = True
    headers: dict[str, str] = field(default_factory=lambda: {"server": "uvicorn"})
    released: asyncio.Event = field(default_factory=asyncio.Event)
    running: dict[str, asyncio.Event] = field(default_factory=dict)

    def dress(self, engine: FakeEngine) -> FakeEngine:
        """Make a server answer as this engine."""
        owner = self.owner or {"generic": "someone"}.get(self.kind, self.kind)
        cards = [{"id": name, "owned_by": owner, "max_model_len": 4096} for name in self.models]
        if self.kind == "generic":
            for card in cards:
                del card["max_model_len"]
        engine.says("/v1/models", {"object": "list", "data": cards}, **self.headers)
        engine.on("/v1/chat/completions", self._chat)
        engine.on("/v1/completions", self._completions)
        if self.kind != "generic":
            engine.on("/metrics", self._metrics)
            engine.on("/tokenize", self._tokenize)
        if self.kind == "vllm":
            engine.says("/health", {})
            if self.version is not None:
                engine.says("/version", {"version": self.version})
            engine.on("/inference/v1/abort_requests", self._abort)
            engine.on("/v1/chat/completions/render", self._render)
        if self.kind == "sglang":
            if self.version is not None:
                engine.says("/server_info", {"version": self.version, "model_path": "m"})
            engine.on("/abort_request", self._abort)
        return engine

    async def _metrics(self, _: Seen, wire: Wire) -> None:
        start_s, *others = self.start_s
        self.start_s = (*others, start_s)
        await wire.text(f"process_start_time_seconds {start_s}\n")

    async def _tokenize(self, seen: Seen, wire: Wire) -> None:
        ids = rendered(seen.body["messages"])
        await wire.json({"count": len(ids), "max_model_len": 4096, "tokens": ids})

    async def _render(self, seen: Seen, wire: Wire) -> None:
        if not self.scale_out:
            await wire.json({"error": {"message": "Scale-out endpoints are disabled.", "code": 403}}, 403)
            return
        ids = rendered(seen.body["messages"])
        await wire.json({"token_ids": ids if self.renders_alike else [*ids, 1], "sampling_params": {}})

    async def _abort(self, seen: Seen, wire: Wire) -> None:
        if self.admin_key or (self.kind == "vllm" and not self.scale_out):
            await wire.json({"error": {"message": "not permitted", "code": 403}}, 403)
            return
        for request_id in seen.body.get("request_ids") or [seen.body.get("rid")]:
            if request_id in self.running:
                self.running[request_id].set()
        await wire.text("")

    async def _chat(self, seen: Seen, wire: Wire) -> None:
        await self._sample(seen, wire, Run(self, seen, chat=True))

    async def _completions(self, seen: Seen, wire: Wire) -> None:
        await self._sample(seen, wire, Run(self, seen, chat=False))

    async def _sample(self, seen: Seen, wire: Wire, run: Run) -> None:
        if not self.answers:
            await asyncio.Event().wait()
        problem = run.problem()
        if problem is not None:
            await wire.json({"error": {"message": problem, "type": "BadRequestError", "code": 400}}, 400)
        elif run.long:
            aborted = self.running.setdefault(run.request_id, asyncio.Event())
            await aborted.wait()
            await self._answer(wire, run, seen.body["stream"])
        else:
            await self._answer(wire, run, seen.body["stream"])

    async def _answer(self, wire: Wire, run: Run, stream: bool) -> None:
        if stream and self.streams:
            await wire.events("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in run.chunks()) + "data: [DONE]\n\n")
        else:
            await wire.json(run.body())


def rendered(messages: list[Json]) -> list[int]:
    """The ids of a prompt: a few for each message, and the generation prompt."""
    ids = [1]
    for message in messages:
        ids += [2, *(100 + len(word) for word in str(message.get("content")).split()), 3]
    return [*ids, 4]


class Step(NamedTuple):
    """One sampled token."""

    token_id: int
    text: str
    logprob: float
    top: list[tuple[str, float]]


class Run:
    """One request and what is sampled for it."""

    def __init__(self, toy: Toy, seen: Seen, *, chat: bool) -> None:
        self.toy, self.seen, self.chat = toy, seen, chat
        self.asked: Json = seen.body
        self.long = self.asked.get("max_tokens", 0) > 1000
        self.kind = toy.kind
        self.prompt = self._prompt()
        self.steps, self.finish, self.matched = self._steps()

    @property
    def request_id(self) -> str:
        given = self.asked.get("rid") if self.kind == "sglang" else self.seen.headers.get("x-request-id")
        if self.kind != "vllm":
            return str(given)
        return f"chatcmpl-{given}" if self.chat else f"cmpl-{given}-0"

    def problem(self) -> str | None:
        asked, toy = self.asked, self.toy
        if asked.get("model") not in toy.models:
            return "no such model"
        known = {"model", "messages", "prompt", "max_tokens", "temperature", "stream", "stream_options", "tools"}
        if toy.refuses_unknown and (more := sorted(set(asked) - known)):
            return f"Unrecognized request argument supplied: {more[0]}"
        if asked.get("stream_options") and not asked["stream"]:
            return "Stream options can only be defined when `stream=True`."
        if (asked.get("top_logprobs") or 0) > toy.max_logprobs:
            return f"Requested sample logprobs of {asked['top_logprobs']}, greater than max allowed: {toy.max_logprobs}"
        if asked.get("tools") and not toy.tools:
            return '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        if self.kind == "sglang" and self.chat and asked["stream"]:
            for name in ("return_token_ids", "return_prompt_token_ids", "return_meta_info"):
                if asked.get(name):
                    return f"{name} is not supported with streaming."
        return None

    def _prompt(self) -> list[int]:
        given = (self.asked.get("kv_transfer_params") or {}).get("prompt_token_ids") or self.asked.get("input_ids")
        if given and self.toy.takes_ids:
            return given
        prompt = self.asked.get("prompt")
        if self.chat:
            return rendered(self.asked["messages"])
        return prompt if isinstance(prompt, list) else [100 + len(word) for word in str(prompt).split()]

    def _steps(self) -> tuple[list[Step], str, Any]:
        asked, steps = self.asked, list[Step]()
        limit = min(asked.get("max_tokens") or 16, 5 if self.long else 1000)
        stops = {STOP, *(asked.get("stop_token_ids") or ())}
        for place in range(limit):
            token = STOP if place == LENGTH else 200 + (sum(self.prompt) + 3 * place) % 50
            steps.append(self._step(token))
            if token in stops:
                if not self.toy.stop_included:
                    steps.pop()
                return steps, "stop", None if token == STOP else token
        return steps, "abort" if self.long else "length", None

    def _step(self, token: int) -> Step:
        temperature = self.asked.get("temperature") or 1.0
        logits = [value / temperature if self.toy.mode == "processed" else value for value in LOGITS]
        total = 0.0 if self.toy.mode == "logits" else math.log(sum(map(math.exp, logits)))
        values = [value - total for value in logits]
        names = [f"w{token}", *(f"other{place}" for place in range(1, len(LOGITS)))]
        text = "" if token == STOP or token in (self.asked.get("stop_token_ids") or ()) else f" w{token}"
        return Step(token, text, values[0], list(zip(names, values, strict=True)))

    # ---- what of it is told --------------------------------------------------------------------------------

    @property
    def _hidden(self) -> bool:
        return self.kind == "vllm" and self.chat and self.asked.get("include_reasoning") is False

    def _asks(self, *names: str) -> bool:
        told = self.toy.gives_ids and not self.toy.drops_unknown_reply_fields and not self._hidden
        return told and any(self.asked.get(name) for name in names)

    def _entries(self, steps: list[Step]) -> Any:
        asked = self.asked.get("logprobs")
        if self._hidden or not steps or asked is None or asked is False:
            return None
        as_ids = self.asked.get("return_tokens_as_token_ids")
        names = [f"token_id:{step.token_id}" if as_ids else step.text for step in steps]
        if not self.chat:
            return {
                "text_offset": [0] * len(steps),
                "tokens": names,
                "token_logprobs": [step.logprob for step in steps],
                "top_logprobs": [dict(step.top[: max(asked, 1)]) for step in steps],
            }
        top = self.asked.get("top_logprobs") or 0
        listed = [
            [{"token": name, "logprob": value, "bytes": None} for name, value in step.top[:top]] for step in steps
        ]
        content = [
            {"token": name, "logprob": step.logprob, "bytes": list(step.text.encode()), "top_logprobs": entries}
            for name, step, entries in zip(names, steps, listed, strict=True)
        ]
        return {"content": content}

    def _usage(self) -> Json:
        count = len(self.steps)
        return {"prompt_tokens": len(self.prompt), "completion_tokens": count, "total_tokens": len(self.prompt) + count}

    def _root(self) -> Json:
        kind = "chat.completion" if self.chat else "text_completion"
        return {"id": self.request_id, "object": kind, "created": 1, "model": self.asked["model"]}

    def _stop(self) -> Json:
        return {"matched_stop" if self.kind == "sglang" else "stop_reason": self.matched}

    def _ids(self) -> Json:
        """The fields of a choice's own ids in a body."""
        ids = [step.token_id for step in self.steps]
        if self.kind == "sglang" and self.chat:
            told: Json = {"response_token_ids": ids} if self._asks("return_token_ids") else {}
            if self._asks("return_token_ids", "return_prompt_token_ids"):
                told["prompt_token_ids"] = self.prompt
            if self._asks("return_meta_info"):
                triples = [[step.logprob, step.token_id, step.text] for step in self.steps]
                version = {"weight_version": "7"} if self.toy.weight_versions else {}
                told["meta_info"] = {"id": self.request_id, "output_token_logprobs": triples, **version}
            return told
        told = {"token_ids": ids} if self._asks("return_token_ids") else {}
        if told and not self.chat:
            told["prompt_token_ids"] = self.prompt
        if told and self.kind == "vllm":
            told["routed_experts"] = None
        if self.toy.weight_versions and self.asked.get("return_weight_versions"):
            told["weight_versions"] = [{"version": "7", "start": 0, "end": len(ids)}]
        return told

    def _message(self, text: str) -> Json:
        if not self.chat:
            return {"text": text}
        thought = {"vllm": "reasoning", "sglang": "reasoning_content"}.get(self.kind)
        return {"message": {"role": "assistant", "content": text, **({thought: "hm"} if thought else {})}}

    def body(self) -> Json:
        text = "".join(step.text for step in self.steps)
        choice = {
            "index": 0,
            **self._message(text),
            "logprobs": self._entries(self.steps),
            "finish_reason": self.finish,
            **self._stop(),
            **self._ids(),
        }
        body = {**self._root(), "choices": [choice], "usage": self._usage()}
        if self.chat and self.kind != "sglang" and self._asks("return_token_ids"):
            body["prompt_token_ids"] = self.prompt
        return body

    def chunks(self) -> Iterator[Json]:
        yield from self._sglang_chunks() if self.kind == "sglang" and self.chat else self._plain_chunks()
        if (self.asked.get("stream_options") or {}).get("include_usage"):
            yield {**self._root(), "choices": [], "usage": self._usage()}

    def _plain_chunks(self) -> Iterator[Json]:
        told, first = self._asks("return_token_ids"), True
        prompt: Json = {"prompt_token_ids": self.prompt} if told else {}
        if self.chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            yield {**self._root(), "choices": [role], **prompt}
        # One chunk may hold several ids.
        for start in range(0, len(self.steps), 2):
            steps = self.steps[start : start + 2]
            text = "".join(step.text for step in steps)
            choice: Json = {"index": 0, "logprobs": self._entries(steps), "finish_reason": None}
            choice |= {"delta": {"content": text} if text else {}} if self.chat else {"text": text}
            if told:
                choice["token_ids"] = [step.token_id for step in steps]
                if not self.chat:
                    choice["prompt_token_ids"] = self.prompt if first else None
            if start + 2 >= len(self.steps):
                choice |= {"finish_reason": self.finish, **self._stop()}
            first = False
            yield {**self._root(), "choices": [choice]}

    def _sglang_chunks(self) -> Iterator[Json]:
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        yield {**self._root(), "choices": [role]}
        for step in self.steps:
            if step.text or self.toy.parsers:
                delta = {"content": step.text} if step.text else {}
                choice = {"index": 0, "delta": delta, "logprobs": self._entries([step]), "finish_reason": None}
                yield {**self._root(), "choices": [choice]}
        end = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": self.finish, **self._stop()}
        yield {**self._root(), "choices": [end]}
        told: Json = {}
        if self._asks("return_input_ids_in_sglext"):
            told["input_ids"] = self.prompt
        if self._asks("return_output_ids_in_sglext"):
            told["output_ids"] = [[step.token_id for step in self.steps]]
        if told:
            yield {**self._root(), "choices": [], "sglext": told}
