"""Calls that do not end by themselves: clients that close their connection, rollouts finished while a call runs."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from gristmill.errors import Code
from gristmill.records import CallRecord, Delivery
from tests.e2e.client import ask, leave
from tests.e2e.evidence import check_tokens
from tests.e2e.stage import Rollout, until
from tests.e2e.vllm.asking import PATHS
from tests.e2e.vllm.engine import MODEL
from tests.e2e.vllm.scene import Scene
from tests.e2e.witness import Seen, sampled

__all__ = ["ENDLESS", "clients_that_leave", "endless", "finish_while_running"]

Json = dict[str, Any]

ENDLESS: Json = {"overrides": {"temperature": 0.0}}
"""Of an attempt that samples the model's likeliest token, which never ends a turn."""


def endless(dialect: str, *, stream: bool) -> Json:
    """A request whose reply goes on for a minute or more, in a rollout with `ENDLESS` set over it."""
    body: Json = {"model": MODEL, "stream": stream, "max_tokens": 30000}
    if dialect == "completions":
        return {**body, "prompt": "Once upon a time"}
    if dialect == "responses":
        del body["max_tokens"]
        return {**body, "input": "Tell me everything.", "max_output_tokens": 30000}
    return {**body, "messages": [{"role": "user", "content": "Tell me everything."}]}


def clients_that_leave(scene: Scene) -> None:
    """A client closes its connection; the engine is stopped, and what it sampled is kept."""
    for dialect in PATHS:
        for stream in (True, False):
            name = f"{dialect}{' streamed' if stream else ''}"
            rollout = scene.gateway.begin(f"leaving-{name.replace(' ', '-')}", **ENDLESS)
            body = endless(dialect, stream=stream)
            before = len(scene.witness.calls())
            if stream:
                leave(rollout.base, PATHS[dialect], rollout.key, body, after_events=12)
            else:
                _leave_running(scene, rollout, PATHS[dialect], body, before)
            _check_aborted(scene, rollout, name, before, Delivery.PARTIAL if stream else Delivery.ABORTED)


def _leave_running(scene: Scene, rollout: Rollout, path: str, body: Json, before: int) -> None:
    """Send a request for a body and go as soon as the engine has it."""
    parts = urlsplit(rollout.base)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    headers = {"content-type": "application/json", "authorization": f"Bearer {rollout.key}"}
    connection.request("POST", path, json.dumps(body), headers)
    until("the engine's request", lambda: len(scene.witness.calls()) > before)
    until("a few tokens", lambda: _running(scene) > 0, 20)
    connection.close()


def _running(scene: Scene) -> float:
    with urllib.request.urlopen(f"{scene.engine.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


def _check_aborted(scene: Scene, rollout: Rollout, name: str, before: int, delivery: Delivery) -> None:
    checks = scene.checks
    capture = scene.gateway.settled(rollout, 1)
    seen: list[Seen] = scene.witness.calls()[before:]
    checks.equal(f"{name}: one request, one record", (1, 1), (len(seen), len(capture.records)))
    record: CallRecord = capture.records[0]
    checks.equal(f"{name}: it was aborted", (False, Code.ABORTED), (record.usable, record.unusable_reason))
    until("the engine to be free", lambda: _running(scene) == 0, 20)
    told = sampled(seen[0]) if seen[0].ended == "complete" else {}
    kept = told[0].token_ids if told else []
    checks.check(f"{name}: the engine said what it had sampled", bool(kept), seen[0].ended)
    finish = told[0].finish_reason if told else None
    checks.equal(f"{name}: and ended by abort", "abort", finish)
    scene.gateway.finish(rollout)
    after = scene.gateway.captured(rollout)
    checks.equal(f"{name}: delivery", delivery, after.records[0].delivery)
    delta = capture.tokens.get(record.model_call_id)
    ids = [] if delta is None else delta.ids_T[delta.mask_T == 1].tolist()
    checks.equal(f"{name}: the ledger has these ids", kept, ids)
    check_tokens(checks, capture, seen, unusable=[record.model_call_id])


def finish_while_running(scene: Scene) -> None:
    """A rollout is finished without patience: its running calls are aborted, its finished ones stay."""
    checks = scene.checks
    rollout = scene.gateway.begin("finishing", **ENDLESS)
    short = ask(rollout.base, PATHS["chat"], rollout.key, {**endless("chat", stream=False), "max_tokens": 8})
    checks.equal("a short call is served", 200, short.status)
    before = len(scene.witness.calls())
    answers: list[Any] = []
    bodies = [("chat", True), ("messages", True), ("responses", False)]

    def one(dialect: str, stream: bool) -> None:
        answers.append(ask(rollout.base, PATHS[dialect], rollout.key, endless(dialect, stream=stream)))

    threads = [threading.Thread(target=one, args=each) for each in bodies]
    for thread in threads:
        thread.start()
    until("three running calls", lambda: len(scene.witness.calls()) == before + 3 and _running(scene) == 3)
    scored = scene.gateway.captured(rollout).records[0].response_id
    told = scene.gateway.finish(rollout, {"terminal_response_id": scored}, drain_s=0.0)
    for thread in threads:
        thread.join(30)
    checks.equal("three calls were aborted", 3, told["aborted"])
    checks.equal("their clients have an answer", 3, len(answers))
    until("the engine to be free", lambda: _running(scene) == 0, 20)
    capture = scene.gateway.captured(rollout)
    usable = [record.model_call_id for record in capture.records if record.usable]
    checks.equal("the short call alone is usable", [short.headers["x-gristmill-call-id"]], usable)
    checks.equal(
        "and the attempt takes no more calls",
        409,
        ask(rollout.base, PATHS["chat"], rollout.key, endless("chat", stream=False)).status,
    )
    scene.rollouts.append(rollout)
