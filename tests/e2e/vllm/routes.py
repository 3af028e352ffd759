"""What else the gateway answers: counts of tokens, models, compressed bodies, conversations by reference, replays."""

from __future__ import annotations

import gzip
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import zstandard

from tests.e2e.client import ask
from tests.e2e.evidence import check_all_captured, check_tokens, records_of
from tests.e2e.stage import Rollout
from tests.e2e.vllm.asking import PATHS
from tests.e2e.vllm.engine import MODEL
from tests.e2e.vllm.scene import Scene
from tests.e2e.witness import sampled

__all__ = ["by_reference", "compressed", "counting"]

Json = dict[str, Any]
_TOOL: Json = {"name": "bash", "description": "Run it", "input_schema": {"type": "object", "properties": {}}}


def counting(scene: Scene) -> None:
    """`count_tokens` says what the same request then costs."""
    rollout = scene.gateway.begin("counting")
    wrong: list[str] = []
    for extra in ({}, {"system": "You mend mills."}, {"tools": [_TOOL]}, {"thinking": {"type": "disabled"}}):
        body: Json = {"model": MODEL, "messages": [{"role": "user", "content": "Ça va, moulin ?"}], **extra}
        counted = ask(rollout.base, f"{PATHS['messages']}/count_tokens", rollout.key, body).body
        answer = ask(rollout.base, PATHS["messages"], rollout.key, {**body, "max_tokens": 4})
        call = next(c for c in scene.witness.calls() if c.call_id == answer.headers["x-gristmill-call-id"])
        prompt = len(sampled(call)[0].prompt_ids or [])
        if counted != {"input_tokens": prompt} or answer.body["usage"]["input_tokens"] != prompt:
            wrong.append(f"{extra}: counted {counted}, prompt {prompt}, usage {answer.body['usage']}")
    scene.checks.check("count_tokens is the length of the prompt", not wrong, "\n".join(wrong))
    request = urllib.request.Request(f"{rollout.base}/v1/models", headers={"authorization": f"Bearer {rollout.key}"})
    with urllib.request.urlopen(request, timeout=20) as told:
        names = [model["id"] for model in json.loads(told.read())["data"]]
    scene.checks.equal("the models are the engine's", [MODEL], names)
    scene.checks.equal("counting is no call", 4, len(scene.gateway.captured(rollout).records))
    scene.finish(rollout)


def by_reference(scene: Scene) -> None:
    """A Responses conversation in which each request names the response before and says only what is new."""
    checks, rollout = scene.checks, scene.gateway.begin("by-reference")
    asked: list[str] = []
    previous: str | None = None
    for turn in range(4):
        body: Json = {"model": MODEL, "input": f"Turn {turn}: what now?", "max_output_tokens": 60, "store": True}
        body |= {"stream": bool(turn % 2)} | ({} if previous is None else {"previous_response_id": previous})
        answer = ask(rollout.base, PATHS["responses"], rollout.key, body)
        if not checks.equal(f"turn {turn} is served", 200, answer.status):
            checks.check("(why not)", False, answer.whole)
            return
        previous = (answer.events[-1]["response"] if answer.events else answer.body)["id"]
        asked.append(answer.headers["x-gristmill-call-id"])
    other = scene.gateway.begin("by-reference-other")
    stolen: Json = {"model": MODEL, "input": "And?", "previous_response_id": previous}
    checks.equal(
        "another attempt's response is unknown: 400", 400, ask(other.base, PATHS["responses"], other.key, stolen).status
    )
    seen = [call for call in scene.witness.calls() if call.call_id in asked]
    lengths = [len(call.body["messages"]) for call in seen]
    checks.equal("the engine gets the whole conversation", [1, 3, 5, 7], lengths)
    scene.finish(rollout)
    capture = scene.gateway.captured(rollout)
    check_all_captured(checks, capture, seen)
    check_tokens(checks, capture, seen)
    parents = [record.parent_call_id for record in records_of(capture, seen)]
    checks.equal("each turn continues the one before", [None, *asked[:-1]], parents)


def compressed(scene: Scene) -> None:
    """Bodies that are gzip'd or zstd'd are read; one that unpacks to too much is refused."""
    rollout = scene.gateway.begin("compressed")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "grain " * 3000}], "max_tokens": 4}
    plain = json.dumps(body).encode()
    for name, packed in (("gzip", gzip.compress(plain)), ("zstd", zstandard.compress(plain))):
        scene.checks.equal(f"{name}: served", 200, _post(rollout, packed, {"content-encoding": name}))
    bomb = gzip.compress(b" " * (65 * 1024 * 1024))
    scene.checks.equal("too much inside: 413", 413, _post(rollout, bomb, {"content-encoding": "gzip"}))
    scene.finish(rollout)


def _post(rollout: Rollout, body: bytes, headers: Mapping[str, str]) -> int:
    said = {"authorization": f"Bearer {rollout.key}", "content-type": "application/json", **headers}
    request = urllib.request.Request(rollout.base + PATHS["chat"], body, said, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
