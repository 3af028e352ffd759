"""A gateway that ends and comes back on its ledger, one that is killed, and an engine that dies silently."""

from __future__ import annotations

import os
import signal
import threading
from time import monotonic
from typing import Any

from gristmill.errors import Code
from tests.e2e.client import ask, leave
from tests.e2e.stage import Gateway, Rollout, gateway, until
from tests.e2e.vllm.asking import PATHS
from tests.e2e.vllm.engine import MODEL
from tests.e2e.vllm.leaving import ENDLESS, endless
from tests.e2e.vllm.scene import Scene

__all__ = ["engine_dies", "gateway_restarts"]

Json = dict[str, Any]


def gateway_restarts(scene: Scene) -> None:
    """Keys, parents and durable calls survive; a call that ran while the gateway was killed is lost and counted."""
    checks, folder = scene.checks, scene.folder / "restarts"
    folder.mkdir()
    messages: list[Json] = [{"role": "user", "content": "Mend the mill."}]

    def turn(base: str, key: str) -> str:
        answer = ask(base, PATHS["chat"], key, {"model": MODEL, "messages": messages, "max_tokens": 40})
        if answer.status != 200:
            raise RuntimeError(answer.whole)
        said = {k: v for k, v in answer.body["choices"][0]["message"].items() if v is not None}
        messages.extend([said, {"role": "user", "content": "And then?"}])
        return answer.headers["x-gristmill-call-id"]

    with gateway(scene.witness.url, folder) as gate:
        rollout = gate.begin("survives", **ENDLESS)
        calls = [turn(gate.address, rollout.key)]
    with gateway(scene.witness.url, folder) as gate:
        calls.append(turn(gate.address, rollout.key))
        before = len(scene.witness.calls())
        thread = threading.Thread(target=lambda: _until_broken(gate.address, rollout.key), daemon=True)
        thread.start()
        until(
            "a running call", lambda: len(scene.witness.calls()) > before and len(scene.witness.calls()[-1].raw) > 2000
        )
        gate.running.send_signal(signal.SIGKILL)
        gate.running.wait()
        thread.join(20)
    with gateway(scene.witness.url, folder) as gate:
        calls.append(turn(gate.address, rollout.key))
        gate.finish(rollout)
        capture = gate.captured(rollout)
    by_id = {record.model_call_id: record for record in capture.records}
    checks.equal("the durable calls are there", sorted(calls), sorted(by_id))
    checks.equal("each continues the one before", [None, *calls[:-1]], [by_id[call].parent_call_id for call in calls])
    checks.equal("the call that ran at the kill is lost", 1, len(capture.lost))
    until("the engine to be free", lambda: scene.witness.calls()[before].ended != "running", 30)


def _until_broken(base: str, key: str) -> None:
    try:
        leave(base, PATHS["chat"], key, endless("chat", stream=True), after_events=100000)
    except (ConnectionError, OSError, ValueError):
        return


def engine_dies(scene: Scene) -> None:
    """An engine that is frozen while calls run is given up, and served again when it goes on; then it is ended."""
    checks, folder = scene.checks, scene.folder / "dies"
    folder.mkdir()
    with gateway(scene.witness.url, folder, "--idle-timeout-s", "4", "--health-timeout-s", "3") as gate:
        rollout = gate.begin("engine-dies", **ENDLESS)
        _freeze(scene, gate, rollout, signal.SIGSTOP)
        capture = gate.settled(rollout, 2)
        reasons = {record.unusable_reason for record in capture.records}
        checks.equal("frozen: no call is usable", [], [r.model_call_id for r in capture.records if r.usable])
        allowed = {Code.STREAM_TRUNCATED, Code.ENGINE_LOST, Code.CALL_FAILED, Code.TOKEN_IDS_MISSING}
        checks.check("frozen: their records say why", reasons <= allowed, reasons)
        os.killpg(scene.engine.running.pid, signal.SIGCONT)
        body = {**endless("chat", stream=False), "max_tokens": 8}
        served = until(
            "the engine again", lambda: ask(gate.address, PATHS["chat"], rollout.key, body).status == 200, 60
        )
        checks.check("it goes on and is served again", served)
        before = len(gate.captured(rollout).records)
        _freeze(scene, gate, rollout, signal.SIGTERM)
        capture = gate.settled(rollout, before + 2)
        ended = capture.records[before:]
        checks.equal("ended: no call is usable", [], [r.model_call_id for r in ended if r.usable])
        allowed.add(Code.ABORTED)  # some versions abort what runs
        reasons = {record.unusable_reason for record in ended}
        checks.check("ended: their records say why", reasons <= allowed, reasons)
        gate.finish(rollout)


def _freeze(scene: Scene, gate: Gateway, rollout: Rollout, how: signal.Signals) -> None:
    """Send the engine a signal while two calls run; both clients are answered."""
    answers: list[Any] = []

    def one(dialect: str, stream: bool) -> None:
        answers.append(ask(gate.address, PATHS[dialect], rollout.key, endless(dialect, stream=stream)))

    threads = [threading.Thread(target=one, args=each) for each in (("chat", True), ("messages", False))]
    before = len(scene.witness.calls())
    for thread in threads:
        thread.start()
    until("two running calls", lambda: len(scene.witness.calls()) == before + 2)
    until("tokens", lambda: any(len(call.raw) > 2000 for call in scene.witness.calls()[before:]))
    began = monotonic()
    os.killpg(scene.engine.running.pid, how)
    for thread in threads:
        thread.join(60)
    took = monotonic() - began
    scene.checks.check(
        f"{how.name}: both clients have an answer soon", took < 25 and len(answers) == 2, (took, answers)
    )
