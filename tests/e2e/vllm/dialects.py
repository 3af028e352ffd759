"""Single calls: every request of `asking`, the engine asked besides, refusals, many at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.e2e.client import Answer, ask
from tests.e2e.evidence import check_all_captured, check_tokens
from tests.e2e.spoken import Spoken, engine_spoke, spoken
from tests.e2e.vllm.asking import PATHS, Asking, askings
from tests.e2e.vllm.engine import MODEL
from tests.e2e.vllm.scene import Scene
from tests.e2e.witness import Seen, sampled

__all__ = ["at_once", "every_request", "refusals", "same_seed"]

Json = dict[str, Any]
_TOKEN_KEYS = ('"token_ids"', '"prompt_token_ids"', '"token_id:')


def every_request(scene: Scene) -> None:
    """Each request once: what the client is told, and what the ledger holds."""
    checks = scene.checks
    rollouts = {dialect: scene.gateway.begin(f"one-{dialect}") for dialect in PATHS}
    seen: dict[str, list[Seen]] = {dialect: [] for dialect in PATHS}
    for asking in askings():
        rollout = rollouts[asking.dialect]
        answer = ask(rollout.base, asking.path, rollout.key, asking.body)
        if not checks.equal(f"{asking.name}: status", 200, answer.status):
            checks.check(f"{asking.name}: answer", False, answer.whole)
            continue
        call = _seen(scene, answer)
        seen[asking.dialect].append(call)
        _check_answer(scene, asking, answer, call)
    for dialect, rollout in rollouts.items():
        scene.finish(rollout)
        capture = scene.gateway.captured(rollout)
        check_all_captured(checks, capture, seen[dialect])
        check_tokens(checks, capture, seen[dialect])


def _seen(scene: Scene, answer: Answer) -> Seen:
    call_id = answer.headers["x-gristmill-call-id"]
    return next(call for call in scene.witness.calls() if call.call_id == call_id)


def _check_answer(scene: Scene, asking: Asking, answer: Answer, call: Seen) -> None:
    problems: list[str] = []
    told, said = spoken(asking.dialect, answer), engine_spoke(call)
    if asking.hides_reasoning:
        for choice in said:
            choice.reasoning = ""
    if [_meaning(choice) for choice in told] != [_meaning(choice) for choice in said]:
        problems.append(_apart(str([_meaning(choice) for choice in said]), str([_meaning(choice) for choice in told])))
    if asking.dialect in {"chat", "completions"} and [c.end for c in told] != [c.end for c in said]:
        problems.append(f"finish reasons: engine {[c.end for c in said]}, client {[c.end for c in told]}")
    if asking.ends and any(choice.end not in asking.ends for choice in told):
        problems.append(f"ended with {[choice.end for choice in told]}")
    leaks = [key for key in _TOKEN_KEYS if key in answer.whole]
    if leaks and not asking.asks_ids:
        problems.append(f"the client was told {leaks}: {answer.whole[:600]}")
    if asking.asks_ids:
        problems += _own_ids(answer, call)
    if asking.dialect in {"chat", "completions"} and asking.body.get("stream") and not answer.done:
        problems.append("no [DONE]")
    scene.checks.check(f"{asking.name}: the client is told what the engine said", not problems, "\n".join(problems))


def _meaning(choice: Spoken) -> tuple[Any, ...]:
    return choice.reasoning, choice.text, choice.tools


def _apart(said: str, told: str) -> str:
    at = next((at for at, (a, b) in enumerate(zip(said, told, strict=False)) if a != b), min(len(said), len(told)))
    start = max(at - 60, 0)
    return f"engine said     …{said[start : at + 200]}\nclient was told …{told[start : at + 200]}"


def _own_ids(answer: Answer, call: Seen) -> list[str]:
    told: list[int] = []
    for part in answer.events or [answer.body]:
        for choice in part.get("choices", []):
            told += choice.get("token_ids") or []
    said = sampled(call)[0].token_ids
    return [] if told == said else [f"the client asked for ids, the engine said {said}, the client was told {told}"]


def same_seed(scene: Scene) -> None:
    """The engine, asked besides with the same seed, samples what the ledger holds."""
    rollout = scene.gateway.begin("seeds")
    messages = [{"role": "user", "content": "Which stone is the oldest?"}]
    wrong: list[str] = []
    for seed in range(4):
        body: Json = {"model": MODEL, "messages": messages, "seed": seed, "max_tokens": 64}
        direct = ask(scene.engine.url, PATHS["chat"], "", {**body, "return_token_ids": True}).body
        through = ask(rollout.base, PATHS["chat"], rollout.key, {**body, "stream": bool(seed % 2)})
        expected = (direct["prompt_token_ids"], direct["choices"][0]["token_ids"])
        choice = sampled(_seen(scene, through))[0]
        if (choice.prompt_ids, choice.token_ids) != expected:
            wrong.append(f"seed {seed}")
    scene.checks.check("the same seed gives the same ids with and without the gateway", not wrong, "\n".join(wrong))
    scene.finish(rollout)


def refusals(scene: Scene) -> None:
    """What is not served leaves no call, or a failed one, and an answer in the dialect's shape."""
    checks, rollout = scene.checks, scene.gateway.begin("refusals")
    user = [{"role": "user", "content": "hi"}]
    chat: Json = {"model": MODEL, "messages": user, "max_tokens": 8}

    def status(dialect: str, body: Json, key: str = rollout.key) -> int:
        answer = ask(rollout.base, PATHS[dialect], key, body)
        if not isinstance(answer.body, dict) or "error" not in json.dumps(answer.body):
            return answer.status if answer.status == 200 else -answer.status
        return answer.status

    before = len(scene.witness.seen)
    checks.equal(
        "prompt ids of its own: 400", 400, status("chat", {**chat, "kv_transfer_params": {"prompt_token_ids": [1]}})
    )
    checks.equal("a chat template of its own: 400", 400, status("chat", {**chat, "chat_template": "{{ messages }}"}))
    checks.equal("an image by address: 400", 400, status("chat", {**chat, "messages": [_IMAGE]}))
    checks.equal("no such key: 401", 401, status("messages", {**chat}, "gm_unknown"))
    checks.equal("none of these reached the engine", before, len(scene.witness.seen))
    long = [{"role": "user", "content": "grain " * 40000}]
    for dialect, body in (
        ("chat", {**chat, "messages": long}),
        ("chat", {**chat, "messages": long, "stream": True}),
        ("messages", {**chat, "messages": long}),
        ("responses", {"model": MODEL, "input": "grain " * 40000}),
        ("completions", {"model": MODEL, "prompt": "grain " * 40000}),
    ):
        checks.equal(f"a prompt that is too long, {dialect}: 400", 400, status(dialect, body))
    big = ask(rollout.base, PATHS["messages"], rollout.key, {**chat, "max_tokens": 64000, "stop_sequences": ["e"]})
    checks.equal("max_tokens above the model's limit is served", 200, big.status)
    checks.check("and said", "max_tokens" in big.headers.get("x-gristmill-notes", ""), big.headers)
    marked = ask(rollout.base, PATHS["chat"], rollout.key, {**chat, "request_id": "mine", "priority": 3})
    checks.equal("its own request id is taken out", 200, marked.status)
    checks.check("and said", "request_id" in marked.headers.get("x-gristmill-notes", ""), marked.headers)
    told = scene.gateway.finish(rollout)
    checks.equal("nothing is left running", 0, told["aborted"])


_IMAGE: Json = {
    "role": "user",
    "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/mill.png"}}],
}


def at_once(scene: Scene) -> None:
    """Calls of several rollouts and dialects at the same time, some with equal requests: nothing mixes."""
    checks = scene.checks
    rollouts = [scene.gateway.begin(f"at-once-{number}") for number in range(4)]
    chosen = [asking for asking in askings() if asking.name.split()[1] in {"text", "reasoning", "thinking", "two"}]

    def one(rollout: Any) -> list[Seen]:
        return [_seen(scene, ask(rollout.base, each.path, rollout.key, each.body)) for each in chosen]

    with ThreadPoolExecutor(16) as pool:
        seen = list(pool.map(one, [rollout for rollout in rollouts for _ in range(3)]))
    for number, rollout in enumerate(rollouts):
        scene.finish(rollout)
        capture = scene.gateway.captured(rollout)
        mine = [call for calls in seen[number * 3 : number * 3 + 3] for call in calls]
        check_all_captured(checks, capture, mine)
        check_tokens(checks, capture, mine)
